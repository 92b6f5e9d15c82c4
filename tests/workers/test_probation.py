"""Suspects: an innocent job must never be given up because it ran beside a guilty one."""

import random

import pytest
from gewell_workers.probation import Probation, Suspect
from harness import Harness, expected_ids, wait_for

from gewell.protocol import State


def suspect(name: str, started_at_ms: int, *, alone: bool = False) -> Suspect:
    return Suspect(
        lane="normal",
        entry_id=f"{name}-0",
        job_id=name,
        conversation_id=None,
        tenant=None,
        started_at_ms=started_at_ms,
        must_be_alone=alone,
    )


def names(group: list[Suspect]) -> list[str]:
    return [one.job_id for one in group]


def test_who_joined_last_is_tried_first_and_never_more_than_half():
    probation = Probation()
    for name, at in (("1", 1_000), ("2", 2_000), ("3", 5_000), ("4", 5_050), ("5", 5_060), ("6", 100)):
        probation.add(suspect(name, at))
    assert names(probation.next_group(is_engine_empty=False)) == ["5", "4", "3"]
    assert probation.next_group(is_engine_empty=True) == []  # one trial at a time
    for name in ("3", "4", "5"):
        probation.saw_tokens(name, 8)
    assert names(probation.next_group(is_engine_empty=False)) == ["2"]
    probation.left(["2"])
    assert names(probation.next_group(is_engine_empty=False)) == ["1"]


def test_a_job_that_one_more_crash_ends_runs_alone_in_an_empty_engine():
    probation = Probation()
    probation.add(suspect("a", 1, alone=True))
    probation.add(suspect("b", 2, alone=True))
    assert probation.needs_empty_engine
    assert probation.next_group(is_engine_empty=False) == []
    assert names(probation.next_group(is_engine_empty=True)) == ["b"]
    assert probation.needs_empty_engine
    probation.saw_tokens("b", 7)
    assert probation.has_trial
    probation.saw_tokens("b", 1)
    assert not probation.has_trial
    assert names(probation.next_group(is_engine_empty=True)) == ["a"]
    probation.left(["a"])
    assert not probation.needs_empty_engine


def test_trials_end_with_time_too():
    now = [0.0]
    probation = Probation(clock=lambda: now[0])
    for name, at in (("slow", 3), ("stuck", 2), ("last", 1)):
        probation.add(suspect(name, at * 1_000))
    assert names(probation.next_group(is_engine_empty=False)) == ["slow"]
    probation.started(["slow"])
    now[0] = 0.9
    probation.clear_survivors()
    assert probation.has_trial
    now[0] = 1.0  # a second in the batch and nobody died
    probation.clear_survivors()
    assert names(probation.next_group(is_engine_empty=False)) == ["stuck"]
    now[0] = 6.1  # it found no free row in five
    probation.clear_survivors()
    assert names(probation.next_group(is_engine_empty=False)) == ["last"]


@pytest.mark.parametrize("seed", range(20))
def test_only_the_guilty_are_given_up(seed: int):
    """A worker's life as a model: it dies in the step in which a guilty job joins, and counts everyone in the batch."""
    rng = random.Random(seed)
    num, max_crashes = rng.randint(1, 64), rng.randint(1, 3)
    guilty = set(rng.sample(range(num), rng.randint(1, min(3, num))))
    crashes = dict.fromkeys(range(num), 1)  # the first crash: all in one batch
    started = {job: rng.randint(0, 1_000) for job in range(num)}
    cleared: set[int] = set()
    given_up = {job for job in crashes if crashes[job] > max_crashes}
    while True:
        probation = Probation()
        waiting = [job for job in range(num) if job not in cleared | given_up]
        if not waiting:
            break
        for job in waiting:
            probation.add(suspect(str(job), started[job], alone=crashes[job] >= max_crashes))
        while group := [int(name) for name in names(probation.next_group(is_engine_empty=True))]:
            if guilty & set(group):
                for job in group:
                    crashes[job] += 1
                    started[job] += 10_000
                    if crashes[job] > max_crashes:
                        given_up.add(job)
                break
            cleared.update(group)
            probation.left(str(job) for job in group)
    assert given_up == guilty


@pytest.mark.redis
def test_poison_is_given_up_and_all_others_are_served(harness: Harness):
    worker = harness.start_worker("--rows", "16", step_s=0.01, traps=True)
    for idx in range(12):
        harness.submit(f"good-{idx}", f"prompt {idx}", max_tokens=150)
    wait_for(lambda: all(harness.num_streamed(f"good-{idx}") for idx in range(12)))
    harness.submit("poison", "!!die now", max_tokens=3)
    deaths = 0
    while harness.redis.get(harness.keys.res("poison")) is None:
        wait_for(lambda w=worker: w.process.poll() is not None or harness.redis.get(harness.keys.res("poison")))
        if worker.process.poll() is not None:
            deaths += 1
            worker.close()
            worker = harness.start_worker("--rows", "16", step_s=0.01, traps=True)
    record = harness.result("poison")
    assert (record.state, record.error.code, record.crashes) == (State.ERROR, "crashed", 3)
    assert deaths == 3
    for idx in range(12):
        good = harness.check_stream(f"good-{idx}")
        assert good.state == State.DONE
        assert list(good.token_ids) == expected_ids(f"prompt {idx}".encode(), 7, 150)
    ((_, dead),) = harness.redis.xrange(harness.keys.dead)
    assert dead[b"id"] == b"poison"
    assert b"!!die now" in dead[b"body"]
    harness.check_nothing_left()
