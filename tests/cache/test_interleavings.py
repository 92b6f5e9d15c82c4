"""Random interleavings of everything that happens to a cache. A wrong byte here is another user's text in an answer."""

import hypothesis.strategies as st
from cache_world import World
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
RARELY = st.sampled_from([False] * 7 + [True])


class CacheMachine(RuleBasedStateMachine):
    """Forks, extends, edits, cancels, preempts, evicts, spills and restores, in any order."""

    prompts = Bundle("prompts")

    def __init__(self) -> None:
        super().__init__()
        self.world = World(num_pages=16, num_host_pages=14)

    @rule(target=prompts, ids=TOKENS)
    def fresh_prompt(self, ids: list[int]) -> list[int]:
        return ids

    @rule(target=prompts, base=prompts, tail=TOKENS, cut=st.integers(0, 12))
    def forked_prompt(self, base: list[int], tail: list[int], cut: int) -> list[int]:
        """An edit of the last `cut` tokens, an extension where cut is 0."""
        return [*base[: max(0, len(base) - cut)], *tail][:40]

    @rule(
        ids=prompts,
        conversation=st.sampled_from([None, "a", "b"]),
        is_salted=RARELY,
        hints=st.one_of(
            st.just({}),
            st.sampled_from(
                [
                    {"mode": "read"},
                    {"mode": "off"},
                    {"pin": True},
                    {"one_off": True},
                    {"release": True},
                    {"ttl_s": 5.0},
                    {"priority": "low"},
                    {"expect_after": "r1"},
                    {"expect_after": "r9"},
                    {"breakpoints": (3, 8, 11)},
                ]
            ),
        ),
        drop=st.integers(0, 4),
        num_started=st.integers(0, 2),
    )
    def submit(self, ids, conversation, is_salted, hints, drop, num_started) -> None:
        """A request that may start and compute its prompt at once, as on an idle engine."""
        world = self.world
        if len(world.waiting) >= 6:
            return
        stable, salt = (max(1, len(ids) - drop),), "s" if is_salted else None
        request_id = world.submit(ids, conversation_id=conversation, stable=stable, salt=salt, **hints)
        if num_started and len(world.running) < 3:
            world.start(request_id)
            if num_started > 1:
                world.compute(request_id)

    def _pick(self, names, at: int) -> str | None:
        names = sorted(names)
        return names[at % len(names)] if names else None

    @rule(at=st.integers(0, 5))
    def start(self, at: int) -> None:
        request_id = self._pick(self.world.waiting, at)
        if request_id is not None and len(self.world.running) < 3:
            self.world.start(request_id)

    @rule(at=st.integers(0, 5), num_tokens=st.integers(1, 20))
    def compute(self, at: int, num_tokens: int) -> None:
        request_id = self._pick(self.world.running, at)
        if request_id is not None:
            self.world.compute(request_id, num_tokens)

    @rule(token=st.integers(0, 1), num_steps=st.integers(1, 6))
    def decode(self, token: int, num_steps: int) -> None:
        for _ in range(num_steps):
            self._decode(token)

    def _decode(self, token: int) -> None:
        rows = [name for name, row in sorted(self.world.running.items()) if row.pages.num_tokens == len(row.ids)]
        if rows:
            self.world.decode(rows, token)

    @rule(at=st.integers(0, 5))
    def preempt(self, at: int) -> None:
        request_id = self._pick(self.world.running, at)
        if request_id is not None:
            self.world.preempt(request_id)

    @rule(at=st.integers(0, 5))
    def cancel(self, at: int) -> None:
        request_id = self._pick([*self.world.waiting, *self.world.running], at)
        if request_id is not None:
            self.world.cancel(request_id)

    @rule(at=st.integers(0, 5))
    def finish(self, at: int) -> None:
        rows = [name for name, row in self.world.running.items() if row.pages.num_tokens == len(row.ids)]
        request_id = self._pick(rows, at)
        if request_id is not None:
            self.world.finish(request_id)

    @rule(at=st.integers(0, 5), position=st.integers(1, 30))
    def want(self, at: int, position: int) -> None:
        request_id = self._pick(self.world.running, at)
        if request_id is not None:
            row = self.world.running[request_id]
            if position > row.pages.num_tokens and self.world.cache.want(request_id, position):
                row.positions = sorted({*row.positions, position})

    @rule(num_pages=st.integers(1, 6))
    def evict(self, num_pages: int) -> None:
        before = self.world.pool.num_free_pages
        possible = self.world.pool.num_evictable_pages
        freed = self.world.cache.evict(num_pages)
        assert self.world.pool.num_free_pages == before + freed
        assert freed >= min(num_pages, possible)  # no hint withholds a page under pressure

    @rule(at=st.integers(0, 5))
    def restore(self, at: int) -> None:
        request_id = self._pick(self.world.waiting, at)
        if request_id is not None:
            self.world.cache.restore(request_id)

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds: int) -> None:
        self.world.now_s += seconds

    @invariant()
    def references_balance(self) -> None:
        self.world.check_references()

    @invariant()
    def nothing_was_overwritten(self) -> None:
        for request_id in self.world.running:
            self.world.check_readable(request_id)
        self.world.check_checkpoints()

    def teardown(self) -> None:
        self.world.drain()


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestInterleavings = CacheMachine.TestCase
