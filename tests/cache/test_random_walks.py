"""Long random lives of a cache always short of pages: conversations grow, fork, are edited, cancelled, preempted.

The state machine of `test_interleavings` shrinks failures well but rarely gets deep; these walks go deep. Each checks
every stored token, all reference counts, and that pressure always finds its pages.
"""

import random
from collections import Counter

import pytest
from cache_world import World

from gewell.cache.retention import Retention

HINTS = ({"pin": True}, {"one_off": True}, {"release": True}, {"ttl_s": 5.0}, {"priority": "high"}, {"mode": "read"})


class Walk:
    """One random life. `events` counts what happened, so that a walk that never meets the hard cases is noticed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World(num_pages=self.rng.choice([14, 20, 28]), num_host_pages=self.rng.choice([0, 10, 24]))
        self.texts: list[list[int]] = [[0, 1, 1]]
        self.events: Counter[str] = Counter()

    def token(self) -> int:
        return self.rng.randrange(2)

    def tokens(self, low: int, high: int) -> list[int]:
        return [self.token() for _ in range(self.rng.randint(low, high))]

    def step(self) -> None:
        rng, world = self.rng, self.world
        action = rng.choices(
            (self.submit, self.start, self.compute, self.decode, self.finish, self.preempt, self.cancel, self.evict),
            (20, 25, 30, 25, 14, 3, 3, 3),
        )[0]
        action()
        world.now_s += rng.random()
        world.check_references()
        world.check_checkpoints()
        for request_id in world.running:
            world.check_readable(request_id)

    def submit(self) -> None:
        if len(self.world.waiting) >= 6:
            return
        rng = self.rng
        base = rng.choice(self.texts[-8:])
        cut = rng.choice([0, 0, 0, 1, 2, 3, 5, 9])  # an edit of the last tokens
        ids = [*base[: max(0, len(base) - cut)], *self.tokens(1, 9)][-45:]
        hints = dict(rng.choice(HINTS)) if rng.random() < 0.25 else {}
        if rng.random() < 0.3:
            hints["expect_after"] = f"r{self.world.num_requests + rng.randint(-2, 3)}"
        if rng.random() < 0.2:
            hints["breakpoints"] = tuple(rng.sample(range(1, 30), 2))
        salt = "s" if rng.random() < 0.1 else None
        stable = (max(1, len(ids) - rng.choice([0, 0, 1, 4])),)
        self.world.submit(ids, conversation_id=rng.choice([None, "a", "b"]), stable=stable, salt=salt, **hints)

    def start(self) -> None:
        world = self.world
        if not world.waiting or len(world.running) >= 3:
            return
        request_id = self.rng.choice(sorted(world.waiting))
        match = world.cache.match(request_id)
        position = world.start(request_id)
        self.events["start"] += 1
        self.events["hit"] += position > 0
        self.events["restored"] += match.on_host
        row = world.running[request_id]
        if position and all(c.position != position for c in world.cache.index):
            self.events["resumed inside a checkpoint's slack"] += 1
        self.events["resumed inside a page"] += position % 8 > 0
        later = row.pages.num_tokens + self.rng.randint(1, 12)
        if self.rng.random() < 0.2 and world.cache.want(request_id, later):
            row.positions = sorted({*row.positions, later})

    def compute(self) -> None:
        rows = [name for name, row in self.world.running.items() if row.pages.num_tokens < len(row.ids)]
        if rows and not self.world.compute(self.rng.choice(rows), self.rng.choice([1, 3, 7, 20, 50])):
            self.events["preempted for room"] += 1

    def complete(self) -> list[str]:
        return [name for name, row in self.world.running.items() if row.pages.num_tokens == len(row.ids)]

    def decode(self) -> None:
        for _ in range(self.rng.randint(1, 5)):
            self.world.decode(self.complete(), self.token())

    def finish(self) -> None:
        rows = self.complete()
        if rows:
            request_id = self.rng.choice(rows)
            self.texts.append(list(self.world.running[request_id].ids))
            self.world.finish(request_id)

    def preempt(self) -> None:
        if self.world.running:
            self.world.preempt(self.rng.choice(sorted(self.world.running)))

    def cancel(self) -> None:
        names = sorted([*self.world.running, *self.world.waiting])
        if names:
            self.world.cancel(self.rng.choice(names))

    def evict(self) -> None:
        pool, num_pages = self.world.pool, self.rng.randint(1, 8)
        possible, before = pool.num_evictable_pages, pool.num_free_pages
        freed = self.world.cache.evict(num_pages)
        assert pool.num_free_pages == before + freed
        assert freed >= min(num_pages, possible)  # no hint withholds a page under pressure


@pytest.fixture(scope="module")
def totals() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize("seed", range(24))
def test_no_interleaving_loses_a_page_or_overwrites_a_token(seed, totals, monkeypatch):
    walk = Walk(seed)
    spill = Retention._spill

    def counted(self, checkpoint):
        walk.events["spilled"] += 1
        return spill(self, checkpoint)

    monkeypatch.setattr(Retention, "_spill", counted)
    for _ in range(200):
        walk.step()
    walk.events["copied on write"] = walk.world.num_copies
    walk.world.drain()
    totals.update(walk.events)


def test_the_walks_met_the_hard_cases(totals):
    assert totals["hit"] > totals["start"] / 3
    for event in (
        "restored",
        "spilled",
        "copied on write",
        "preempted for room",
        "resumed inside a checkpoint's slack",
        "resumed inside a page",
    ):
        assert totals[event] > 5, (event, totals)
