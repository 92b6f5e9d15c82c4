"""The machine that a trace runs on: which jobs run side by side, and which are in the queue.

Jobs start in queue order, at most `width` at a time. Prefill is one lane of 10,000 tokens/s, a decode step takes 20 ms.
Time only decides which jobs overlap and which are visible; no token is charged for it. A waiting job is visible when it
is among the next `lookahead`, has arrived, and all jobs it is made from are finished.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gewell.cache.sim.trace import Job, Trace
from gewell.errors import ConfigError

PREFILL_TOKENS_PER_S = 10_000
DECODE_STEP_S = 0.02


class Store(Protocol):
    """A cache under test."""

    lookahead: int  # jobs from the head of the queue that it may see

    def show(self, job: Job) -> None:
        """The job is visible in the queue from now on, until it starts."""

    def start(self, job: Job) -> tuple[int, bool] | None:
        """Served prompt tokens and whether they came from the host; None: no room beside the running jobs."""

    def finish(self, job: Job) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What one run of a trace through a store came to."""

    jobs: int
    prompt_tokens: int
    served_tokens: int
    host_tokens: int  # of the served ones
    width: float  # jobs side by side, mean over busy time


def run_trace(trace: Trace, store: Store, *, width: int = 64, tick: Callable[[], None] | None = None) -> Counts:
    """Run all jobs through the store. tick() is called after each started job, for progress bars."""
    return _Run(trace, store, width).run(tick)


class _Run:
    def __init__(self, trace: Trace, store: Store, width: int) -> None:
        self.jobs, self.store, self.width = trace.jobs, store, width
        self.unmet = [len(job.after) for job in self.jobs]
        self.visible: set[int] = set()
        self.late: list[tuple[float, int]] = []
        self.running: list[tuple[float, int]] = []
        self.horizon = 0
        self.clock = self.prefill_free = self.busy = self.active = 0.0

    def run(self, tick: Callable[[], None] | None) -> Counts:
        served = host = 0
        for job in self.jobs:
            self._advance_to(job)
            got = self._start(job)
            served += got[0]
            host += got[0] * got[1]
            begin = max(self.clock, self.prefill_free)
            self.prefill_free = begin + (job.prompt - got[0]) / PREFILL_TOKENS_PER_S
            end = self.prefill_free + job.out * DECODE_STEP_S
            self.busy += end - self.clock
            heapq.heappush(self.running, (end, job.index))
            if tick is not None:
                tick()
        while self.running:
            self._retire()
        return Counts(
            jobs=len(self.jobs),
            prompt_tokens=sum(job.prompt for job in self.jobs),
            served_tokens=served,
            host_tokens=host,
            width=self.busy / self.active if self.active else 0.0,
        )

    def _advance_to(self, job: Job) -> None:
        while self.unmet[job.index]:
            self._retire()
        while self.running and self.running[0][0] <= job.t:
            self._retire()
        if job.t > self.clock:
            self.active += job.t - self.clock if self.running else 0.0
            self.clock = job.t
        end = min(len(self.jobs), job.index + 1 + self.store.lookahead) if self.store.lookahead else 0
        while self.horizon < end:
            self.horizon += 1
            self._show(self.jobs[self.horizon - 1])
        while self.late and self.late[0][0] <= self.clock:
            self._show(self.jobs[heapq.heappop(self.late)[1]])
        self.visible.discard(job.index)

    def _show(self, job: Job) -> None:
        if job.index >= self.horizon or self.unmet[job.index] or job.index in self.visible:
            return
        if job.t > self.clock:
            heapq.heappush(self.late, (job.t, job.index))
        else:
            self.visible.add(job.index)
            self.store.show(job)

    def _start(self, job: Job) -> tuple[int, bool]:
        got = self.store.start(job) if len(self.running) < self.width else None
        while got is None:
            if not self.running:
                raise ConfigError(
                    "gpu_gib", job.job_id, f"a job of {job.prompt + job.out} tokens does not fit the pool"
                )
            self._retire()
            got = self.store.start(job)
        assert 0 <= got[0] <= job.prompt, (job.job_id, got, job.prompt)
        return got

    def _retire(self) -> None:
        end, index = heapq.heappop(self.running)
        self.active += max(0.0, end - self.clock)
        self.clock = max(self.clock, end)
        job = self.jobs[index]
        self.store.finish(job)
        for dependent in job.dependents:
            self.unmet[dependent.index] -= 1
            self._show(dependent)
