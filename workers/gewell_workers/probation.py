"""Suspects: jobs that were in the batch when a worker died. One of them may have killed it.

All at once they would kill the next worker too, and each death counts for everyone in the batch, so that after
`max_crashes` the innocent would be given up with the guilty. So they come back in groups: first those that had joined
the batch last (what kills mostly kills in its first steps), never more than half of those left. A job that one more
crash would end runs alone in an empty engine: whoever is given up had no one else beside it.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_LAST_STEPS_MS = 100  # who joined so close to the last one joined in the worker's last steps
_TRIAL_TOKENS = 8  # after so many tokens (or its end) a suspect is cleared
_TRIAL_S = 1.0  # or after so long in the batch: a long prefill need not end
_PATIENCE_S = 5.0  # or if it waits so long for a free row: the others must not wait for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A job that waits for its trial. Only its entry is kept; the body is read again."""

    lane: str
    entry_id: str
    job_id: str
    conversation_id: str | None
    tenant: str | None
    started_at_ms: int
    must_be_alone: bool  # one more crash ends it

    @property
    def entry(self) -> str:
        return f"{self.lane}/{self.entry_id}"


class Probation:
    """Who waits, who is on trial. Knows no Redis and no engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.waiting: dict[str, Suspect] = {}  # by entry
        self._clock = clock
        self._on_trial: dict[str, int] = {}  # job id -> tokens seen
        self._cleared_at_s: dict[str, float] = {}  # job id -> when it is cleared without tokens
        self._is_alone = False

    @property
    def needs_empty_engine(self) -> bool:
        """No new job may join: one is on trial alone, or only such are left to try."""
        if self._on_trial:
            return self._is_alone
        return bool(self.waiting) and all(suspect.must_be_alone for suspect in self.waiting.values())

    @property
    def has_trial(self) -> bool:
        return bool(self._on_trial)

    def add(self, suspect: Suspect) -> None:
        self.waiting[suspect.entry] = suspect

    def next_group(self, *, is_engine_empty: bool) -> list[Suspect]:
        """Who may join now; they are on trial from here on. Empty while a trial is under way."""
        if self._on_trial or not self.waiting:
            return []
        latest_first = sorted(self.waiting.values(), key=lambda suspect: suspect.started_at_ms, reverse=True)
        together = [suspect for suspect in latest_first if not suspect.must_be_alone]
        if together:
            newest_ms = together[0].started_at_ms
            last_steps = [s for s in together if newest_ms - s.started_at_ms <= _LAST_STEPS_MS]
            group = last_steps[: max(1, len(together) // 2)]
            self._is_alone = False
        elif is_engine_empty:
            group = latest_first[:1]
            self._is_alone = True
        else:
            return []
        for suspect in group:
            del self.waiting[suspect.entry]
            self._on_trial[suspect.job_id] = 0
            self._cleared_at_s[suspect.job_id] = self._clock() + _PATIENCE_S
        return group

    def started(self, job_ids: Iterable[str]) -> None:
        """These join the batch now."""
        for job_id in job_ids:
            if job_id in self._on_trial:
                self._cleared_at_s[job_id] = self._clock() + _TRIAL_S

    def saw_tokens(self, job_id: str, num_tokens: int) -> None:
        if job_id in self._on_trial:
            self._on_trial[job_id] += num_tokens
            if self._on_trial[job_id] >= _TRIAL_TOKENS:
                self.left([job_id])

    def clear_survivors(self) -> None:
        """End the trials whose time is up."""
        now_s = self._clock()
        self.left([job_id for job_id, at_s in self._cleared_at_s.items() if at_s <= now_s])

    def left(self, job_ids: Iterable[str]) -> None:
        """These are cleared, have ended, or could not be admitted after all."""
        for job_id in job_ids:
            self._on_trial.pop(job_id, None)
            self._cleared_at_s.pop(job_id, None)
