"""Hints are advice with an answer. An answer that does not say what happened makes a pipeline's author guess."""

from dataclasses import replace

import pytest
from cache_world import GEOMETRY, World


def answers(answer):
    return {a.hint: a.outcome for a in answer.hints}


def text(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


def test_without_hints_there_is_nothing_to_answer():
    assert World(40).run(text(0, 10))[1].hints == ()


@pytest.mark.parametrize(
    "hints",
    [{"pin": True}, {"ttl_s": 60.0}, {"priority": "high"}, {"expect_after": "x"}, {"breakpoints": (8,)}],
)
def test_a_hint_about_what_is_kept_is_applied_when_it_is_kept_and_missed_when_nothing_is(hints):
    (name,) = hints
    name = name.removesuffix("_after")
    kept = World(40).run([*text(0, 16), 99], conversation_id="c", stable=[16], **hints)[1]
    assert answers(kept) == {name: "applied"}
    read = World(40).run([*text(0, 16), 99], conversation_id="c", stable=[16], mode="read", **hints)[1]
    assert answers(read) == {"mode=read": "applied", name: "missed"}
    assert all(a.why for a in read.hints)


def test_a_one_off_keeps_nothing():
    world = World(40)
    answer = world.run(text(0, 16), one_off=True, pin=True)[1]
    assert answers(answer) == {"one_off": "applied", "pin": "missed"}
    assert len(world.cache.index) == 0


LONG_WINDOW = replace(GEOMETRY, sliding_window=512, slack_tokens=64)


@pytest.mark.parametrize("num_shared", [70, 168, 300])
def test_one_offs_that_begin_alike_keep_their_beginning_and_nothing_else(num_shared):
    world = World(1500, geometry=LONG_WINDOW)
    prompts = [[*text(0, num_shared), *text(10_000 * i, 90)] for i in range(1, 6)]
    cached = [world.run(prompt, one_off=True)[1].cached_tokens for prompt in prompts]
    assert cached == [0, 0, num_shared, num_shared, num_shared]  # the second shows where prompts part
    assert [c.position for c in world.cache.index] == [num_shared]


def test_what_was_warmed_for_anybody_outlives_the_tails_of_conversations():
    world = World(60)
    world.run(text(0, 40), max_tokens=0)
    for i in range(1, 20):
        assert world.run([*text(0, 40), *text(1_000 * i, 10)], one_off=True)[1].cached_tokens == 40
        for j in range(4):
            world.run(text(100_000 * (4 * i + j), 50), conversation_id=f"c{4 * i + j}", stable=[49])


def test_expect_and_release_need_a_conversation():
    answer = World(40).run(text(0, 16), expect_after="x", release=True)[1]
    assert answers(answer) == {"expect": "rejected", "release": "rejected"}
    assert {a.why for a in answer.hints} == {"needs conversation.id"}


def test_release_forgets_the_conversation_and_says_how_much():
    world = World(60)
    world.run([*text(0, 16), 99], conversation_id="c", stable=[16])
    answer = world.run([*text(0, 24), 98], conversation_id="c", stable=[24], release=True)[1]
    assert answers(answer) == {"release": "applied"}
    assert [c for c in world.cache.index if c.conversation is not None] == []
    assert answers(world.run([1], conversation_id="new", release=True, mode="read")[1])["release"] == "missed"


def test_pins_beyond_the_budget_are_clipped():
    world = World(40, pin_share=0.25)  # 10 pages
    assert answers(world.run(text(0, 24), max_tokens=0, pin=True)[1]) == {"pin": "applied"}
    assert answers(world.run(text(500, 40), max_tokens=0, pin=True)[1]) == {"pin": "clipped"}


def test_a_pin_outlives_more_valuable_things_but_not_the_last_pressure():
    world = World(60)
    world.run(text(0, 16), max_tokens=0, pin=True)
    world.run(text(500, 40), max_tokens=0)
    world.submit([*text(500, 40), 1])
    world.cache.evict(1)
    assert [c.position for c in world.cache.index] == [16]
    world.cache.evict(1)
    assert len(world.cache.index) == 0


def test_an_expired_checkpoint_goes_first_and_only_under_pressure():
    world = World(60)
    world.run(text(0, 40), max_tokens=0, ttl_s=10.0)
    world.run(text(500, 16), max_tokens=0)
    world.submit([*text(0, 40), 1])
    world.now_s = 11.0
    assert len(world.cache.index) == 2
    world.cache.evict(1)
    assert [c.position for c in world.cache.index] == [16]


def test_breakpoints_are_kept_exactly_and_judged_one_by_one():
    world = World(80)
    ids = text(0, 40)
    kept = world.run(ids, breakpoints=(10, 30))[1]
    assert answers(kept) == {"breakpoints": "applied"}
    assert world.run([*ids[:10], 900])[0] == 10
    assert answers(World(80).run(ids, breakpoints=(10, 99))[1]) == {"breakpoints": "clipped"}
    assert answers(World(80).run(ids, breakpoints=(0, 99))[1]) == {"breakpoints": "rejected"}
    many = World(200).run(ids, breakpoints=tuple(range(1, 40, 3)))[1]
    assert answers(many) == {"breakpoints": "clipped"}


def test_an_expected_conversation_outlives_one_that_nobody_speaks_for():
    world = World(80)
    world.submit(text(900, 4), request_id="critic")
    world.run([*text(0, 24), 99], conversation_id="told", stable=[24], expect_after="critic")
    world.run([*text(500, 24), 99], conversation_id="quiet", stable=[24])
    for n in range(40):  # the quiet one stays away for long; the critic has not run yet
        world.run([n], mode="off")
    world.cache.evict(1)
    assert world.run([*text(0, 24), 1], conversation_id="told")[0] == 24


def test_the_salt_is_answered_too():
    assert answers(World(40).run(text(0, 8), salt="team")[1]) == {"salt": "applied"}


@pytest.mark.parametrize(
    ("positions", "outcome", "why"),
    [((), "rejected", "no message 7, 99 in the prompt"), ((10,), "clipped", "1 of 3 are kept: no message 7, 99 in")],
)
def test_breakpoints_after_messages_that_are_not_there_are_answered_too(positions, outcome, why):
    answer = World(80).run(text(0, 40), breakpoints=positions, unknown_breakpoints=(7, 99))[1]
    assert answers(answer) == {"breakpoints": outcome}
    assert why in answer.hints[0].why
