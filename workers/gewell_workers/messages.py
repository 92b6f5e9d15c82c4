"""What the worker process and its output process say to each other: frames of JSON over a socket pair.

The worker writes from its asyncio loop, whose transport buffers without end: neither the engine thread nor ingest ever
waits for the output process, and the buffer is bounded by the rows that run, since a full window stops pulling.
"""

import asyncio
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import orjson

from gewell.engine.api import Event, FinishedEvent

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenJob:
    """A claimed job, as the output process needs it to write the stream and the final record.

    kept_*   what earlier epochs wrote to `out`: all token ids, the text of each channel, the tool calls; their
             logprobs where they were asked for
    """

    job_id: str
    epoch: int
    lane: str
    entry_id: str
    kept_ids: list[int]
    kept_ends_with_stop_id: bool
    kept_text: dict[str, str]
    kept_tools: list[dict[str, Any]]
    kept_logprobs: list[dict[str, Any]]
    is_chat: bool
    tools: list[dict[str, Any]] | None
    stop: list[str]
    include_stop: bool
    min_tokens: int
    ends_loops: bool
    first_prompt_id: int | None  # where log-probabilities of the prompt are wanted: the one token that has none
    wants_logprobs: bool
    stream: bool
    reply_to: str | None
    result_ttl_s: float
    seed: int
    crashes: int
    num_prompt_tokens: int
    enqueued_at_ms: int
    clock_offset_ms: float  # server's clock minus ours
    warnings: list[str]
    metadata: Any
    traceparent: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJob:
    """The worker ends a job that the engine does not run: refused, cancelled, expired, already complete."""

    job_id: str
    state: str
    finish_reason: str
    code: str | None = None
    message: str = ""
    field: str | None = None


class FrameProtocol(asyncio.Protocol):
    """Both ends' reader: calls `on_frame` with every decoded frame and `on_end` once the peer is gone."""

    def __init__(self, on_frame: Callable[[dict[str, Any]], None], on_end: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_end = on_end
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            end = at + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            frame = bytes(memoryview(self._buffer)[at + _LENGTH.size : end])
            at = end
            self._on_frame(orjson.loads(frame))
        del self._buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()

    def write(self, kind: str, body: Any) -> None:
        """Queue one frame; never blocks. A peer that is gone is reported by `on_end`, not here."""
        if self._transport is not None and not self._transport.is_closing():
            payload = orjson.dumps({"kind": kind, "body": body})
            self._transport.write(_LENGTH.pack(len(payload)) + payload)

    def close(self) -> None:
        """Send what is queued, then close."""
        if self._transport is not None:
            self._transport.close()


def step_body(events: Iterable[Event]) -> dict[str, Any]:
    """Events of one or several steps, in order, as short lists."""
    tokens: list[Any] = []
    finished: list[Any] = []
    for event in events:
        if isinstance(event, FinishedEvent):
            finished.append(event)
        else:
            logprobs = None
            if event.logprobs is not None:
                logprobs = [(entry.token_id, entry.logprob, entry.top) for entry in event.logprobs]
            tokens.append((event.request_id, event.token_ids, logprobs))
    return {"tokens": tokens, "finished": finished}
