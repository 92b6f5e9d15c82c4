"""Checkpoints: pages kept so that a later prompt can resume, where they lie in the tree, and who waits for them.

A checkpoint at position p references the full pages up to p and the sliding pages of the window before p plus a slack.
Taking one copies nothing; neighbours share pages. Any position from `min_resume` to p can be resumed, exact to the
token. A waiting request *targets* the deepest checkpoint on its path: the one it would resume from.
"""

from bisect import insort
from collections.abc import Iterator, Sequence
from enum import StrEnum
from operator import itemgetter
from typing import Any

from gewell.cache.page_pool import PagePool
from gewell.cache.policy import Conversation
from gewell.cache.prefix_tree import Node
from gewell.cache.sequence_pages import ResumePoint
from gewell.cache.tiers import Tier


class Kind(StrEnum):
    """Why a checkpoint was taken; says what its reuse depends on."""

    TAIL = "tail"  # the next turn of its conversation
    SHARED = "shared"  # other prompts with the same beginning
    SPACED = "spaced"  # inside a long prompt, for edits
    SWAP = "swap"  # a preempted request that will return


class Waiting:
    """A request in the window. `order` is its place in the queue; `target` the checkpoint it would resume from."""

    __slots__ = ("leaf", "order", "root", "target")

    def __init__(self, order: int, root: Node, leaf: Node) -> None:
        self.order = order
        self.root = root
        self.leaf = leaf
        self.target: Checkpoint | None = None


def _by_order(waiting: Waiting) -> int:
    return waiting.order


class Checkpoint:
    """References to the pages of one resume position. The pages' references are taken and dropped by `PrefixCache`.

    tier          GPU, or HOST when only the host tier holds its bytes: then the GPU page ids mean nothing
    host_pages    its copy in the host tier, full pages first; None: there is none
    min_resume    first position that can be resumed with its window
    above         the next shallower checkpoint on its path
    waiters       waiting requests that target it, in queue order
    """

    __slots__ = (
        "_pick_sliding",
        "above",
        "born",
        "conversation",
        "expires_at_s",
        "full_pages",
        "host_pages",
        "is_pinned",
        "is_superseded",
        "kind",
        "last_hidden",
        "last_use",
        "min_resume",
        "node",
        "position",
        "priority",
        "sliding_pages",
        "sliding_start",
        "sliding_valid",
        "tier",
        "uses",
        "waiters",
    )

    def __init__(
        self, node: Node, point: ResumePoint, min_resume: int, kind: Kind, conversation: Conversation | None, now: int
    ) -> None:
        self.node = node
        self.position = point.position
        self.kind = kind
        self.conversation = conversation
        self.born = self.last_use = now
        self.uses = 0
        self.min_resume = min_resume
        self.tier = Tier.GPU
        self.host_pages: list[int] | None = None
        self.above: Checkpoint | None = None
        self.waiters: list[Waiting] = []
        self.is_superseded = self.is_pinned = False
        self.priority = 1.0
        self.expires_at_s: float | None = None
        self.last_hidden: Any = point.last_hidden
        self.hold(point)

    def hold(self, point: ResumePoint) -> None:
        """Take over the page ids of a point (references are the caller's business)."""
        self.full_pages: Sequence[int] = list(point.full_pages)
        self.sliding_pages: Sequence[int] = list(point.sliding_pages)
        self.sliding_start = point.sliding_start
        self.sliding_valid = point.sliding_valid
        self._pick_sliding = itemgetter(*self.sliding_pages) if len(self.sliding_pages) > 1 else None

    @property
    def is_live_tail(self) -> bool:
        """A conversation's next turn would resume here, as far as one knows."""
        return self.kind is Kind.TAIL and self.conversation is not None and not self.is_superseded

    def exclusive_pages(self, pool: PagePool) -> int:
        """Pages that dropping this checkpoint would free.

        Whoever shares a full page shares all before it, so the shared part is found by bisection. A window shares
        its front with a shallower neighbour and its back with a deeper one: there every page is looked at.
        """
        refs, pages = pool.refs, self.full_pages
        low, high = 0, len(pages)
        while low < high:
            middle = (low + high) // 2
            if refs[pages[middle]] == 1:
                high = middle
            else:
                low = middle + 1
        count = len(pages) - low
        if self._pick_sliding is not None:
            return count + int(self._pick_sliding(refs).count(1))
        return count + sum(refs[page] == 1 for page in self.sliding_pages)


class CheckpointIndex:
    """All checkpoints, with `above` links and targets of waiting requests kept up to date."""

    def __init__(self) -> None:
        self._held: dict[Checkpoint, None] = {}
        self._uncovered: dict[Node, list[Waiting]] = {}  # by root: waiting requests without a target

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint in self._held

    def add(self, checkpoint: Checkpoint) -> None:
        node = checkpoint.node
        above = deepest_on_path(node.parent)
        checkpoint.above = above
        if node.num_checkpoints:
            for deeper in _nearest_below(node):
                deeper.above = checkpoint
        node.checkpoint = checkpoint
        for x in node.path():
            x.num_checkpoints += 1
        self._held[checkpoint] = None
        if node.num_waiting:
            root = _root_of(node)
            for waiting in list(above.waiters if above is not None else self._uncovered.get(root, ())):
                if _passes(waiting.leaf, node):
                    self._retarget(waiting, checkpoint)

    def drop(self, checkpoint: Checkpoint) -> None:
        node, above = checkpoint.node, checkpoint.above
        del self._held[checkpoint]
        for x in node.path():
            x.num_checkpoints -= 1
        node.checkpoint = None
        if node.num_checkpoints:
            for deeper in _nearest_below(node):
                deeper.above = above
        for waiting in list(checkpoint.waiters):
            self._retarget(waiting, above)

    def add_waiting(self, waiting: Waiting) -> None:
        for node in waiting.leaf.path():
            node.num_waiting += 1
        waiting.target = deepest_on_path(waiting.leaf)
        insort(self._list_of(waiting), waiting, key=_by_order)

    def drop_waiting(self, waiting: Waiting) -> None:
        for node in waiting.leaf.path():
            node.num_waiting -= 1
        queue = self._list_of(waiting)
        queue.remove(waiting)
        if not queue and waiting.target is None:
            del self._uncovered[waiting.root]

    def _retarget(self, waiting: Waiting, target: Checkpoint | None) -> None:
        self._list_of(waiting).remove(waiting)
        waiting.target = target
        insort(self._list_of(waiting), waiting, key=_by_order)

    def _list_of(self, waiting: Waiting) -> list[Waiting]:
        if waiting.target is not None:
            return waiting.target.waiters
        return self._uncovered.setdefault(waiting.root, [])


def deepest_on_path(node: Node | None) -> Checkpoint | None:
    """The deepest checkpoint at the node or above it."""
    while node is not None and node.checkpoint is None:
        node = node.parent
    return node.checkpoint if node is not None else None


def _nearest_below(node: Node) -> Iterator[Checkpoint]:
    """Checkpoints below the node with no other between."""
    stack = [child for child in node.children.values() if child.num_checkpoints]
    while stack:
        child = stack.pop()
        if child.checkpoint is not None:
            yield child.checkpoint
        else:
            stack.extend(x for x in child.children.values() if x.num_checkpoints)


def _passes(leaf: Node, node: Node) -> bool:
    x: Node | None = leaf
    while x is not None and x.end > node.end:
        x = x.parent
    return x is node


def _root_of(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node
