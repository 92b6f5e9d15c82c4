"""The prefix cache: what a request can resume from, what is kept of it, and what gives way under pressure.

One object per engine, used by the engine's thread alone. A request's life here:

    add_waiting -> match ... -> start -> retain at the wanted positions -> finished
                      ^                        |
                      +------- preempted <-----+          drop_waiting: cancelled while waiting

Nothing here touches bytes: pages are numbers, and `SequencePages` of the engine hold the running sequences.
"""

import time
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from gewell.cache.checkpoints import Checkpoint, CheckpointIndex, Kind, Waiting
from gewell.cache.geometry import KVGeometry
from gewell.cache.hints import HintBook
from gewell.cache.page_pool import PagePool
from gewell.cache.policy import PRIORITY_FACTOR, Conversation, ReusePolicy
from gewell.cache.prefix_tree import ImageRun, Node, PrefixTree, common_depth, encode_key
from gewell.cache.sequence_pages import ResumePoint, SequencePages
from gewell.request import CacheAnswer, EngineRequest

MIN_SHARED_TOKENS = 256  # below this a shared prefix is cheaper to compute than a window is to hold
SPACED_FROM_TOKENS = 32_768  # prompts this long get checkpoints on the way, doubling apart
MAX_CONVERSATIONS = 100_000


class Match(NamedTuple):
    """What a request could start from now.

    point      borrow it at once: `SequencePages(pool, geometry, point)`; None: from scratch
    wait_for   a running request that is about to retain more of this prompt: better start after it has
    """

    point: ResumePoint | None
    wait_for: str | None = None

    @property
    def position(self) -> int:
        return self.point.position if self.point is not None else 0


@dataclass(slots=True)
class _Entry:
    """A request between add_waiting and finished."""

    request: EngineRequest
    num_prompt_tokens: int
    images: Sequence[ImageRun]
    root: Node
    leaf: Node
    order: int
    conversation: Conversation | None
    hints: HintBook
    waiting: Waiting | None = None
    source: Checkpoint | None = None  # what the last match found
    planned: dict[int, tuple[Node, Kind]] | None = None
    num_starts: int = 0
    cached_tokens: int = 0
    written_to: int = 0
    restored_from: str | None = None
    miss_token: int | None = None
    swap: Checkpoint | None = None
    taken: list[Checkpoint] | None = None


class PrefixCache:
    """Retains resume points of prompts inside the pool that running sequences use too.

    pin_share   most of the pool that pinned checkpoints may hold
    """

    def __init__(
        self,
        pool: PagePool,
        geometry: KVGeometry,
        *,
        policy: ReusePolicy | None = None,
        pin_share: float = 0.3,
        max_index_tokens: int = 10_000_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.geometry = geometry
        self.policy = policy or ReusePolicy()
        self.pin_budget = int(pin_share * pool.num_pages)
        self.tree = PrefixTree(max_index_tokens)
        self.index = CheckpointIndex()
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._orders: list[int] = []  # of waiting requests, ascending
        self._next_order = 0
        self._front = 0
        self._conversations: OrderedDict[tuple[str | None, str], Conversation] = OrderedDict()
        self._expecting: dict[str, list[Conversation]] = {}
        self._ranking: list[tuple[float, int, Checkpoint]] = []
        self._ranked_at = -1
        self._num_ranked = 0

    # ---------------------------------------------------------------------------------------------- the waiting window

    def add_waiting(
        self,
        request: EngineRequest,
        images: Sequence[ImageRun] = (),
        *,
        key: bytes | None = None,
        order: int | None = None,
    ) -> None:
        """The request is in the window: its prefix becomes something to keep.

        key     `encode_key` of prompt and emitted ids, where the caller has it
        order   its place in a queue whose order is known; by default behind all others that wait
        """
        if request.request_id in self._entries:
            raise ValueError(f"request {request.request_id!r} is known already")
        hints = request.cache
        if key is None:
            key = encode_key(
                [*request.prompt_ids, *request.emitted_ids] if request.emitted_ids else request.prompt_ids, images
            )
        root = self.tree.root(hints.salt)
        if hints.mode == "off":
            leaf, conversation = root, None
        else:
            leaf = self.tree.insert(root, key)
            conversation = self._conversation(request)
        entry = _Entry(request, len(request.prompt_ids), images, root, leaf, 0, conversation, HintBook(request))
        leaf.num_users += 1
        self._entries[request.request_id] = entry
        self._enqueue(entry, order)

    def drop_waiting(self, request_id: str) -> None:
        """The request leaves the window without having started. An unknown or running one is left alone."""
        entry = self._entries.get(request_id)
        if entry is None or entry.waiting is None:
            return
        self._dequeue(entry)
        self._forget(entry)

    def _enqueue(self, entry: _Entry, order: int | None) -> None:
        entry.order = self._next_order if order is None else order
        self._next_order = max(self._next_order, entry.order + 1)
        insort(self._orders, entry.order)
        entry.waiting = Waiting(entry.order, entry.root, entry.leaf)
        if entry.request.cache.mode != "off":
            self.index.add_waiting(entry.waiting)

    def _dequeue(self, entry: _Entry) -> None:
        assert entry.waiting is not None
        del self._orders[bisect_left(self._orders, entry.order)]
        if entry.request.cache.mode != "off":
            self.index.drop_waiting(entry.waiting)
        entry.waiting = None

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.request.request_id]
        if entry.swap is not None and entry.swap in self.index:
            self._drop(entry.swap)
        entry.leaf.num_users -= 1
        self.tree.prune_path(entry.leaf)

    def _conversation(self, request: EngineRequest) -> Conversation | None:
        if request.conversation_id is None:
            return None
        key = (request.cache.salt, request.conversation_id)
        conversation = self._conversations.get(key)
        if conversation is None:
            conversation = self._conversations[key] = Conversation()
            if len(self._conversations) > MAX_CONVERSATIONS:
                self._conversations.popitem(last=False)
        else:
            self._conversations.move_to_end(key)
        return conversation

    # -------------------------------------------------------------------------------------------------------- resuming

    def match(self, request_id: str) -> Match:
        """Where the request could start now. Changes nothing; ask again when it really starts."""
        entry = self._entries[request_id]
        if entry.request.cache.mode == "off":
            return Match(None)
        source, position = self._find_source(entry)
        entry.source = source
        wait_for = None
        for node in entry.leaf.path():
            if node.end <= position + MIN_SHARED_TOKENS:
                break
            if node.planned is not None and node.planned != request_id:
                wait_for = node.planned
                break
        if source is None:
            return Match(None, wait_for)
        return Match(self._point(source, position), wait_for)

    def _find_source(self, entry: _Entry) -> tuple[Checkpoint | None, int]:
        """The checkpoint from which the most tokens can be resumed, and how many."""
        limit = entry.leaf.end
        best, position = None, 0
        for node in entry.leaf.path():
            if node.end <= position:
                break
            at = node.checkpoint
            if at is not None and at.tier == "gpu":
                usable = at.position if at.position < limit or at.last_hidden is not None else limit - 1
                if usable > position and (usable == at.position or usable >= at.min_resume):
                    best, position = at, usable
            if node.num_checkpoints and node.end > position:  # an edited tail: a branch that we leave at node.end
                usable = min(node.end, limit - 1)
                found = self._beside(node, usable) if usable > position else None
                if found is not None:
                    best, position = found, usable
        return best, position

    def _beside(self, node: Node, position: int) -> Checkpoint | None:
        """A checkpoint below the node whose slack lets one resume at `position`, at or before the node's end."""
        reach = None if self.geometry.sliding is None else position + self.geometry.slack_tokens
        stack = [child for child in node.children.values() if child.num_checkpoints]
        while stack:
            child = stack.pop()
            at = child.checkpoint
            if at is not None and at.tier == "gpu" and at.min_resume <= position:
                return at
            if reach is None or child.end <= reach:
                stack.extend(x for x in child.children.values() if x.num_checkpoints)
        return None

    def _point(self, source: Checkpoint, position: int) -> ResumePoint:
        full = source.full_pages
        if self.geometry.full is not None:
            full = full[: -(-position // self.geometry.full.page_tokens)]
        sliding = source.sliding_pages
        if self.geometry.sliding is not None:
            sliding = sliding[: -(-(position - source.sliding_start) // self.geometry.sliding.page_tokens)]
        hidden = source.last_hidden if position == source.position else None
        return ResumePoint(position, full, sliding, source.sliding_start, source.sliding_valid, hidden, source.tier)

    def peek(self, request_id: str) -> int:
        """Tokens that the request would resume now, for the choice of what to start next."""
        entry = self._entries[request_id]
        return 0 if entry.request.cache.mode == "off" else self._find_source(entry)[1]

    # --------------------------------------------------------------------------------------------------------- running

    def start(self, request_id: str, resumed: int) -> tuple[int, ...]:
        """The request runs now, from position `resumed`. Returns the ascending positions at which to call `retain`."""
        entry = self._entries[request_id]
        if entry.waiting is not None:
            self._dequeue(entry)
        self._front = entry.order
        entry.num_starts += 1
        first = entry.num_starts == 1
        if first:
            self.policy.now += 1
            entry.cached_tokens = min(resumed, entry.num_prompt_tokens)
        if entry.request.cache.mode == "off":
            return ()
        if entry.source is not None and resumed:
            self._used(entry.source)
            if first:
                entry.restored_from = entry.source.tier
        if entry.swap is not None and entry.swap in self.index:
            self._drop(entry.swap)
        entry.swap = None
        conversation = entry.conversation
        if first and conversation is not None:
            entry.miss_token = self._diverged_at(entry, conversation)
            self.policy.turn_started(conversation)
            conversation.num_running += 1
            self._told(conversation, None)
        plan = self._plan(entry, resumed)
        for node in entry.leaf.path():
            node.seen = True
            node.owner = entry.request.conversation_id
            node.touched = self.policy.now
        entry.planned = plan
        for node, _ in plan.values():
            node.planned = request_id
        entry.written_to = max(entry.written_to, resumed)
        return tuple(sorted(plan))

    def _used(self, source: Checkpoint) -> None:
        source.last_use = self.policy.now
        source.uses += 1

    def _diverged_at(self, entry: _Entry, conversation: Conversation) -> int | None:
        """First token that differs from what the conversation's last turn promised to repeat, if one does."""
        last = conversation.leaf
        if not isinstance(last, Node) or last.parent is None:
            return None
        common = common_depth(entry.leaf, last)
        return common if common < conversation.stable else None

    def _plan(self, entry: _Entry, resumed: int) -> dict[int, tuple[Node, Kind]]:
        """Positions worth a checkpoint, beyond where the request resumes."""
        request, hints, length = entry.request, entry.request.cache, entry.num_prompt_tokens
        if hints.mode == "read":
            return {}
        wanted: dict[int, Kind] = {}
        if length >= SPACED_FROM_TOKENS and not hints.one_off:
            step = SPACED_FROM_TOKENS // 2
            while resumed + step < length:
                wanted[resumed + step] = Kind.SPACED
                step *= 2
        starts = request.message_starts
        if len(starts) > 1 and starts[1] >= MIN_SHARED_TOKENS:
            wanted[starts[1]] = Kind.SHARED
        seen = next((node for node in entry.leaf.path() if node.seen), None)
        own = request.conversation_id
        if seen is not None and seen.end >= MIN_SHARED_TOKENS and not (own is not None and seen.owner == own):
            wanted[seen.end] = Kind.SHARED
        fork = next((node for node in entry.leaf.path() if node.num_waiting), None)
        if fork is not None and fork.end >= MIN_SHARED_TOKENS:
            wanted[fork.end] = Kind.SHARED
        if not hints.one_off:
            # A prompt that returns whole is followed by its answer: the end of that will be the tail.
            whole = Kind.TAIL if request.sampling.max_tokens == 0 else Kind.SPACED
            for position in request.stable_lengths or (length,):
                wanted[position] = whole if position == length else Kind.TAIL
        for position in entry.hints.breakpoints(length, entry.images):
            wanted[position] = Kind.SHARED
        plan: dict[int, tuple[Node, Kind]] = {}
        for position, kind in wanted.items():
            if resumed < position <= length and not any(run.start < position < run.end for run in entry.images):
                plan[position] = (self.tree.node_at(entry.leaf, position), kind)
        return plan

    def retain(
        self, request_id: str, sequence: SequencePages, position: int, *, last_hidden: Any = None
    ) -> Checkpoint | None:
        """Keep the pages with which others can resume at `position`, one of those that `start` returned.

        Call it after the step that computes the position was launched and before `trim`. None: not kept.
        """
        entry = self._entries[request_id]
        node, kind = (entry.planned or {}).pop(position, (None, Kind.TAIL))
        if node is None:
            return None
        if node.planned == request_id:
            node.planned = None
        return self._retain(entry, sequence, node, kind, last_hidden)

    def _retain(
        self, entry: _Entry, sequence: SequencePages, node: Node, kind: Kind, last_hidden: Any = None
    ) -> Checkpoint | None:
        point = sequence.point_at(node.end, last_hidden=last_hidden)
        if point is None:
            return None
        old = node.checkpoint
        if old is not None and old.tier == "gpu":
            if last_hidden is not None:
                old.last_hidden = last_hidden
            self._claim(entry, old, kind)
            return old
        if old is not None:
            self._drop(old)
        self.pool.touch(point.full_pages)
        self.pool.touch(point.sliding_pages)
        window = self.geometry.sliding_window - 1 if self.geometry.sliding is not None else 0
        min_resume = point.sliding_valid + window if point.sliding_valid else 1
        checkpoint = Checkpoint(node, point, min_resume, kind, entry.conversation, self.policy.now)
        self.index.add(checkpoint)
        entry.written_to = max(entry.written_to, node.end)
        self._claim(entry, checkpoint, kind)
        return checkpoint

    def _claim(self, entry: _Entry, checkpoint: Checkpoint, kind: Kind) -> None:
        """The request wants this checkpoint: its hints apply, and older tails of its conversation are superseded."""
        hints = entry.request.cache
        if entry.taken is None:
            entry.taken = []
        entry.taken.append(checkpoint)
        if checkpoint.kind is not Kind.SHARED:
            checkpoint.kind = kind
        checkpoint.priority = max(PRIORITY_FACTOR[hints.priority], 0.0 if checkpoint.uses == 0 else checkpoint.priority)
        if hints.ttl_s is not None:
            checkpoint.expires_at_s = self._clock() + hints.ttl_s
        if hints.pin and not checkpoint.pinned:
            self._pin(entry, checkpoint)
        conversation = entry.conversation
        if kind is Kind.TAIL and conversation is not None:
            checkpoint.conversation = conversation
            checkpoint.superseded = False
            for old in conversation.tails:
                if old.position < checkpoint.position and common_depth(old.node, checkpoint.node) == old.position:
                    old.superseded = True
            conversation.tails = [old for old in conversation.tails if not old.superseded and old in self.index]
            if checkpoint not in conversation.tails:
                conversation.tails.append(checkpoint)

    def _pin(self, entry: _Entry, checkpoint: Checkpoint) -> None:
        held: set[int] = set()
        for other in self.index:
            if other.pinned and other.tier == "gpu":
                held.update(other.full_pages)
                held.update(other.sliding_pages)
        held.update(checkpoint.full_pages)
        held.update(checkpoint.sliding_pages)
        if len(held) <= self.pin_budget:
            checkpoint.pinned = True
            entry.hints.pinned += 1
        else:
            entry.hints.clipped_pins += 1

    def preempted(self, request_id: str, sequence: SequencePages, ids: Sequence[int]) -> None:
        """The request returns to the front of the window; its computed tokens `ids` stay as a resume point for a while.

        Call it before `sequence.release()`.
        """
        entry = self._entries[request_id]
        self._unplan(entry)
        if entry.request.cache.mode != "off":
            num_tokens = min(len(ids), sequence.num_tokens)
            self._extend_leaf(entry, ids[:num_tokens])
            node = self.tree.node_at(entry.leaf, num_tokens) if num_tokens else None
            if node is not None and node.checkpoint is None:
                entry.swap = self._retain(entry, sequence, node, Kind.SWAP)
        self._enqueue(entry, self._orders[0] - 1 if self._orders else self._next_order - 1)

    def _extend_leaf(self, entry: _Entry, ids: Sequence[int]) -> None:
        """The request has computed `ids`: the leaf moves to their end when they go beyond it."""
        if len(ids) <= entry.leaf.end:
            return
        leaf = self.tree.insert(entry.leaf, encode_key(ids[entry.leaf.end :]))
        leaf.num_users += 1
        entry.leaf.num_users -= 1
        entry.leaf = leaf
        for node in leaf.path():
            if node.seen:
                break
            node.seen = True
            node.owner = entry.request.conversation_id
            node.touched = self.policy.now

    def _unplan(self, entry: _Entry) -> None:
        for node, _ in (entry.planned or {}).values():
            if node.planned == entry.request.request_id:
                node.planned = None
            self.tree.prune_path(node)
        entry.planned = None

    def finished(
        self, request_id: str, sequence: SequencePages | None, ids: Sequence[int], *, completed: bool = True
    ) -> CacheAnswer:
        """The request ends; call it before `sequence.release()`. Returns what its final record says about the cache.

        ids         prompt and generated tokens
        completed   False: cancelled or failed; what it retained stays, nothing new is taken
        """
        entry = self._entries[request_id]
        if entry.waiting is not None:
            self._dequeue(entry)
        self._unplan(entry)
        request, hints, conversation = entry.request, entry.request.cache, entry.conversation
        if hints.mode != "off" and entry.num_starts:
            self._extend_leaf(entry, ids)
            stable = max(request.stable_lengths, default=entry.num_prompt_tokens)
            verbatim = stable >= entry.num_prompt_tokens
            if completed and verbatim and sequence is not None and hints.mode == "auto" and not hints.one_off:
                end = min(len(ids), sequence.num_tokens)
                if end > entry.num_prompt_tokens:
                    self._retain(entry, sequence, self.tree.node_at(entry.leaf, end), Kind.TAIL)
            if conversation is not None:
                conversation.num_running -= 1
                conversation.leaf = entry.leaf
                conversation.stable = stable
                self._told(conversation, hints.expect_after)
        for waiting in self._expecting.pop(request_id, ()):
            waiting.expected = True
        if hints.release and conversation is not None:
            entry.hints.num_released = self._release(conversation)
        answer = self._answer(entry)
        self._forget(entry)
        self.tree.shrink()
        return answer

    def _told(self, conversation: Conversation, expect_after: str | None) -> None:
        """The conversation returns after that job; None: nothing is known (any more)."""
        if conversation.expect_after is not None:
            listed = self._expecting.get(conversation.expect_after)
            if listed is not None and conversation in listed:
                listed.remove(conversation)
                if not listed:
                    del self._expecting[conversation.expect_after]
        conversation.expected = False
        conversation.expect_after = expect_after
        if expect_after is not None:
            self._expecting.setdefault(expect_after, []).append(conversation)

    def _release(self, conversation: Conversation) -> int:
        mine = [c for c in self.index if c.conversation is conversation and c.kind is not Kind.SHARED]
        for checkpoint in mine:
            self._drop(checkpoint)
        conversation.tails = []
        return len(mine)

    def forget_taken(self, request_id: str) -> None:
        """Drop what this running request has retained: its bytes turned out to be wrong (NaN)."""
        entry = self._entries[request_id]
        for checkpoint in entry.taken or ():
            if checkpoint in self.index:
                self._drop(checkpoint)
        entry.taken = []

    def _answer(self, entry: _Entry) -> CacheAnswer:
        request = entry.request
        held = [c for c in entry.taken or () if c in self.index]
        miss_message = None
        if entry.miss_token is not None and request.message_starts:
            miss_message = max(0, bisect_right(request.message_starts, entry.miss_token) - 1)
        return CacheAnswer(
            cached_tokens=entry.cached_tokens,
            cache_write_tokens=max(0, min(entry.written_to, entry.num_prompt_tokens) - entry.cached_tokens),
            restored_from=entry.restored_from,
            hints=entry.hints.answers(held, entry.cached_tokens),
            miss_token=entry.miss_token,
            miss_message=miss_message,
        )

    # -------------------------------------------------------------------------------------------------------- pressure

    @property
    def num_evictable_pages(self) -> int:
        """Pages that evicting every checkpoint would free."""
        counts: dict[int, int] = {}
        for checkpoint in self.index:
            for page in checkpoint.full_pages:
                counts[page] = counts.get(page, 0) + 1
            for page in checkpoint.sliding_pages:
                counts[page] = counts.get(page, 0) + 1
        refs = self.pool.refs
        return sum(refs[page] == count for page, count in counts.items())

    def evict(self, num_pages: int) -> int:
        """Give up the least valuable checkpoints until that many pages became free; returns how many did.

        Fewer than asked only when no checkpoint is left whose pages nobody else holds. Pins go last, but they go.
        """
        freed = 0
        while freed < num_pages:
            victim = self._next_victim()
            if victim is None:
                break
            freed += self._drop(victim)
        return freed

    def _next_victim(self) -> Checkpoint | None:
        if self._ranked_at != self.policy.now or not self._ranking:
            self._rank()
        pool, ranking = self.pool, self._ranking
        while ranking:
            value, number, checkpoint = heappop(ranking)
            if checkpoint not in self.index or checkpoint.tier != "gpu":
                continue
            pages = checkpoint.exclusive_pages(pool)
            if not pages:
                continue
            fresh = self._value(checkpoint, pages)
            if fresh > value * 1.02 and ranking and fresh > ranking[0][0]:
                heappush(ranking, (fresh, number, checkpoint))
                continue
            return checkpoint
        return self._tangled_victim()

    def _rank(self) -> None:
        ranking = []
        for number, checkpoint in enumerate(self.index):
            if checkpoint.tier == "gpu":
                pages = checkpoint.exclusive_pages(self.pool)
                if pages:
                    ranking.append((self._value(checkpoint, pages), number, checkpoint))
        heapify(ranking)
        self._ranking, self._ranked_at, self._num_ranked = ranking, self.policy.now, len(self.index)

    def _value(self, checkpoint: Checkpoint, pages: int) -> float:
        if checkpoint.expires_at_s is not None and self._clock() >= checkpoint.expires_at_s:
            return 0.0
        distance = checkpoint.waiters[0].order - self._front if checkpoint.waiters else None
        value = self.policy.value(checkpoint, pages, distance)
        return 1e9 + value if checkpoint.pinned else value

    def _tangled_victim(self) -> Checkpoint | None:
        """A checkpoint whose pages only other checkpoints share: none frees a page alone, but together they do."""
        counts: dict[int, int] = {}
        held = [c for c in self.index if c.tier == "gpu"]
        for checkpoint in held:
            for page in (*checkpoint.full_pages, *checkpoint.sliding_pages):
                counts[page] = counts.get(page, 0) + 1
        refs = self.pool.refs
        worst, worst_value = None, float("inf")
        for checkpoint in held:
            idle = sum(refs[p] == counts[p] for p in (*checkpoint.full_pages, *checkpoint.sliding_pages))
            if idle and (value := self._value(checkpoint, idle)) < worst_value:
                worst, worst_value = checkpoint, value
        return worst

    def _drop(self, checkpoint: Checkpoint) -> int:
        """Remove a checkpoint; returns pages that became free. Its neighbours' values change: they are ranked anew."""
        above = checkpoint.above
        self.index.drop(checkpoint)
        node = checkpoint.node
        freed = self.pool.free(checkpoint.full_pages)
        freed += self.pool.free(checkpoint.sliding_pages)
        if self._ranked_at == self.policy.now:
            self._num_ranked += 1
            touched: Iterable[Checkpoint | None] = (above,)
            for neighbour in touched:
                if neighbour is not None and neighbour.tier == "gpu":
                    pages = neighbour.exclusive_pages(self.pool)
                    if pages:
                        heappush(self._ranking, (self._value(neighbour, pages), self._num_ranked, neighbour))
        self.tree.prune_path(node)
        return len(freed)
