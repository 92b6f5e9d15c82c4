"""The worker's end of the output process: starts it, writes frames to it, hears from it."""

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any

from gewell.engine.api import Event
from gewell.errors import EngineError
from gewell_workers.messages import EndJob, FrameProtocol, OpenJob, step_body


class OutputLink:
    """Writing never waits. Start it early: it loads its tokenizer while the model is loaded.

    on_frame(kind, body)   the process says stop, drop, done, trouble
    on_end()               it is gone, and nobody had asked it to go
    """

    def __init__(self) -> None:
        self.on_frame: Callable[[str, Any], None] = lambda kind, body: None
        self.on_end: Callable[[], None] = lambda: None
        self._ready = asyncio.Event()
        self._frames: FrameProtocol | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._is_closing = False
        self._has_ended = False

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, setup: dict[str, Any], *, timeout_s: float = 60.0) -> None:
        """Start the process and wait until it has its tokenizer. Raises EngineError if it does not come up."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gewell_workers.output", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
            )
        loop = asyncio.get_running_loop()
        _, self._frames = await loop.create_connection(lambda: FrameProtocol(self._read, self._ended), sock=ours)
        self._frames.write("setup", setup)
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            self._process.kill()
            raise EngineError(f"the output process was not ready in {timeout_s:g} s") from None
        if self._has_ended:
            raise EngineError(f"the output process ended at start with code {await self._process.wait()}")

    def identify(self, model: str, fingerprint: str) -> None:
        """What the records will name; before the first job."""
        self._write("identity", {"model": model, "fingerprint": fingerprint})

    def open(self, job: OpenJob) -> None:
        self._write("open", job)

    def end(self, end: EndJob) -> None:
        self._write("end", end)

    def expire(self, job_id: str) -> None:
        """The cancellation of this job that follows means that its deadline has passed."""
        self._write("expire", job_id)

    def step(self, events: list[Event]) -> None:
        self._write("step", step_body(events))

    def started(self, job_ids: list[str]) -> None:
        self._write("started", job_ids)

    async def close(self, timeout_s: float) -> None:
        """Let the process write what waits and leave."""
        self._is_closing = True
        if self._frames is not None:
            self._frames.close()
        process = self._process
        if process is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    def _write(self, kind: str, body: Any) -> None:
        assert self._frames is not None
        self._frames.write(kind, body)

    def _read(self, frame: dict[str, Any]) -> None:
        if frame["kind"] == "ready":
            self._ready.set()
        else:
            self.on_frame(frame["kind"], frame["body"])

    def _ended(self) -> None:
        self._has_ended = True
        if not self._ready.is_set():
            self._ready.set()
        elif not self._is_closing:
            self.on_end()
