"""A worker without an engine: it speaks the contract, and the test says what it writes and when.

By hand: `take` a job, `claim` it, write `chunk`s, `finish`. Or `serve()` answers everything from a thread: the answer
to a prompt is its words in reverse order, a chunk a word.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import orjson
import redis

from gewell.job import digest
from gewell.protocol import (
    FENCE_SEQ,
    FIRST_CHUNK_SEQ,
    GROUP,
    RESTART_SEQ,
    Chunk,
    EntryId,
    FinalRecord,
    InfoField,
    JobField,
    Keys,
    Lane,
    Restart,
    State,
    Usage,
    event_message,
    inbox_entry,
)


class FakeJob:
    """One claimed job: what this epoch writes."""

    def __init__(self, worker: "FakeWorker", lane: Lane, entry_id: bytes, job_id: str, body: dict[str, Any]) -> None:
        self.worker, self.lane, self.entry_id, self.id, self.body = worker, lane, entry_id, job_id, body
        self.epoch, self.seq = 0, FIRST_CHUNK_SEQ
        self.ids: list[int] = []
        self.text = ""

    def claim(self, keep: int | None = None) -> Self:
        """Take the job over in a new epoch; `keep` tokens stay, by default all."""
        link, out = self.worker.link, self.worker.keys.out(self.id)
        self.epoch = link.hincrby(self.worker.keys.job(self.id), JobField.EPOCH, 1)
        facts = {JobField.STATE: State.RUNNING, JobField.DIGEST: digest(self.body)}
        link.hset(self.worker.keys.job(self.id), mapping=facts)
        if keep is not None:
            self.ids = self.ids[:keep]
        link.xadd(out, {"fence": 1}, id=f"{self.epoch}-{FENCE_SEQ}")
        link.xadd(out, {"restart": Restart(len(self.ids)).to_json()}, id=f"{self.epoch}-{RESTART_SEQ}")
        self.seq = FIRST_CHUNK_SEQ
        return self

    def chunk(self, text: str, ids: Sequence[int] | None = None, *, publish: bool = True, **fields: Any) -> None:
        chunk = Chunk(ids=tuple(text.encode()) if ids is None else tuple(ids), text=text, **fields)
        self.ids += chunk.ids
        self.text += text
        self._write({"d": chunk.to_json()}, chunk.to_json(), publish)

    def finish(
        self, state: State = State.DONE, *, publish: bool = True, result_ttl_s: int = 60, **fields: Any
    ) -> FinalRecord:
        """Everything of an end in one transaction, then the message."""
        link, keys = self.worker.link, self.worker.keys
        fields = {"finish_reason": "stop", "text": self.text, "token_ids": tuple(self.ids)} | fields
        record = FinalRecord(
            id=self.id,
            state=state,
            epoch=self.epoch,
            usage=Usage(prompt=3, completion=len(self.ids)),
            metadata=self.body.get("metadata"),
            **fields,
        )
        entry = EntryId(self.epoch, self.seq)
        with link.pipeline(transaction=True) as pipeline:
            pipeline.set(keys.res(self.id), record.to_json(), ex=result_ttl_s)
            pipeline.xadd(keys.out(self.id), {"end": record.end().to_json()}, id=str(entry))
            if self.body.get("reply_to"):
                pipeline.xadd(keys.inbox(self.body["reply_to"]), inbox_entry(record.to_json(), self.id, state))
            pipeline.xack(keys.jobs(self.lane), GROUP, self.entry_id)
            pipeline.xdel(keys.jobs(self.lane), self.entry_id)
            pipeline.hset(keys.job(self.id), JobField.STATE, state)
            pipeline.execute()
        if publish:
            link.publish(keys.ev(self.id), event_message(entry, record.end().to_json()))
        return record

    def _write(self, fields: dict[str, Any], payload: bytes, publish: bool) -> None:
        entry = EntryId(self.epoch, self.seq)
        accepted = self.worker.link.xadd(self.worker.keys.out(self.id), fields, id=str(entry), nomkstream=True)
        assert accepted is not None, "the stream is gone"
        if publish:
            self.worker.link.publish(self.worker.keys.ev(self.id), event_message(entry, payload))
        self.seq += 1


class FakeWorker:
    """Consumer `fake` of the group, with a heartbeat that lasts as long as the test."""

    def __init__(self, url: str, ns: str, *, max_queue_len: int = 1000) -> None:
        self.keys = Keys(ns)
        self.link = redis.Redis.from_url(url)
        self._max_queue_len = max_queue_len
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.num_duplicates = 0
        self._taken: list[FakeJob] = []
        self.failure: BaseException | None = None

    def __enter__(self) -> Self:
        self.register()
        return self

    def register(self) -> None:
        for lane in Lane:
            with contextlib.suppress(redis.ResponseError):
                self.link.xgroup_create(self.keys.jobs(lane), GROUP, id="0", mkstream=True)
            self.link.xgroup_createconsumer(self.keys.jobs(lane), GROUP, "fake")
        self.link.hset(self.keys.worker("fake"), "status", "ready")
        self.link.expire(self.keys.worker("fake"), 600)
        self.link.hset(self.keys.info, mapping={InfoField.MODEL: "fake", InfoField.MAX_QUEUE_LEN: self._max_queue_len})

    def die(self) -> None:
        self.link.delete(self.keys.worker("fake"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10)
        self.link.close()
        if self.failure is not None:
            raise self.failure

    def take(self, timeout_s: float = 5.0) -> FakeJob:
        """The next job of any lane, not yet claimed."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._taken += self._read(1, 50)  # one of each lane
            if self._taken:
                return self._taken.pop(0)
        raise TimeoutError("no job came")

    def serve(self) -> None:
        """Answer every job from a thread until the test ends."""
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        is_back = False  # after an outage: what was read and not answered comes first
        while not self._stop.is_set():
            try:
                for job in self._read(64, 50, "0" if is_back else ">"):
                    self._answer(job)
                is_back = False
            except redis.ConnectionError:
                is_back = True
                time.sleep(0.05)
            except redis.ResponseError:
                self.register()
            except BaseException as error:
                self.failure = error
                raise

    def _answer(self, job: FakeJob) -> None:
        standing = self.link.get(self.keys.res(job.id))
        if standing is not None:  # a duplicate: answered from the record
            self.num_duplicates += 1
            if job.body.get("reply_to"):
                self.link.xadd(self.keys.inbox(job.body["reply_to"]), inbox_entry(standing, job.id, State.DONE))
            self.link.xack(self.keys.jobs(job.lane), GROUP, job.entry_id)
            self.link.xdel(self.keys.jobs(job.lane), job.entry_id)
            return
        job.claim()
        request = job.body["request"]
        prompt = request["prompt"] if "prompt" in request else request["messages"][-1]["content"]
        for i, word in enumerate(reversed(prompt.split())):
            job.chunk(word if i == 0 else f" {word}")
        job.finish(State.ERROR, finish_reason="error") if prompt == "fail" else job.finish()

    def _read(self, count: int, block_ms: int, start: str = ">") -> list[FakeJob]:
        streams: dict[Any, Any] = {self.keys.jobs(lane): start for lane in Lane}
        answer: Any = self.link.xreadgroup(GROUP, "fake", streams, count=count, block=block_ms)
        lanes = {self.keys.jobs(lane).encode(): lane for lane in Lane}
        return [
            FakeJob(self, lanes[key], entry_id, fields[b"id"].decode(), orjson.loads(fields[b"body"]))
            for key, rows in answer
            for entry_id, fields in rows
        ]
