"""What dies and what survives: workers killed, stopped and restarted in every phase of a job."""

import time

import pytest
from harness import Follower, Harness, check_entries, expected_ids, wait_for

from gewell.embedded import EmbeddedServer
from gewell.protocol import FinalRecord, State

pytestmark = pytest.mark.redis

TOKENS = 250


def assert_whole(harness: Harness, job_id: str, prompt: bytes = b"hi", seed: int = 7, num: int = TOKENS) -> FinalRecord:
    record = harness.check_stream(job_id)
    assert record.state == State.DONE
    assert list(record.token_ids) == expected_ids(prompt, seed, num)
    return record


@pytest.mark.parametrize("whole_group", [False, True])
def test_killed_workers_stream_goes_on_where_it_stopped(harness: Harness, whole_group: bool):
    first = harness.start_worker(step_s=0.02)
    follower = Follower(harness, "a")
    harness.submit("a", max_tokens=TOKENS)
    wait_for(lambda: harness.num_streamed("a") >= 10)
    (first.kill_group if whole_group else first.kill)()
    harness.start_worker()
    entries = follower.run()
    record = assert_whole(harness, "a")
    ids, texts = check_entries(entries)  # what the follower was shown: every token once, in order
    assert ids == list(record.token_ids)
    assert texts["content"] == record.text
    assert record.epoch == 2
    assert record.crashes == 1
    harness.check_nothing_left()


def test_waiting_jobs_of_a_killed_worker_are_not_blamed(harness: Harness):
    first = harness.start_worker("--rows", "1", step_s=0.02)
    for idx in range(4):
        harness.submit(f"w{idx}", max_tokens=TOKENS)
    wait_for(lambda: harness.num_streamed("w0") >= 5)
    first.kill_group()
    harness.start_worker()
    assert [assert_whole(harness, f"w{idx}").crashes for idx in range(4)] == [1, 0, 0, 0]


def test_stopped_worker_that_wakes_up_is_fenced(harness: Harness):
    zombie = harness.start_worker(step_s=0.02)
    harness.submit("z", max_tokens=TOKENS)
    wait_for(lambda: harness.num_streamed("z") >= 5)
    zombie.pause()
    harness.start_worker()
    record = assert_whole(harness, "z")
    assert record.epoch == 2
    zombie.resume()
    wait_for(lambda: '"outcome":"fenced"' in zombie.log, what="the zombie hears that it is fenced")
    assert FinalRecord.from_json(harness.redis.get(harness.keys.res("z"))) == record
    harness.check_stream("z")
    harness.submit("after", max_tokens=TOKENS)  # the zombie is a worker again
    assert_whole(harness, "after")


def test_sigterm_finishes_running_jobs_and_exits_with_zero(harness: Harness):
    worker = harness.start_worker(step_s=0.005)
    harness.submit("d", max_tokens=TOKENS)
    wait_for(lambda: harness.num_streamed("d") >= 5)
    assert worker.stop() == 0
    assert_whole(harness, "d")
    assert harness.redis.keys(harness.keys.workers_pattern) == []


def test_sigterm_hands_back_what_does_not_finish_in_time(harness: Harness):
    first = harness.start_worker("--drain-s", "0.2", step_s=0.02)
    harness.submit("h", max_tokens=TOKENS)
    harness.submit("h2", max_tokens=TOKENS)
    wait_for(lambda: harness.num_streamed("h") >= 5)
    assert first.stop() == 0
    assert harness.redis.get(harness.keys.res("h")) is None
    pending = harness.redis.xpending(harness.keys.jobs("normal"), "gpu")
    assert [(c["name"], c["pending"]) for c in pending["consumers"]] == [(b"handback", 2)]
    harness.start_worker()
    record = assert_whole(harness, "h")
    assert (record.epoch, record.crashes) == (2, 0)  # a hand-back is no crash
    assert_whole(harness, "h2")
    harness.check_nothing_left()


def test_second_signal_leaves_at_once(harness: Harness):
    worker = harness.start_worker(step_s=0.05)
    harness.submit("s", max_tokens=TOKENS)
    wait_for(lambda: harness.num_streamed("s") >= 2)
    worker.process.terminate()
    wait_for(lambda: "draining" in worker.log)
    worker.process.terminate()
    assert worker.process.wait(5) == 130


def test_stop_string_found_before_the_crash_ends_the_continuation(harness: Harness):
    """The stop string is complete in the stream, the end is not written: nothing may follow it."""
    whole = bytes(expected_ids(b"hi", 7, TOKENS)).decode()
    stop = whole[30:34]
    harness.submit("s", max_tokens=TOKENS, stop=[stop])
    ids = expected_ids(b"hi", 7, 34)
    harness.plant("s", ids=ids, t=whole[:30])
    harness.start_worker()
    record = harness.check_stream("s")
    assert record.finish_reason == "stop"
    assert record.text == whole[:30]
    assert list(record.token_ids) == ids


def test_held_back_text_is_shown_once_by_the_continuation(harness: Harness):
    """The last text was held back as the possible start of a stop string when the worker died."""
    whole = bytes(expected_ids(b"hi", 7, TOKENS)).decode()
    stop = whole[28:30] + "\x00"
    harness.submit("t", max_tokens=TOKENS, stop=[stop])
    harness.plant("t", ids=expected_ids(b"hi", 7, 30), t=whole[:28])
    harness.start_worker()
    assert assert_whole(harness, "t").text == whole


def test_tokens_of_another_model_cannot_be_continued(harness: Harness):
    harness.submit("m", max_tokens=TOKENS)
    harness.plant("m", ids=[65], t="A", fingerprint="another")
    harness.start_worker()
    record = harness.result("m")
    assert record.error.code == "restart_impossible"
    assert record.text == "A"


def test_job_survives_a_restart_of_the_server(own_server: EmbeddedServer, tmp_path):
    harness = Harness(own_server, "restart", tmp_path)
    try:
        harness.start_worker(step_s=0.02)
        harness.submit("r", max_tokens=TOKENS)
        wait_for(lambda: harness.num_streamed("r") >= 5)
        own_server.kill()
        time.sleep(0.3)
        own_server.start()
        record = assert_whole(harness, "r")
        assert record.epoch == 1  # the worker lived on: it only waited for the server
        harness.submit("r2", max_tokens=5)
        assert harness.result("r2").state == State.DONE
        harness.check_nothing_left()
    finally:
        harness.close()


def test_lost_stream_is_written_again_in_full(harness: Harness):
    harness.start_worker(step_s=0.02)
    harness.submit("l", max_tokens=TOKENS)
    wait_for(lambda: harness.num_streamed("l") >= 10)
    harness.redis.delete(harness.keys.out("l"))
    record = harness.result("l")
    entries = harness.entries("l")
    ids = [token for _, entry in entries for token in getattr(entry, "ids", ())]
    assert ids == list(record.token_ids) == expected_ids(b"hi", 7, TOKENS)


def test_emptied_server_is_served_again(own_server: EmbeddedServer, tmp_path):
    harness = Harness(own_server, "empty", tmp_path)
    try:
        harness.start_worker(step_s=0.02)
        harness.submit("lost", max_tokens=TOKENS)
        wait_for(lambda: harness.num_streamed("lost") >= 5)
        harness.redis.flushall()
        wait_for(lambda: harness.redis.exists(harness.keys.info))
        harness.submit("new", max_tokens=TOKENS)
        assert_whole(harness, "new")
    finally:
        harness.close()
