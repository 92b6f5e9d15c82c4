"""What to run this step: decode rows first, then prefill under a budget, then whoever may start. Plain ints and lists.

Order and room. Every decode row runs in every step. Running prefills go on in start order; then preempted requests
return, oldest first; only when none waits does the window give up a new one. Admission reserves what a request is
expected to need, not what it might: when pages run out all the same, cached prefixes go first, then the request that
started last is preempted and recomputed later from the best resume point. The one that started first is never
preempted while another runs, and it fits the pool alone, so every request gets to its end.
"""

from array import array
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from gewell.cache.geometry import KVGeometry
from gewell.cache.page_pool import PagePool
from gewell.cache.places import MIN_SHARED_TOKENS
from gewell.cache.sequence_pages import SequencePages, append_decode
from gewell.errors import ConfigError
from gewell.scheduler.lengths import OutputLengths
from gewell.scheduler.plan import PrefillChunk, StepPlan
from gewell.scheduler.prefixes import Prefixes
from gewell.scheduler.request import RequestState, Stage
from gewell.scheduler.window import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step.

    max_num_batched_tokens   tokens of a step while there are too few decode rows
    shadow_tokens            prefill tokens of a step at full width: what hides behind reading the weights
    min_shared_tokens        a sibling waits for a prefill in progress only when that saves so many tokens
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    shadow_tokens: int = 256
    min_shared_tokens: int = MIN_SHARED_TOKENS

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ConfigError("max_num_seqs", self.max_num_seqs, "at least 1")
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens", self.max_num_batched_tokens, f"more than max_num_seqs = {self.max_num_seqs}"
            )
        if not 1 <= self.shadow_tokens <= self.max_num_batched_tokens:
            raise ConfigError("shadow_tokens", self.shadow_tokens, f"1 to {self.max_num_batched_tokens}")

    def prefill_budget(self, num_decode_rows: int) -> int:
        """Prefill tokens of a step: all of it while decode is far from full width, its shadow when it is there.

        Between a quarter below full width and full width the budget falls in a straight line, so that a row more or
        less does not change the step's length abruptly.
        """
        largest = self.max_num_batched_tokens - num_decode_rows
        missing = min(1.0, 4.0 * (1.0 - num_decode_rows / self.max_num_seqs))
        return min(largest, self.shadow_tokens + int(missing * max(0, largest - self.shadow_tokens)))


def max_tokens_alone(num_pages: int, geometry: KVGeometry) -> int:
    """Longest sequence that a pool of `num_pages` holds when nothing else runs.

    A window that straddles pages takes one more; two pages of slack serve the copies of shared pages of each kind.
    """
    spare = num_pages - 2
    if geometry.sliding is not None:
        spare -= -(-geometry.sliding_window // geometry.sliding.page_tokens) + 1
    if spare <= 0:
        return 0
    if geometry.full is None:
        return 2**31 - 1  # windows alone are kept: any length fits
    return spare * geometry.full.page_tokens


class Scheduler:
    """Requests from the window to their end. One thread owns it.

    add, plan, complete, remove are all there is: `plan` changes page tables for a step that must then be launched,
    `complete` says that the step was computed.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        geometry: KVGeometry,
        prefixes: Prefixes,
        *,
        window: Window | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self.geometry = geometry
        self.prefixes = prefixes
        self.lengths = OutputLengths()
        self.window = window if window is not None else Window(prefixes.warm_tokens)
        self.num_preemptions = 0
        self._prefills: list[RequestState] = []  # in start order
        self._landing: list[RequestState] = []  # last chunk planned, not yet computed
        self._decodes: list[RequestState] = []
        self._decode_pages: list[SequencePages] = []  # parallel to _decodes
        self._positions: list[int] = []  # parallel: where each row's next query stands
        self._has_left = False  # some of _decodes no longer decode
        self._returning: list[RequestState] = []  # preempted, in start order
        self._num_following = 0  # behind a leader
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._num_reserved = 0  # pages that running requests are expected to add
        self._num_started = 0
        self._step_idx = 0
        self._blocked: tuple[RequestState, int] | None = None  # did not fit when so many pages were free

    # ------------------------------------------------------------------------------------------------------- state

    @property
    def num_running(self) -> int:
        return self.config.max_num_seqs - len(self._free_rows)

    @property
    def num_waiting(self) -> int:
        return len(self.window) + len(self._returning) + self._num_following

    def has_work(self) -> bool:
        return bool(self.num_running or self.num_waiting)

    def running(self) -> list[RequestState]:
        decodes = [req for req in self._decodes if req.stage is Stage.DECODE]
        return self._prefills + self._landing + decodes

    # ---------------------------------------------------------------------------------------------- coming and going

    def add(self, req: RequestState) -> None:
        req.cost = float(req.num_tokens + self.lengths.expected(req))
        self.prefixes.add_waiting(req)
        if not self._follow(req):  # at once: the prefill may have passed their common part when the window gives it up
            self.window.add(req)

    def remove(self, req: RequestState, *, is_completed: bool = True, is_sound: bool = True) -> None:
        """The request has ended, wherever it was; everything it held goes back. See `Prefixes.finished`."""
        self.prefixes.finished(req, is_sound=is_sound, is_completed=is_completed)
        if req.stage is Stage.WAITING:
            self._leave_waiting(req)
        else:
            self._stop_running(req)
        req.stage = Stage.FINISHED

    def _leave_waiting(self, req: RequestState) -> None:
        if req.leader is not None:
            req.leader.followers = [(at, other) for at, other in req.leader.followers if other is not req]
            req.leader = None
            self._num_following -= 1
        elif req.request_id in self.window:
            self.window.remove(req)
        else:
            self._returning.remove(req)

    def _stop_running(self, req: RequestState) -> None:
        """Give back row and pages, and let siblings go."""
        if req.stage is Stage.DECODE:
            self._has_left = True
        elif req in self._prefills:
            self._prefills.remove(req)
        else:
            self._landing.remove(req)
        assert req.pages is not None
        req.pages.release()
        req.pages = None
        self._num_reserved -= req.num_reserved_pages
        req.num_reserved_pages = 0
        self._free_rows.append(req.row_idx)
        req.row_idx = -1
        req.keep_positions = []
        req.pending_keeps = []
        self._release_followers(req, None)
        self._blocked = None

    def _preempt(self, plan: StepPlan, req: RequestState) -> None:
        self.prefixes.preempted(req)
        self._stop_running(req)
        req.stage = Stage.WAITING
        req.num_computed_tokens = 0
        req.num_preemptions += 1
        self.num_preemptions += 1
        plan.preempted.append(req)
        insort(self._returning, req, key=lambda other: other.start_order)

    # ---------------------------------------------------------------------------------------------------- one step

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run. Launch it: page tables already say that it was."""
        if self._has_left:
            self._compact()
        plan = StepPlan(
            step_idx=self._step_idx,
            decode_rows=self._decodes,
            decode_positions=self._positions,
            decode_full_slots=[],
            decode_sliding_slots=[],
        )
        self._plan_decodes(plan)
        budget = self.config.prefill_budget(len(plan.decode_rows))
        budget = self._plan_prefills(plan, budget)
        if not plan.preempted:
            self._admit(plan, budget)
        if not plan.decode_rows and not plan.chunks:
            return None
        plan.transfers = self.prefixes.take_transfers()
        self._step_idx += 1
        return plan

    def complete(self, plan: StepPlan, bad: Iterable[RequestState] = ()) -> None:
        """The step was computed: take its checkpoints, let finished prefills decode. `bad`: rows that are not sound."""
        unsound = set(bad)
        for chunk in plan.chunks:
            req = chunk.req
            if req.pages is None or req.stage is not Stage.PREFILL:
                continue  # preempted or ended while the step was under way
            for position in chunk.keep_positions:
                req.pending_keeps.remove(position)
                if req not in unsound:
                    self.prefixes.retain(req, position)
            self._release_followers(req, chunk.end)
            if chunk.is_last:
                self._landing.remove(req)
                self._start_decode(req)

    def _start_decode(self, req: RequestState) -> None:
        assert req.pages is not None
        req.stage = Stage.DECODE
        self._decodes = [*self._decodes, req]
        self._decode_pages = [*self._decode_pages, req.pages]
        self._positions = [*self._positions, req.pages.num_tokens]

    def _compact(self) -> None:
        kept = [i for i, req in enumerate(self._decodes) if req.stage is Stage.DECODE]
        self._keep_decodes(kept)
        self._has_left = False

    def _keep_decodes(self, kept: list[int]) -> None:
        self._decodes = [self._decodes[i] for i in kept]
        self._decode_pages = [self._decode_pages[i] for i in kept]
        self._positions = [self._positions[i] for i in kept]

    # ------------------------------------------------------------------------------------------------------- decode

    def _plan_decodes(self, plan: StepPlan) -> None:
        full, sliding = plan.decode_full_slots, plan.decode_sliding_slots
        num_served = 0
        while True:
            rest = self._decode_pages[num_served:] if num_served else self._decode_pages
            copies, num_more, changed = append_decode(rest, full, sliding)
            plan.copies.extend(copies)
            for i in changed:
                req = self._decodes[num_served + i]
                plan.changed_tables.append(req)
                self._reserve(req)
            num_served += num_more
            if num_served == len(self._decodes):
                break
            if not self._make_room(self._decode_pages[num_served].num_pages_needed(1)):
                num_served -= self._preempt_for_decode(plan, num_served)
        plan.decode_rows = self._decodes
        plan.decode_positions = self._positions
        self._positions = [position + 1 for position in self._positions]

    def _preempt_for_decode(self, plan: StepPlan, num_served: int) -> int:
        """Preempt the youngest and take it out of the step being planned; returns by how much num_served shrinks."""
        victim = self._youngest()
        served_before = False
        if victim.stage is Stage.DECODE:
            at = self._decodes.index(victim)
            served_before = at < num_served
            if served_before:
                del plan.decode_full_slots[at], plan.decode_sliding_slots[at]
                plan.changed_tables = [req for req in plan.changed_tables if req is not victim]
            self._keep_decodes([i for i in range(len(self._decodes)) if i != at])
        had_left = self._has_left
        self._preempt(plan, victim)
        self._has_left = had_left
        plan.copies = [copy for copy in plan.copies if self.pool.ref_cnt(copy[1])]
        return int(served_before)

    # ------------------------------------------------------------------------------------------------------ prefill

    def _plan_prefills(self, plan: StepPlan, budget: int) -> int:
        """Go on with running prefills, in start order; returns the budget left."""
        for req in list(self._prefills):
            if budget <= 0:
                break
            if req.stage is not Stage.PREFILL:
                continue  # preempted for one before it
            num_tokens = self._plan_chunk(plan, req, budget)
            while not num_tokens and self._is_oldest(req) and self.num_running > 1:
                self._preempt(plan, self._youngest())
                num_tokens = self._plan_chunk(plan, req, budget)
            budget -= num_tokens
        return budget

    def _plan_chunk(self, plan: StepPlan, req: RequestState, budget: int) -> int:
        """Plan the request's next tokens; returns how many, 0 when there is no room for even one."""
        pages, start = req.pages, req.num_computed_tokens
        assert pages is not None
        if not req.pending_keeps:
            pages.trim()
        end = chunk_end(start, min(start + budget, req.num_tokens), req.image_runs)
        keeps = [position for position in req.keep_positions if position <= end]
        while (appended := pages.append(end - start, keeps)) is None:
            if self._make_room(pages.num_pages_needed(end - start, keeps)):
                continue
            if keeps:
                keeps = []  # room for the request itself goes before checkpoints
            elif (smaller := chunk_end(start, start + (end - start) // 2, req.image_runs)) < end and smaller > start:
                end = smaller
            else:
                return 0
        is_last = end == req.num_tokens
        plan.chunks.append(
            PrefillChunk(
                req=req,
                start=start,
                token_ids=req.tokens[start:end],
                full_slots=appended.full_slots,
                sliding_slots=appended.sliding_slots,
                is_last=is_last,
                samples=is_last and req.num_output_tokens < req.max_output_tokens,
                keep_positions=tuple(keeps),
                scored=req.scored_tokens(start, end),
            )
        )
        plan.copies.extend(appended.copies)
        plan.changed_tables.append(req)
        req.num_computed_tokens = end
        req.pending_keeps.extend(keeps)
        req.keep_positions = [position for position in req.keep_positions if position > end]
        self._reserve(req)
        if is_last:
            self._prefills.remove(req)
            self._landing.append(req)
        return end - start

    # ---------------------------------------------------------------------------------------------------- admission

    def _admit(self, plan: StepPlan, budget: int) -> None:
        while budget > 0 and self._free_rows:
            req = self._returning[0] if self._returning else self._choose()
            if req is None or not self._start(plan, req):
                return
            budget -= self._plan_chunk(plan, req, budget)

    def _choose(self) -> RequestState | None:
        """The window's next request; those that would compute what a running prefill is computing wait behind it."""
        while (req := self.window.choose()) is not None:
            if not self._follow(req):
                return req
            self.window.remove(req)
        return None

    def _follow(self, req: RequestState) -> bool:
        """Let the request wait behind a running prefill that will compute more of its prompt than is cached, if any."""
        shared = self._shared_with_prefill(req)
        if shared is None:
            return False
        leader, position = shared
        req.leader = leader
        leader.followers.append((position, req))
        self._num_following += 1
        return True

    def _shared_with_prefill(self, req: RequestState) -> tuple[RequestState, int] | None:
        """A running prefill that will leave a checkpoint in this request's prompt beyond what is cached, and where."""
        cache = req.request.cache
        if cache.mode == "off" or req.num_tokens <= self.config.min_shared_tokens:
            return None
        least = self.prefixes.warm_tokens(req) + self.config.min_shared_tokens
        for leader in self._prefills + self._landing:
            if leader.request.cache.mode != "auto" or leader.request.cache.salt != cache.salt:
                continue
            limit = min(req.num_tokens - 1, _first_other_image(leader, req))
            limit = min(limit, leader.num_shareable_tokens, req.num_shareable_tokens)
            common = common_prefix(leader.tokens, req.tokens, limit)
            if common < least:
                continue
            ahead = [at for at in leader.pending_keeps + leader.keep_positions if least <= at <= common]
            best = max(ahead, default=0)
            if common > max(best, leader.num_computed_tokens) and self.prefixes.want(leader, common):
                insort(leader.keep_positions, common)
                best = common
            if best:
                return leader, best
        return None

    def _start(self, plan: StepPlan, req: RequestState) -> bool:
        """Give the request a row and the pages of its resume point. False: it does not fit now."""
        if self._blocked is not None:
            blocked, num_free = self._blocked
            if blocked is req and self.pool.num_free_pages <= num_free:
                return False
        pages = SequencePages(self.pool, self.geometry, self.prefixes.match(req))
        req.pages = pages
        num_expected = self.geometry.num_pages(req.num_prompt_tokens + self.lengths.expected(req))
        if not self._fits(num_expected - self._num_held(req)):
            pages.release()
            req.pages = None
            self._blocked = (req, self.pool.num_free_pages)
            return False
        self._blocked = None
        if self._returning and self._returning[0] is req:
            del self._returning[0]
        else:
            self.window.start(req)
        if req.start_order < 0:
            req.start_order = self._num_started
            req.num_cached_tokens = min(pages.num_tokens, req.num_prompt_tokens)
            self._num_started += 1
        req.stage = Stage.PREFILL
        req.row_idx = self._free_rows.pop()
        req.num_computed_tokens = pages.num_tokens
        req.num_expected_pages = num_expected
        req.keep_positions = self.prefixes.start(req, pages.num_tokens)
        self._reserve(req)
        insort(self._prefills, req, key=lambda other: other.start_order)
        plan.joined.append(req)
        return True

    def _fits(self, num_new_pages: int) -> bool:
        """Room for a request that is expected to add so many pages, beside what running ones are expected to add."""
        if not self.num_running:
            return True  # alone it always fits: longer ones are refused at the door
        margin = 1 + self.num_running // 8  # rows that outlive their expected end
        return (
            num_new_pages + self._num_reserved + margin <= self.pool.num_free_pages + self.prefixes.num_evictable_pages
        )

    # --------------------------------------------------------------------------------------------------------- room

    def _make_room(self, num_pages: int) -> bool:
        """True when that many pages are free, perhaps after dropping cached prefixes."""
        missing = num_pages - self.pool.num_free_pages
        if missing > 0:
            self.prefixes.evict(missing)
        return self.pool.num_free_pages >= num_pages

    @staticmethod
    def _num_held(req: RequestState) -> int:
        assert req.pages is not None
        return len(req.pages.full_pages) + len(req.pages.sliding_pages)

    def _reserve(self, req: RequestState) -> None:
        """Keep the sum of expected growth up to date after the request's tables changed."""
        num_reserved = max(0, req.num_expected_pages - self._num_held(req))
        self._num_reserved += num_reserved - req.num_reserved_pages
        req.num_reserved_pages = num_reserved

    def _youngest(self) -> RequestState:
        running = self.running()
        if len(running) < 2:
            raise RuntimeError(
                f"one running request and no room for its next token: {self.pool.num_free_pages} of "
                f"{self.pool.num_pages} pages free, {[req.num_tokens for req in running]} tokens"
            )
        return max(running, key=lambda req: req.start_order)

    def _is_oldest(self, req: RequestState) -> bool:
        return req.start_order == min(other.start_order for other in self.running())

    def _release_followers(self, leader: RequestState, computed: int | None) -> None:
        """Siblings whose shared part is computed go back to the window; all do when the leader is gone (None)."""
        if not leader.followers:
            return
        waiting = []
        for position, req in leader.followers:
            if computed is not None and position > computed:
                waiting.append((position, req))
                continue
            req.leader = None
            self._num_following -= 1
            self.window.add(req)
        leader.followers = waiting


def chunk_end(start: int, end: int, image_runs: tuple[tuple[int, int], ...]) -> int:
    """Where a chunk that may reach `end` really ends: before an image run that it would cut, or after its first one.

    A run longer than the budget is taken whole: its tokens see each other both ways, no part can be computed alone.
    """
    for run_start, run_end in image_runs:
        if run_start < end < run_end:
            return run_start if run_start > start else run_end
    return end


def _first_other_image(a: RequestState, b: RequestState) -> int:
    """Where two prompts part by their pictures: all images are written with the same placeholder tokens."""
    for x, y in zip_longest(a.request.images, b.request.images):
        if x is None or y is None or (x.start, x.end, x.digest) != (y.start, y.end, y.digest):
            return min(image.start for image in (x, y) if image is not None)
    return max(a.num_tokens, b.num_tokens)


def common_prefix(a: "array[int]", b: "array[int]", limit: int) -> int:
    """Number of equal leading items, at most `limit`. Compares slices, so long prompts cost microseconds."""
    high = min(len(a), len(b), limit)
    if a[:high] == b[:high]:
        return max(high, 0)
    low = 0  # a[:low] == b[:low], a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
