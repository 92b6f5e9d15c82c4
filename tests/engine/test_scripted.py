"""The scripted runner must see paging faults: if it did not, every test that runs on it would prove nothing."""

from collections.abc import Callable

import pytest

from gewell.engine.engine import PagedEngine
from gewell.engine.scripted import PagingFault, _mix, build_scripted_engine, scripted_token
from gewell.errors import EngineError
from gewell.request import EngineRequest
from gewell.sampling import SamplingParams
from gewell.scheduler.plan import StepPlan

Sabotage = Callable[[StepPlan], None]


def engine_with(sabotage: Sabotage, at_step: int) -> PagedEngine:
    """Two requests decode side by side; the plan of one step is spoilt before it is launched."""
    engine = build_scripted_engine(num_pages=60, sliding_window=6, slack_tokens=0)
    launch = engine._runner.launch

    def spoilt(plan: StepPlan) -> None:
        if plan.step_idx == at_step:
            sabotage(plan)
        launch(plan)

    engine._runner.launch = spoilt
    for name in "ab":
        prompt = [65 + ord(name) % 2] * 18
        engine.add(EngineRequest(request_id=name, prompt_ids=prompt, sampling=SamplingParams(max_tokens=40)))
    return engine


def run(engine: PagedEngine) -> None:
    while engine.has_work():
        engine.step()


def swap_slots(plan: StepPlan) -> None:
    plan.decode_full_slots.reverse()


def lose_write(plan: StepPlan) -> None:
    plan.decode_sliding_slots[0] = -1


def forget_tables(plan: StepPlan) -> None:
    plan.changed_tables.clear()


def write_over_a_neighbour(plan: StepPlan) -> None:
    other = plan.decode_rows[1].pages
    assert other is not None
    plan.decode_full_slots[0] = other.full_pages[0] * 16


def free_too_early(plan: StepPlan) -> None:
    pages = plan.decode_rows[0].pages
    assert pages is not None
    plan.freed_pages.append(pages.sliding_pages[-1])


@pytest.mark.parametrize(
    ("sabotage", "at_step"),
    [
        (swap_slots, 3),
        (lose_write, 3),
        (forget_tables, 15),  # position 32: both kinds open a page
        (write_over_a_neighbour, 3),
        (free_too_early, 4),
    ],
)
def test_a_spoilt_plan_is_noticed(sabotage: Sabotage, at_step: int) -> None:
    with pytest.raises(EngineError) as caught:
        run(engine_with(sabotage, at_step))
    assert isinstance(caught.value.__cause__, PagingFault)


def test_the_same_plans_unspoilt_raise_nothing() -> None:
    run(engine_with(lambda plan: None, 3))


def test_a_lost_copy_is_noticed() -> None:
    """A request resumes inside a page into which the first went on writing: the page must be copied."""
    engine = build_scripted_engine(num_pages=60, min_shared_tokens=4)
    launch = engine._runner.launch
    copies: list[tuple[int, int]] = []

    def without_copies(plan: StepPlan) -> None:
        copies.extend(plan.copies)
        plan.copies.clear()
        launch(plan)

    shared = list(range(40, 70))
    engine._runner.launch = without_copies
    first, second = (
        EngineRequest(
            request_id=name,
            prompt_ids=shared + tail,
            stable_lengths=(len(shared),),
            sampling=SamplingParams(max_tokens=4),
        )
        for name, tail in (("a", [97] * 8), ("b", [98] * 8))
    )
    engine.add(first)
    run(engine)
    engine.add(second)
    with pytest.raises(EngineError) as caught:
        run(engine)
    assert copies
    assert isinstance(caught.value.__cause__, PagingFault)


def test_tokens_depend_on_seed_position_and_last_token_alone() -> None:
    assert scripted_token(1, 10, 65) == scripted_token(1, 10, 65)
    draws = {scripted_token(seed, position, last) for seed in range(4) for position in range(4) for last in (65, 66)}
    assert len(draws) > 20
    assert draws <= set(range(32, 127))


def test_a_hash_is_never_the_mark_of_an_unwritten_slot() -> None:
    state = 0
    for value in range(2000):
        state = _mix(state, value)
        assert state & 1
