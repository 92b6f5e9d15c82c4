"""Writes chunks and ends of all running jobs to Redis, many jobs a round trip. Lives in the output process.

One task owns the connection. What the server has not accepted stays in the job's stream object, so a lost connection
loses nothing: on the next one the top of each stream tells what had arrived.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from gewell.protocol import EntryId, FinalRecord, JobField, Keys, State, event_message
from gewell_workers.finish import Finish, Outcome, finish_jobs
from gewell_workers.job_stream import JobStream, OutEntry
from gewell_workers.resp import Client, LinkLost, Reply, ReplyError, is_fenced, pack, raise_error

log = logging.getLogger(__name__)

_MAX_BATCH = 1_024  # jobs a round trip
_MAX_FINISHES = 64  # jobs a transaction
_RETRY_S = 0.5  # after an error reply that may pass: out of memory, read-only, loading


class Publisher:
    """Call `touch` whenever a stream got tokens or its ending; `run` does the rest.

    on_done(stream, outcome, record)   the job has left this process: written, or another epoch's, or lost by the server
    on_trouble(text | None)    the server refuses writes, None: it takes them again
    """

    def __init__(
        self,
        client: Client,
        keys: Keys,
        *,
        flush_s: float,
        flush_tokens: int,
        on_done: Callable[[JobStream, Outcome, FinalRecord | None], None],
        on_trouble: Callable[[str | None], None],
    ) -> None:
        self._client = client
        self._keys = keys
        self.model = ""
        self.fingerprint = ""
        self._flush_s = flush_s
        self._flush_tokens = flush_tokens
        self._on_done = on_done
        self._on_trouble = on_trouble
        self._ready: deque[JobStream] = deque()
        self._due: deque[JobStream] = deque()  # ordered: all wait equally long
        self._wake = asyncio.Event()
        self._closing = False
        self._started: list[JobStream] = []
        self._unsure: list[JobStream] = []  # their last entries may or may not have arrived
        self._trouble: str | None = None

    def touch(self, stream: JobStream) -> None:
        """Queue the stream now if it must not wait, else when its time has come."""
        if stream.is_queued or stream.is_gone:
            return
        if stream.ending is not None:
            self._queue(stream)
        elif not stream.job.stream:
            return
        elif not stream.has_sent or stream.num_waiting >= self._flush_tokens:
            self._queue(stream)
        elif stream.due_at_s == 0.0:
            stream.due_at_s = time.monotonic() + self._flush_s
            self._due.append(stream)
            if len(self._due) == 1:
                self._wake.set()  # `run` may sleep without a time to wake at

    def note_started(self, streams: Sequence[JobStream]) -> None:
        """These rows join the batch: should the worker die now, they are suspects."""
        self._started.extend(streams)
        self._wake.set()

    def close(self, streams: Sequence[JobStream]) -> None:
        """Write what waits in these streams, then let `run` return."""
        for stream in streams:
            if not stream.is_queued and not stream.is_gone and stream.job.stream:
                self._queue(stream)
        self._closing = True
        self._wake.set()

    async def run(self) -> None:
        """Write until closed. A failure that is none of the server's ends it."""
        while True:
            await self._wait()
            streams = self._take()
            if not streams and not self._started and self._closing:
                return
            for stream in streams:
                stream.make_entries()
            while streams or self._started:
                try:
                    await self._client.wait_until_up()
                    await self._resolve_unsure()
                    await self._write(streams)
                    self._set_trouble(None)
                    break
                except (LinkLost, ReplyError) as error:
                    self._unsure = streams
                    if isinstance(error, ReplyError):
                        self._set_trouble(str(error))
                        await asyncio.sleep(_RETRY_S)

    async def _wait(self) -> None:
        if self._ready or self._started or self._closing:
            return
        self._wake.clear()
        timeout_s = None
        if self._due:
            timeout_s = max(0.0, self._due[0].due_at_s - time.monotonic())
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            pass  # something is due

    def _queue(self, stream: JobStream) -> None:
        stream.is_queued = True
        self._ready.append(stream)
        self._wake.set()

    def _take(self) -> list[JobStream]:
        now_s = time.monotonic()
        while self._due and self._due[0].due_at_s <= now_s:
            stream = self._due.popleft()
            stream.due_at_s = 0.0
            if not stream.is_queued and not stream.is_gone and stream.num_waiting:
                stream.is_queued = True
                self._ready.append(stream)
        taken: list[JobStream] = []
        while self._ready and len(taken) < _MAX_BATCH:
            stream = self._ready.popleft()
            stream.is_queued = False
            if not stream.is_gone:
                stream.has_sent = True
                taken.append(stream)
        return taken

    async def _write(self, streams: Sequence[JobStream]) -> None:
        await self._write_chunks([stream for stream in streams if stream.ending is None])
        ending = [stream for stream in streams if stream.ending is not None and not stream.is_gone]
        for start in range(0, len(ending), _MAX_FINISHES):
            await self._finish(ending[start : start + _MAX_FINISHES])

    def _started_commands(self) -> list[bytes]:
        """For rows that joined the batch and are not over already: a note about those would outlive its job."""
        self._started = [stream for stream in self._started if not stream.is_gone]
        now_ms = int(time.time() * 1e3)
        return [pack("HSET", self._keys.job(s.job.job_id), JobField.STARTED_AT_MS, now_ms) for s in self._started]

    async def _write_chunks(self, streams: Sequence[JobStream]) -> None:
        """One entry a stream a round trip: a refused entry must not be overtaken by its successor."""
        while True:
            streams = [stream for stream in streams if stream.unacked and not stream.is_gone]
            started = self._started_commands()
            if not streams and not started:
                return
            commands = list(started)
            for stream in streams:
                entry_id, name, payload = stream.unacked[0]
                out = self._keys.out(stream.job.job_id)
                commands.append(pack("XADD", out, "NOMKSTREAM", str(entry_id), name, payload))
            self._started, noted = [], self._started
            try:
                replies = await self._client.batch(commands)
            except LinkLost:
                self._started = noted + self._started
                raise
            messages: list[bytes] = []
            refused: ReplyError | None = next((r for r in replies[: len(started)] if isinstance(r, ReplyError)), None)
            for stream, reply in zip(streams, replies[len(started) :], strict=True):
                if isinstance(reply, bytes):
                    messages += self._messages(stream, [stream.unacked.pop(0)])
                elif reply is None:
                    await self._reopen_or_leave(stream)
                elif is_fenced(reply):
                    self._leave(stream, Outcome.FENCED)
                else:
                    refused = reply
            self._publish(messages)
            if refused is not None:
                raise refused

    async def _finish(self, streams: Sequence[JobStream]) -> None:
        finishes = []
        for stream in streams:
            stream.make_entries()
            finishes.append(
                Finish(
                    record=stream.record(self.model, self.fingerprint),
                    chunks=list(stream.unacked),
                    reopen=stream.reopen,
                    end_id=stream.peek_id(),
                    lane=stream.job.lane,
                    entry_id=stream.job.entry_id,
                    reply_to=stream.job.reply_to,
                    result_ttl_s=stream.job.result_ttl_s,
                )
            )
        server_ms = int(time.time() * 1e3 + streams[0].job.clock_offset_ms)
        messages: list[bytes] = []
        for stream, finish, done in zip(
            streams, finishes, await finish_jobs(self._client, self._keys, finishes, server_ms), strict=True
        ):
            messages += self._messages(stream, done.entries)
            self._leave(stream, done.outcome, finish.record)
        self._publish(messages)

    def _messages(self, stream: JobStream, entries: Sequence[OutEntry]) -> list[bytes]:
        event = self._keys.ev(stream.job.job_id)
        return [
            pack("PUBLISH", event, event_message(entry_id, payload))
            for entry_id, name, payload in entries
            if name != "restart"
        ]

    def _publish(self, messages: Sequence[bytes]) -> None:
        if messages:
            self._client.send(messages)

    async def _resolve_unsure(self) -> None:
        """After a lost connection: drop from `unacked` what the streams hold already, and tell followers of it."""
        streams = [stream for stream in self._unsure if not stream.is_gone and stream.unacked]
        tops = await self._client.batch(
            [pack("XREVRANGE", self._keys.out(stream.job.job_id), "+", "-", "COUNT", 1) for stream in streams]
        )
        messages: list[bytes] = []
        for stream, reply in zip(streams, tops, strict=True):
            top = _top(raise_error(reply))
            # An entry of our epoch is ours. Of a newer one: the next write is refused and drops the row.
            while stream.unacked and top is not None and top.epoch == stream.job.epoch and stream.unacked[0][0] <= top:
                messages += self._messages(stream, [stream.unacked.pop(0)])
        self._unsure = []
        self._publish(messages)

    async def _reopen_or_leave(self, stream: JobStream) -> None:
        """`out` is gone in mid-job. If the job is still ours, write the stream anew with everything so far."""
        job_key, out = self._keys.job(stream.job.job_id), self._keys.out(stream.job.job_id)
        replies = await self._client.batch(
            [pack("WATCH", job_key), pack("HMGET", job_key, JobField.EPOCH, JobField.STATE)]
        )
        epoch, state = raise_error(replies[1])
        if epoch is None or int(epoch) != stream.job.epoch or state.decode() != State.RUNNING:
            await self._client.call("UNWATCH")
            self._leave(stream, Outcome.LOST if epoch is None else Outcome.FENCED)
            return
        log.warning("job %s: its stream was gone and is written again in full", stream.job.job_id)
        commands = [pack("XADD", out, str(entry_id), name, payload) for entry_id, name, payload in stream.reopen()]
        replies = await self._client.batch([pack("MULTI"), *commands, pack("EXEC")])
        for reply in replies[:-1]:
            raise_error(reply)
        if raise_error(replies[-1]) is None:
            self._leave(stream, Outcome.FENCED)

    def _leave(self, stream: JobStream, outcome: Outcome, record: FinalRecord | None = None) -> None:
        if not stream.is_gone:
            stream.is_gone = True
            self._on_done(stream, outcome, record)

    def _set_trouble(self, text: str | None) -> None:
        if (text is None) != (self._trouble is None):
            if text is not None:
                log.warning("the server refuses writes, results are held: %s", text)
            else:
                log.warning("the server takes writes again")
            self._on_trouble(text)
        self._trouble = text


def _top(entries: Reply) -> EntryId | None:
    return EntryId.parse(entries[0][0]) if entries else None
