"""Byte-exact accounting for the baselines: prompts as a tree of segments, pages counted once however many hold them.

Gemma 4 31B in bf16, values only in full layers: a page of 13,107,200 bytes holds 320 tokens of full KV or 16 tokens of
sliding KV. A holder (checkpoint or running job) at a node holds the full pages up to it, the sliding pages that touch
the window before it, and one page for each partly filled last page.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from enum import IntEnum

from gewell.cache.sim.trace import Job

WINDOW = 1024  # tokens
FULL_PAGE, SLIDING_PAGE = 320, 16  # tokens a page
PAGE_BYTES = 13_107_200
PERIOD = 8192  # nodes are split here, so that a policy may place checkpoints


class Holder(IntEnum):
    """Who holds pages. RUNNING repeats the part of GPU that running jobs hold."""

    GPU = 0
    HOST = 1
    RUNNING = 2


class SegmentNode:
    """A run of tokens [start, end) after its parent's. Every resume position in a trace is the end of some node.

    refs     by holder: holders at this node, and children that are held
    tails    by holder: lengths in pages of the window suffixes held in this node, ascending
    passers  jobs whose prompt goes through here (for the clairvoyant); waiting: those visible in the queue now
    """

    __slots__ = (
        "_spans",
        "checkpoint",
        "children",
        "end",
        "first",
        "last",
        "last_conversation",
        "parent",
        "passers",
        "refs",
        "seen",
        "start",
        "tails",
        "waiting",
    )

    def __init__(self, parent: "SegmentNode | None", start: int, end: int) -> None:
        self.parent, self.start, self.end = parent, start, end
        self.children: dict[tuple[str, int], SegmentNode] = {}
        self.refs = [0, 0, 0]
        self.tails: tuple[list[int], list[int], list[int]] = ([], [], [])
        self.passers: list[int] = []
        self.waiting: list[int] = []
        self.seen = False
        self.last_conversation: str | None = None
        self.checkpoint: BaselineCheckpoint | None = None
        self.first = self.last = 0
        self._spans: list[tuple[SegmentNode, int]] | None = None

    def window(self) -> list[tuple["SegmentNode", int]]:
        """(node, pages) of the complete sliding pages in the window that ends here: always a suffix of each node."""
        if self._spans is None:
            low, self._spans = max(0, self.end - WINDOW) // SLIDING_PAGE, []
            for node in self.up():
                if node.end // SLIDING_PAGE <= low:
                    break
                pages = node.end // SLIDING_PAGE - max(low, node.start // SLIDING_PAGE)
                if pages:
                    self._spans.append((node, pages))
        return self._spans

    def up(self) -> Iterator["SegmentNode"]:
        """This node and its ancestors, without the root."""
        node: SegmentNode | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def covers(self, other: "SegmentNode") -> bool:
        """True when `other` is this node or lies below it."""
        return self.first <= other.first <= self.last

    @property
    def num_full_pages(self) -> int:
        return self.end // FULL_PAGE - self.start // FULL_PAGE

    @property
    def num_partial_pages(self) -> int:
        """Partly filled last pages of a holder here: nobody shares them."""
        return (self.end % FULL_PAGE > 0) + (self.end % SLIDING_PAGE > 0)


class SegmentTree:
    """All prompts and answers of a trace: by job index, the nodes of its prompt, and the node at its answer's end."""

    def __init__(self, jobs: list[Job]) -> None:
        self.root = SegmentNode(None, 0, 0)
        self.paths: list[list[SegmentNode]] = []
        self.ends: list[SegmentNode] = []
        for job in jobs:
            self._add(job)
        self._number()

    def _add(self, job: Job) -> None:
        node, path = self.root, []
        for name, num_tokens in (*job.segments, (f"{job.job_id}/out", job.out)):
            done = 0
            while done < num_tokens:
                step = min(num_tokens - done, PERIOD - node.end % PERIOD)
                child = node.children.get((name, done))
                if child is None:
                    child = node.children[name, done] = SegmentNode(node, node.end, node.end + step)
                node, done = child, done + step
                if node.end <= job.prompt:
                    path.append(node)
                    node.passers.append(job.index)
        self.paths.append(path)
        self.ends.append(node)

    def _number(self) -> None:
        """Number the nodes in depth-first order, so that `covers` is two comparisons."""
        order, stack = 0, [(self.root, False)]
        while stack:
            node, is_left = stack.pop()
            if is_left:
                node.last = order
            else:
                order += 1
                node.first = order
                stack.append((node, True))
                stack.extend((child, False) for child in node.children.values())


class SegmentPool:
    """Pages of one memory, by who holds which node."""

    def __init__(self, capacity_bytes: float, holder: Holder) -> None:
        self.capacity, self.holder, self.used = int(capacity_bytes // PAGE_BYTES), holder, 0

    def hold(self, node: SegmentNode, copied: bool = False) -> None:
        """copied: the window is a copy of its own, shared with nobody."""
        self.used += self.cost(node, copied)
        holder = self.holder
        if not copied:
            for x, pages in node.window():
                insort(x.tails[holder], pages)
        for x in node.up():
            x.refs[holder] += 1
            if x.refs[holder] > 1:
                break

    def release(self, node: SegmentNode, copied: bool = False) -> None:
        self.used -= self.exclusive(node, copied)
        holder = self.holder
        if not copied:
            for x, pages in node.window():
                tails = x.tails[holder]
                tails.pop(bisect_left(tails, pages))
        for x in node.up():
            x.refs[holder] -= 1
            if x.refs[holder]:
                break

    def exclusive(self, node: SegmentNode, copied: bool = False) -> int:
        """Pages that `release` would free."""
        holder, pages = self.holder, self._private(node, copied)
        if not copied:
            for x, n in node.window():
                tails = x.tails[holder]
                if tails[-1] == n:
                    pages += n - (tails[-2] if len(tails) > 1 else 0)
        for x in node.up():
            if x.refs[holder] != 1:
                break
            pages += x.num_full_pages
        return pages

    def cost(self, node: SegmentNode, copied: bool = False) -> int:
        """Pages that `hold` would add."""
        holder, pages = self.holder, self._private(node, copied)
        if not copied:
            for x, n in node.window():
                tails = x.tails[holder]
                pages += max(0, n - tails[-1]) if tails else n
        for x in node.up():
            if x.refs[holder]:
                break
            pages += x.num_full_pages
        return pages

    @staticmethod
    def _private(node: SegmentNode, copied: bool) -> int:
        if copied:
            return (node.end % FULL_PAGE > 0) + -(-min(node.end, WINDOW) // SLIDING_PAGE)
        return node.num_partial_pages


class BaselineCheckpoint:
    """A held resume position. `above` is the next shallower one on its path, `below` those whose `above` this is.

    is_reused, is_recent   CLOCK's class and reference bit
    """

    __slots__ = (
        "above",
        "below",
        "born",
        "is_recent",
        "is_reused",
        "kind",
        "node",
        "tier",
    )

    def __init__(self, node: SegmentNode, kind: str, now: int) -> None:
        self.node, self.kind, self.born, self.tier = node, kind, now, Holder.GPU
        self.above: BaselineCheckpoint | None = None
        self.below: set[BaselineCheckpoint] = set()
        self.is_reused = self.is_recent = False
