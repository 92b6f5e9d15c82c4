"""The prefix cache as the engine sees it: what a request can resume from, and what is kept of it for others.

One object per engine, used by the engine's thread alone. A request's life here:

    add_waiting -> match [-> restore -> match] -> start -> retain at the wanted positions -> finished
                     ^                                        |
                     +--------------- preempted <-------------+          drop_waiting: cancelled while waiting

Nothing here touches bytes: pages are numbers, and `SequencePages` of the engine hold the running sequences.
"""

import time
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from gewell.cache.checkpoints import Checkpoint, CheckpointIndex, Kind, Waiting
from gewell.cache.expectations import Expectations
from gewell.cache.geometry import KVGeometry
from gewell.cache.hints import HintBook
from gewell.cache.page_pool import PagePool
from gewell.cache.places import MIN_SHARED_TOKENS, own_places, shared_places
from gewell.cache.policy import PRIORITY_FACTOR, Conversation, ReusePolicy
from gewell.cache.prefix_tree import ImageRun, Node, PrefixTree, common_depth, encode_key
from gewell.cache.retention import Retention, message_of
from gewell.cache.sequence_pages import ResumePoint, SequencePages
from gewell.cache.tiers import Tier, Transfer
from gewell.request import CacheAnswer, EngineRequest

MAX_CONVERSATIONS = 20_000
MAX_BRANCHES = 64  # looked at for an edited prompt


class Match(NamedTuple):
    """What a request could start from now.

    point      borrow it at once: `SequencePages(pool, geometry, point)`; None: from scratch
    wait_for   a running request that is about to retain more of this prompt: better start after it has
    on_host    more of the prompt lies in the host tier: call `restore`, then match again whatever it returned
    """

    point: ResumePoint | None
    wait_for: str | None = None
    on_host: bool = False

    @property
    def position(self) -> int:
        return self.point.position if self.point is not None else 0


@dataclass(slots=True, eq=False)
class _Entry:
    """A request between add_waiting and finished."""

    request: EngineRequest
    num_prompt_tokens: int
    images: Sequence[ImageRun]
    root: Node
    leaf: Node
    conversation: Conversation | None
    hints: HintBook
    order: int = 0
    waiting: Waiting | None = None
    source: Checkpoint | None = None  # what the last match found
    swap: Checkpoint | None = None  # what preemption left behind
    resumed_tail: Checkpoint | None = None  # of its own conversation
    planned: dict[int, tuple[Node, Kind]] = field(default_factory=dict)
    taken: list[Checkpoint] = field(default_factory=list)
    num_starts: int = 0
    started_at: int = 0  # tick
    cached_tokens: int = 0
    written_to: int = 0
    restored_from: str | None = None
    was_restored: bool = False
    miss_token: int | None = None

    @property
    def is_cacheable(self) -> bool:
        return self.request.cache.mode != "off"

    def is_inside_image(self, position: int) -> bool:
        return any(run.start < position < run.end for run in self.images)


class PrefixCache:
    """Retains resume points of prompts inside the pool that running sequences use too.

    pin_share        most of the pool that pinned checkpoints may hold
    num_host_pages   size of the host tier; 0: none
    """

    def __init__(
        self,
        pool: PagePool,
        geometry: KVGeometry,
        *,
        policy: ReusePolicy | None = None,
        pin_share: float = 0.3,
        num_host_pages: int = 0,
        max_index_tokens: int = 10_000_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.geometry = geometry
        self.policy = policy or ReusePolicy()
        self.tree = PrefixTree(max_index_tokens)
        self.retention = Retention(
            pool,
            geometry,
            self.policy,
            self.tree,
            num_host_pages=num_host_pages,
            pin_share=pin_share,
            clock=clock,
        )
        self.retention.told_wait = self._told_wait
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._orders: list[int] = []  # of waiting requests, ascending
        self._next_order = 0
        self._conversations: OrderedDict[tuple[str | None, str], Conversation] = OrderedDict()
        self._expectations = Expectations()

    @property
    def index(self) -> CheckpointIndex:
        return self.retention.index

    # ------------------------------------------------------------------------------------------------ waiting window

    def add_waiting(
        self,
        request: EngineRequest,
        images: Sequence[ImageRun] = (),
        *,
        key: bytes | None = None,
        order: int | None = None,
    ) -> None:
        """The request is in the window: its prefix becomes something to keep. Raises ValueError on a known id.

        key     `encode_key` of prompt and emitted ids, where the caller has it
        order   its place in a queue whose order is known; by default behind all others that wait
        """
        if request.request_id in self._entries:
            raise ValueError(f"request {request.request_id!r} is known already")
        leaf = root = self.tree.root(request.cache.salt)
        conversation = None
        if request.cache.mode != "off":
            if key is None:
                ids = [*request.prompt_ids, *request.emitted_ids] if request.emitted_ids else request.prompt_ids
                key = encode_key(ids, images)
            leaf = self.tree.insert(root, key)
            conversation = self._conversation(request)
        entry = _Entry(request, len(request.prompt_ids), images, root, leaf, conversation, HintBook(request))
        leaf.num_users += 1
        self._entries[request.request_id] = entry
        self._enqueue(entry, self._next_order if order is None else order)
        self.policy.request_shown(entry.order - self.retention.front, conversation)

    def drop_waiting(self, request_id: str) -> None:
        """The request leaves the window without having started. An unknown or running one is left alone."""
        entry = self._entries.get(request_id)
        if entry is None or entry.waiting is None:
            return
        self._dequeue(entry)
        if entry.num_starts and entry.conversation is not None:  # it was preempted
            self._leave_turn(entry, entry.conversation)
        self._expectations.job_ended(request_id, entry.conversation)
        self._forget(entry)

    def _enqueue(self, entry: _Entry, order: int) -> None:
        entry.order = order
        self._next_order = max(self._next_order, order + 1)
        insort(self._orders, order)
        entry.waiting = Waiting(order, entry.root, entry.leaf)
        if entry.is_cacheable:
            self.index.add_waiting(entry.waiting)

    def _dequeue(self, entry: _Entry) -> None:
        assert entry.waiting is not None
        del self._orders[bisect_left(self._orders, entry.order)]
        if entry.is_cacheable:
            self.index.drop_waiting(entry.waiting)
        entry.waiting = None

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.request.request_id]
        if entry.swap is not None and entry.swap in self.index:
            self.retention.drop(entry.swap)
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
                _, forgotten = self._conversations.popitem(last=False)
                self._expectations.tell(forgotten, None)
        else:
            self._conversations.move_to_end(key)
        return conversation

    # ------------------------------------------------------------------------------------------------ resuming

    def match(self, request_id: str) -> Match:
        """Where the request could start now. Takes nothing; ask again when it starts: `start` credits the last one."""
        entry = self._entries[request_id]
        if not entry.is_cacheable:
            return Match(None)
        source, position = self._find_source(entry, None)
        on_host = False
        if source is not None and source.tier is Tier.HOST:
            on_host = True
            source, position = self._find_source(entry, Tier.GPU)
        entry.source = source
        wait_for = None
        for node in entry.leaf.path():
            if node.end <= position + MIN_SHARED_TOKENS:
                break
            if node.planned is not None and node.planned != request_id:
                wait_for = node.planned
                break
        point = self._point(source, position) if source is not None else None
        return Match(point, wait_for, on_host)

    def peek(self, request_id: str) -> int:
        """Tokens that the request would resume now (from either tier), for the choice of what to start next."""
        entry = self._entries[request_id]
        return self._find_source(entry, None)[1] if entry.is_cacheable else 0

    def restore(self, request_id: str) -> bool:
        """Bring what `match` found on the host back to the GPU, evicting there; the bytes follow by `take_transfers`.

        False: there was no room, or it is gone. Earlier matches are void in any case. May be called ahead of time for
        a request that will start soon.
        """
        entry = self._entries[request_id]
        if not entry.is_cacheable:
            return False
        source, _ = self._find_source(entry, None)
        if source is None or source.tier is not Tier.HOST or not self.retention.restore(source):
            return False
        entry.was_restored = True
        return True

    def take_transfers(self) -> list[Transfer]:
        """Copies between tiers that the plan made so far needs.

        Execute them in this order before the step writes anything: before poisoning freed pages (and spare the
        targets of copies to the GPU), before `Appended.copies`.
        """
        return self.retention.take_transfers()

    def _find_source(self, entry: _Entry, tier: Tier | None) -> tuple[Checkpoint | None, int]:
        """The checkpoint (of that tier) from which the most tokens can be resumed, and how many."""
        limit = entry.leaf.end
        best: Checkpoint | None = None
        position = 0
        for node in entry.leaf.path():
            if node.end <= position:
                break
            at = node.checkpoint
            if at is not None and (tier is None or at.tier is tier):
                usable = at.position if at.position < limit or at.last_hidden is not None else limit - 1
                if usable > position and (usable == at.position or usable >= at.min_resume):
                    best, position = at, usable
            if node.num_checkpoints and node.end > position:  # an edited tail: a branch that we leave at node.end
                usable = min(node.end, limit - 1)
                found = self._beside(node, usable, tier) if usable > position else None
                if found is not None:
                    best, position = found, usable
        return best, position

    def _beside(self, node: Node, position: int, tier: Tier | None) -> Checkpoint | None:
        """A checkpoint below the node whose slack lets one resume at `position`, at or before the node's end.

        Looks at the newest branches: where thousands of prompts part, the older ones are not worth the search.
        """
        reach = None if self.geometry.sliding is None else position + self.geometry.slack_tokens
        newest = islice((child for child in reversed(node.children.values()) if child.num_checkpoints), MAX_BRANCHES)
        stack = list(newest)[::-1]
        for _ in range(MAX_BRANCHES):
            if not stack:
                break
            child = stack.pop()
            at = child.checkpoint
            if at is not None and (tier is None or at.tier is tier) and at.min_resume <= position:
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
        return ResumePoint(position, full, sliding, source.sliding_start, source.sliding_valid, hidden)

    # ------------------------------------------------------------------------------------------------ running

    def start(self, request_id: str, resumed: int) -> tuple[int, ...]:
        """The request runs now, from position `resumed`. Returns the ascending positions at which to call `retain`."""
        entry = self._entries[request_id]
        if entry.waiting is not None:
            self._dequeue(entry)
        self.retention.front = entry.order
        entry.num_starts += 1
        is_first = entry.num_starts == 1
        if is_first:
            self.policy.now += 1
            entry.started_at = self.policy.now
            entry.cached_tokens = min(resumed, entry.num_prompt_tokens)
        if not entry.is_cacheable:
            return ()
        if is_first and entry.conversation is not None:
            entry.miss_token = _diverged_at(entry, entry.conversation)
            self.policy.turn_started(entry.conversation)
            self._expectations.tell(entry.conversation, entry.request.cache.expect_after)
        plan = self._plan(entry, resumed)
        if entry.source is not None and resumed:
            self._used(entry, entry.source)
            if is_first:
                entry.restored_from = Tier.HOST if entry.was_restored else Tier.GPU
        if entry.swap is not None and entry.swap in self.index:
            self.retention.drop(entry.swap)
        entry.swap = entry.source = None
        self._mark_seen(entry, until_seen=False)
        entry.planned = plan
        for node, _ in plan.values():
            node.planned = request_id
        entry.written_to = max(entry.written_to, resumed)
        return tuple(sorted(plan))

    def _used(self, entry: _Entry, source: Checkpoint) -> None:
        source.last_use = self.policy.now
        source.uses += 1
        if source.is_live_tail:
            self.policy.tail_ended(was_used=True)
            if source.conversation is entry.conversation:
                source.is_superseded = True  # this very turn goes beyond it
                entry.resumed_tail = source

    def _mark_seen(self, entry: _Entry, *, until_seen: bool) -> None:
        owner, now = entry.request.conversation_id, self.policy.now
        for node in entry.leaf.path():
            if until_seen and node.seen:
                break
            node.seen = True
            node.owner = owner
            node.touched = now

    def _plan(self, entry: _Entry, resumed: int) -> dict[int, tuple[Node, Kind]]:
        """Positions worth a checkpoint, beyond where the request resumes."""
        if entry.request.cache.mode != "auto":
            return {}
        length = entry.num_prompt_tokens
        asked = entry.hints.breakpoints(length, entry.images)
        wanted = own_places(entry.request, resumed)
        wanted |= shared_places(entry.request, entry.leaf) | dict.fromkeys(asked, Kind.SHARED)
        plan: dict[int, tuple[Node, Kind]] = {}
        for position, kind in wanted.items():
            if not resumed < position <= length or entry.is_inside_image(position):
                continue
            if kind is Kind.SHARED or self._is_worth_taking(entry, kind, resumed, position):
                plan[position] = (self.tree.node_at(entry.leaf, position), kind)
        return plan

    def _is_worth_taking(self, entry: _Entry, kind: Kind, resumed: int, position: int) -> bool:
        """A tail replaces the one it was resumed from; where tails rarely live to be used, it must be worth that."""
        share = self.policy.strictness if kind is Kind.TAIL and entry.conversation is not None else 1.0
        source, start = entry.source, resumed
        if source is not None and source.kind is Kind.TAIL and source.conversation is entry.conversation:
            start = source.above.position if source.above is not None else 0
        return self.retention.is_worth_taking(kind, entry.conversation, start, position, share)

    def want(self, request_id: str, position: int) -> bool:
        """A running request shall also retain `position`, beyond what it has computed: a later request shares it.

        False: its job wants nothing retained, or the position is unknown to it or lies inside an image.
        """
        entry = self._entries[request_id]
        if entry.waiting is not None or entry.request.cache.mode != "auto":
            return False
        if not 0 < position <= entry.leaf.end or entry.is_inside_image(position):
            return False
        node = self.tree.node_at(entry.leaf, position)
        if node.planned is None:
            node.planned = request_id
        entry.planned[position] = (node, Kind.SHARED)
        return True

    def retain(
        self, request_id: str, sequence: SequencePages, position: int, *, last_hidden: Any = None
    ) -> Checkpoint | None:
        """Keep the pages with which others can resume at `position`: one that `start` returned or `want` named.

        Call it after the step that computes the position was launched and before `trim`. None: not kept.
        """
        entry = self._entries[request_id]
        node, kind = entry.planned.pop(position, (None, Kind.TAIL))
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
            self.tree.prune_path(node)
            return None
        checkpoint = self.retention.hold(node, point, kind, entry.conversation)
        entry.written_to = max(entry.written_to, node.end)
        entry.taken.append(checkpoint)
        self._apply_hints(entry, checkpoint)
        if checkpoint.kind is not Kind.SHARED:
            checkpoint.kind = kind
        if kind is Kind.TAIL and entry.conversation is not None:
            self._supersede(entry.conversation, checkpoint)
        return checkpoint

    def _apply_hints(self, entry: _Entry, checkpoint: Checkpoint) -> None:
        hints = entry.request.cache
        factor = PRIORITY_FACTOR[hints.priority]
        checkpoint.priority = max(checkpoint.priority, factor) if checkpoint.uses else factor
        if hints.ttl_s is not None:
            checkpoint.expires_at_s = self._clock() + hints.ttl_s
        if hints.pin and not checkpoint.is_pinned:
            entry.hints.count_pin(self.retention.pin(checkpoint))

    def _supersede(self, conversation: Conversation, newest: Checkpoint) -> None:
        """The newest tail is the one that the next turn resumes from; older ones on its path fall back."""
        newest.conversation = conversation
        newest.is_superseded = False
        living = []
        for old in conversation.tails:
            if old.position < newest.position and common_depth(old.node, newest.node) == old.position:
                old.is_superseded = True
            elif old is not newest:
                living.append(old)
        conversation.tails = [*living, newest]

    def preempted(self, request_id: str, sequence: SequencePages, ids: Sequence[int]) -> None:
        """The request returns to the front of the window; what it has computed stays as a resume point for a while.

        ids   all tokens known so far, prompt and generated; the newest need not be computed yet
        Call it before `sequence.release()`.
        """
        entry = self._entries[request_id]
        self._unplan(entry)
        if entry.is_cacheable:
            self._extend_leaf(entry, ids)
            num_tokens = min(len(ids), sequence.num_tokens)
            node = self.tree.node_at(entry.leaf, num_tokens) if num_tokens else None
            point = sequence.point_at(num_tokens)
            if node is not None and point is not None and node.checkpoint is None:
                entry.swap = self.retention.hold(node, point, Kind.SWAP, entry.conversation)
        self._enqueue(entry, self._orders[0] - 1 if self._orders else self._next_order - 1)

    def _extend_leaf(self, entry: _Entry, ids: Sequence[int]) -> None:
        """The request knows `ids` now: its leaf moves to their end when they go beyond it."""
        if len(ids) <= entry.leaf.end:
            return
        leaf = self.tree.insert(entry.leaf, encode_key(ids[entry.leaf.end :]))
        leaf.num_users += 1
        entry.leaf.num_users -= 1
        entry.leaf = leaf
        self._mark_seen(entry, until_seen=True)

    def _unplan(self, entry: _Entry) -> None:
        for node, _ in entry.planned.values():
            if node.planned == entry.request.request_id:
                node.planned = None
            self.tree.prune_path(node)
        entry.planned = {}

    # ------------------------------------------------------------------------------------------------ ending

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
        if entry.num_starts:
            self.policy.request_finished(self.policy.now - entry.started_at)
            if entry.is_cacheable:
                self._end_turn(entry, sequence, ids, completed)
        self._expectations.job_ended(request_id, entry.conversation)
        if entry.request.cache.release and entry.conversation is not None:
            entry.hints.num_released = self._release(entry.conversation)
        answer = self._answer(entry)
        self._forget(entry)
        self.tree.shrink()
        return answer

    def _end_turn(self, entry: _Entry, sequence: SequencePages | None, ids: Sequence[int], completed: bool) -> None:
        self._extend_leaf(entry, ids)
        hints, conversation = entry.request.cache, entry.conversation
        stable = max(entry.request.stable_lengths, default=entry.num_prompt_tokens)
        is_verbatim = stable >= entry.num_prompt_tokens
        if completed and is_verbatim and sequence is not None and hints.mode == "auto" and not hints.one_off:
            end = min(len(ids), sequence.num_tokens)
            if end > entry.num_prompt_tokens:
                self._retain(entry, sequence, self.tree.node_at(entry.leaf, end), Kind.TAIL)
        if conversation is None:
            return
        self._leave_turn(entry, conversation)
        conversation.leaf = entry.leaf
        conversation.stable = stable
        for tail in list(conversation.tails):
            if not tail.is_superseded:
                self.retention.write_back(tail)

    def _leave_turn(self, entry: _Entry, conversation: Conversation) -> None:
        """The turn is over. If it left no tail of its own, the next one resumes where this one did."""
        self.policy.turn_finished(conversation)
        if entry.resumed_tail is not None and entry.resumed_tail in conversation.tails:
            entry.resumed_tail.is_superseded = False

    def _release(self, conversation: Conversation) -> int:
        mine = [c for c in self.index if c.conversation is conversation and c.kind is not Kind.SHARED]
        for checkpoint in mine:
            self.retention.drop(checkpoint)
        conversation.tails = []
        return len(mine)

    def forget_taken(self, request_id: str) -> None:
        """Drop what this running request has retained: its bytes turned out to be wrong (NaN)."""
        entry = self._entries[request_id]
        for checkpoint in entry.taken:
            if checkpoint in self.index:
                self.retention.drop(checkpoint)
        entry.taken = []

    def _answer(self, entry: _Entry) -> CacheAnswer:
        held = [c for c in dict.fromkeys(entry.taken) if c in self.index]
        miss = entry.miss_token
        return CacheAnswer(
            cached_tokens=entry.cached_tokens,
            cache_write_tokens=max(0, min(entry.written_to, entry.num_prompt_tokens) - entry.cached_tokens),
            restored_from=entry.restored_from,
            hints=entry.hints.answers(held, entry.cached_tokens),
            miss_token=miss,
            miss_message=message_of(entry.request.message_starts, miss) if miss is not None else None,
        )

    # ------------------------------------------------------------------------------------------------ expectations

    def _told_wait(self, conversation: Conversation) -> float | None:
        """Ticks until the job named by `expect` has ended and the turn after it starts; None: the job is not known."""
        policy = self.policy
        if conversation.is_due:
            return policy.turn_distance
        job = self._entries.get(conversation.expect_after or "")
        if job is None or job.conversation is conversation:
            return None
        if job.waiting is not None:
            return job.order - self.retention.front + policy.run_ticks + policy.turn_distance
        return policy.run_ticks / 2 + policy.turn_distance

    # ------------------------------------------------------------------------------------------------ pressure

    @property
    def num_evictable_pages(self) -> int:
        """Pages that evicting every checkpoint would free."""
        return self.pool.num_evictable_pages

    def evict(self, num_pages: int) -> int:
        """Give up the least valuable checkpoints until that many pages became free; returns how many did."""
        return self.retention.evict(num_pages)


def _diverged_at(entry: _Entry, conversation: Conversation) -> int | None:
    """First token that differs from what the conversation's last turn promised to repeat, if one does."""
    last = conversation.leaf
    if last is None or last.parent is None:
        return None
    common = common_depth(entry.leaf, last)
    return common if common < conversation.stable else None
