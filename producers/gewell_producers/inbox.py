"""Bookkeeping of many jobs whose results come through one inbox. No I/O: clients do the reading and the sending."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gewell.errors import InvalidRequest
from gewell.protocol import ErrorCode, FinalRecord, Lane
from gewell_producers.job import Job

BATCH_SIZE = 256  # jobs a pipeline; larger ones gain nothing (2 cores, Valkey on loopback)
MAX_IN_FLIGHT = 4096  # bodies kept for resubmission: 4 MB at 1 kB each

InboxRow = tuple[bytes, Mapping[bytes, bytes]]


class InFlight:
    """Jobs between submission and result, at most `limit` of them, taken from an iterable as room appears.

    Each id is answered once, however often the inbox names it: a job that was submitted twice because its
    acknowledgement was lost is answered twice there.
    """

    def __init__(self, jobs: Iterable[Job], inbox: str, limit: int = MAX_IN_FLIGHT) -> None:
        self._source: Iterator[Job] = iter(jobs)
        self._inbox = inbox
        self._limit = limit
        self._waiting: dict[str, Job] = {}
        self._entries: dict[str, bytes] = {}  # id of the jobs stream's entry, once acknowledged
        self._is_exhausted = False
        self.num_submitted = 0
        self.num_finished = 0

    @property
    def is_finished(self) -> bool:
        return self._is_exhausted and not self._waiting

    @property
    def waiting_ids(self) -> list[str]:
        return list(self._waiting)

    @property
    def has_room(self) -> bool:
        return not self._is_exhausted and len(self._waiting) < self._limit

    def next_batch(self, size: int = BATCH_SIZE) -> list[Job]:
        """The next jobs to submit, addressed to the inbox; they count as in flight from now on."""
        batch: list[Job] = []
        while len(batch) < size and self.has_room:
            job = next(self._source, None)
            if job is None:
                self._is_exhausted = True
                break
            if job.id in self._waiting:
                raise InvalidRequest(ErrorCode.ID_CONFLICT, f"job id {job.id} is twice in one run", "id")
            job = replace(job, reply_to=self._inbox)
            self._waiting[job.id] = job
            batch.append(job)
        return batch

    def acknowledged(self, batch: Sequence[Job], entry_ids: Sequence[bytes]) -> None:
        self.num_submitted += len(batch)
        self._entries.update(zip((job.id for job in batch), entry_ids, strict=True))

    def take(self, rows: Sequence[InboxRow]) -> list[FinalRecord]:
        """Records of the inbox entries that this run still waits for."""
        records = []
        for _, fields in rows:
            job_id = fields[b"id"].decode()
            if job_id in self._waiting:
                records.append(FinalRecord.from_json(fields[b"res"]))
                self._settle(job_id)
        return records

    def places(self, ids: Sequence[str]) -> list[tuple[Lane, bytes]]:
        """Lane and entry of each id, to see whether its entry still stands."""
        return [(self._waiting[job_id].lane, self._entries.get(job_id, b"0-0")) for job_id in ids]

    def settle(
        self, ids: Sequence[str], found: Sequence[tuple[bool, bytes | None]]
    ) -> tuple[list[FinalRecord], list[Job]]:
        """After an outage or a long silence: results that the inbox did not bring, and jobs that the server lost.

        found   (whether the entry stands, the result if there is one) of each id, the entry looked at first. A job
                finishes in one transaction, so one that has neither was lost.
        """
        records: list[FinalRecord] = []
        lost: list[Job] = []
        for job_id, (has_entry, raw) in zip(ids, found, strict=True):
            if raw is not None:
                records.append(FinalRecord.from_json(raw))
                self._settle(job_id)
            elif not has_entry:
                lost.append(self._waiting[job_id])
        return records, lost

    def _settle(self, job_id: str) -> None:
        del self._waiting[job_id]
        self._entries.pop(job_id, None)
        self.num_finished += 1


def inbox_rows(reply: Any) -> list[InboxRow]:
    """Rows of an XREAD over one stream."""
    return list(reply[0][1]) if reply else []
