"""Cancels: by job, conversation or tenant, running or deep in the backlog.

A cancel covers every job whose entry is older than the cancel's own. Markers in Redis serve jobs that are read later;
the newest cancels are kept here too, for jobs that are being made ready this moment.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from gewell.job import Job
from gewell.protocol import CANCEL_MARKER_TTL_S, CancelKind, EntryId, Keys, is_valid_id
from gewell_workers.claim import Taken, covers_group, covers_id
from gewell_workers.jobs import HeldJob, ParkedJob
from gewell_workers.probation import Suspect
from gewell_workers.resp import Client, pack, raise_error

_MAX_RECENT = 10_000


class Cancel(NamedTuple):
    kind: CancelKind
    name: str
    entry_id: str


def parse_cancel(entry_id: str, fields: dict[str, str]) -> list[Cancel]:
    """Cancels that one entry names; what cannot be an id is dropped."""
    return [Cancel(kind, fields[kind], entry_id) for kind in CancelKind if is_valid_id(fields.get(kind))]


class CancelLog:
    """The newest cancels of this process."""

    def __init__(self) -> None:
        self._newest: OrderedDict[tuple[CancelKind, str], str] = OrderedDict()

    def add(self, cancels: Iterable[Cancel]) -> None:
        for cancel in cancels:
            self._newest[cancel.kind, cancel.name] = cancel.entry_id
            self._newest.move_to_end((cancel.kind, cancel.name))
        while len(self._newest) > _MAX_RECENT:
            self._newest.popitem(last=False)

    def covers(self, taken: Taken, job: Job | None) -> bool:
        names: list[tuple[CancelKind, str | None]] = [(CancelKind.ID, taken.job_id)]
        if job is not None:
            names += [(CancelKind.TENANT, job.tenant), (CancelKind.CONVERSATION, job.conversation_id)]
        newest = [(kind, self._newest.get((kind, name))) for kind, name in names if name is not None]
        return any(marker is not None and _covers(kind, marker, taken.entry_id) for kind, marker in newest)


def _covers(kind: CancelKind, cancel_id: str, entry_id: str) -> bool:
    return covers_id(cancel_id, entry_id) if kind is CancelKind.ID else covers_group(cancel_id, entry_id)


def is_hit(cancel: Cancel, job_id: str, conversation_id: str | None, tenant: str | None, entry_id: str) -> bool:
    name = {CancelKind.ID: job_id, CancelKind.CONVERSATION: conversation_id, CancelKind.TENANT: tenant}[cancel.kind]
    return name == cancel.name and _covers(cancel.kind, cancel.entry_id, entry_id)


def hits_held(cancel: Cancel, job: HeldJob) -> bool:
    return is_hit(cancel, job.taken.job_id, job.conversation_id, job.tenant, job.taken.entry_id)


def hits_waiting(cancel: Cancel, job: ParkedJob | Suspect) -> bool:
    return is_hit(cancel, job.job_id, job.conversation_id, job.tenant, job.entry_id)


async def set_markers(client: Client, keys: Keys, cancels: Iterable[Cancel]) -> None:
    """Write the markers that are newer than what stands. All workers do so in the stream's order; the newest stays."""
    cancels = list(cancels)
    names = [keys.cancel_marker(cancel.kind, cancel.name) for cancel in cancels]
    standing = [raise_error(reply) for reply in await client.batch([pack("GET", name) for name in names])]
    commands = [
        pack("SET", name, cancel.entry_id, "PX", int(CANCEL_MARKER_TTL_S * 1e3))
        for name, cancel, old in zip(names, cancels, standing, strict=True)
        if old is None or EntryId.parse(old) < EntryId.parse(cancel.entry_id)
    ]
    for reply in await client.batch(commands):
        raise_error(reply)
