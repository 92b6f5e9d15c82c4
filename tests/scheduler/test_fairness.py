"""Shares between lanes and tenants: a wrong answer lets one pipeline stop everybody else's."""

import pytest

from gewell.scheduler.fairness import DeficitRoundRobin, LaneClocks


def serve(clocks: LaneClocks, num: int, cost: float = 10.0) -> dict[str, int]:
    served: dict[str, int] = {}
    for _ in range(num):
        lane = clocks.order()[0]
        clocks.charge(lane, cost)
        served[lane] = served.get(lane, 0) + 1
    return served


def test_saturated_lanes_share_8_to_4_to_1() -> None:
    clocks = LaneClocks()
    for lane in ("low", "normal", "high"):
        clocks.wake(lane)
    assert serve(clocks, 130) == {"high": 80, "normal": 40, "low": 10}


def test_two_lanes_share_by_their_own_weights() -> None:
    clocks = LaneClocks()
    clocks.wake("normal")
    clocks.wake("low")
    assert serve(clocks, 50) == {"normal": 40, "low": 10}


def test_a_lane_that_was_empty_saves_no_turns() -> None:
    clocks = LaneClocks()
    clocks.wake("low")
    serve(clocks, 1000)
    clocks.wake("high")
    assert serve(clocks, 90) == {"high": 81, "low": 9}  # one more than 8 to 1: low has just been served


def test_a_lane_that_sleeps_and_wakes_at_once_gains_nothing() -> None:
    clocks = LaneClocks({"a": 1, "b": 1})
    clocks.wake("a")
    clocks.wake("b")
    served = {"a": 0, "b": 0}
    for _ in range(100):
        lane = clocks.order()[0]
        clocks.charge(lane, 1.0)
        served[lane] += 1
        if lane == "a":
            clocks.sleep("a")
            clocks.wake("a")
    assert served == {"a": 50, "b": 50}


def test_the_share_is_of_cost_not_of_requests() -> None:
    clocks = LaneClocks({"a": 1, "b": 1})
    clocks.wake("a")
    clocks.wake("b")
    spent = {"a": 0.0, "b": 0.0}
    for _ in range(110):
        lane = clocks.order()[0]
        cost = 100.0 if lane == "a" else 10.0
        clocks.charge(lane, cost)
        spent[lane] += cost
    assert spent == {"a": 1000.0, "b": 1000.0}


@pytest.mark.parametrize("weights", [{}, {"a": 0}, {"a": 1, "b": -1}])
def test_weights_that_cannot_be_used_are_refused(weights: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="weights"):
        LaneClocks(weights)


def play(turns: DeficitRoundRobin, costs: dict[str, float], num: int) -> dict[str, float]:
    spent = dict.fromkeys(costs, 0.0)
    for _ in range(num):
        tenant = turns.choose(costs.get)
        assert tenant is not None
        assert turns.choose(costs.get) == tenant, "asking again changes nothing"
        turns.charge(tenant, costs[tenant])
        spent[tenant] += costs[tenant]
    return spent


def test_tenants_spend_alike_whatever_their_requests_cost() -> None:
    turns = DeficitRoundRobin(quantum=100.0)
    for tenant in ("small", "large"):
        turns.enter(tenant)
    spent = play(turns, {"small": 10.0, "large": 1000.0}, 1010)
    assert spent["small"] == pytest.approx(spent["large"], rel=0.11)


def test_requests_far_above_the_quantum_are_reached_without_walking_every_round() -> None:
    turns = DeficitRoundRobin(quantum=1.0)
    for tenant in "abc":
        turns.enter(tenant)
    spent = play(turns, {"a": 100_000.0, "b": 100_000.0, "c": 50_000.0}, 40)
    assert spent["a"] == spent["b"] == spent["c"] == 1_000_000.0


def test_a_tenant_that_leaves_loses_what_it_saved() -> None:
    turns = DeficitRoundRobin(quantum=10.0)
    turns.enter("a")
    turns.enter("b")
    play(turns, {"a": 10.0, "b": 10.0}, 4)
    turns.leave("a")
    turns.enter("a")
    spent = play(turns, {"a": 10.0, "b": 10.0}, 10)
    assert spent == {"a": 50.0, "b": 50.0}


def test_a_tenant_without_a_price_is_passed_over() -> None:
    turns = DeficitRoundRobin(quantum=10.0)
    turns.enter("a")
    turns.enter("b")
    assert turns.choose({"b": 5.0}.get) == "b"
    assert turns.choose({}.get) is None
