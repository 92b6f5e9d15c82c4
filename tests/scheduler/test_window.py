"""Who starts next. A wrong answer is a job that overtakes others for ever, or a deadline missed for no reason."""

from gewell.scheduler.request import RequestState
from gewell.scheduler.window import Window
from tests.scheduler.conftest import MakeRequest


def drain(window: Window, num: int | None = None) -> list[str]:
    order = []
    while len(window) and (num is None or len(order) < num):
        req = window.choose()
        assert req is not None
        assert window.choose() is req, "choosing changes nothing"
        window.start(req)
        order.append(req.request_id)
    return order


def test_submit_order_is_kept_among_equals(make_request: MakeRequest) -> None:
    window = Window()
    for name in "abcde":
        window.add(make_request(name))
    assert drain(window) == list("abcde")


def test_the_producers_clock_comes_before_arrival_here(make_request: MakeRequest) -> None:
    window = Window()
    window.add(make_request("late", enqueued_at_ms=20))
    window.add(make_request("early", enqueued_at_ms=10))
    assert drain(window) == ["early", "late"]


def test_earlier_deadlines_go_first_and_equal_ones_keep_submit_order(make_request: MakeRequest) -> None:
    window = Window()
    for name, deadline in (("none", None), ("b", 200), ("c", 200), ("a", 100)):
        window.add(make_request(name, deadline_ms=deadline))
    assert drain(window) == ["a", "b", "c", "none"]


def test_the_longest_warm_prefix_goes_first(make_request: MakeRequest) -> None:
    warmth = {"a": 0, "b": 100, "c": 50}
    window = Window(lambda req: warmth[req.request_id])
    for name in "abc":
        window.add(make_request(name))
    assert drain(window) == ["b", "c", "a"]


def test_warmth_that_was_evicted_since_counts_no_more(make_request: MakeRequest) -> None:
    warmth = {"a": 80, "b": 100, "c": 50}
    window = Window(lambda req: warmth[req.request_id])
    for name in "abc":
        window.add(make_request(name))
    warmth["b"] = 0
    assert drain(window) == ["a", "c", "b"]


def test_the_oldest_is_overtaken_a_bounded_number_of_times(make_request: MakeRequest) -> None:
    window = Window(lambda req: 0 if req.request_id == "cold" else 100, max_overtakes=3)
    window.add(make_request("cold"))
    for i in range(10):
        window.add(make_request(f"warm{i}"))
    assert drain(window, 4) == ["warm0", "warm1", "warm2", "cold"]


def test_deadlines_do_not_starve_those_without(make_request: MakeRequest) -> None:
    window = Window(max_overtakes=2)
    window.add(make_request("patient"))
    for i in range(5):
        window.add(make_request(f"urgent{i}", deadline_ms=i))
    assert drain(window, 3) == ["urgent0", "urgent1", "patient"]


def test_tenants_take_turns_inside_a_lane(make_request: MakeRequest) -> None:
    window = Window(quantum=1.0)
    for i in range(4):
        window.add(make_request(f"a{i}", tenant="a"))
    for i in range(2):
        window.add(make_request(f"b{i}", tenant="b"))
    assert drain(window) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_flood_of_one_tenant_does_not_delay_another(make_request: MakeRequest) -> None:
    window = Window(quantum=1.0)
    for i in range(500):
        window.add(make_request(f"flood{i}", tenant="flood"))
    drain(window, 100)
    window.add(make_request("lone", tenant="lone"))
    assert "lone" in drain(window, 2)


def test_lanes_share_8_to_4_to_1_while_all_have_work(make_request: MakeRequest) -> None:
    window = Window()
    for lane in ("low", "normal", "high"):
        for i in range(100):
            window.add(make_request(f"{lane}-{i}", lane=lane))
    lanes = [name.split("-")[0] for name in drain(window, 130)]
    assert {lane: lanes.count(lane) for lane in set(lanes)} == {"high": 80, "normal": 40, "low": 10}
    assert "low" in lanes[:13]


def test_a_removed_request_costs_its_tenant_nothing(make_request: MakeRequest) -> None:
    window = Window(quantum=1.0)
    gone = make_request("gone", tenant="a", cost=1000.0)
    window.add(gone)
    window.add(make_request("a1", tenant="a"))
    window.add(make_request("b1", tenant="b"))
    window.remove(gone)
    assert "gone" not in window
    assert drain(window) == ["a1", "b1"]


def test_started_requests_are_not_kept_alive_by_a_busy_window(make_request: MakeRequest) -> None:
    window = Window(lambda req: 1000 - req.order if req.request_id.startswith("warm") else 0, max_overtakes=10**9)
    requests: list[RequestState] = [make_request(f"cold{i}", prompt=1) for i in range(300)]
    for req in requests:
        window.add(req)
    for req in requests[::2]:
        window.remove(req)  # their entries lie at the bottom of the heap of warmth
    for i in range(300):
        window.add(make_request(f"warm{i}"))
        drain(window, 1)
    (queue,) = window._queues.values()
    assert len(queue) == 150
    for heap in (queue._by_age, queue._by_warmth, queue._by_deadline):
        assert len(heap) <= 2 * len(queue) + 64
