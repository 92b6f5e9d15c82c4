"""Page tables of one running sequence: which page and slot each new token gets, per layer kind.

Full layers keep every token. Sliding layers keep the last window; pages wholly before it go back to the pool. A long
prefill chunk writes sliding slots only where somebody will read them: inside the window of its end and inside the
windows of `keep_positions` (checkpoints taken in the chunk). The others get slot -1, and where a whole page would be
unwritten the table has a HOLE. Example, window 6 (5 earlier keys), pages of 4, a chunk of 20 tokens: positions
15..19 are needed, so the table starts at 12 with two pages, slots of 12..14 stay unwritten.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gewell.cache.geometry import KVGeometry
from gewell.cache.page_pool import PagePool

HOLE = -1  # an entry of `sliding_pages` that nobody reads; kernels want any valid id there
NO_SLOT = -1  # the token's keys and values of this kind are not stored


class ResumePoint(NamedTuple):
    """Pages that let a sequence start at `position`. Borrowed: `SequencePages` takes references of its own.

    sliding_pages[i] holds positions [sliding_start + i * page_tokens, ...), valid from `sliding_valid` to `position`.
    """

    position: int
    full_pages: Sequence[int]
    sliding_pages: Sequence[int]
    sliding_start: int
    sliding_valid: int
    last_hidden: Any = None  # hidden state of token position - 1, when kept: then nothing need be replayed
    tier: str = "gpu"  # where the bytes were when the point was matched: gpu | host


class Appended(NamedTuple):
    """Where new tokens go. Run `copies` (src, dst) before the step writes; a kind that stores nothing has no slots."""

    full_slots: "array[int]"  # int64, page * page_tokens + offset
    sliding_slots: "array[int]"  # int64, or NO_SLOT
    copies: tuple[tuple[int, int], ...]


class _Plan(NamedTuple):
    """What an append needs, before anything is changed."""

    num_pages: int
    copy_full: bool
    copy_sliding: bool
    runs: list[tuple[int, int]]  # positions that get sliding slots
    new_sliding: list[tuple[int, int]]  # table entries to add, by turns: (holes, then pages)


class SequencePages:
    """Page tables of one sequence. Owns one reference to each page in them until `release`.

    full_pages      page of tokens [i * page_tokens, (i + 1) * page_tokens)
    sliding_pages   the same from position `sliding_start` on (a multiple of the page's tokens); may contain HOLE
    num_tokens      tokens with a slot, computed or planned
    """

    __slots__ = (
        "_copy_sources",
        "_full_base",
        "_full_claimed",
        "_gaps",
        "_open_end",
        "_sliding_base",
        "_sliding_claimed",
        "full_pages",
        "geometry",
        "num_tokens",
        "pool",
        "sliding_pages",
        "sliding_start",
    )

    def __init__(self, pool: PagePool, geometry: KVGeometry, resume: ResumePoint | None = None) -> None:
        self.pool = pool
        self.geometry = geometry
        self.num_tokens = 0
        self.full_pages: list[int] = []
        self.sliding_pages: list[int] = []
        self.sliding_start = 0
        self._gaps: list[tuple[int, int]] = []  # unwritten positions inside the sliding table, ascending
        self._copy_sources: list[int] = []  # kept until the step that reads them has been planned and launched
        # Slots of positions [num_tokens, _x_claimed) lie in pages that this sequence has claimed; for those below
        # _open_end, the smaller of the two, slot = position + base.
        self._full_claimed = self._sliding_claimed = self._open_end = 0
        self._full_base = self._sliding_base = 0
        if resume is not None:
            self._adopt(resume)

    def _adopt(self, resume: ResumePoint) -> None:
        self.pool.touch(resume.full_pages)
        self.pool.touch(resume.sliding_pages)
        self.num_tokens = self._full_claimed = self._sliding_claimed = self._open_end = resume.position
        self.full_pages.extend(resume.full_pages)
        self.sliding_pages.extend(resume.sliding_pages)
        self.sliding_start = resume.sliding_start
        if resume.sliding_valid > resume.sliding_start:
            self._gaps.append((resume.sliding_start, resume.sliding_valid))

    # ------------------------------------------------------------------------------------------------------ growing

    def num_pages_needed(self, num_new_tokens: int, keep_positions: Iterable[int] = ()) -> int:
        """Pages that `append` with the same arguments would allocate."""
        if self.num_tokens + num_new_tokens <= self._open_end:
            return 0
        return self._plan(num_new_tokens, keep_positions).num_pages

    def append(self, num_new_tokens: int, keep_positions: Iterable[int] = ()) -> Appended | None:
        """Give the next tokens their slots. None: the pool has too few free pages and nothing has changed.

        keep_positions   positions in (num_tokens, num_tokens + num_new_tokens] where a checkpoint will be taken: the
                         window before each, and the slack, is stored too
        A page that another sequence has written beyond our position is copied: see `copies`. The old page stays
        referenced until the next call of this object.
        """
        start = self.num_tokens
        reserved = self._reserve(num_new_tokens, keep_positions)
        if reserved is None:
            return None
        plan, copies = reserved
        full_slots, sliding_slots = array("q"), array("q")
        if self.geometry.full is not None:
            full_slots = _slots(self.full_pages, 0, self.geometry.full.page_tokens, start, self.num_tokens)
        if self.geometry.sliding is not None:
            sliding_slots = self._sliding_slots(plan.runs, start)
        return Appended(full_slots, sliding_slots, copies)

    def reserve(self, num_new_tokens: int, keep_positions: Iterable[int] = ()) -> bool:
        """`append` for a world without bytes: pages are taken alike, no slots are listed. False: no room."""
        return self._reserve(num_new_tokens, keep_positions) is not None

    def _reserve(
        self, num_new_tokens: int, keep_positions: Iterable[int]
    ) -> tuple[_Plan, tuple[tuple[int, int], ...]] | None:
        self._drop_copy_sources()
        plan = self._plan(num_new_tokens, keep_positions)
        fresh = self.pool.allocate(plan.num_pages)
        if fresh is None:
            return None
        fresh.reverse()
        copies: list[tuple[int, int]] = []
        end = self.num_tokens + num_new_tokens
        if self.geometry.full is not None:
            self._grow_full(plan, fresh, copies, end)
        if self.geometry.sliding is not None:
            self._grow_sliding(plan, fresh, copies)
        self.num_tokens = end
        self._open()
        return plan, tuple(copies)

    def _plan(self, num_new_tokens: int, keep_positions: Iterable[int]) -> _Plan:
        pool, geometry, position = self.pool, self.geometry, self.num_tokens
        end = position + num_new_tokens
        num_pages = 0
        copy_full = copy_sliding = False
        runs: list[tuple[int, int]] = []
        new_sliding: list[tuple[int, int]] = []
        if geometry.full is not None:
            size = geometry.full.page_tokens
            num_pages += -(-end // size) - len(self.full_pages)
            offset = position % size
            if offset and position >= self._full_claimed:
                copy_full = not pool.can_claim(self.full_pages[-1], offset)
        if geometry.sliding is not None:
            size = geometry.sliding.page_tokens
            runs = self._runs(end, keep_positions)
            first = self._table_end() if self.sliding_pages else runs[0][0] // size * size
            at = first
            for start, stop in runs:
                page_start, page_stop = max(at, start // size * size), -(-stop // size) * size
                if page_stop > at:
                    new_sliding.append(((page_start - at) // size, (page_stop - page_start) // size))
                    num_pages += new_sliding[-1][1]
                    at = page_stop
            if position < first and self.sliding_pages and position >= self._sliding_claimed and runs[0][0] < first:
                copy_sliding = not pool.can_claim(self.sliding_pages[-1], position % size)
        return _Plan(num_pages + copy_full + copy_sliding, copy_full, copy_sliding, runs, new_sliding)

    def _runs(self, end: int, keep_positions: Iterable[int]) -> list[tuple[int, int]]:
        """Positions of the chunk [num_tokens, end) that need a sliding slot, as disjoint ascending intervals."""
        geometry, position = self.geometry, self.num_tokens
        wanted = [(max(position, geometry.first_needed(end)), end)]
        for keep in keep_positions:
            if position < keep <= end:
                wanted.append((max(position, geometry.first_needed(keep) - geometry.slack_tokens), keep))
        wanted.sort()
        runs: list[tuple[int, int]] = []
        for start, stop in wanted:
            if runs and start <= runs[-1][1]:
                runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
            else:
                runs.append((start, stop))
        return runs

    def _grow_full(self, plan: _Plan, fresh: list[int], copies: list[tuple[int, int]], end: int) -> None:
        assert self.geometry.full is not None
        pool, pages, size = self.pool, self.full_pages, self.geometry.full.page_tokens
        if plan.copy_full:
            copies.append(self._copy_last(pages, fresh))
        if self.num_tokens >= self._full_claimed and self.num_tokens % size:
            pool.claim_slots(pages[-1], self.num_tokens % size, size)
        while len(pages) * size < end:
            pages.append(fresh.pop())
            pool.claim_slots(pages[-1], 0, size)
        self._full_claimed = len(pages) * size

    def _grow_sliding(self, plan: _Plan, fresh: list[int], copies: list[tuple[int, int]]) -> None:
        assert self.geometry.sliding is not None
        pool, pages, size = self.pool, self.sliding_pages, self.geometry.sliding.page_tokens
        first_run = plan.runs[0][0]
        if not pages:
            self.sliding_start = first_run // size * size
            if first_run > self.sliding_start:
                self._gaps.append((self.sliding_start, first_run))
        elif first_run > self.num_tokens:
            self._gaps.append((self.num_tokens, first_run))
        for (_, stop), (start, _) in zip(plan.runs, plan.runs[1:], strict=False):
            self._gaps.append((stop, start))
        if plan.copy_sliding:
            copies.append(self._copy_last(pages, fresh))
        table_end = self._table_end()
        if pages and first_run < table_end and self.num_tokens >= self._sliding_claimed:
            pool.claim_slots(pages[-1], self.num_tokens % size, size)
        for num_holes, num_pages in plan.new_sliding:
            pages.extend([HOLE] * num_holes)
            for _ in range(num_pages):
                pages.append(fresh.pop())
                pool.claim_slots(pages[-1], 0, size)
        self._sliding_claimed = self._table_end()

    def _copy_last(self, pages: list[int], fresh: list[int]) -> tuple[int, int]:
        source, pages[-1] = pages[-1], fresh.pop()
        self._copy_sources.append(source)
        return source, pages[-1]

    def _drop_copy_sources(self) -> list[int]:
        if not self._copy_sources:
            return []
        sources, self._copy_sources = self._copy_sources, []
        return self.pool.free(sources)

    def _sliding_slots(self, runs: list[tuple[int, int]], at: int) -> "array[int]":
        assert self.geometry.sliding is not None
        size, slots = self.geometry.sliding.page_tokens, array("q")
        for start, stop in runs:
            slots.extend([NO_SLOT] * (start - at))
            slots.extend(_slots(self.sliding_pages, self.sliding_start, size, start, stop))
            at = stop
        return slots

    def _table_end(self) -> int:
        """Position after the last slot of the sliding table."""
        assert self.geometry.sliding is not None
        return self.sliding_start + len(self.sliding_pages) * self.geometry.sliding.page_tokens

    def _open(self) -> None:
        """Set the fast path: up to _open_end a token's slot is its position plus a constant."""
        geometry, ends = self.geometry, []
        if geometry.full is not None:
            size = geometry.full.page_tokens
            self._full_base = self.full_pages[-1] * size - (len(self.full_pages) - 1) * size
            ends.append(self._full_claimed)
        if geometry.sliding is not None:
            size = geometry.sliding.page_tokens
            self._sliding_base = self.sliding_pages[-1] * size - (self._table_end() - size)
            ends.append(self._sliding_claimed)
        self._open_end = min(ends)

    def _open_pages(self) -> bool:
        """`trim` and `append(1)` of a decode row whose last pages are written to the brim; a quarter of their time.

        False: it is another case (a copy is due, gaps, several pages to trim, no room). Then nothing has changed but
        that a page before the window may have been given back.
        """
        position, sliding, full = self.num_tokens, self.geometry.sliding, self.geometry.full
        if sliding is None or full is None or self._copy_sources or self._gaps:
            return False
        size, pages = sliding.page_tokens, self.sliding_pages
        if position != self._sliding_claimed or position != self.sliding_start + len(pages) * size:
            return False
        opens_full = position >= self._full_claimed
        if opens_full and position != len(self.full_pages) * full.page_tokens:
            return False
        num_before = (position - self.geometry.sliding_window + 1 - self.sliding_start) // size
        if num_before > 1:
            return False
        if num_before == 1:
            self.sliding_start += size
            self.pool.free((pages.pop(0),))
        fresh = self.pool.allocate(1 + opens_full)
        if fresh is None:
            return False
        if opens_full:
            self.full_pages.append(fresh[0])
            self.pool.claim_slots(fresh[0], 0, full.page_tokens)
            self._full_base = fresh[0] * full.page_tokens - position
            self._full_claimed = position + full.page_tokens
        pages.append(fresh[-1])
        self.pool.claim_slots(fresh[-1], 0, size)
        self._sliding_base = fresh[-1] * size - position
        self._sliding_claimed = position + size
        self._open_end = min(self._full_claimed, self._sliding_claimed)
        self.num_tokens = position + 1
        return True

    # ---------------------------------------------------------------------------------------------------- shrinking

    def trim(self, slack_tokens: int = 0) -> list[int]:
        """Give back sliding pages wholly before the window of the next query; returns pages that became free.

        Call it after the step that reads them has been launched and after its checkpoints have been retained.
        slack_tokens   keep that many tokens more, for a checkpoint that will be taken at the end of the answer
        """
        freed = self._drop_copy_sources()
        if self.geometry.sliding is None:
            return freed
        size = self.geometry.sliding.page_tokens
        low = self.geometry.first_needed(self.num_tokens) - slack_tokens
        num_before = min((low - self.sliding_start) // size, len(self.sliding_pages) - 1)
        if num_before <= 0:
            return freed
        dropped = [page for page in self.sliding_pages[:num_before] if page != HOLE]
        del self.sliding_pages[:num_before]
        self.sliding_start += num_before * size
        if self._gaps:
            self._gaps = [gap for gap in self._gaps if gap[1] > self.sliding_start]
        return freed + self.pool.free(dropped)

    def release(self) -> list[int]:
        """Drop all references; returns pages that became free. The object is empty afterwards."""
        freed = self._drop_copy_sources()
        pages = [page for page in self.sliding_pages if page != HOLE]
        self._unclaim()
        freed += self.pool.free(self.full_pages)
        freed += self.pool.free(pages)
        self.full_pages = []
        self.sliding_pages = []
        self._gaps = []
        self.num_tokens = self.sliding_start = 0
        self._full_claimed = self._sliding_claimed = self._open_end = 0
        return freed

    def _unclaim(self) -> None:
        geometry, written = self.geometry, self.num_tokens
        if geometry.full is not None and self._full_claimed > written and self.full_pages:
            size = geometry.full.page_tokens
            self.pool.unclaim(self.full_pages[-1], written - (len(self.full_pages) - 1) * size)
        if geometry.sliding is not None and self._sliding_claimed > written and self.sliding_pages:
            size = geometry.sliding.page_tokens
            self.pool.unclaim(self.sliding_pages[-1], written - (self._table_end() - size))

    # ------------------------------------------------------------------------------------------------------ sharing

    def point_at(self, position: int, *, last_hidden: Any = None) -> ResumePoint | None:
        """The pages with which another sequence could start at `position`, with slack where it is there.

        None when the window before `position` is no longer, or was never, stored. Takes no references.
        """
        if not 0 < position <= self.num_tokens:
            return None
        geometry = self.geometry
        full: list[int] = []
        if geometry.full is not None:
            full = self.full_pages[: -(-position // geometry.full.page_tokens)]
        if geometry.sliding is None:
            return ResumePoint(position, full, (), position, 0, last_hidden)
        size = geometry.sliding.page_tokens
        needed = geometry.first_needed(position)
        valid = self.sliding_start
        for start, stop in self._gaps:
            if start < position:
                if stop > needed:
                    return None
                valid = stop
        if valid > needed:
            return None
        valid = max(valid, needed - geometry.slack_tokens)
        first = (valid - self.sliding_start) // size
        last = -(-(position - self.sliding_start) // size)
        return ResumePoint(
            position, full, self.sliding_pages[first:last], self.sliding_start + first * size, valid, last_hidden
        )

    def fork(self, position: int | None = None) -> "SequencePages | None":
        """Another sequence that starts at `position` (default: here) with shared pages; None as in `point_at`."""
        point = self.point_at(self.num_tokens if position is None else position)
        return None if point is None else SequencePages(self.pool, self.geometry, point)


class DecodeAppended(NamedTuple):
    """What a decode step's appends did besides the slots."""

    copies: list[tuple[int, int]]  # (src, dst), to be run before the step writes
    num_served: int  # fewer than given: the pool ran dry at that sequence; it and those after it have not changed
    changed: list[int]  # indexes of sequences whose page tables differ from before


def append_decode(
    sequences: Iterable[SequencePages], full_slots: list[int], sliding_slots: list[int]
) -> DecodeAppended:
    """One token for each sequence, in order; their slots are added to the two lists. For decode steps of many rows.

    Inside an open page this costs a few attribute accesses a row. At a page boundary the sequence also gives back
    what has left its window. Entries of a kind that stores nothing mean nothing.
    """
    copies: list[tuple[int, int]] = []
    changed: list[int] = []
    num_served = 0
    add_full, add_sliding = full_slots.append, sliding_slots.append
    for sequence in sequences:
        position = sequence.num_tokens
        if position < sequence._open_end:
            sequence.num_tokens = position + 1
            add_full(position + sequence._full_base)
            add_sliding(position + sequence._sliding_base)
        elif sequence._open_pages():
            changed.append(num_served)
            add_full(position + sequence._full_base)
            add_sliding(position + sequence._sliding_base)
        else:
            sequence.trim()
            appended = sequence.append(1)
            if appended is None:
                break
            changed.append(num_served)
            copies.extend(appended.copies)
            full_slots.extend(appended.full_slots or (NO_SLOT,))
            sliding_slots.extend(appended.sliding_slots or (NO_SLOT,))
        num_served += 1
    return DecodeAppended(copies, num_served, changed)


def _slots(pages: Sequence[int], table_start: int, page_tokens: int, start: int, end: int) -> "array[int]":
    """Slots of positions [start, end), which lie in real pages of the table."""
    slots = array("q")
    while start < end:
        index, offset = divmod(start - table_start, page_tokens)
        stop = min(end, start + page_tokens - offset)
        first = pages[index] * page_tokens + offset
        slots.extend(range(first, first + stop - start))
        start = stop
    return slots
