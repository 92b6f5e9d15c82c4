"""One row's fault is one row's end; an engine that hangs is a process that leaves; workers come and go unseen."""

import time
from pathlib import Path

import pytest
from gewell_producers import Client, Job
from gewell_workers.gpu import EXIT_STALLED
from harness import Harness, expected_ids, wait_for

from gewell.embedded import EmbeddedServer, Persistence
from gewell.protocol import State

pytestmark = pytest.mark.redis


def test_logits_that_are_no_numbers_end_their_row_alone(harness: Harness):
    harness.start_worker(traps=True)
    harness.submit("good-1", max_tokens=50)
    harness.submit("bad", "!!nan", max_tokens=50)
    harness.submit("good-2", max_tokens=50)
    record = harness.check_stream("bad")
    assert (record.state, record.error.code, record.error.retryable) == (State.ERROR, "numerics", True)
    for job_id in ("good-1", "good-2"):
        assert list(harness.check_stream(job_id).token_ids) == expected_ids(b"hi", 7, 50)


def test_engine_without_progress_ends_the_process_with_a_dump(harness: Harness):
    worker = harness.start_worker("--stall-s", "1", traps=True)
    harness.submit("hangs", "!!hang", max_tokens=3, job={"max_crashes": 0})
    assert worker.process.wait(20) == EXIT_STALLED
    assert "no step ended for" in worker.log
    assert "_spring_trap" in worker.log  # where it hung
    assert not harness.redis.keys(harness.keys.workers_pattern)  # no heartbeat that lies
    harness.start_worker(traps=True)
    assert harness.result("hangs").error.code == "crashed"
    harness.submit("next", max_tokens=3)
    assert harness.result("next").state == State.DONE


def test_rolling_restart_loses_no_token_and_counts_no_crash(harness: Harness):
    workers = [harness.start_worker("--drain-s", "0.2", step_s=0.01) for _ in range(2)]
    job_ids = [f"job-{idx}" for idx in range(30)]
    for job_id in job_ids:
        harness.submit(job_id, max_tokens=300)
    wait_for(lambda: all(harness.num_streamed(job_id) for job_id in job_ids))
    for idx in range(2):
        assert workers[idx].stop() == 0
        workers[idx] = harness.start_worker("--drain-s", "0.2", step_s=0.01)
    for job_id in job_ids:
        record = harness.check_stream(job_id)
        assert list(record.token_ids) == expected_ids(b"hi", 7, 300)
        assert record.crashes == 0
    harness.check_nothing_left()


def test_two_workers_share_a_queue_and_no_job_runs_twice(harness: Harness):
    for _ in range(2):
        harness.start_worker(step_s=0.002)
    job_ids = [f"job-{idx}" for idx in range(200)]
    for job_id in job_ids:
        harness.submit(job_id, max_tokens=5)
    records = [harness.result(job_id) for job_id in job_ids]
    assert {record.epoch for record in records} == {1}
    by = {harness.redis.hget(harness.keys.job(job_id), "worker") for job_id in job_ids}
    assert len(by) == 2
    harness.check_nothing_left()


def test_queue_without_a_file_is_lost_by_a_crash_and_sent_again_by_its_clients(tmp_path: Path):
    """The promise without persistence: the server forgets, the client that waits sends its job again."""
    with EmbeddedServer(tmp_path / "s", persistence=Persistence.NONE) as server:
        harness = Harness(server, "gewell", tmp_path)
        try:
            harness.start_worker(step_s=0.02)
            info = wait_for(lambda: harness.redis.hget(harness.keys.info, "promise"))
            assert info == b"none"
            harness.submit("lost", max_tokens=200)
            wait_for(lambda: harness.num_streamed("lost"))
            server.kill()
            server.start()
            time.sleep(1.0)
            assert harness.redis.get(harness.keys.res("lost")) is None
            assert harness.state("lost") is None
            with Client(server.url) as client:
                job = Job.completion("hi", max_tokens=5, seed=7)
                assert client.run(job, timeout_s=20).state == State.DONE
        finally:
            harness.close()
