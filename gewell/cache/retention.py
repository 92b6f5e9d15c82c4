"""Which checkpoints live, where, and which give way. Owns the checkpoints' page references in both tiers."""

import time
from array import array
from bisect import bisect_right
from collections.abc import Callable
from heapq import heapify, heappop, heappush, nsmallest

from gewell.cache.checkpoints import Checkpoint, CheckpointIndex, Kind
from gewell.cache.geometry import KVGeometry
from gewell.cache.page_pool import PagePool
from gewell.cache.policy import Conversation, ReusePolicy
from gewell.cache.prefix_tree import Node, PrefixTree
from gewell.cache.sequence_pages import ResumePoint
from gewell.cache.tiers import HostTier, Tier, Transfer

_TICKS_RANKED = 1 / 128  # a ranking serves so many starts for each checkpoint in it: valuing all takes about 1 us each
_PINNED = 1e9  # added to a pinned checkpoint's value: it goes after all others, but it goes


class Retention:
    """Holds checkpoints, values them, and gives up the least valuable under pressure.

    front       order of the request started last: a waiting request's distance is its order minus this
    told_wait   ticks until a conversation returns, from its `expect` hint; None: nothing known
    """

    def __init__(
        self,
        pool: PagePool,
        geometry: KVGeometry,
        policy: ReusePolicy,
        tree: PrefixTree,
        *,
        num_host_pages: int = 0,
        pin_share: float = 0.3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.geometry = geometry
        self.policy = policy
        self.tree = tree
        self.index = CheckpointIndex()
        self.host = HostTier(pool, num_host_pages) if num_host_pages else None
        self.pin_budget = int(pin_share * pool.num_pages)
        self.front = 0
        self.told_wait: Callable[[Conversation], float | None] = lambda conversation: None
        self._clock = clock
        self._transfers: list[Transfer] = []
        self._ranking: list[tuple[float, int, Checkpoint]] = []
        self._ranked_at = -1
        self._ranked_until = -1  # tick
        self._num_ranked = 0
        self._host_ranking: list[tuple[float, int, Checkpoint]] = []
        self._host_ranked_at = -1

    # ------------------------------------------------------------------------------------------------ holding

    def hold(self, node: Node, point: ResumePoint, kind: Kind, conversation: Conversation | None) -> Checkpoint:
        """A checkpoint at the node's end; one that is there already is refreshed, from the host it comes back."""
        there = node.checkpoint
        if there is not None:
            if there.tier is Tier.HOST:
                self._adopt(there, point)
            if point.last_hidden is not None:
                there.last_hidden = point.last_hidden
            return there
        self.pool.touch_cached(point.full_pages)
        self.pool.touch_cached(point.sliding_pages)
        checkpoint = Checkpoint(node, point, self._min_resume(point), kind, conversation, self.policy.now)
        self.index.add(checkpoint)
        return checkpoint

    def _min_resume(self, point: ResumePoint) -> int:
        if self.geometry.sliding is None or point.sliding_valid == 0:
            return 1
        return point.sliding_valid + self.geometry.sliding_window - 1

    def _adopt(self, checkpoint: Checkpoint, point: ResumePoint) -> None:
        self.pool.touch_cached(point.full_pages)
        self.pool.touch_cached(point.sliding_pages)
        checkpoint.hold(point)
        checkpoint.min_resume = self._min_resume(point)
        checkpoint.tier = Tier.GPU

    def pin(self, checkpoint: Checkpoint) -> bool:
        """Protect a checkpoint until nothing else is left to evict. False: the budget for pins is spent."""
        held: set[int] = set()
        for other in self.index:
            if (other.is_pinned or other is checkpoint) and other.tier is Tier.GPU:
                held.update(other.full_pages, other.sliding_pages)
        checkpoint.is_pinned = len(held) <= self.pin_budget
        return checkpoint.is_pinned

    def drop(self, checkpoint: Checkpoint) -> int:
        """Forget a checkpoint in both tiers; returns GPU pages that became free."""
        above, node = checkpoint.above, checkpoint.node
        self.index.drop(checkpoint)
        conversation = checkpoint.conversation
        if conversation is not None and checkpoint in conversation.tails:
            conversation.tails.remove(checkpoint)
        freed = self._free_gpu(checkpoint) if checkpoint.tier is Tier.GPU else 0
        self._free_host(checkpoint)
        self._rank_anew(above)
        self.tree.prune_path(node)
        return freed

    def _free_gpu(self, checkpoint: Checkpoint) -> int:
        return len(self.pool.free_cached(checkpoint.full_pages)) + len(self.pool.free_cached(checkpoint.sliding_pages))

    def _free_host(self, checkpoint: Checkpoint) -> None:
        if checkpoint.host_pages is not None and self.host is not None:
            self.host.pool.free(checkpoint.host_pages)
            checkpoint.host_pages = None

    # ------------------------------------------------------------------------------------------------ values

    def value(self, checkpoint: Checkpoint, num_pages: int) -> float:
        if checkpoint.expires_at_s is not None and self._clock() >= checkpoint.expires_at_s:
            return 0.0
        wait = checkpoint.waiters[0].order - self.front if checkpoint.waiters else None
        told = None
        conversation = checkpoint.conversation
        if conversation is not None and conversation.expect_after is not None:
            told = self.told_wait(conversation)
        value = self.policy.value(checkpoint, num_pages, wait, told)
        return _PINNED + value if checkpoint.is_pinned else value

    def is_worth_taking(
        self, kind: Kind, conversation: Conversation | None, start: int, position: int, share: float
    ) -> bool:
        """Would a checkpoint at `position`, saving tokens from `start` on, reach `share` of what it would push out?"""
        if share <= 0:
            return True
        num_pages = self.geometry.num_pages(position) - self.geometry.num_pages(start) if start else 0
        num_pages = max(num_pages, 0) + self._window_pages if start else self.geometry.num_pages(position)
        if self.pool.num_free_pages > 4 * num_pages:
            return True
        told = self.told_wait(conversation) if conversation is not None else None
        value = self.policy.prospect(kind, conversation, start, position, num_pages, told)
        return value >= share * self._lowest_value(num_pages)

    @property
    def _window_pages(self) -> int:
        sliding = self.geometry.sliding
        return 0 if sliding is None else -(-self.geometry.sliding_window // sliding.page_tokens) + 1

    def _lowest_value(self, num_pages: int) -> float:
        """Value of the last of the least valuable checkpoints that together free that many pages."""
        self._ensure_ranking()
        freed, highest = 0, 0.0
        for value, _, checkpoint in nsmallest(6, self._ranking):
            highest = value
            freed += checkpoint.exclusive_pages(self.pool) if checkpoint in self.index else 0
            if freed >= num_pages:
                break
        return highest

    # ------------------------------------------------------------------------------------------------ pressure

    def evict(self, num_pages: int) -> int:
        """Give up the least valuable checkpoints until that many pages became free; returns how many did.

        Fewer than asked only when no checkpoint is left whose pages nobody else holds. Pins go last, but they go.
        What is worth it moves to the host tier.
        """
        freed = 0
        while freed < num_pages:
            victim = self._next_victim()
            if victim is None:
                break
            freed += self._spill(victim) if self._is_worth_spilling(victim) else self._give_up(victim)
        return freed

    def _give_up(self, checkpoint: Checkpoint) -> int:
        if checkpoint.is_live_tail:
            self.policy.tail_ended(was_used=False)
        return self.drop(checkpoint)

    def _ensure_ranking(self) -> None:
        if not self._ranking or self.policy.now > self._ranked_until:
            self._rank()

    def _rank(self) -> None:
        ranking = []
        for number, checkpoint in enumerate(self.index):
            if checkpoint.tier is Tier.GPU:
                pages = checkpoint.exclusive_pages(self.pool)
                if pages:
                    ranking.append((self.value(checkpoint, pages), number, checkpoint))
        heapify(ranking)
        self._ranking, self._ranked_at, self._num_ranked = ranking, self.policy.now, len(ranking)
        self._ranked_until = self.policy.now + int(len(ranking) * _TICKS_RANKED)

    def _rank_anew(self, checkpoint: Checkpoint | None) -> None:
        """A neighbour was dropped: this checkpoint holds more alone now."""
        if checkpoint is None or checkpoint.tier is not Tier.GPU or self.policy.now > self._ranked_until:
            return
        pages = checkpoint.exclusive_pages(self.pool)
        if pages:
            self._num_ranked += 1
            heappush(self._ranking, (self.value(checkpoint, pages), -self._num_ranked, checkpoint))

    def _next_victim(self) -> Checkpoint | None:
        self._ensure_ranking()
        victim = self._pop_victim()
        if victim is None and self._ranked_at != self.policy.now:  # what came since then is not in it
            self._rank()
            victim = self._pop_victim()
        return victim or self._tangled_victim()

    def _pop_victim(self) -> Checkpoint | None:
        """Values are checked again as they are popped: one that rose since the ranking goes back into it."""
        ranking = self._ranking
        while ranking:
            value, number, checkpoint = heappop(ranking)
            if checkpoint not in self.index or checkpoint.tier is not Tier.GPU:
                continue
            pages = checkpoint.exclusive_pages(self.pool)
            if not pages:
                continue
            fresh = self.value(checkpoint, pages)
            if ranking and fresh > value and fresh > ranking[0][0]:
                heappush(ranking, (fresh, number, checkpoint))
                continue
            return checkpoint
        return None

    def _tangled_victim(self) -> Checkpoint | None:
        """The least valuable checkpoint whose pages only checkpoints share: only together they free them."""
        if not self.pool.num_evictable_pages:
            return None
        is_evictable = self.pool.is_evictable
        worst, worst_value = None, float("inf")
        for checkpoint in self.index:
            if checkpoint.tier is not Tier.GPU:
                continue
            idle = sum(map(is_evictable, (*checkpoint.full_pages, *checkpoint.sliding_pages)))
            if idle and (value := self.value(checkpoint, idle)) < worst_value:
                worst, worst_value = checkpoint, value
        return worst

    # ------------------------------------------------------------------------------------------------ host tier

    def take_transfers(self) -> list[Transfer]:
        """Copies that the plan made so far needs. Execute them in this order before the step writes anything."""
        transfers, self._transfers = self._transfers, []
        return transfers

    def _is_worth_spilling(self, checkpoint: Checkpoint) -> bool:
        if self.host is None or checkpoint.is_superseded or checkpoint.kind is Kind.SPACED:
            return False
        if checkpoint.kind is Kind.TAIL and checkpoint.conversation is None and not checkpoint.waiters:
            return False
        return self.value(checkpoint, 1) > 0.0

    def _spill(self, checkpoint: Checkpoint) -> int:
        """Move a checkpoint to the host, dropping there what is worth less; returns GPU pages that became free."""
        if checkpoint.host_pages is None and not self._copy_to_host(checkpoint, is_spill=True):
            return self._give_up(checkpoint)
        freed = self._free_gpu(checkpoint)
        checkpoint.tier = Tier.HOST
        self._rank_anew(checkpoint.above)
        return freed

    def write_back(self, checkpoint: Checkpoint) -> bool:
        """Copy a checkpoint to the host tier ahead of its eviction, into room that nothing else needs."""
        return self._copy_to_host(checkpoint, is_spill=False)

    def _copy_to_host(self, checkpoint: Checkpoint, *, is_spill: bool) -> bool:
        """False: there is no room, and what is there is worth more."""
        host = self.host
        if host is None:
            return False
        if checkpoint.host_pages is not None:
            return True
        pages = [*checkpoint.full_pages, *checkpoint.sliding_pages]
        fills = self._fills(checkpoint)
        num_missing = host.num_missing(pages, fills)
        limit = self.value(checkpoint, max(1, num_missing)) if is_spill else 0.0
        if not self._make_host_room(host, num_missing, limit):
            return False
        stored = host.store(pages, fills)
        if stored is None:
            return False
        checkpoint.host_pages, pairs = stored
        if pairs:
            self._transfers.append(Transfer(Tier.GPU, Tier.HOST, tuple(pairs)))
        return True

    def _make_host_room(self, host: HostTier, num_missing: int, limit: float) -> bool:
        if num_missing > host.pool.num_pages:
            return False
        while host.pool.num_free_pages < num_missing:
            worst = self._worst_on_host(host, limit)
            if worst is None:
                return False
            if worst.tier is Tier.HOST:
                self._give_up(worst)
            else:
                self._free_host(worst)
        return True

    def _worst_on_host(self, host: HostTier, limit: float) -> Checkpoint | None:
        """The least valuable checkpoint in host memory, if it is worth no more than `limit` per page.

        A copy of what is on the GPU anyway only saves time when that is evicted: such copies go first.
        """
        if self._host_ranked_at != self.policy.now or not self._host_ranking:
            refs, ranking = host.pool.refs, []
            for number, checkpoint in enumerate(self.index):
                if checkpoint.host_pages is not None and (alone := _count_ones(refs, checkpoint.host_pages)):
                    value = self.value(checkpoint, alone) if checkpoint.tier is Tier.HOST else 0.0
                    ranking.append((value, number, checkpoint))
            heapify(ranking)
            self._host_ranking, self._host_ranked_at = ranking, self.policy.now
        while self._host_ranking and self._host_ranking[0][0] <= limit:
            _, _, checkpoint = heappop(self._host_ranking)
            if checkpoint in self.index and checkpoint.host_pages is not None:
                return checkpoint
        return None

    def restore(self, checkpoint: Checkpoint) -> bool:
        """Bring a checkpoint back from the host; False: no room for it, or it is gone."""
        if checkpoint not in self.index or checkpoint.host_pages is None or self.host is None:
            return False
        if checkpoint.tier is Tier.GPU:
            return True
        host_pages, full = list(checkpoint.host_pages), self._full_pages_above(checkpoint)
        # Making room on the GPU may spill others, which may push out what we read: hold both ends meanwhile.
        self.pool.touch_cached(full)
        self.host.pool.touch(host_pages)
        num_missing = len(host_pages) - len(full)
        self.evict(num_missing - self.pool.num_free_pages)
        fresh = self.pool.allocate(num_missing) if checkpoint in self.index else None
        self.host.pool.free(host_pages)
        if fresh is None or checkpoint.host_pages is None:
            self.pool.free_cached(full)
            self.pool.free(fresh or ())
            return False
        self.pool.touch_cached(fresh)
        self.pool.free(fresh)
        sources, fills = host_pages[len(full) :], self._fills(checkpoint)[len(full) :]
        self._transfers.append(Transfer(Tier.HOST, Tier.GPU, tuple(zip(sources, fresh, strict=True))))
        self.pool.mark_written(fresh, fills)
        self.host.restored(fresh, sources, fills)
        split = len(checkpoint.full_pages) - len(full)
        checkpoint.hold(
            ResumePoint(
                checkpoint.position,
                [*full, *fresh[:split]],
                fresh[split:],
                checkpoint.sliding_start,
                checkpoint.sliding_valid,
                checkpoint.last_hidden,
            )
        )
        checkpoint.tier = Tier.GPU
        return True

    def _full_pages_above(self, checkpoint: Checkpoint) -> list[int]:
        """Leading full pages that a shallower checkpoint on the path still has on the GPU: the same tokens."""
        above = checkpoint.above
        while above is not None and above.tier is not Tier.GPU:
            above = above.above
        if above is None or self.geometry.full is None:
            return []
        return list(above.full_pages[: above.position // self.geometry.full.page_tokens])

    def _fills(self, checkpoint: Checkpoint) -> list[int]:
        """Leading tokens of each page that belong to the checkpoint, full pages first."""
        fills: list[int] = []
        for kind, pages, start in (
            (self.geometry.full, checkpoint.full_pages, 0),
            (self.geometry.sliding, checkpoint.sliding_pages, checkpoint.sliding_start),
        ):
            if kind is not None:
                size = kind.page_tokens
                fills += [min(size, checkpoint.position - start - i * size) for i in range(len(pages))]
        return fills


def _count_ones(refs: "array[int]", pages: list[int]) -> int:
    return list(map(refs.__getitem__, pages)).count(1)


def message_of(message_starts: tuple[int, ...], position: int) -> int | None:
    """Index of the message in which a token position lies; None when the messages are unknown."""
    return max(0, bisect_right(message_starts, position) - 1) if message_starts else None
