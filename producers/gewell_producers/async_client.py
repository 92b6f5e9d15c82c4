"""The asynchronous client: the same methods as `Client`, for one event loop.

All followers of one client share one subscribed connection (`Hub`), so that a gateway can follow hundreds of jobs. Each
has a bounded queue; what does not fit is dropped, and the follower finds the gap and reads the stream itself.
"""

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from itertools import islice
from types import TracebackType
from typing import Any, Self, TypeAlias

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.exceptions import RedisError, ResponseError

from gewell.errors import JobFailed
from gewell.job import parse_job
from gewell.protocol import (
    BLOB_TTL_S,
    GROUP,
    MAX_QUEUE_LEN,
    Chunk,
    End,
    EntryId,
    FinalRecord,
    InfoField,
    JobField,
    Keys,
    Lane,
    State,
)
from gewell.redis_url import check_url
from gewell_producers.connection import (
    FULL_POLL_S,
    LATER_ERRORS,
    LINK_ERRORS,
    RANGE_ROWS,
    ROOM_CHECK_S,
    SILENCE_S,
    SWEEP_S,
    Backoff,
    Patience,
    WorkerWatch,
    acknowledged_ids,
    as_text,
    cancel_entry,
    connection_options,
    oldest_cancel_id,
    refused,
)
from gewell_producers.errors import QueueFull, UnknownJob
from gewell_producers.inbox import BATCH_SIZE, MAX_IN_FLIGHT, InFlight, inbox_rows
from gewell_producers.job import Job, check_digest
from gewell_producers.settings import default_namespace, default_url
from gewell_producers.stream import Delivery, StreamReader

MessageQueue: TypeAlias = "asyncio.Queue[bytes | None]"

QUEUE_MESSAGES = 256  # a follower's queue; at 16 tokens a message more than any answer lags behind
MAX_CONNECTIONS = 32  # for commands; a follower needs one only while it reads a range


class Hub:
    """One subscribed connection for all followers of a client. Messages go to the queues of their channel.

    home    a channel that nobody writes to: with it the connection always has a subscription
    """

    def __init__(self, link: Any, home: str, backoff: Backoff) -> None:
        self._link = link
        self._home = home.encode()
        self._backoff = backoff
        self._queues: dict[bytes, set[MessageQueue]] = {}
        self._confirmed: dict[bytes, asyncio.Event] = {}
        self._lock = asyncio.Lock()  # one writer at a time on the connection
        self._heard: set[bytes] = set()  # channels with a message since the last tick
        self._pubsub: Any = None
        self._task: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    async def subscribe(self, channel: bytes) -> MessageQueue:
        """A queue of the channel's messages from now on; None in it: the link was lost, read the stream.

        Returns when the server has confirmed: a chunk after that is announced, one before it is in the range.
        """
        queue: MessageQueue = asyncio.Queue(QUEUE_MESSAGES)
        is_first = channel not in self._queues
        self._queues.setdefault(channel, set()).add(queue)
        if is_first:
            self._confirmed[channel] = asyncio.Event()
            if self._task is None or self._task.done():
                self._failure = None
                self._task = asyncio.create_task(self._listen())
            await self._send("subscribe", channel)
        while not self._confirmed[channel].is_set():
            self.check()
            with contextlib.suppress(TimeoutError):  # a look at `check` now and then
                await asyncio.wait_for(self._confirmed[channel].wait(), SILENCE_S)
        return queue

    async def unsubscribe(self, channel: bytes, queue: MessageQueue) -> None:
        self._queues[channel].discard(queue)
        if not self._queues[channel]:
            del self._queues[channel], self._confirmed[channel]
            await self._send("unsubscribe", channel)

    def check(self) -> None:
        """Raise what ended the listener, if something did."""
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _send(self, command: str, channel: bytes) -> None:
        """Tell the server, if there is a connection; a new connection subscribes to all channels anyway."""
        async with self._lock:
            # A channel may have come back, or gone, while another writer had the lock.
            if self._pubsub is not None and (channel in self._queues) == (command == "subscribe"):
                with contextlib.suppress(*LINK_ERRORS):  # the listener notices too
                    await getattr(self._pubsub, command)(channel)

    async def _listen(self) -> None:
        ticking = asyncio.create_task(self._tick())
        try:
            while True:
                pubsub = self._link.pubsub()
                try:
                    async with self._lock:
                        await pubsub.subscribe(self._home, *self._queues)
                        self._pubsub = pubsub
                    await self._receive(pubsub)
                except LINK_ERRORS as error:
                    self._pubsub = None
                    for event in self._confirmed.values():
                        event.clear()
                    await asyncio.sleep(self._backoff.failed(error))
                finally:
                    self._pubsub = None
                    with contextlib.suppress(*LINK_ERRORS):
                        await pubsub.aclose()
        except Exception as error:  # patience is over: every follower raises it
            self._failure = error
            for channel in self._queues:
                self._put(channel, None)
        finally:
            ticking.cancel()

    async def _tick(self) -> None:
        """Wake the followers that heard nothing for a while. One timer for all: one a message would cost too much."""
        while True:
            self._heard.clear()
            await asyncio.sleep(SILENCE_S)
            for channel in self._queues.keys() - self._heard:
                self._put(channel, None)

    async def _receive(self, pubsub: Any) -> None:
        while True:
            # Past `get_message`: its timer and its dict cost more than everything that is done with a message.
            kind, channel, data = await pubsub.connection.read_response(disconnect_on_error=False)
            if kind == b"message":
                self._put(channel, data)
            elif kind == b"subscribe":
                self._backoff.ok()
                confirmed = self._confirmed.get(channel)
                if confirmed is not None and not confirmed.is_set():
                    confirmed.set()
                    self._put(channel, None)  # what came while there was no link is in the range

    def _put(self, channel: bytes, data: bytes | None) -> None:
        self._heard.add(channel)
        for queue in self._queues.get(channel, ()):
            if not queue.full():  # a slow follower finds the gap
                queue.put_nowait(data)


class AsyncClient:
    """Submits jobs and reads results. Arguments as for `Client`."""

    def __init__(
        self, url: str | None = None, *, namespace: str | None = None, patience: Patience | None = None
    ) -> None:
        self.url = check_url(default_url() if url is None else url)
        self.keys = Keys(default_namespace() if namespace is None else namespace)
        self.patience = patience or Patience()
        pool: Any = redis.asyncio.BlockingConnectionPool.from_url(
            self.url, max_connections=MAX_CONNECTIONS, timeout=None, **connection_options(self.url, Retry)
        )
        self._redis: Any = redis.asyncio.Redis(connection_pool=pool)
        # Blocking reads and the subscription have connections of their own: they would starve the pool.
        self._own_link: Any = redis.asyncio.Redis.from_url(self.url, **connection_options(self.url, Retry))
        listening = connection_options(self.url, Retry) | {"socket_timeout": None}  # silence is no fault there
        self._hub_link: Any = redis.asyncio.Redis.from_url(self.url, **listening)
        self._backoff = Backoff(self.url, self.patience)
        home = self.keys.ev(f"hub-{secrets.token_hex(8)}")
        self._hub = Hub(self._hub_link, home, Backoff(self.url, self.patience))
        self._room: dict[Lane, tuple[float, int]] = {}

    async def close(self) -> None:
        await self._hub.close()
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()
        await self._own_link.aclose()
        await self._hub_link.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- submitting ---------------------------------------------------------------------------------------------------

    async def submit(self, job: Job) -> str:
        """Check the job, enqueue it and return its id. Raises InvalidRequest before anything is sent."""
        parse_job(job.body())
        await self._submit_batch([job])
        return job.id

    async def submit_many(self, jobs: Iterable[Job], *, batch_size: int = BATCH_SIZE) -> int:
        """Enqueue any number of jobs, pipelined and in order, and return how many. See `Client.submit_many`."""
        source, count = iter(jobs), 0
        while batch := list(islice(source, batch_size)):
            await self._submit_batch(batch)
            count += len(batch)
        return count

    async def run(self, job: Job, *, timeout_s: float | None = None) -> FinalRecord:
        """Submit, wait, return the record. Raises JobFailed when it ends in another state than `done`."""
        await self.submit(job)
        record = await self.result(job.id, timeout_s=timeout_s)
        check_digest(job, await self.digest(job.id))  # the id may have been another request's
        return record

    async def map(
        self, jobs: Iterable[Job], *, inbox: str | None = None, max_in_flight: int = MAX_IN_FLIGHT
    ) -> AsyncGenerator[FinalRecord]:
        """Submit all jobs and yield their records as they finish, failures included. See `Client.map`."""
        name = inbox or f"map-{secrets.token_hex(8)}"
        flight = InFlight(jobs, name, max_in_flight)
        key, last = self.keys.inbox(name), b"0-0"
        watch = WorkerWatch(self.url, self.keys.ns, self.patience)
        heard_at = time.monotonic()
        try:
            while not flight.is_finished:
                batch = flight.next_batch()
                if batch:
                    flight.acknowledged(batch, await self._submit_batch(batch))
                block_ms = None if flight.has_room else int(SILENCE_S * 1000)
                try:
                    rows = inbox_rows(await self._own_link.xread({key: last}, count=BATCH_SIZE, block=block_ms))
                except LINK_ERRORS as error:
                    await asyncio.sleep(self._backoff.failed(error))
                    async for record in self._sweep(flight):
                        yield record
                    continue
                self._backoff.ok()
                if rows:
                    heard_at, last = time.monotonic(), rows[-1][0]
                    for record in flight.take(rows):
                        yield record
                    await self._call(self._redis.xdel, key, *(row_id for row_id, _ in rows))
                elif block_ms is not None:
                    await self._watch(watch)
                    if time.monotonic() - heard_at > SWEEP_S:
                        heard_at = time.monotonic()
                        async for record in self._sweep(flight):
                            yield record
        finally:
            if inbox is None:
                with contextlib.suppress(RedisError):
                    await self._redis.delete(key)

    async def gather(self, jobs: Iterable[Job]) -> list[FinalRecord]:
        """Submit all jobs and return their records in the jobs' order, failures included."""
        order = list(jobs)
        records = {record.id: record async for record in self.map(order)}
        return [records[job.id] for job in order]

    # --- reading ------------------------------------------------------------------------------------------------------

    def follow(
        self, job_id: str, *, after: EntryId | str | None = None, timeout_s: float | None = None
    ) -> "AsyncStream":
        """Iterate over a job's chunks from its beginning (or behind entry `after`), each once and in order."""
        start = EntryId.parse(after) if isinstance(after, str) else after
        return AsyncStream(self, job_id, start, timeout_s)

    async def result(self, job_id: str, *, timeout_s: float | None = None) -> FinalRecord:
        """Wait for a job's final record. Raises JobFailed unless it is `done`, TimeoutError after `timeout_s`."""
        record = await self.record(job_id)
        if record is None:
            async with self.follow(job_id, timeout_s=timeout_s) as stream:
                record = await stream.record()
        if record.state is not State.DONE:
            raise JobFailed(job_id, record.to_dict())
        return record

    async def record(self, job_id: str) -> FinalRecord | None:
        """The final record if it stands now, whatever its state."""
        raw = await self._call(self._redis.get, self.keys.res(job_id))
        return None if raw is None else FinalRecord.from_json(raw)

    async def state(self, job_id: str) -> State | None:
        """What is known of a job now; None: no trace. A job that no worker has looked at shows no trace either."""
        raw = await self._call(self._redis.hget, self.keys.job(job_id), JobField.STATE)
        return None if raw is None else State(raw.decode())

    async def digest(self, job_id: str) -> str | None:
        """Digest of the request that the id belongs to; None: no worker has looked at such a job."""
        raw = await self._call(self._redis.hget, self.keys.job(job_id), JobField.DIGEST)
        return None if raw is None else raw.decode()

    async def upload(self, data: bytes) -> str:
        """Keep an image for jobs to come; returns its sha256: a message says {"type": "image", "image": sha256}.

        It stays `BLOB_TTL_S` after it was uploaded or last used.
        """
        sha256 = hashlib.sha256(data).hexdigest()
        await self._call(self._redis.set, self.keys.blob(sha256), data, px=int(BLOB_TTL_S * 1000))
        return sha256

    # --- operating ----------------------------------------------------------------------------------------------------

    async def cancel(
        self, job_id: str | None = None, *, conversation: str | None = None, tenant: str | None = None
    ) -> None:
        """Cancel one job, or everything that is queued or running now in a conversation or of a tenant."""
        entry = cancel_entry(job_id, conversation, tenant)
        await self._call(self._redis.xadd, self.keys.cancel, entry, minid=oldest_cancel_id(), approximate=True)

    async def workers(self) -> list[str]:
        """Ids of the workers with a live heartbeat."""
        alive: list[str] = await self._call(self._live_workers)
        return alive

    async def worker_facts(self) -> dict[str, dict[str, str]]:
        """The heartbeat of every live worker: see `gewell.protocol.WorkerField`."""
        raw = {name: await self._call(self._redis.hgetall, self.keys.worker(name)) for name in await self.workers()}
        return {name: as_text(fields) for name, fields in raw.items()}

    async def info(self) -> dict[str, str]:
        """What the newest worker says of itself: see `gewell.protocol.InfoField`. Empty: none was ever here."""
        return as_text(await self._call(self._redis.hgetall, self.keys.info))

    async def queue_lengths(self) -> dict[Lane, int]:
        """Jobs in each lane, queued and running."""
        return {lane: await self._call(self._redis.xlen, self.keys.jobs(lane)) for lane in Lane}

    async def require_worker(self) -> None:
        """Raise NoWorker unless a worker is alive now."""
        if not await self.workers():
            raise WorkerWatch(self.url, self.keys.ns, self.patience).no_worker()

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _call(self, command: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:
        """Run an idempotent command, again after outages, as long as patience lasts."""
        while True:
            try:
                answer = await command(*args, **options)
            except (*LINK_ERRORS, *LATER_ERRORS) as error:
                await asyncio.sleep(self._backoff.failed(error))
            except RedisError as error:
                raise refused(error) from error
            else:
                self._backoff.ok()
                return answer

    async def _live_workers(self) -> list[str]:
        names: set[bytes] = set()
        for lane in Lane:
            with contextlib.suppress(ResponseError):  # no stream or no group yet
                names.update(row["name"] for row in await self._redis.xinfo_consumers(self.keys.jobs(lane), GROUP))
        ids = sorted(name.decode() for name in names)
        return [worker_id for worker_id in ids if await self._redis.exists(self.keys.worker(worker_id))]

    async def _watch(self, watch: WorkerWatch) -> None:
        if watch.is_due():
            watch.saw(len(await self.workers()))

    async def _submit_batch(self, batch: Sequence[Job]) -> list[bytes]:
        for lane in {job.lane for job in batch}:
            await self._wait_for_room(lane, sum(job.lane is lane for job in batch))
        fields = [(self.keys.jobs(job.lane), job.entry()) for job in batch]
        acknowledged: list[bytes] = []
        while len(acknowledged) < len(fields):
            acknowledged += await self._call(self._send, fields[len(acknowledged) :])
        return acknowledged

    async def _send(self, entries: Sequence[tuple[str, Any]]) -> list[bytes]:
        """One pipeline of XADDs. Returns the ids up to the first refusal, raises it when it is the first answer."""
        pipeline = self._redis.pipeline(transaction=False)
        for key, fields in entries:
            pipeline.xadd(key, fields)
        return acknowledged_ids(await pipeline.execute(raise_on_error=False))

    async def _wait_for_room(self, lane: Lane, count: int) -> None:
        looked_at, room = self._room.get(lane, (-ROOM_CHECK_S, 0))
        started = time.monotonic()
        while room < count or time.monotonic() - looked_at > ROOM_CHECK_S:
            length, limit = await self._call(self._length_and_limit, lane)
            looked_at, room = time.monotonic(), limit - length
            if room >= min(count, limit):
                break
            waited_s = looked_at - started
            if self.patience.queue_full_s is not None and waited_s >= self.patience.queue_full_s:
                raise QueueFull(lane, length, limit, waited_s)
            await asyncio.sleep(FULL_POLL_S)
        self._room[lane] = (looked_at, room - count)

    async def _length_and_limit(self, lane: Lane) -> tuple[int, int]:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.xlen(self.keys.jobs(lane))
        pipeline.hget(self.keys.info, InfoField.MAX_QUEUE_LEN)
        length, limit = await pipeline.execute()
        return length, MAX_QUEUE_LEN if limit is None else int(limit)

    async def _sweep(self, flight: InFlight) -> AsyncIterator[FinalRecord]:
        """As `Client._sweep`."""
        ids = flight.waiting_ids
        for start in range(0, len(ids), BATCH_SIZE):
            part = ids[start : start + BATCH_SIZE]
            found = await self._call(self._entries_and_results, flight, part)
            records, lost = flight.settle(part, found)
            for record in records:
                yield record
            if lost:
                flight.acknowledged(lost, await self._submit_batch(lost))

    async def _entries_and_results(self, flight: InFlight, ids: Sequence[str]) -> list[tuple[bool, bytes | None]]:
        pipeline = self._redis.pipeline(transaction=False)
        for lane, entry_id in flight.places(ids):
            pipeline.xrange(self.keys.jobs(lane), entry_id, entry_id)
        pipeline.mget([self.keys.res(job_id) for job_id in ids])
        *entries, results = await pipeline.execute()
        return [(bool(entry), raw) for entry, raw in zip(entries, results, strict=True)]


class AsyncStream(AsyncIterator[Chunk]):
    """One follower of one job: iterate over its chunks. `last` is where a later follower may resume (`after=`)."""

    def __init__(self, client: AsyncClient, job_id: str, after: EntryId | None, timeout_s: float | None) -> None:
        self.job_id = job_id
        self.last = after
        self._client = client
        self._reader = StreamReader(job_id, after=after)
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._watch = WorkerWatch(client.url, client.keys.ns, client.patience)
        self._deliveries = self._follow()

    async def __anext__(self) -> Chunk:
        self.last, chunk = await anext(self._deliveries)
        return chunk

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._deliveries.aclose()

    @property
    def end(self) -> End | None:
        """How the job ended; None while it has not."""
        return self._reader.end

    async def record(self) -> FinalRecord:
        """The final record, whatever its state; waits for the end (chunks not yet taken are passed over)."""
        async for _ in self:
            pass
        record = self._reader.final or await self._client.record(self.job_id)
        if record is None:
            raise UnknownJob(self.job_id)
        return record

    async def _follow(self) -> AsyncGenerator[Delivery]:  # steps as numbered in docs/protocol.md
        client, reader = self._client, self._reader
        channel = client.keys.ev(self.job_id).encode()
        queue = await client._hub.subscribe(channel)  # (1), and again by the hub on a lost link (5)
        try:
            message: bytes | None = None
            while reader.end is None:
                new = None if message is None else reader.message(message)  # (3)
                if new is None:  # at first (2), after silence (4), or a gap of (3)
                    async for delivery in self._read():
                        yield delivery
                else:
                    for delivery in new:
                        yield delivery
                if reader.end is None:
                    message = await self._next_message(queue)
                    self._check_deadline()
                    client._hub.check()
        finally:
            await client._hub.unsubscribe(channel, queue)

    async def _next_message(self, queue: MessageQueue) -> bytes | None:
        """The next message; None after silence, or after the link was lost."""
        if self._deadline is None:
            return await queue.get()
        try:
            return await asyncio.wait_for(queue.get(), max(self._deadline - time.monotonic(), 0))
        except TimeoutError:
            return None

    async def _read(self) -> AsyncIterator[Delivery]:
        """Everything of the stream behind what was taken; without a stream, what else is known of the job."""
        client, reader = self._client, self._reader
        is_new = False
        while reader.end is None:
            out = client.keys.out(self.job_id)
            rows = await client._call(client._redis.xrange, out, min=reader.range_start, count=RANGE_ROWS)
            if not rows:
                for delivery in await self._look_further():
                    yield delivery
                break
            if reader.was_replaced(rows):
                reader.rewind()
                continue
            before = reader.last
            for delivery in reader.rows(rows):
                yield delivery
            is_new = is_new or reader.last != before
            if len(rows) < RANGE_ROWS:
                break
        if reader.end is None and not is_new:
            await client._watch(self._watch)

    async def _look_further(self) -> Sequence[Delivery]:
        result, num_traces, *lengths = await self._client._call(self._read_traces)
        return self._reader.nothing_there(result, num_traces, sum(lengths), time.monotonic())  # (6)

    async def _read_traces(self) -> list[Any]:
        keys = self._client.keys
        pipeline = self._client._redis.pipeline(transaction=True)  # one moment: a job between two would seem unknown
        pipeline.get(keys.res(self.job_id))
        pipeline.exists(keys.out(self.job_id), keys.job(self.job_id))
        for lane in Lane:
            pipeline.xlen(keys.jobs(lane))
        answer: list[Any] = await pipeline.execute()
        return answer

    def _check_deadline(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise TimeoutError(f"job {self.job_id} has not ended in time")
