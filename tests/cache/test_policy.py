"""Values decide what users wait for. Each test fixes one thing that the value depends on, and its direction."""

import pytest

from gewell.cache.policy import ENDED, Conversation, Delays, PrefillCost, ReusePolicy


def conversation_with_gap(policy: ReusePolicy, gap: int, turns: int = 5) -> Conversation:
    conversation = Conversation()
    for _ in range(turns):
        policy.turn_started(conversation)
        policy.now += gap
        policy.turn_finished(conversation)
    return conversation


def test_attention_makes_late_tokens_dearer():
    cost = PrefillCost(seconds_per_token=1e-4, seconds_per_token_pair=1e-8)
    assert cost.seconds(0, 1000) == pytest.approx(0.1 + 0.005)
    assert cost.seconds(10_000, 11_000) > cost.seconds(0, 1000)
    assert cost.seconds(0, 500) + cost.seconds(500, 1000) == pytest.approx(cost.seconds(0, 1000))


def test_the_cost_per_token_follows_what_is_measured():
    cost = PrefillCost(seconds_per_token=1e-4)
    for _ in range(200):
        cost.observe(0, 8192, 8192 * 5e-5)
    assert cost.seconds_per_token == pytest.approx(5e-5, rel=0.01)
    cost.observe(0, 0, 1.0)
    assert cost.seconds_per_token == pytest.approx(5e-5, rel=0.01)


def test_what_returns_sooner_and_saves_more_in_fewer_pages_is_worth_more():
    policy = ReusePolicy()
    near, far = conversation_with_gap(policy, 10), conversation_with_gap(policy, 100)
    near.num_running = far.num_running = 1  # a turn runs, so its successor cannot be in the queue yet

    def value(conversation=near, start=0, end=1000, pages=10):
        return policy.prospect("tail", conversation, start, end, pages, None)

    assert value() > value(conversation=far)
    assert value() > value(start=500)
    assert value() > value(pages=20)
    assert value() > policy.prospect("spaced", near, 0, 1000, 10, None)
    assert value() > policy.prospect("tail", None, 0, 1000, 10, None)


def test_an_announced_return_overrules_the_rhythm():
    policy = ReusePolicy()
    conversation = conversation_with_gap(policy, 100)
    assert policy.next_turn(conversation, 0, 7.0) == (0.98, 7.0)


def test_a_conversation_that_always_announced_its_return_and_now_does_not_has_ended():
    policy = ReusePolicy()
    conversation = conversation_with_gap(policy, 50)
    assert policy.next_turn(conversation, 0, None) != ENDED
    conversation.has_expected = True
    assert policy.next_turn(conversation, 0, None) == ENDED


def test_a_turn_that_should_have_shown_up_by_now_becomes_improbable():
    policy = ReusePolicy()
    conversation = conversation_with_gap(policy, 20)
    for _ in range(50):
        policy.show_delays.add(2)
    conversation.last_finish = policy.now
    soon, _ = policy.next_turn(conversation, 0, None)
    policy.now += 500
    late, _ = policy.next_turn(conversation, 500, None)
    assert late < 0.05 < 0.5 < soon


def test_strictness_rises_where_tails_rarely_live_to_be_used():
    policy = ReusePolicy()
    assert policy.strictness == 0
    for _ in range(1000):
        policy.tail_ended(was_used=False)
    assert policy.strictness == pytest.approx(0.8)
    for _ in range(100):
        policy.show_delays.add(0)  # next turns show up at once: one soon knows which tails to keep
    assert policy.strictness < 0.05
    for _ in range(1000):
        policy.show_delays.add(60)
    assert policy.strictness > 0.7
    for _ in range(1000):
        policy.tail_ended(was_used=True)
    assert policy.strictness == 0


def test_survival_falls_with_the_delay_and_old_samples_fade():
    delays = Delays()
    assert delays.survival(1000) == 1.0  # nothing known yet
    for _ in range(200):
        delays.add(4)
    assert delays.survival(0) == pytest.approx(1.0)
    assert delays.survival(1000) == pytest.approx(0.0)
    for _ in range(2000):
        delays.add(3000)
    assert delays.survival(1000) > 0.95
    assert delays.remaining(0) > 1000
