"""What ours is measured against: LRU, CLOCK, a clairvoyant, and an infinite cache.

All but `infinite` keep checkpoints under the same accounting. The clairvoyant knows every future job; it is greedy, so
a reference and no bound. Its result on a trace is the best of three rules.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable
from itertools import islice

from gewell.cache.sim.machine import Store
from gewell.cache.sim.prompt_tree import (
    PERIOD,
    WINDOW,
    BaselineCheckpoint,
    Holder,
    SegmentNode,
    SegmentPool,
    SegmentTree,
)
from gewell.cache.sim.trace import Job

MIN_SYSTEM_TOKENS = 256
MAX_PARTINGS = 6  # positions that the clairvoyant takes on one prompt


class CheckpointStore(ABC):
    """A GPU pool and an optional host pool of checkpoints. Subclasses decide where to take and what to evict."""

    lookahead = 0
    copies_windows = False  # True: each checkpoint has a window of its own; False: neighbours share pages
    promotes = True  # a checkpoint restored from the host moves back to the GPU

    def __init__(self, jobs: list[Job], gpu_bytes: float, host_bytes: float, running_share: float = 0.6) -> None:
        self.jobs = jobs
        self.tree = SegmentTree(jobs)
        self.pools = (SegmentPool(gpu_bytes, Holder.GPU), SegmentPool(host_bytes, Holder.HOST))
        self.running = SegmentPool(gpu_bytes * running_share, Holder.RUNNING)
        self.held: tuple[dict[BaselineCheckpoint, None], ...] = ({}, {})  # by tier, oldest first
        self.tops: set[BaselineCheckpoint] = set()  # with no shallower one on their path
        self.now = 0

    # ------------------------------------------------------------------------------------------------ as a Store

    def show(self, job: Job) -> None:
        for node in self.tree.paths[job.index]:
            insort(node.waiting, job.index)

    def start(self, job: Job) -> tuple[int, bool] | None:
        path, end = self.tree.paths[job.index], self.tree.ends[job.index]
        if self.lookahead:
            for node in path:
                if job.index in node.waiting:
                    node.waiting.remove(job.index)
        self.now = job.index
        if self.running.used + self.running.cost(end, self.copies_windows) > self.running.capacity:
            return None
        source = next((node.checkpoint for node in reversed(path) if node.checkpoint is not None), None)
        resumed, tier = (source.node.end, source.tier) if source is not None else (0, Holder.GPU)
        self.running.hold(end, self.copies_windows)
        self.pools[Holder.GPU].hold(end, self.copies_windows)
        if source is not None:
            if tier is Holder.HOST and self.promotes:
                self._move(source, Holder.GPU)
            self.used(source)
        self.admit(job, path, resumed)
        self._make_room()
        for node in path:
            node.seen, node.last_conversation = True, job.conversation_id
        return resumed, tier is Holder.HOST

    def finish(self, job: Job) -> None:
        end = self.tree.ends[job.index]
        for node in end.up():
            if node.seen:
                break
            node.seen, node.last_conversation = True, job.conversation_id
        self.finished(job, end)
        self.running.release(end, self.copies_windows)
        self.pools[Holder.GPU].release(end, self.copies_windows)
        self._make_room()

    # ------------------------------------------------------------------------------------------------ decisions

    def used(self, checkpoint: BaselineCheckpoint) -> None:  # noqa: B027 - most policies need not know
        """A job resumed from it."""

    def admit(self, job: Job, path: list[SegmentNode], resumed: int) -> None:
        """The job starts: take checkpoints beyond `resumed`."""
        for node, kind in self.positions(job, path, resumed):
            self.take(node, kind)

    def finished(self, job: Job, end: SegmentNode) -> None:
        """The answer is there; when the next turn replays it verbatim, its end is a resume position."""
        if job.stable == job.prompt:
            self.take(end, "tail")

    @abstractmethod
    def victims(self, tier: Holder) -> Iterable[BaselineCheckpoint]:
        """Checkpoints of the tier in the order in which to give them up; asked again if they do not suffice."""

    def spills(self, checkpoint: BaselineCheckpoint) -> bool:
        return True

    def positions(self, job: Job, path: list[SegmentNode], resumed: int) -> list[tuple[SegmentNode, str]]:
        """System end, where prompts were seen to part, where they will part, stable end."""
        found: dict[SegmentNode, str] = {}
        system = job.segments[0][1] if len(job.segments) > 1 else 0
        for node in path:
            if node.end == system >= MIN_SYSTEM_TOKENS:
                found[node] = "shared"
        fork = next((node for node in reversed(path) if node.waiting), None)
        if fork is not None:
            found[fork] = "shared"
        seen = next((node for node in reversed(path) if node.seen), None)
        if seen is not None and not (job.conversation_id and seen.last_conversation == job.conversation_id):
            found[seen] = "shared"
        if job.stable != job.prompt:
            found.update((node, "tail") for node in path if node.end == job.stable)
        return [(node, kind) for node, kind in found.items() if node.end > resumed]

    # ------------------------------------------------------------------------------------------------ holding

    def exclusive(self, checkpoint: BaselineCheckpoint) -> int:
        """Pages that dropping this checkpoint would free in its tier."""
        return self.pools[checkpoint.tier].exclusive(checkpoint.node, self.copies_windows)

    def take(self, node: SegmentNode, kind: str) -> BaselineCheckpoint:
        """Add a checkpoint, or return the one that is there; room is made afterwards."""
        there = node.checkpoint
        if there is not None and there.tier is Holder.GPU:
            return there
        if there is not None:
            self.drop(there)
        new = node.checkpoint = BaselineCheckpoint(node, kind, self.now)
        new.above = next((x.checkpoint for x in node.up() if x is not node and x.checkpoint is not None), None)
        siblings = new.above.below if new.above is not None else self.tops
        new.below = {c for c in siblings if node.covers(c.node)}
        siblings -= new.below
        siblings.add(new)
        for c in new.below:
            c.above = new
        self.held[Holder.GPU][new] = None
        self.pools[Holder.GPU].hold(node, self.copies_windows)
        return new

    def drop(self, checkpoint: BaselineCheckpoint) -> None:
        siblings = checkpoint.above.below if checkpoint.above is not None else self.tops
        siblings.discard(checkpoint)
        siblings |= checkpoint.below
        for c in checkpoint.below:
            c.above = checkpoint.above
        checkpoint.node.checkpoint = None
        del self.held[checkpoint.tier][checkpoint]
        self.pools[checkpoint.tier].release(checkpoint.node, self.copies_windows)

    def _move(self, checkpoint: BaselineCheckpoint, tier: Holder) -> None:
        del self.held[checkpoint.tier][checkpoint]
        self.pools[checkpoint.tier].release(checkpoint.node, self.copies_windows)
        checkpoint.tier = tier
        self.held[tier][checkpoint] = None
        self.pools[tier].hold(checkpoint.node, self.copies_windows)

    def _make_room(self) -> None:
        gpu, host = self.pools
        while gpu.used > gpu.capacity:
            for victim in self.victims(Holder.GPU):
                if host.capacity and self.spills(victim):
                    self._move(victim, Holder.HOST)
                else:
                    self.drop(victim)
                if gpu.used <= gpu.capacity:
                    break
        while host.used > host.capacity:
            for victim in self.victims(Holder.HOST):
                self.drop(victim)
                if host.used <= host.capacity:
                    break


class LRUStore(CheckpointStore):
    """Checkpoints at system ends, partings, stable ends; least recently used first."""

    def used(self, checkpoint: BaselineCheckpoint) -> None:
        held = self.held[checkpoint.tier]
        held[checkpoint] = held.pop(checkpoint)

    def victims(self, tier: Holder) -> Iterable[BaselineCheckpoint]:
        return [c for c in self.held[tier] if self.exclusive(c)]


class ClockStore(CheckpointStore):
    """Checkpoints every 8192 tokens, at branches, forks and answer ends, with window copies; two-class CLOCK."""

    lookahead = 64  # only to fork prefixes in flight
    copies_windows = True
    promotes = False
    spacing, redundant, periodic_limit, reused_share = 1024, 8192, 8, 0.75

    def used(self, checkpoint: BaselineCheckpoint) -> None:
        checkpoint.is_reused = checkpoint.is_recent = True

    def admit(self, job: Job, path: list[SegmentNode], resumed: int) -> None:
        live = [node for node in path if node.end > resumed]
        end = self.tree.ends[job.index]
        branch = next((node for node in reversed(live) if self._is_known(node, end)), None)
        fork = next((node for node in reversed(live) if node.waiting), None)
        for node in live:
            if node is fork or node is branch:
                self._capture(node, "fork" if node is fork else "branch")
            elif node.end % PERIOD == 0:
                self._capture(node, "periodic")

    def _is_known(self, node: SegmentNode, own_end: SegmentNode) -> bool:
        """Another sequence that is held goes through this node (the job itself holds it once along its own path)."""
        held = [c for c in node.children.values() if c.refs[Holder.GPU] or c.refs[Holder.HOST]]
        if len(held) > 1 or node.refs[Holder.GPU] + node.refs[Holder.HOST] > len(held):
            return True
        return len(held) == 1 and not held[0].covers(own_end)

    def finished(self, job: Job, end: SegmentNode) -> None:
        answer = [node for node in end.up() if node.end > job.prompt]
        for node in reversed(answer):
            if node.end % PERIOD == 0:
                self._capture(node, "periodic")
        self._capture(end, "tail")

    def _capture(self, node: SegmentNode, kind: str) -> None:
        if node.checkpoint is not None:
            if kind != "periodic":
                node.checkpoint.kind = kind
            return
        above = next((x.checkpoint for x in node.up() if x is not node and x.checkpoint is not None), None)
        if node.end >= WINDOW and above is not None and node.end - above.node.end < self.spacing:
            return
        new = self.take(node, kind)
        if kind == "periodic":
            chain: list[BaselineCheckpoint] = []
            c: BaselineCheckpoint | None = new
            while c is not None:
                if c.kind == "periodic" and not c.is_reused:
                    chain.append(c)
                c = c.above
            if len(chain) > self.periodic_limit:
                self.drop(chain[-1])

    def spills(self, checkpoint: BaselineCheckpoint) -> bool:
        """A full host pool only gives way to entries of the higher class."""
        host = self.pools[Holder.HOST]
        return host.used + self.exclusive(checkpoint) <= host.capacity or checkpoint.is_reused

    def victims(self, tier: Holder) -> Iterable[BaselineCheckpoint]:
        live = [c for c in self.held[tier] if self.exclusive(c)]
        # A fork whose siblings are queued is not given up (optimistic: they all join the running prefill).
        live = [c for c in live if not (c.kind == "fork" and c.node.waiting)] or live
        spaced = [
            (c.node.end - c.above.node.end, c.born, at, c)
            for at, c in enumerate(live)
            if not c.is_reused and c.node.end >= WINDOW and c.above and c.node.end - c.above.node.end <= self.redundant
        ]
        if spaced:
            yield min(spaced)[3]
            return
        self._demote(live)
        for wanted in (False, True):
            for c in [c for c in live if c.is_reused is wanted] * 2:
                if not c.is_recent:
                    yield c
                    return
                c.is_recent = False
                self.held[tier][c] = self.held[tier].pop(c)

    def _demote(self, live: list[BaselineCheckpoint]) -> None:
        """The reused class keeps at most its share; what was not used lately leaves it."""
        size = {c: self.exclusive(c) for c in live}
        excess = sum(n for c, n in size.items() if c.is_reused) - self.reused_share * sum(size.values())
        for c in live * 2:
            if excess <= 0:
                break
            if c.is_reused and c.is_recent:
                c.is_recent = False
            elif c.is_reused and abs(excess - size[c]) <= excess:
                c.is_reused = False
                excess -= size[c]


class ClairvoyantStore(CheckpointStore):
    """Knows every future job. Takes checkpoints where one will leave this prompt, drops those without a future.

    rule   density: tokens saved / (exclusive pages x jobs until the next use); steep: the same with the distance
           squared; belady: farthest next use first
    """

    def __init__(
        self, jobs: list[Job], gpu_bytes: float, host_bytes: float, running_share: float = 0.6, *, rule: str
    ) -> None:
        super().__init__(jobs, gpu_bytes, host_bytes, running_share)
        self.rule = rule

    def admit(self, job: Job, path: list[SegmentNode], resumed: int) -> None:
        for node in self._partings(path, resumed):
            self.take(node, "tail")
        end = self.tree.ends[job.index]
        for node in path:
            if node.checkpoint is not None:
                index = self._upcoming(node.checkpoint)
                if index is None or end.covers(self.tree.paths[index][-1]):  # that one will resume at this job's end
                    self.drop(node.checkpoint)

    def finished(self, job: Job, end: SegmentNode) -> None:
        if end.passers and end.passers[-1] > self.now:
            self.take(end, "tail")
            for node in self.tree.paths[job.index]:
                if node.checkpoint is not None and self._upcoming(node.checkpoint) is None:
                    self.drop(node.checkpoint)

    def _partings(self, path: list[SegmentNode], resumed: int) -> list[SegmentNode]:
        """Nodes where some future job leaves this path, those that leave soonest."""
        below, found = 0, []
        for node in reversed(path):
            first = bisect_right(node.passers, self.now)
            ahead = len(node.passers) - first
            if ahead > below and node.end > resumed:
                found.append((node.passers[first], -node.end, node))
            below = ahead
        return [node for _, _, node in sorted(found, key=lambda f: f[0])[:MAX_PARTINGS]]

    def _upcoming(self, checkpoint: BaselineCheckpoint) -> int | None:
        """The first future job that would resume at this very checkpoint."""
        passers = checkpoint.node.passers
        start = bisect_right(passers, self.now)
        for at, index in enumerate(islice(passers, start, start + 17)):
            leaf = self.tree.paths[index][-1]
            if at == 16 or not any(b.node.covers(leaf) for b in checkpoint.below):
                return index
        return None

    def victims(self, tier: Holder) -> Iterable[BaselineCheckpoint]:
        scored = []
        for at, checkpoint in enumerate(self.held[tier]):
            pages = self.exclusive(checkpoint)
            if pages:
                scored.append((self._score(checkpoint, pages), at, checkpoint))
        return [checkpoint for _, _, checkpoint in sorted(scored)]

    def _score(self, checkpoint: BaselineCheckpoint, pages: int) -> float:
        index = self._upcoming(checkpoint)
        if index is None:
            return -1.0
        wait = index - self.now
        if self.rule == "belady":
            return 1 / wait
        saved = checkpoint.node.end - (checkpoint.above.node.end if checkpoint.above is not None else 0)
        return saved / (pages * wait * (wait if self.rule == "steep" else 1))


class InfiniteStore:
    """Every position of every past sequence can be resumed."""

    lookahead = 0

    def __init__(self, jobs: list[Job]) -> None:
        self.tree = SegmentTree(jobs)

    def show(self, job: Job) -> None:
        pass

    def start(self, job: Job) -> tuple[int, bool] | None:
        path = self.tree.paths[job.index]
        hit = max((node.end for node in path if node.seen), default=0)
        for node in path:
            node.seen = True
        return hit, False

    def finish(self, job: Job) -> None:
        for node in self.tree.ends[job.index].up():
            node.seen = True


StoreFactory = Callable[[list[Job], float, float], Store]

BASELINES: dict[str, tuple[StoreFactory, ...]] = {  # a policy's result is the best of its stores'
    "lru": (LRUStore,),
    "clock": (ClockStore,),
    "clairvoyant": (
        lambda jobs, gpu, host: ClairvoyantStore(jobs, gpu, host, rule="density"),
        lambda jobs, gpu, host: ClairvoyantStore(jobs, gpu, host, rule="steep"),
        lambda jobs, gpu, host: ClairvoyantStore(jobs, gpu, host, rule="belady"),
    ),
    "infinite": (lambda jobs, gpu, host: InfiniteStore(jobs),),
}
