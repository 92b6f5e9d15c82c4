"""The product's own cache on a trace: the real `PrefixCache`, page tables and pool, without bytes."""

from array import array
from collections.abc import Sequence
from typing import overload

from gewell.cache.geometry import KVGeometry
from gewell.cache.page_pool import PagePool
from gewell.cache.policy import ReusePolicy
from gewell.cache.prefix_cache import PrefixCache
from gewell.cache.sequence_pages import ResumePoint, SequencePages
from gewell.cache.sim.trace import Job, SegmentTokens
from gewell.request import CacheHints, EngineRequest
from gewell.sampling import SamplingParams


class _Tokens(Sequence[int]):
    """A prompt, or a prompt and its answer, known by length; only its answer can be looked at."""

    def __init__(self, num_prompt: int, answer: bytes = b"") -> None:
        self._num_prompt = num_prompt
        self._answer = array("i", answer)

    def __len__(self) -> int:
        return self._num_prompt + len(self._answer)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        if isinstance(at, slice):
            start, stop, _ = at.indices(len(self))
            if start < self._num_prompt:
                raise IndexError("the prompt's tokens are known as a key only")
            return self._answer[start - self._num_prompt : stop - self._num_prompt]
        return self._answer[at - self._num_prompt]


class GewellStore:
    """Runs jobs on a `PrefixCache`. Running jobs hold at most `running_share` of the pool, as on the other stores.

    A job holds its whole sequence from its start. The model: Gemma 4 31B in bf16, one page of 13,107,200 bytes.
    """

    def __init__(
        self,
        gpu_bytes: float,
        host_bytes: float = 0.0,
        *,
        running_share: float = 0.6,
        lookahead: int = 1024,
        use_expect: bool = False,
        policy: ReusePolicy | None = None,
    ) -> None:
        self.lookahead = lookahead
        # Traces differ only at segment borders: nothing is ever edited, so a slack would only cost pages here, and
        # the other policies hold none.
        self.geometry = KVGeometry.build(
            sliding_bytes_per_token=819_200, full_bytes_per_token=40_960, sliding_window=1024, slack_tokens=0
        )
        self.pool = PagePool(int(gpu_bytes // self.geometry.page_bytes))
        self.cache = PrefixCache(
            self.pool, self.geometry, policy=policy, num_host_pages=int(host_bytes // self.geometry.page_bytes)
        )
        self._running_limit = int(gpu_bytes * running_share // self.geometry.page_bytes)
        self._sequences: dict[str, SequencePages] = {}
        self._tokens = SegmentTokens()
        self._use_expect = use_expect
        self._known: set[str] = set()
        self._from_host: set[str] = set()

    def show(self, job: Job) -> None:
        hints = job.hints
        request = EngineRequest(
            request_id=job.job_id,
            prompt_ids=_Tokens(job.prompt),
            sampling=SamplingParams(max_tokens=job.out),
            stable_lengths=(job.stable,) if job.stable else (),
            message_starts=(0, job.segments[0][1]) if len(job.segments) > 1 else (0,),
            conversation_id=job.conversation_id,
            cache=CacheHints(
                one_off=bool(hints.get("one_off")),
                pin=bool(hints.get("pin")),
                ttl_s=hints.get("ttl_s"),
                priority=hints.get("priority", "normal"),
                expect_after=job.expect_after if self._use_expect else None,
            ),
        )
        self.cache.add_waiting(request, key=self._tokens.prompt(job), order=job.index)
        self._known.add(job.job_id)

    def start(self, job: Job) -> tuple[int, bool] | None:
        if job.job_id not in self._known:
            self.show(job)
        match = self.cache.match(job.job_id)
        if match.on_host and self._fits(job, match.point):
            if self.cache.restore(job.job_id):
                self._from_host.add(job.job_id)
            match = self.cache.match(job.job_id)
        self.cache.take_transfers()
        if not self._fits(job, match.point):
            return None
        sequence = SequencePages(self.pool, self.geometry, match.point)
        positions = self.cache.start(job.job_id, match.position)
        self._grow(sequence, job.prompt - match.position, positions)
        for position in positions:
            self.cache.retain(job.job_id, sequence, position, last_hidden=True)
        sequence.trim()
        self._grow(sequence, job.out)
        sequence.trim()
        self._sequences[job.job_id] = sequence
        return match.position, job.job_id in self._from_host

    def _fits(self, job: Job, point: ResumePoint | None) -> bool:
        """Would the running jobs and this one stay within their share of the pool?"""
        num_shared = 0
        if point is not None and self.geometry.full is not None:
            num_whole = point.position // self.geometry.full.page_tokens
            num_shared = num_whole - sum(map(self.pool.is_evictable, point.full_pages[:num_whole]))
        num_pages = self.geometry.num_pages(job.prompt + job.out)
        pool = self.pool
        num_running = pool.num_pages - pool.num_free_pages - pool.num_evictable_pages
        return num_running + num_pages - num_shared <= self._running_limit

    def _grow(self, sequence: SequencePages, num_tokens: int, positions: Sequence[int] = ()) -> None:
        if not num_tokens:
            return
        missing = sequence.num_pages_needed(num_tokens, positions) - self.pool.num_free_pages
        if missing > 0:
            self.cache.evict(missing)
        if not sequence.reserve(num_tokens, positions):
            raise RuntimeError(f"{missing} pages are missing and cannot be evicted")

    def finish(self, job: Job) -> None:
        sequence = self._sequences.pop(job.job_id)
        self._known.discard(job.job_id)
        self._from_host.discard(job.job_id)
        self.cache.finished(job.job_id, sequence, _Tokens(job.prompt, self._tokens.answer(job)))
        sequence.release()
