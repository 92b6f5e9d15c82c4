"""The host tier: a second pool for checkpoints that the GPU's pool has no room for.

Bytes move by `Transfer`s, which the engine executes in the order given, before the step whose plan produced them writes
anything: pages freed by a spill may be filled again in the same step. A host page is the copy of one GPU page as long
as neither has been given to somebody else, so a page shared by many checkpoints is stored and moved once.
A disk tier would be one more `HostTier` below this one: `PageMap` and `Transfer` know tiers by name only.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from gewell.cache.page_pool import PagePool


class Tier(StrEnum):
    GPU = "gpu"
    HOST = "host"


class Transfer(NamedTuple):
    """Copy whole pages: pairs of (page of `source`, page of `target`)."""

    source: Tier
    target: Tier
    pairs: tuple[tuple[int, int], ...]


class _Copy(NamedTuple):
    host_page: int
    gpu_version: int
    host_version: int
    num_tokens: int  # leading slots that were written when it was copied


class PageMap:
    """Which host page holds the bytes of which GPU page. Entries go stale by themselves: versions tell."""

    def __init__(self, gpu: PagePool, host: PagePool) -> None:
        self._gpu, self._host = gpu, host
        self._copies: dict[int, _Copy] = {}

    def find(self, gpu_page: int) -> tuple[int, int] | None:
        """(host page, tokens of it that are copied), or None."""
        copy = self._copies.get(gpu_page)
        if copy is None:
            return None
        is_held = self._host.ref_cnt(copy.host_page) > 0 and copy.host_version == self._host.version(copy.host_page)
        if not is_held or copy.gpu_version != self._gpu.version(gpu_page):
            del self._copies[gpu_page]
            return None
        return copy.host_page, copy.num_tokens

    def record(self, gpu_page: int, host_page: int, num_tokens: int) -> None:
        self._copies[gpu_page] = _Copy(
            host_page, self._gpu.version(gpu_page), self._host.version(host_page), num_tokens
        )


class HostTier:
    """Pages in host memory. Plans copies; who lives here is `Retention`'s decision."""

    def __init__(self, gpu: PagePool, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self._map = PageMap(gpu, self.pool)

    def num_missing(self, pages: Sequence[int], fills: Sequence[int]) -> int:
        """Host pages that `store` would allocate."""
        return sum(self._find(page, fill) is None for page, fill in zip(pages, fills, strict=True))

    def store(self, pages: Sequence[int], fills: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Host pages for GPU pages, each with one more reference, and the (gpu, host) copies to make. None: no room.

        fills   leading tokens of each page that must be there
        """
        found = [self._find(page, fill) for page, fill in zip(pages, fills, strict=True)]
        fresh = self.pool.allocate(sum(copy is None for copy in found))
        if fresh is None:
            return None
        host_pages, pairs = [], []
        for page, fill, copy in zip(pages, fills, found, strict=True):
            if copy is None:
                host_page, num_copied = fresh.pop(), 0
            else:
                host_page, num_copied = copy
                self.pool.touch((host_page,))
            host_pages.append(host_page)
            if num_copied < fill:
                pairs.append((page, host_page))
                self.pool.mark_written((host_page,), (fill,))
                self._map.record(page, host_page, fill)
        return host_pages, pairs

    def _find(self, page: int, fill: int) -> tuple[int, int] | None:
        """The copy of a page, if it has `fill` tokens or can be copied again in place to have them.

        That is safe while nobody has stored more in the host page than this GPU page had when it was copied: pages
        only grow. Otherwise another branch may have its own tokens there.
        """
        copy = self._map.find(page)
        if copy is None or copy[1] >= fill or self.pool.fill_mark(copy[0]) == copy[1]:
            return copy
        return None

    def restored(self, gpu_pages: Sequence[int], host_pages: Sequence[int], fills: Sequence[int]) -> None:
        """The GPU pages are copies of these host pages now: storing them again will cost nothing."""
        for gpu_page, host_page, fill in zip(gpu_pages, host_pages, fills, strict=True):
            self._map.record(gpu_page, host_page, fill)
