"""An engine without a model: deterministic tokens over real paging and scheduling. No torch.

The next token is a function of (seed, position, last token), so a request's output does not depend on what else runs,
on preemption, on the cache or on the epoch. What does depend on them is checked instead: a shadow memory holds, for
every slot, a hash of the whole prefix up to the token that was written there, and before a row draws its token each
slot that a model would read is compared with the row's own history. A lost copy, a page freed too early, a stale page
table or a resume point that promises too much raises `PagingFault` in the step where a model would have read garbage.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gewell.cache.geometry import KindGeometry, KVGeometry
from gewell.cache.page_pool import PagePool
from gewell.cache.prefix_cache import PrefixCache
from gewell.cache.sequence_pages import NO_SLOT
from gewell.cache.tiers import Tier, Transfer
from gewell.engine.api import EngineInfo, TokenLogprobs
from gewell.engine.engine import PagedEngine
from gewell.scheduler.batch import Scheduler, SchedulerConfig, max_tokens_alone
from gewell.scheduler.plan import PrefillChunk, StepPlan, StepResult
from gewell.scheduler.prefixes import CachedPrefixes, NoPrefixes, Prefixes
from gewell.scheduler.request import RequestState

PRINTABLE = tuple(range(32, 127))  # ids of ASCII text under a byte tokenizer
EOS_ID = 1

_UNWRITTEN = 0
_MASK = 2**64 - 1


class PagingFault(RuntimeError):
    """A row would have read keys and values that are not those of its own prefix."""


def _mix(state: int, value: int) -> int:
    """One step of a 64-bit hash (splitmix64's finaliser over a sum). Never `_UNWRITTEN`."""
    z = (state + 0x9E3779B97F4A7C15 * (value + 1)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) | 1


def scripted_token(
    seed: int, position: int, last_token: int, *, alphabet: Sequence[int] = PRINTABLE, eos_odds: int = 0
) -> int:
    """The token at `position` after `last_token`. eos_odds = n: one draw in n is `EOS_ID`; 0: none is."""
    draw = _mix(_mix(_mix(0, seed), position), last_token) >> 8
    if eos_odds and draw % eos_odds == 0:
        return EOS_ID
    return alphabet[draw // max(eos_odds, 1) % len(alphabet)]


def scripted_logprob(position: int, token: int) -> float:
    """What the script says of a given token."""
    return -(_mix(_mix(0, position), token) % 1000) / 100


def _scores(chunk: PrefillChunk) -> list[TokenLogprobs]:
    num_top, tokens = chunk.req.request.num_score_top, chunk.req.tokens
    found = [(tokens[at], scripted_logprob(at, tokens[at])) for at in range(*chunk.scored)]
    return [TokenLogprobs(token_id=t, logprob=lp, top=((t, lp),) if num_top else ()) for t, lp in found]


def _is_allowed(words: list[int], token: int) -> bool:
    return bool(words[token // 32] >> token % 32 & 1)


class _Shadow:
    """What lies in the slots of one layer kind."""

    def __init__(self, num_pages: int, kind: KindGeometry, window: int | None, num_host_pages: int) -> None:
        self.page_tokens = kind.page_tokens
        self.window = window
        self.slots = array("Q", bytes(8 * num_pages * kind.page_tokens))
        self._tiers = {Tier.GPU: self.slots, Tier.HOST: array("Q", bytes(8 * num_host_pages * kind.page_tokens))}
        self._empty = array("Q", bytes(8 * kind.page_tokens))

    def clear(self, page: int) -> None:
        self.slots[page * self.page_tokens : (page + 1) * self.page_tokens] = self._empty

    def copy(self, source: int, destination: int) -> None:
        size = self.page_tokens
        self.slots[destination * size : (destination + 1) * size] = self.slots[source * size : (source + 1) * size]

    def transfer(self, move: Transfer) -> None:
        size, source, target = self.page_tokens, self._tiers[move.source], self._tiers[move.target]
        for a, b in move.pairs:
            target[b * size : (b + 1) * size] = source[a * size : (a + 1) * size]

    def check(self, row: "_Row", pages: Sequence[int], table_start: int, start: int, end: int, name: str) -> None:
        """Positions [start, end) of the row's history lie where its page table says."""
        size, hashes = self.page_tokens, row.hashes
        while start < end:
            index, offset = divmod(start - table_start, size)
            stop = min(end, start + size - offset)
            if not 0 <= index < len(pages) or pages[index] < 0:
                raise PagingFault(f"{row.name}: no {name} page for position {start} (table starts at {table_start})")
            first = pages[index] * size + offset
            if self.slots[first : first + stop - start] != hashes[start:stop]:
                wrong = next(i for i in range(stop - start) if self.slots[first + i] != hashes[start + i])
                what = "nothing" if self.slots[first + wrong] == _UNWRITTEN else "another prefix"
                raise PagingFault(
                    f"{row.name}: {name} slot {first + wrong} (page {pages[index]}) of position {start + wrong} "
                    f"holds {what}"
                )
            start = stop


class _Row:
    """A runner's own state of one running request, kept as a GPU runner would keep it: by deltas."""

    def __init__(self, req: RequestState) -> None:
        self.name = f"request {req.request_id}"
        self.hashes = array("Q")  # hash of the prefix that ends with token i
        self.state = 0
        self.last_token = -1
        self.full_pages: list[int] = []
        self.sliding_pages: list[int] = []
        self.sliding_start = 0
        self.extend(req.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.state = _mix(self.state, token)
            self.hashes.append(self.state)
        self.last_token = tokens[-1]


class ScriptedRunner:
    """A `Runner` that draws tokens from a script and checks every slot that a model would read.

    step_delay_s     sleeps that long in every step
    depth            0 or 1, as a device would behave
    is_bad           called with (request, position of the token to draw): True gives logits that are not numbers
    fail_at_step     raises in that step, as a device fault would
    """

    def __init__(
        self,
        geometry: KVGeometry,
        num_pages: int,
        max_num_seqs: int,
        *,
        num_host_pages: int = 0,
        alphabet: Sequence[int] = PRINTABLE,
        eos_odds: int = 0,
        step_delay_s: float = 0.0,
        depth: int = 0,
        is_bad: Callable[[RequestState, int], bool] | None = None,
        fail_at_step: int | None = None,
    ) -> None:
        self._full = _Shadow(num_pages, geometry.full, None, num_host_pages) if geometry.full else None
        window = geometry.sliding_window
        self._sliding = _Shadow(num_pages, geometry.sliding, window, num_host_pages) if geometry.sliding else None
        self._rows: list[_Row | None] = [None] * max_num_seqs
        self._alphabet = alphabet
        self._eos_odds = eos_odds
        self._step_delay_s = step_delay_s
        self._depth = depth
        self._is_bad = is_bad
        self._fail_at_step = fail_at_step
        self._results: deque[StepResult] = deque()
        self._drawing: list[tuple[RequestState, _Row]] = []  # of the step launched last
        self._masked_rows: list[int] = []
        self._scores: dict[int, list[TokenLogprobs]] = {}

    @property
    def depth(self) -> int:
        return self._depth

    def launch(self, plan: StepPlan) -> None:
        if self._step_delay_s:
            time.sleep(self._step_delay_s)
        if plan.step_idx == self._fail_at_step:
            raise RuntimeError(f"scripted fault in step {plan.step_idx}")
        for move in plan.transfers:
            for shadow in self._shadows():
                shadow.transfer(move)
        for page in plan.freed_pages:
            self._clear(page)
        for req in plan.joined:
            self._rows[req.row_idx] = _Row(req)
        for req in plan.changed_tables:
            self._load_tables(req)
        for source, destination in plan.copies:
            for shadow in self._shadows():
                shadow.copy(source, destination)
        self._write(plan)
        for req, position in zip(plan.decode_rows, plan.decode_positions, strict=True):
            self._check_row(self._row(req), position, position + 1)
        for chunk in plan.chunks:
            self._check_row(self._row(chunk.req), chunk.start, chunk.end)
        self._drawing = [(req, self._row(req)) for req in plan.sampling_rows()]
        self._scores = {i: _scores(chunk) for i, chunk in enumerate(plan.chunks) if chunk.scored[1]}
        if not plan.masked_rows:
            self._results.append(self._draw({}))
        else:
            self._masked_rows = plan.masked_rows

    def draw(self, masks: Any) -> None:
        self._results.append(self._draw(dict(zip(self._masked_rows, masks.tolist(), strict=True))))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self._results.clear()

    def _shadows(self) -> list[_Shadow]:
        return [shadow for shadow in (self._full, self._sliding) if shadow is not None]

    def _row(self, req: RequestState) -> _Row:
        row = self._rows[req.row_idx]
        if row is None:
            raise PagingFault(f"request {req.request_id}: row {req.row_idx} was never joined")
        return row

    def _load_tables(self, req: RequestState) -> None:
        row, pages = self._row(req), req.pages
        assert pages is not None
        row.full_pages = list(pages.full_pages)
        row.sliding_pages = list(pages.sliding_pages)
        row.sliding_start = pages.sliding_start

    # ------------------------------------------------------------------------------------------------------ writing

    def _clear(self, page: int) -> None:
        for shadow in self._shadows():
            shadow.clear(page)

    def _write(self, plan: StepPlan) -> None:
        full, sliding = plan.decode_full_slots, plan.decode_sliding_slots
        for i, (req, position) in enumerate(zip(plan.decode_rows, plan.decode_positions, strict=True)):
            row = self._row(req)
            if len(row.hashes) != position + 1:
                raise PagingFault(f"{row.name}: decodes position {position} with {len(row.hashes)} tokens known")
            written = row.hashes[position : position + 1]
            self._store(self._full, full[i : i + 1], written)
            self._store(self._sliding, sliding[i : i + 1], written)
        for chunk in plan.chunks:
            written = self._row(chunk.req).hashes[chunk.start : chunk.end]
            self._check_chunk(chunk)
            self._store(self._full, chunk.full_slots, written)
            self._store(self._sliding, chunk.sliding_slots, written)

    def _check_chunk(self, chunk: PrefillChunk) -> None:
        num_tokens = len(chunk.token_ids)
        for shadow, slots in ((self._full, chunk.full_slots), (self._sliding, chunk.sliding_slots)):
            if shadow is not None and len(slots) != num_tokens:
                raise PagingFault(f"request {chunk.req.request_id}: {len(slots)} slots for {num_tokens} tokens")

    def _store(self, shadow: _Shadow | None, slots: Sequence[int], hashes: "array[int]") -> None:
        """A page serves one kind at a time: what the other kind had there is overwritten bytes."""
        if shadow is None:
            return
        other = self._sliding if shadow is self._full else self._full
        for slot, value in zip(slots, hashes, strict=True):
            if slot == NO_SLOT:
                continue
            if other is not None and slot % shadow.page_tokens == 0:
                other.clear(slot // shadow.page_tokens)
            shadow.slots[slot] = value

    # ------------------------------------------------------------------------------------------------------ reading

    def _check_row(self, row: _Row, start: int, end: int) -> None:
        """Queries at [start, end) of the row find their keys. Sliding keys of the chunk itself need no page."""
        if self._full is not None:
            self._full.check(row, row.full_pages, 0, 0, end, "full")
        if self._sliding is not None:
            assert self._sliding.window is not None
            first = max(0, start - self._sliding.window + 1)
            last = end if end == start + 1 else start
            self._sliding.check(row, row.sliding_pages, row.sliding_start, first, last, "sliding")

    def _draw(self, masks: dict[int, list[int]]) -> StepResult:
        """masks: words of 32 bits by index of the row. A token that a mask bans gives way to the next one allowed."""
        token_ids: list[int] = []
        bad_rows: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        for i, (req, row) in enumerate(self._drawing):
            position = len(row.hashes)
            token = scripted_token(
                req.request.sampling.seed, position, row.last_token, alphabet=self._alphabet, eos_odds=self._eos_odds
            )
            words = masks.get(i)
            if words is not None and not _is_allowed(words, token):
                allowed = [other for other in range(256) if _is_allowed(words, other)]
                token = next((other for other in allowed if other > token), allowed[0])
            if self._is_bad is not None and self._is_bad(req, position):
                bad_rows.append(i)
            if req.request.sampling.logprobs is not None:
                top = ((token, 0.0),) if req.request.sampling.logprobs else ()
                logprobs[i] = TokenLogprobs(token_id=token, logprob=0.0, top=top)
            token_ids.append(token)
            row.extend((token,))
        return StepResult(token_ids=token_ids, bad_rows=bad_rows, logprobs=logprobs, scores=self._scores)


def build_scripted_engine(
    *,
    num_pages: int = 512,
    num_host_pages: int = 0,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 512,
    max_context: int = 8192,
    sliding_window: int = 16,
    sliding_page_tokens: int = 4,
    full_page_tokens: int = 16,
    slack_tokens: int = 4,
    model: str = "scripted",
    fingerprint: str = "scripted-1",
    has_cache: bool = True,
    min_shared_tokens: int = 16,
    eos_odds: int = 0,
    alphabet: Sequence[int] = PRINTABLE,
    step_delay_s: float = 0.0,
    depth: int = 0,
    is_bad: Callable[[RequestState, int], bool] | None = None,
    fail_at_step: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> PagedEngine:
    """An engine for tests of everything above it: ids 0..255 are bytes, output is printable ASCII, `EOS_ID` ends it.

    Expected output of a request: `scripted_token` from its seed, position by position. The pool is small on purpose;
    give it more pages where preemption would disturb.
    """
    geometry = KVGeometry(
        page_bytes=16 * full_page_tokens,
        sliding=KindGeometry(page_tokens=sliding_page_tokens, bytes_per_token=8),
        full=KindGeometry(page_tokens=full_page_tokens, bytes_per_token=8),
        sliding_window=sliding_window,
        slack_tokens=slack_tokens,
    )
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        shadow_tokens=max(1, max_num_batched_tokens // 8),
        min_shared_tokens=min_shared_tokens,
    )
    pool = PagePool(num_pages, record_freed=True)
    prefixes: Prefixes = NoPrefixes()
    if has_cache:
        prefixes = CachedPrefixes(PrefixCache(pool, geometry, num_host_pages=num_host_pages, clock=clock))
    longest = min(max_context, max_tokens_alone(num_pages, geometry))
    info = EngineInfo(
        model=model,
        fingerprint=fingerprint,
        vocab_size=256,
        max_context=longest,
        max_prompt_tokens=longest - 1,
        max_num_seqs=max_num_seqs,
        eos_token_ids=(EOS_ID,),
    )
    runner = ScriptedRunner(
        geometry,
        num_pages,
        max_num_seqs,
        num_host_pages=num_host_pages,
        alphabet=alphabet,
        eos_odds=eos_odds,
        step_delay_s=step_delay_s,
        depth=depth,
        is_bad=is_bad,
        fail_at_step=fail_at_step,
    )
    scheduler = Scheduler(config, pool, geometry, prefixes)
    return PagedEngine(info=info, scheduler=scheduler, runner=runner, is_recording_freed=True, clock=clock)
