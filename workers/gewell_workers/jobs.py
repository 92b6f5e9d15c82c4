"""The jobs that this process has taken and not finished."""

from dataclasses import dataclass, field

from gewell_workers.claim import Taken


@dataclass(slots=True, kw_only=True)
class HeldJob:
    """A job between claim and end. `is_ending`: its end is under way, cancels and deadlines come too late."""

    taken: Taken
    epoch: int
    num_tokens: int  # of the prompt: what it takes of the window
    conversation_id: str | None
    tenant: str | None
    deadline_ms: int | None
    is_ending: bool = False


@dataclass(slots=True, kw_only=True)
class ParkedJob:
    """A job whose time has not come. Only its entry is kept; the body is read again when it is due."""

    lane: str
    entry_id: str
    job_id: str
    conversation_id: str | None
    tenant: str | None
    due_ms: int

    @property
    def entry(self) -> str:
        return f"{self.lane}/{self.entry_id}"


@dataclass(slots=True)
class JobTable:
    held: dict[str, HeldJob] = field(default_factory=dict)
    parked: dict[str, ParkedJob] = field(default_factory=dict)  # by entry, "<lane>/<id>"
    entries: set[str] = field(default_factory=set)  # every entry that some part of this process is busy with
    num_tokens: int = 0
    num_finished: int = 0

    def hold(self, job: HeldJob) -> None:
        self.held[job.taken.job_id] = job
        self.num_tokens += job.num_tokens

    def drop(self, job_id: str, epoch: int) -> HeldJob | None:
        """Forget the job if it is held under this epoch."""
        job = self.held.get(job_id)
        if job is None or job.epoch != epoch:
            return None
        del self.held[job_id]
        self.entries.discard(job.taken.entry)
        self.num_tokens -= job.num_tokens
        self.num_finished += 1
        return job
