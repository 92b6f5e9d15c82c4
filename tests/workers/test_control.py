"""Cancels, duplicates, deadlines, pauses: what users and operators do to jobs in every state."""

import json
import time

import pytest
from harness import Harness, expected_ids, wait_for

from gewell.protocol import FinalRecord, State

pytestmark = pytest.mark.redis


def cancel(harness: Harness, **fields: str) -> None:
    harness.redis.xadd(harness.keys.cancel, fields)


def test_cancel_of_a_running_job_keeps_what_was_generated(harness: Harness):
    harness.start_worker(step_s=0.02)
    harness.submit("run", max_tokens=500)
    wait_for(lambda: harness.num_streamed("run") >= 5)
    cancel(harness, id="run")
    record = harness.check_stream("run")
    assert (record.state, record.finish_reason) == (State.CANCELLED, "cancelled")
    assert len(record.token_ids) >= 5
    assert list(record.token_ids) == expected_ids(b"hi", 7, len(record.token_ids))
    harness.check_nothing_left()


def test_cancel_of_a_job_in_the_window(harness: Harness):
    harness.start_worker("--rows", "1", step_s=0.02)
    harness.submit("first", max_tokens=60)
    harness.submit("waits", max_tokens=60)
    wait_for(lambda: harness.state("waits") == "running" and harness.num_streamed("first"))
    cancel(harness, id="waits")
    record = harness.check_stream("waits")
    assert record.state == State.CANCELLED
    assert record.token_ids == ()
    assert harness.result("first").state == State.DONE


def test_cancel_reaches_jobs_deep_in_the_backlog_and_no_later_one(harness: Harness):
    for idx in range(50):
        harness.submit(f"old-{idx}", max_tokens=3, job={"conversation": {"id": "talk"}})
    harness.submit("other", max_tokens=3)
    time.sleep(0.002)  # as clients do: entries of one millisecond have no order
    cancel(harness, conv="talk")
    harness.submit("new", max_tokens=3, job={"conversation": {"id": "talk"}})
    harness.start_worker()
    assert {harness.result(f"old-{idx}").state for idx in range(50)} == {State.CANCELLED}
    assert harness.result("other").state == State.DONE
    assert harness.result("new").state == State.DONE
    harness.check_nothing_left()


def test_cancel_of_a_tenant(harness: Harness):
    harness.start_worker(step_s=0.02)
    harness.submit("t1", max_tokens=500, job={"tenant": "acme"})
    harness.submit("t2", max_tokens=40)
    wait_for(lambda: harness.num_streamed("t1"))
    cancel(harness, tenant="acme")
    assert harness.result("t1").state == State.CANCELLED
    assert harness.result("t2").state == State.DONE


def test_cancel_of_a_finished_job_has_no_effect(shared: Harness):
    shared.submit("fin", max_tokens=3)
    record = shared.result("fin")
    cancel(shared, id="fin")
    cancel(shared, id="never-was")
    shared.submit("after-fin", max_tokens=3)
    shared.result("after-fin")
    assert FinalRecord.from_json(shared.redis.get(shared.keys.res("fin"))) == record
    assert shared.state("fin") == "done"


def test_cancel_entries_that_name_nothing_usable_are_ignored(shared: Harness):
    cancel(shared, id="no id:*")
    cancel(shared, nonsense="x")
    shared.submit("still-alive", max_tokens=3)
    assert shared.result("still-alive").state == State.DONE


def test_duplicate_of_a_finished_job_gets_its_record(shared: Harness):
    shared.submit("dup-1", max_tokens=3)
    record = shared.result("dup-1")
    shared.submit("dup-1", max_tokens=3, job={"reply_to": "dup-reader"})
    ((_, fields),) = wait_for(lambda: shared.redis.xrange(shared.keys.inbox("dup-reader")))
    assert FinalRecord.from_json(fields[b"res"]) == record
    wait_for(lambda: shared.redis.xlen(shared.keys.jobs("normal")) == 0)
    shared.check_nothing_left()


def test_duplicate_of_a_running_job_is_answered_when_it_ends(harness: Harness):
    harness.start_worker(step_s=0.02)
    harness.submit("dup", max_tokens=40, job={"reply_to": "one"})
    wait_for(lambda: harness.num_streamed("dup"))
    harness.submit("dup", max_tokens=40, job={"reply_to": "two", "metadata": {"not": "part of the digest"}})
    harness.submit("dup", max_tokens=40)  # nobody waits for this one
    record = harness.check_stream("dup")
    for name in ("one", "two"):
        ((_, fields),) = wait_for(lambda name=name: harness.redis.xrange(harness.keys.inbox(name)))
        assert FinalRecord.from_json(fields[b"res"]) == record
    assert record.epoch == 1
    wait_for(lambda: harness.redis.xlen(harness.keys.jobs("normal")) == 0)
    harness.check_nothing_left()


def test_two_entries_of_one_id_in_one_read_run_once(harness: Harness):
    harness.submit("twin", max_tokens=4)
    harness.submit("twin", max_tokens=4, job={"reply_to": "twin-reader"})
    harness.start_worker()
    assert harness.check_stream("twin").epoch == 1
    assert len(wait_for(lambda: harness.redis.xrange(harness.keys.inbox("twin-reader")))) == 1
    harness.check_nothing_left()


def test_same_id_with_another_request_is_a_conflict_and_harms_nothing(shared: Harness):
    shared.submit("con", max_tokens=3)
    record = shared.result("con")
    shared.submit("con", max_tokens=4, job={"reply_to": "con-reader"})
    ((_, fields),) = wait_for(lambda: shared.redis.xrange(shared.keys.inbox("con-reader")))
    refused = FinalRecord.from_json(fields[b"res"])
    assert (refused.state, refused.error.code) == (State.ERROR, "id_conflict")
    assert FinalRecord.from_json(shared.redis.get(shared.keys.res("con"))) == record


def test_deadline_in_the_past_and_in_mid_job(harness: Harness):
    harness.start_worker(step_s=0.02)
    now_ms = int(time.time() * 1e3)
    harness.submit("late", max_tokens=3, job={"deadline_ms": now_ms - 1})
    harness.submit("soon", max_tokens=500, job={"deadline_ms": now_ms + 700})
    late, soon = harness.check_stream("late"), harness.check_stream("soon")
    assert (late.state, late.error.code) == (State.EXPIRED, "deadline")
    assert (soon.state, soon.error.code) == (State.EXPIRED, "deadline")
    assert 0 < len(soon.token_ids) < 500
    assert 600 < soon.timing.total < 2_000


def test_not_before_is_waited_for_and_can_be_cancelled(harness: Harness):
    harness.start_worker()
    due_ms = int(time.time() * 1e3) + 800
    harness.submit("later", max_tokens=3, job={"not_before_ms": due_ms})
    harness.submit("never", max_tokens=3, job={"not_before_ms": due_ms + 3_600_000})
    harness.submit("now", max_tokens=3)
    assert harness.result("now").state == State.DONE
    assert harness.redis.get(harness.keys.res("later")) is None
    cancel(harness, id="never")
    assert harness.result("never").state == State.CANCELLED
    record = harness.result("later")
    assert record.state == State.DONE
    assert record.timing.total >= 750
    harness.check_nothing_left()


def test_paused_lane_waits_and_resumes(harness: Harness):
    harness.redis.xadd(harness.keys.ctl, {"cmd": "pause", "lane": "low"})
    harness.start_worker()
    harness.submit("low", max_tokens=3, lane="low")
    harness.submit("normal", max_tokens=3)
    assert harness.result("normal").state == State.DONE
    time.sleep(0.3)
    assert harness.redis.get(harness.keys.res("low")) is None
    harness.redis.xadd(harness.keys.ctl, {"cmd": "resume", "lane": "low"})
    assert harness.result("low").state == State.DONE


def test_drain_command_ends_the_worker_and_not_its_successor(harness: Harness):
    worker = harness.start_worker()
    harness.redis.xadd(harness.keys.ctl, {"cmd": "drain"})
    assert worker.process.wait(10) == 0
    harness.start_worker()
    harness.submit("x", max_tokens=3)
    assert harness.result("x").state == State.DONE


def test_result_lives_as_long_as_the_job_asks(shared: Harness):
    body = {"kind": "completion", "request": {"prompt": "hi", "max_tokens": 3}, "result_ttl_s": 100}
    shared.submit_raw("ttl", json.dumps(body))
    shared.result("ttl")
    assert 90_000 < shared.redis.pttl(shared.keys.res("ttl")) <= 100_000
    assert 90_000 < shared.redis.pttl(shared.keys.job("ttl")) <= 100_000
