"""Server-sent events over a job's stream, and waiting that notices when the caller has left."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

KEEP_ALIVE_S = 15.0
MERGE_QUEUE = 256  # items; a slow caller holds the followers back
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that would collect the stream
]
KEEP_ALIVE = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"


class Disconnected(Exception):
    """The caller has gone before the answer was there."""


def event(data: bytes, event_id: str | None = None) -> bytes:
    return b"data: " + data + b"\n\n" if event_id is None else b"id: %s\ndata: %s\n\n" % (event_id.encode(), data)


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """The work's result. Raises Disconnected, and cancels the work, when the caller leaves first."""
    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Disconnected
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):  # its result was taken, or is of no use
                await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merge(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Items of all sources as they come. The first error of one ends all."""
    queue: asyncio.Queue[tuple[T] | None] = asyncio.Queue(MERGE_QUEUE)

    async def pump(source: AsyncGenerator[T]) -> None:
        async for item in source:
            await queue.put((item,))

    async def pump_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for source in sources:
                    group.create_task(pump(source))
        finally:
            for source in sources:
                await source.aclose()
            with contextlib.suppress(asyncio.QueueFull):
                queue.put_nowait(None)  # wakes a reader that waits; one that does not finds the task done

    pumping = asyncio.create_task(pump_all())
    try:
        while not (pumping.done() and queue.empty()):
            item = await queue.get()
            if item is not None:
                yield item[0]
        try:
            pumping.result()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)


class EventStream:
    """An ASGI response. Ends early when the caller leaves; `on_disconnect` is then awaited.

    first         the first event, or the task that waits for it
    events        the rest; closed in every case, and then `on_close` is called
    keep_alive_s  after so long without an event a comment is sent: clients and proxies give up on silence
    """

    def __init__(
        self,
        first: "asyncio.Future[bytes]",
        events: AsyncGenerator[bytes],
        *,
        keep_alive_s: float,
        on_disconnect: Callable[[], Awaitable[None]],
        on_close: Callable[[], None],
    ) -> None:
        self._first = first
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._on_disconnect = on_disconnect
        self._on_close = on_close
        self._sent_at_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.create_task(self._write(send))
        watching = asyncio.create_task(_disconnected(receive))
        ticking = asyncio.create_task(self._keep_alive(send))
        try:
            await asyncio.wait({writing, watching}, return_when=asyncio.FIRST_COMPLETED)
            has_left = not writing.done()
        finally:
            for task in (writing, watching, ticking, self._first):
                task.cancel()
            await asyncio.gather(writing, watching, ticking, self._first, return_exceptions=True)
            await self._events.aclose()
            self._on_close()
        if has_left:
            await self._on_disconnect()
        else:
            writing.result()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            await self._send(send, await self._first)
        except StopAsyncIteration:
            pass
        else:
            async for data in self._events:
                await self._send(send, data)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        self._sent_at_s = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        """One timer a period, not one an event."""
        wait_s = 0.0 if not self._first.done() else self._keep_alive_s
        while True:
            await asyncio.sleep(wait_s)
            wait_s = self._sent_at_s + self._keep_alive_s - time.monotonic()
            if wait_s <= 0:
                wait_s = self._keep_alive_s
                await self._send(send, KEEP_ALIVE)
