"""The synchronous client. Threads may share one; every method does its own waiting and survives a restart of Redis."""

import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from types import TracebackType
from typing import Any, Self

import redis
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

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


class Client:
    """Submits jobs and reads results.

    url        redis://, rediss:// or unix://; default: GEWELL_REDIS, else the server that `gewell up` started here
    namespace  prefix of all keys; default: GEWELL_NAMESPACE, else "gewell"
    patience   how long to wait for Redis, for a worker and for room in the queue
    tell       hears a line when a wait has become doubtful: no worker is alive; and when one is there again
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        namespace: str | None = None,
        patience: Patience | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.url = check_url(default_url() if url is None else url)
        self.keys = Keys(default_namespace() if namespace is None else namespace)
        self.patience = patience or Patience()
        self._tell = tell
        self._redis = redis.Redis.from_url(self.url, **connection_options(self.url, Retry))
        self._backoff = Backoff(self.url, self.patience)
        self._room: dict[Lane, tuple[float, int]] = {}  # lane: (when looked, jobs that fitted then and are not used up)

    def close(self) -> None:
        self._redis.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- submitting ---------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> str:
        """Check the job, enqueue it and return its id. Raises InvalidRequest before anything is sent."""
        parse_job(job.body())
        self._submit_batch([job])
        return job.id

    def submit_many(self, jobs: Iterable[Job], *, batch_size: int = BATCH_SIZE) -> int:
        """Enqueue any number of jobs, pipelined and in order, and return how many. Holds one batch in memory.

        The bodies are not checked here: a faulty job gets its own error record. What was not acknowledged when a
        connection broke is sent again under the same ids.
        """
        source, count = iter(jobs), 0
        while batch := list(islice(source, batch_size)):
            self._submit_batch(batch)
            count += len(batch)
        return count

    def run(self, job: Job, *, timeout_s: float | None = None) -> FinalRecord:
        """Submit, wait, return the record. Raises JobFailed when it ends in another state than `done`."""
        self.submit(job)
        record = self.result(job.id, timeout_s=timeout_s)
        check_digest(job, self.digest(job.id))  # the id may have been another request's
        return record

    def map(
        self, jobs: Iterable[Job], *, inbox: str | None = None, max_in_flight: int = MAX_IN_FLIGHT
    ) -> Iterator[FinalRecord]:
        """Submit all jobs and yield their records as they finish, failures included, in bounded memory.

        inbox   a name of one's own (one reader each): a later run with the same inbox and ids is answered from what an
                earlier one has finished. Default: a fresh inbox, removed at the end.
        """
        name = inbox or f"map-{secrets.token_hex(8)}"
        flight = InFlight(jobs, name, max_in_flight)
        key, last, taken = self.keys.inbox(name), b"0-0", list[bytes]()
        watch = self._new_watch()
        heard_at = time.monotonic()
        try:
            while not flight.is_finished:
                batch = flight.next_batch()
                if batch:
                    flight.acknowledged(batch, self._submit_batch(batch))
                block_ms = None if flight.has_room else int(SILENCE_S * 1000)
                try:
                    rows = inbox_rows(self._redis.xread({key: last}, count=BATCH_SIZE, block=block_ms))
                except LINK_ERRORS as error:
                    time.sleep(self._backoff.failed(error))
                    yield from self._sweep(flight)
                    continue
                self._backoff.ok()
                if rows:
                    heard_at, last = time.monotonic(), rows[-1][0]
                    yield from flight.take(rows)
                    taken = [row_id for row_id, _ in rows]
                    self._call(self._redis.xdel, key, *taken)
                elif block_ms is not None:
                    self._watch(watch)
                    if time.monotonic() - heard_at > SWEEP_S:
                        heard_at = time.monotonic()
                        yield from self._sweep(flight)
        finally:
            if inbox is None:
                with contextlib.suppress(RedisError):
                    self._redis.delete(key)

    def gather(self, jobs: Iterable[Job]) -> list[FinalRecord]:
        """Submit all jobs and return their records in the jobs' order, failures included."""
        order = list(jobs)
        records = {record.id: record for record in self.map(order)}
        return [records[job.id] for job in order]

    def drain(self, inbox: str) -> Iterator[FinalRecord]:
        """Records that wait in an inbox, oldest first; each is removed once the next one is asked for."""
        key = self.keys.inbox(inbox)
        while rows := self._call(self._redis.xrange, key, count=BATCH_SIZE):
            for row_id, fields in rows:
                yield FinalRecord.from_json(fields[b"res"])
                self._call(self._redis.xdel, key, row_id)

    # --- reading ------------------------------------------------------------------------------------------------------

    def follow(self, job_id: str, *, after: EntryId | str | None = None, timeout_s: float | None = None) -> "Stream":
        """Iterate over a job's chunks from its beginning (or behind entry `after`), each once and in order."""
        start = EntryId.parse(after) if isinstance(after, str) else after
        return Stream(self, job_id, start, timeout_s)

    def result(self, job_id: str, *, timeout_s: float | None = None) -> FinalRecord:
        """Wait for a job's final record. Raises JobFailed unless it is `done`, TimeoutError after `timeout_s`."""
        record = self.record(job_id)
        if record is None:
            with self.follow(job_id, timeout_s=timeout_s) as stream:
                record = stream.record()
        if record.state is not State.DONE:
            raise JobFailed(job_id, record.to_dict())
        return record

    def record(self, job_id: str) -> FinalRecord | None:
        """The final record if it stands now, whatever its state."""
        raw = self._call(self._redis.get, self.keys.res(job_id))
        return None if raw is None else FinalRecord.from_json(raw)

    def state(self, job_id: str) -> State | None:
        """What is known of a job now; None: no trace. A job that no worker has looked at shows no trace either."""
        raw = self._call(self._redis.hget, self.keys.job(job_id), JobField.STATE)
        return None if raw is None else State(raw.decode())

    def digest(self, job_id: str) -> str | None:
        """Digest of the request that the id belongs to; None: no worker has looked at such a job."""
        raw = self._call(self._redis.hget, self.keys.job(job_id), JobField.DIGEST)
        return None if raw is None else raw.decode()

    def upload(self, data: bytes) -> str:
        """Keep an image for jobs to come; returns its sha256: a message says {"type": "image", "image": sha256}.

        It stays `BLOB_TTL_S` after it was uploaded or last used.
        """
        sha256 = hashlib.sha256(data).hexdigest()
        self._call(self._redis.set, self.keys.blob(sha256), data, px=int(BLOB_TTL_S * 1000))
        return sha256

    # --- operating ----------------------------------------------------------------------------------------------------

    def cancel(self, job_id: str | None = None, *, conversation: str | None = None, tenant: str | None = None) -> None:
        """Cancel one job, or everything that is queued or running now in a conversation or of a tenant."""
        entry = cancel_entry(job_id, conversation, tenant)
        self._call(self._redis.xadd, self.keys.cancel, entry, minid=oldest_cancel_id(), approximate=True)

    def worker_facts(self) -> dict[str, dict[str, str]]:
        """The heartbeat of every live worker: see `gewell.protocol.WorkerField`."""
        raw = {name: self._call(self._redis.hgetall, self.keys.worker(name)) for name in self.workers()}
        return {name: as_text(fields) for name, fields in raw.items()}

    def workers(self) -> list[str]:
        """Ids of the workers with a live heartbeat."""
        alive: list[str] = self._call(self._live_workers)
        return alive

    def info(self) -> dict[str, str]:
        """What the newest worker says of itself: see `gewell.protocol.InfoField`. Empty: none was ever here."""
        return as_text(self._call(self._redis.hgetall, self.keys.info))

    def queue_lengths(self) -> dict[Lane, int]:
        """Jobs in each lane, queued and running."""
        return {lane: self._call(self._redis.xlen, self.keys.jobs(lane)) for lane in Lane}

    def require_worker(self) -> None:
        """Raise NoWorker unless a worker is alive now."""
        if not self.workers():
            raise self._new_watch().no_worker()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _call(self, command: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run an idempotent command, again after outages, as long as patience lasts."""
        while True:
            try:
                answer = command(*args, **options)
            except (*LINK_ERRORS, *LATER_ERRORS) as error:
                time.sleep(self._backoff.failed(error))
            except RedisError as error:
                raise refused(error) from error
            else:
                self._backoff.ok()
                return answer

    def _live_workers(self) -> list[str]:
        names: set[bytes] = set()
        for lane in Lane:
            with contextlib.suppress(ResponseError):  # no stream or no group yet
                rows: Any = self._redis.xinfo_consumers(self.keys.jobs(lane), GROUP)
                names.update(row["name"] for row in rows)
        ids = sorted(name.decode() for name in names)
        alive = [self._redis.exists(self.keys.worker(worker_id)) for worker_id in ids]
        return [worker_id for worker_id, is_alive in zip(ids, alive, strict=True) if is_alive]

    def _new_watch(self) -> WorkerWatch:
        return WorkerWatch(self.url, self.keys.ns, self.patience, tell=self._tell)

    def _watch(self, watch: WorkerWatch) -> None:
        if watch.is_due():
            watch.saw(len(self.workers()))

    def _submit_batch(self, batch: Sequence[Job]) -> list[bytes]:
        """Enqueue a batch when the queue has room; returns the entries' ids. Sends again what was not acknowledged."""
        for lane in {job.lane for job in batch}:
            self._wait_for_room(lane, sum(job.lane is lane for job in batch))
        fields = [(self.keys.jobs(job.lane), job.entry()) for job in batch]
        acknowledged: list[bytes] = []
        while len(acknowledged) < len(fields):
            acknowledged += self._call(self._send, fields[len(acknowledged) :])
        return acknowledged

    def _send(self, entries: Sequence[tuple[str, Any]]) -> list[bytes]:
        """One pipeline of XADDs. Returns the ids up to the first refusal, raises it when it is the first answer."""
        pipeline = self._redis.pipeline(transaction=False)
        for key, fields in entries:
            pipeline.xadd(key, fields)
        return acknowledged_ids(pipeline.execute(raise_on_error=False))

    def _wait_for_room(self, lane: Lane, count: int) -> None:
        looked_at, room = self._room.get(lane, (-ROOM_CHECK_S, 0))
        started = time.monotonic()
        while room < count or time.monotonic() - looked_at > ROOM_CHECK_S:
            length, limit = self._call(self._length_and_limit, lane)
            looked_at, room = time.monotonic(), limit - length
            if room >= min(count, limit):
                break
            waited_s = looked_at - started
            if self.patience.queue_full_s is not None and waited_s >= self.patience.queue_full_s:
                raise QueueFull(lane, length, limit, waited_s)
            time.sleep(FULL_POLL_S)
        self._room[lane] = (looked_at, room - count)

    def _length_and_limit(self, lane: Lane) -> tuple[int, int]:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.xlen(self.keys.jobs(lane))
        pipeline.hget(self.keys.info, InfoField.MAX_QUEUE_LEN)
        length, limit = pipeline.execute()
        return length, MAX_QUEUE_LEN if limit is None else int(limit)

    def _sweep(self, flight: InFlight) -> Iterator[FinalRecord]:
        """After an outage or a long silence: yield results past the inbox, submit again what the server has lost."""
        ids = flight.waiting_ids
        for start in range(0, len(ids), BATCH_SIZE):
            part = ids[start : start + BATCH_SIZE]
            records, lost = flight.settle(part, self._call(self._entries_and_results, flight, part))
            yield from records
            if lost:
                flight.acknowledged(lost, self._submit_batch(lost))

    def _entries_and_results(self, flight: InFlight, ids: Sequence[str]) -> list[tuple[bool, bytes | None]]:
        pipeline = self._redis.pipeline(transaction=False)
        for lane, entry_id in flight.places(ids):
            pipeline.xrange(self.keys.jobs(lane), entry_id, entry_id)
        pipeline.mget([self.keys.res(job_id) for job_id in ids])
        *entries, results = pipeline.execute()
        return [(bool(entry), raw) for entry, raw in zip(entries, results, strict=True)]


class Stream(Iterator[Chunk]):
    """One follower of one job: iterate over its chunks. `last` is where a later follower may resume (`after=`)."""

    def __init__(self, client: Client, job_id: str, after: EntryId | None, timeout_s: float | None) -> None:
        self.job_id = job_id
        self._client = client
        self._reader = StreamReader(job_id, after=after)
        self.last = after
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._watch = client._new_watch()
        self._deliveries = self._follow()

    def __next__(self) -> Chunk:
        self.last, chunk = next(self._deliveries)
        return chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._deliveries.close()

    @property
    def end(self) -> End | None:
        """How the job ended; None while it has not."""
        return self._reader.end

    def record(self) -> FinalRecord:
        """The final record, whatever its state; waits for the end (chunks not yet taken are passed over)."""
        for _ in self:
            pass
        record = self._reader.final or self._client.record(self.job_id)
        if record is None:
            raise UnknownJob(self.job_id)
        return record

    def _follow(self) -> Generator[Delivery]:  # steps as numbered in docs/protocol.md
        client, reader = self._client, self._reader
        backoff = Backoff(client.url, client.patience)
        while reader.end is None:
            pubsub = client._redis.pubsub()  # type: ignore[no-untyped-call]  # redis-py has no type there
            try:
                self._subscribe(pubsub)  # (1)
                backoff.ok()
                yield from self._read()  # (2)
                while reader.end is None:
                    message = pubsub.get_message(ignore_subscribe_messages=True, timeout=SILENCE_S)
                    new = None if message is None else reader.message(message["data"])  # (3)
                    if new is None:
                        yield from self._read()  # (4), or a gap of (3)
                    else:
                        yield from new
                    self._check_deadline()
            except LINK_ERRORS as error:  # (5)
                self._check_deadline()
                time.sleep(backoff.failed(error))
            finally:
                pubsub.close()

    def _subscribe(self, pubsub: Any) -> None:
        """Subscribe and wait for the server's word: a chunk after it is announced, one before it is in the range."""
        pubsub.subscribe(self._client.keys.ev(self.job_id))
        while (message := pubsub.get_message(timeout=SILENCE_S)) is None or message["type"] != "subscribe":
            self._check_deadline()

    def _read(self) -> Iterator[Delivery]:
        """Everything of the stream behind what was taken; without a stream, what else is known of the job."""
        client, reader = self._client, self._reader
        is_new = False
        while reader.end is None:
            rows: Any = client._redis.xrange(client.keys.out(self.job_id), min=reader.range_start, count=RANGE_ROWS)
            if not rows:
                yield from self._look_further()
                break
            if reader.was_replaced(rows):
                reader.rewind()
                continue
            before = reader.last
            yield from reader.rows(rows)
            is_new = is_new or reader.last != before
            if len(rows) < RANGE_ROWS:
                break
        if reader.end is None and not is_new:
            client._watch(self._watch)

    def _look_further(self) -> Sequence[Delivery]:
        client, keys = self._client, self._client.keys
        pipeline = client._redis.pipeline(transaction=True)  # one moment: a job between two of these would seem unknown
        pipeline.get(keys.res(self.job_id))
        pipeline.exists(keys.out(self.job_id), keys.job(self.job_id))
        for lane in Lane:
            pipeline.xlen(keys.jobs(lane))
        result, num_traces, *lengths = pipeline.execute()
        return self._reader.nothing_there(result, num_traces, sum(lengths), time.monotonic())  # (6)

    def _check_deadline(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise TimeoutError(f"job {self.job_id} has not ended in time")
