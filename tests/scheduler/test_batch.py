"""What a step does. A wrong plan wastes the device's width, or gives two requests one page."""

from array import array
from dataclasses import replace

import pytest

from gewell.cache.geometry import KVGeometry
from gewell.cache.page_pool import PagePool
from gewell.cache.prefix_cache import PrefixCache
from gewell.errors import ConfigError
from gewell.request import RequestImage
from gewell.scheduler.batch import Scheduler, SchedulerConfig, chunk_end, common_prefix, max_tokens_alone
from gewell.scheduler.plan import StepPlan
from gewell.scheduler.prefixes import CachedPrefixes, NoPrefixes
from gewell.scheduler.request import RequestState, Stage
from tests.scheduler.conftest import MakeRequest


def make_scheduler(
    geometry: KVGeometry, *, num_pages: int = 100, has_cache: bool = False, min_shared_tokens: int = 8, **limits: int
) -> Scheduler:
    config = SchedulerConfig(
        **{"max_num_seqs": 4, "max_num_batched_tokens": 16, "shadow_tokens": 4, **limits},
        min_shared_tokens=min_shared_tokens,
    )
    pool = PagePool(num_pages)
    prefixes = CachedPrefixes(PrefixCache(pool, geometry)) if has_cache else NoPrefixes()
    return Scheduler(config, pool, geometry, prefixes)


def step(scheduler: Scheduler) -> StepPlan:
    """Plan and compute one step; every row that draws gets token 7, and ends at its last."""
    plan = scheduler.plan()
    assert plan is not None
    scheduler.complete(plan)
    for req in plan.sampling_rows():
        req.tokens.append(7)
        req.num_output_tokens += 1
        if req.is_complete:
            scheduler.remove(req)
    return plan


def names(requests: list[RequestState]) -> list[str]:
    return [req.request_id for req in requests]


def pieces(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(chunk.req.request_id, chunk.start, chunk.end) for chunk in plan.chunks]


def test_a_prompt_over_the_budget_is_computed_in_chunks_and_then_decodes(
    geometry: KVGeometry, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(geometry)
    scheduler.add(make_request("a", prompt=20))
    first, second, third = step(scheduler), step(scheduler), step(scheduler)
    assert pieces(first) == [("a", 0, 16)]
    assert not first.chunks[0].samples
    assert pieces(second) == [("a", 16, 20)]
    assert second.chunks[0].samples
    assert names(third.decode_rows) == ["a"]
    assert third.decode_positions == [20]
    assert not third.chunks


def test_decode_rows_run_in_every_step_and_prefill_fills_the_rest(
    geometry: KVGeometry, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(geometry, max_num_batched_tokens=12, shadow_tokens=2)
    scheduler.add(make_request("a", prompt=4))
    step(scheduler)
    scheduler.add(make_request("b", prompt=30))
    plans = [step(scheduler) for _ in range(3)]
    assert all(names(plan.decode_rows) == ["a"] for plan in plans)
    assert [pieces(plan) for plan in plans] == [[("b", 0, 11)], [("b", 11, 22)], [("b", 22, 30)]]


def test_the_budget_falls_to_the_shadow_at_full_width() -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=1000, shadow_tokens=100)
    budgets = [config.prefill_budget(rows) for rows in range(9)]
    assert budgets == [1000, 999, 998, 997, 996, 995, 994, 546, 100]


def test_a_step_of_one_row_less_than_the_limit_still_leaves_a_budget() -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=9, shadow_tokens=4)
    assert config.prefill_budget(8) == 1


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens"),
        ({"shadow_tokens": 0}, "shadow_tokens"),
        ({"shadow_tokens": 17}, "shadow_tokens"),
    ],
)
def test_limits_that_cannot_be_used_name_their_field(limits: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, "shadow_tokens": 4, **limits})
    assert caught.value.field == field


def run_until_preempted(scheduler: Scheduler) -> StepPlan:
    for _ in range(200):
        plan = step(scheduler)
        if plan.preempted:
            return plan
    raise AssertionError("nothing was preempted")


def test_the_youngest_is_preempted_and_returns_before_any_newcomer(
    geometry: KVGeometry, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(geometry, num_pages=20, max_num_seqs=3)
    for name in "ab":
        scheduler.add(make_request(name, prompt=4, max_tokens=60))
    step(scheduler)
    plan = run_until_preempted(scheduler)
    assert names(plan.preempted) == ["b"]
    victim = plan.preempted[0]
    assert (victim.stage, victim.row_idx, victim.pages) == (Stage.WAITING, -1, None)
    num_known = victim.num_tokens
    scheduler.add(make_request("newcomer", prompt=4))
    oldest = plan.decode_rows[0]
    scheduler.remove(oldest)
    back = step(scheduler)
    assert names(back.joined)[0] == "b"
    assert pieces(back)[0] == ("b", 0, min(16, num_known))


def test_a_row_preempted_in_the_step_being_planned_leaves_no_trace_in_it(
    geometry: KVGeometry, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(geometry, num_pages=20, max_num_seqs=3)
    for name in "ab":
        scheduler.add(make_request(name, prompt=4, max_tokens=60))
    step(scheduler)
    plan = run_until_preempted(scheduler)
    num_rows = len(plan.decode_rows)
    assert names(plan.decode_rows) == ["a"]
    assert num_rows == len(plan.decode_positions) == len(plan.decode_full_slots) == len(plan.decode_sliding_slots)
    assert plan.preempted[0] not in plan.changed_tables
    assert all(scheduler.pool.ref_cnt(destination) for _, destination in plan.copies)


def test_admission_waits_for_the_pages_that_running_rows_are_expected_to_need(
    geometry: KVGeometry, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(geometry, num_pages=16, max_num_seqs=4)
    scheduler.add(make_request("long", prompt=8, max_tokens=100))  # expected to reach 58 tokens: 10 or 11 pages
    step(scheduler)
    scheduler.add(make_request("next", prompt=8, max_tokens=40))
    assert scheduler.pool.num_free_pages > geometry.num_pages(8 + 40), "it would fit now, but not for long"
    for _ in range(3):
        assert not step(scheduler).joined
    (running,) = scheduler.running()
    scheduler.remove(running)
    assert names(step(scheduler).joined) == ["next"]


def test_a_sibling_waits_for_the_shared_prefix_and_forks(geometry: KVGeometry, make_request: MakeRequest) -> None:
    scheduler = make_scheduler(geometry, has_cache=True)
    shared = [50 + i for i in range(300)]
    first, second = make_request("first", prompt=[*shared, 1, 2, 3]), make_request("second", prompt=[*shared, 8, 9])
    for req in (first, second):
        scheduler.add(req)
    computed: dict[str, int] = {"first": 0, "second": 0}
    while second.stage is not Stage.DECODE:
        for chunk in step(scheduler).chunks:
            computed[chunk.req.request_id] += len(chunk.token_ids)
    assert computed == {"first": 303, "second": 2}
    assert second.num_cached_tokens == 300


def test_siblings_of_another_tenants_salt_share_nothing(geometry: KVGeometry, make_request: MakeRequest) -> None:
    scheduler = make_scheduler(geometry, has_cache=True)
    shared = [50 + i for i in range(300)]
    requests = [make_request(salt, prompt=[*shared, 1], salt=salt) for salt in ("x", "y")]
    for req in requests:
        scheduler.add(req)
    while any(req.num_output_tokens == 0 for req in requests):
        step(scheduler)
    assert [req.num_cached_tokens for req in requests] == [0, 0]


def test_siblings_with_other_pictures_part_where_the_pictures_do(
    geometry: KVGeometry, make_request: MakeRequest
) -> None:
    """The placeholders of all images are the same tokens: by tokens alone these prompts would not part at all."""
    scheduler = make_scheduler(geometry, has_cache=True, max_num_batched_tokens=500)
    prompt = [50 + i for i in range(300)] + [9] * 20 + [40 + i for i in range(20)]
    requests = []
    for digest in ("aa", "bb"):
        req = make_request(digest, prompt=prompt)
        image = RequestImage(start=300, end=320, digest=digest, patches=b"", grid=(1, 1))
        req.request = replace(req.request, images=(image,))
        req.image_runs = ((300, 320),)
        requests.append(req)
        scheduler.add(req)
    while any(req.num_output_tokens == 0 for req in requests):
        step(scheduler)
    assert [req.num_cached_tokens for req in requests] == [0, 300]


def test_a_sibling_whose_leader_is_cancelled_starts_on_its_own(geometry: KVGeometry, make_request: MakeRequest) -> None:
    scheduler = make_scheduler(geometry, has_cache=True, max_num_batched_tokens=400)
    shared = [50 + i for i in range(300)]
    first, second = make_request("first", prompt=[*shared, 1]), make_request("second", prompt=[*shared, 2])
    for req in (first, second):
        scheduler.add(req)
    scheduler.plan()  # has room left for the second, beside the whole prompt of the first
    assert second.leader is first
    assert second.stage is Stage.WAITING
    assert scheduler.num_waiting == 1
    scheduler.remove(first, is_completed=False)
    assert names(step(scheduler).joined) == ["second"]


def test_a_waiting_sibling_can_be_cancelled(geometry: KVGeometry, make_request: MakeRequest) -> None:
    scheduler = make_scheduler(geometry, has_cache=True, max_num_batched_tokens=400)
    shared = [50 + i for i in range(300)]
    first, second = make_request("first", prompt=[*shared, 1]), make_request("second", prompt=[*shared, 2])
    for req in (first, second):
        scheduler.add(req)
    plan = scheduler.plan()
    assert plan is not None
    assert second.leader is first
    scheduler.remove(second, is_completed=False)
    assert scheduler.num_waiting == 0
    scheduler.complete(plan)
    assert (first.stage, second.stage) == (Stage.DECODE, Stage.FINISHED)


def test_a_late_sibling_gets_a_checkpoint_where_it_parts_from_a_prefill_under_way(
    geometry: KVGeometry, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(geometry, has_cache=True, max_num_batched_tokens=200)
    shared = [50 + i for i in range(400)]
    first = make_request("first", prompt=[*shared, *range(1, 300)])
    scheduler.add(first)
    step(scheduler)
    second = make_request("second", prompt=[*shared, 8, 9])
    scheduler.add(second)
    assert second.leader is first
    while second.num_output_tokens == 0:
        step(scheduler)
    assert second.num_cached_tokens == 400


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 10, 10),  # ends at the run's start
        (0, 12, 10),  # would cut it: stops before it
        (0, 20, 20),  # ends with it
        (10, 12, 20),  # starts with it: takes all, over the budget
        (20, 25, 25),  # behind it
    ],
)
def test_a_chunk_never_cuts_an_image_run(start: int, end: int, expected: int) -> None:
    assert chunk_end(start, end, ((10, 20),)) == expected


def test_an_image_run_in_a_prompt_is_computed_in_one_piece(geometry: KVGeometry, make_request: MakeRequest) -> None:
    scheduler = make_scheduler(geometry, max_num_batched_tokens=8)
    req = make_request("picture", prompt=40)
    req.image_runs = ((5, 25),)
    scheduler.add(req)
    assert [pieces(step(scheduler)) for _ in range(4)] == [
        [("picture", 0, 5)],
        [("picture", 5, 25)],
        [("picture", 25, 33)],
        [("picture", 33, 40)],
    ]


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 9, 1000])
def test_the_common_prefix_is_found_to_the_token(length: int) -> None:
    a = array("i", range(1000))
    b = array("i", range(1000))
    for i in range(length, 1000):
        b[i] = -1
    assert common_prefix(a, b, 1000) == length
    assert common_prefix(a, b, 5) == min(length, 5)
    assert common_prefix(a, array("i"), 5) == 0


def test_the_longest_sequence_fits_the_pool_alone(geometry: KVGeometry, make_request: MakeRequest) -> None:
    for num_pages in range(5, 30):
        longest = max_tokens_alone(num_pages, geometry)
        if longest < 2:
            continue
        scheduler = make_scheduler(geometry, num_pages=num_pages)
        req = make_request("alone", prompt=longest // 2, max_tokens=longest - longest // 2)
        scheduler.add(req)
        while not req.is_complete:
            assert not step(scheduler).preempted
        assert req.num_tokens == longest
