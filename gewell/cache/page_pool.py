"""The pool of equal KV pages: who holds how many references, and up to where each page is written. No bytes here."""

from array import array
from collections.abc import Iterable, Sequence


class PagePool:
    """Reference counts and fill marks of `num_pages` pages.

    A *fill mark* is the number of leading slots of a page that somebody has written or claimed. Slots at or beyond it
    are free for whoever claims them first, however many readers the page has; slots below the mark of a shared page
    are somebody's data, and writing there needs a copy. Writers claim the rest of a page when they open it and hand
    back what they did not use (`unclaim`), so that the step-by-step path touches no shared state.

    References of checkpoints are counted apart: `num_evictable_pages` are those that nobody else holds.
    Freed pages are handed out again last in, first out. With `record_freed`, `drain_freed` tells which pages became
    free, so that tests can poison them. `refs` is for reading only, by those who look at many pages.
    """

    def __init__(self, num_pages: int, *, record_freed: bool = False) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages: {num_pages} is not usable: at least 1")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self.refs = array("l", bytes(array("l").itemsize * num_pages))
        self._fill = array("l", bytes(array("l").itemsize * num_pages))
        self._versions = array("l", bytes(array("l").itemsize * num_pages))
        self._cached = array("l", bytes(array("l").itemsize * num_pages))  # of refs, those held by checkpoints
        self._freed: list[int] | None = [] if record_freed else None
        self.num_evictable_pages = 0

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def can_allocate(self, num_pages: int) -> bool:
        return num_pages <= len(self._free)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Pages with one reference and an empty fill mark each, or None when there are too few free ones."""
        if num_pages > len(self._free):
            return None
        if num_pages <= 0:
            return []
        pages = self._free[: -num_pages - 1 : -1]
        del self._free[-num_pages:]
        for page in pages:
            self.refs[page] = 1
            self._fill[page] = 0
            self._versions[page] += 1
        return pages

    def touch(self, pages: Iterable[int]) -> None:
        """One more reference to each page. All must be held by somebody."""
        refs, cached = self.refs, self._cached
        for page in pages:
            count = refs[page]
            if count < 1:
                raise RuntimeError(f"touch: page {page} is free")
            if count == cached[page]:
                self.num_evictable_pages -= 1
            refs[page] = count + 1

    def free(self, pages: Iterable[int]) -> list[int]:
        """Drop one reference to each page; returns those that became free."""
        refs, cached = self.refs, self._cached
        freed = []
        for page in pages:
            left = refs[page] - 1
            if left < cached[page]:
                raise RuntimeError(f"free: page {page} has no reference left")
            refs[page] = left
            if not left:
                freed.append(page)
            elif left == cached[page]:
                self.num_evictable_pages += 1
        self._give_back(freed)
        return freed

    def touch_cached(self, pages: Iterable[int]) -> None:
        """One more reference to each page, held by a checkpoint: eviction may take it away."""
        refs, cached = self.refs, self._cached
        for page in pages:
            if refs[page] < 1:
                raise RuntimeError(f"touch_cached: page {page} is free")
            refs[page] += 1
            cached[page] += 1

    def free_cached(self, pages: Iterable[int]) -> list[int]:
        """Drop one checkpoint's reference to each page; returns those that became free."""
        refs, cached = self.refs, self._cached
        freed = []
        for page in pages:
            if cached[page] < 1:
                raise RuntimeError(f"free_cached: no checkpoint holds page {page}")
            refs[page] -= 1
            cached[page] -= 1
            if not refs[page]:
                self.num_evictable_pages -= 1
                freed.append(page)
        self._give_back(freed)
        return freed

    def _give_back(self, freed: list[int]) -> None:
        self._free.extend(freed)
        if self._freed is not None:
            self._freed.extend(freed)

    def ref_cnt(self, page: int) -> int:
        return self.refs[page]

    def fill_mark(self, page: int) -> int:
        return self._fill[page]

    def version(self, page: int) -> int:
        """Changes when the page gets a new owner or is written over: copies of its bytes elsewhere are stale then."""
        return self._versions[page]

    def can_claim(self, page: int, start: int) -> bool:
        """True when slots from `start` on may be written in place."""
        return self._fill[page] <= start or self.refs[page] == 1

    def claim_slots(self, page: int, start: int, end: int) -> bool:
        """Claim slots [start, end). True: write in place; False: the page is shared and written there, copy it."""
        if not self.can_claim(page, start):
            return False
        if start < self._fill[page]:  # the only holder writes over what stood there
            self._versions[page] += 1
        self._fill[page] = end
        return True

    def unclaim(self, page: int, written_end: int) -> None:
        """The claimer hands back the slots from `written_end` on. Only who claimed them may call this."""
        self._fill[page] = min(self._fill[page], written_end)

    def mark_written(self, pages: Sequence[int], fills: Sequence[int]) -> None:
        """The leading `fills` slots of these pages have been restored from a copy."""
        for page, fill in zip(pages, fills, strict=True):
            self._fill[page] = fill

    def is_evictable(self, page: int) -> bool:
        """Only checkpoints hold it."""
        return self.refs[page] == self._cached[page] > 0

    def drain_freed(self) -> list[int]:
        """Pages that became free since the last call, each once. Poison them before the next bytes are written.

        Some may be allocated again by now: their new owner has written nothing yet as long as this is called between
        a step's plan and its execution.
        """
        if not self._freed:
            return []
        freed = list(dict.fromkeys(self._freed))
        self._freed.clear()
        return freed
