"""A TCP proxy between worker and server that acts when a given piece of traffic passes: crashes at exact points."""

import contextlib
import socket
import threading
from collections.abc import Callable


class FaultProxy:
    """Forwards everything until the trigger is seen for the `count`-th time, then calls `act` once and goes silent.

    trigger   bytes of a command (or of a reply, with `in_reply`)
    recover   only the connection that held the trigger is cut; all others go on
    forward   whether the piece that holds the trigger still passes: the server then acts on it, and its answer is lost
    """

    def __init__(
        self,
        port: int,
        trigger: bytes,
        act: Callable[[], None],
        *,
        count: int = 1,
        forward: bool = False,
        in_reply: bool = False,
        recover: bool = False,
    ) -> None:
        self._target = ("127.0.0.1", port)
        self._trigger = trigger
        self._act = act
        self._left = count
        self._forward = forward
        self._in_reply = in_reply
        self._recover = recover
        self._lock = threading.Lock()
        self.has_fired = threading.Event()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def close(self) -> None:
        for one in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [client, server]
            threading.Thread(target=self._pump, args=(client, server, not self._in_reply), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, self._in_reply), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, is_watched: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                is_silent = self.has_fired.is_set() and not self._recover
                if is_silent or (is_watched and self._fires(data)):
                    if self._forward and not self._in_reply and self._trigger in data:
                        target.sendall(data)
                    self._fire()
                    if self._recover:
                        break
                    return
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
        if self._recover:
            with contextlib.suppress(OSError):
                source.shutdown(socket.SHUT_RDWR)

    def _fires(self, data: bytes) -> bool:
        if self._trigger not in data:
            return False
        with self._lock:
            self._left -= 1
            return self._left == 0

    def _fire(self) -> None:
        with self._lock:
            if self.has_fired.is_set():
                return
            self.has_fired.set()
        self._act()
