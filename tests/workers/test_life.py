"""A job's whole life through a real server and a real worker: what a user gets back, and what stays behind."""

import json

import pytest
from harness import Follower, Harness, check_entries, expected_ids, wait_for

from gewell.protocol import Chunk, End, State

pytestmark = pytest.mark.redis


def test_completion_gives_the_engines_tokens_as_text_and_leaves_only_mortal_keys(shared: Harness):
    shared.submit("life-1", "hello", max_tokens=40, seed=3)
    record = shared.check_stream("life-1")
    ids = expected_ids(b"hello", 3, 40)
    assert record.state == State.DONE
    assert record.finish_reason == "length"
    assert list(record.token_ids) == ids
    assert record.text == bytes(ids).decode()
    assert (record.usage.prompt, record.usage.completion) == (5, 40)
    assert record.seed == 3
    assert record.epoch == 1
    assert record.fingerprint == "scripted-1"
    assert record.timing.queue is not None
    assert 0 <= record.timing.queue <= record.timing.ttft <= record.timing.total
    shared.check_nothing_left()


def test_chat_is_rendered_and_answered(shared: Harness):
    body = {"kind": "chat", "request": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}}
    shared.submit_raw("life-chat", json.dumps(body))
    record = shared.check_stream("life-chat")
    assert record.state == State.DONE
    assert record.usage.completion == 5


def test_token_ids_are_a_prompt_too(shared: Harness):
    shared.submit("life-ids", [104, 101, 108, 108, 111], max_tokens=8, seed=3)
    assert list(shared.result("life-ids").token_ids) == expected_ids(b"hello", 3, 8)


def test_follower_sees_chunks_as_they_come_and_once(harness: Harness):
    harness.start_worker(step_s=0.01)
    follower = Follower(harness, "f")
    harness.submit("f", max_tokens=60)
    entries = follower.run()
    ids, texts = check_entries(entries)
    record = harness.result("f")
    assert ids == list(record.token_ids)
    assert texts["content"] == record.text
    chunks = [entry for _, entry in entries if isinstance(entry, Chunk)]
    assert len(chunks[0].ids) == 1  # the first token goes at once
    assert len(chunks) >= 5  # 600 ms of tokens in flushes of 50 ms
    assert all(len(chunk.ids) <= 16 for chunk in chunks)


def test_stream_false_writes_nothing_before_the_end(harness: Harness):
    harness.start_worker(step_s=0.01)
    harness.submit("quiet", max_tokens=40, job={"stream": False})
    wait_for(lambda: harness.state("quiet") == "running")
    wait_for(lambda: harness.redis.exists(harness.keys.out("quiet")))
    assert harness.num_streamed("quiet") == 0
    record = harness.check_stream("quiet")
    assert record.usage.completion == 40
    assert [type(entry) for _, entry in harness.entries("quiet")][-2:] == [Chunk, End]


def test_record_goes_to_the_inbox_once(shared: Harness):
    shared.submit("life-inbox", max_tokens=3, job={"reply_to": "reader-1", "metadata": {"row": 17}})
    record = shared.result("life-inbox")
    ((_, fields),) = shared.redis.xrange(shared.keys.inbox("reader-1"))
    assert fields[b"id"] == b"life-inbox"
    assert fields[b"state"] == b"done"
    assert json.loads(fields[b"res"]) == json.loads(record.to_json())
    assert record.metadata == {"row": 17}
    assert shared.redis.pttl(shared.keys.inbox("reader-1")) > 0


def test_missing_seed_is_drawn_and_recorded(shared: Harness):
    body = {"kind": "completion", "request": {"prompt": "hello", "max_tokens": 8}}
    for job_id in ("life-seed-1", "life-seed-2"):
        shared.submit_raw(job_id, json.dumps(body))
    first, second = shared.result("life-seed-1"), shared.result("life-seed-2")
    assert first.seed != second.seed
    for record in (first, second):
        assert list(record.token_ids) == expected_ids(b"hello", record.seed, 8)


def test_stop_string_ends_the_row_and_is_cut_from_the_text(shared: Harness):
    whole = bytes(expected_ids(b"hello", 3, 60)).decode()
    stop = whole[20:23]
    shared.submit("life-stop", "hello", max_tokens=60, seed=3, stop=[stop])
    record = shared.check_stream("life-stop")
    at = whole.index(stop)
    assert record.finish_reason == "stop"
    assert record.text == whole[:at]
    assert len(record.token_ids) == at + 3  # the tokens of the stop string are recorded, those after it are not
    shared.submit("life-stop-in", "hello", max_tokens=60, seed=3, stop=[stop], include_stop_str_in_output=True)
    assert shared.check_stream("life-stop-in").text == whole[: at + 3]


def test_stop_string_within_min_tokens_does_not_end_the_row(shared: Harness):
    whole = bytes(expected_ids(b"hello", 3, 60)).decode()
    first, later = whole[0], whole[20:23]
    assert first not in whole[10:23]
    shared.submit("life-min", "hello", max_tokens=60, seed=3, min_tokens=10, stop=[first, later])
    record = shared.check_stream("life-min")
    assert record.finish_reason == "stop"
    assert record.text == whole[: whole.index(later, 10)]


def test_stop_id_is_recorded_and_not_shown(shared: Harness):
    ids = expected_ids(b"hello", 3, 60)
    stop_id = ids[12]
    shared.submit("life-stop-id", "hello", max_tokens=60, seed=3, stop_token_ids=[stop_id])
    record = shared.check_stream("life-stop-id")
    at = ids.index(stop_id)
    assert record.finish_reason == "stop"
    assert list(record.token_ids) == ids[: at + 1]
    assert record.text == bytes(ids[:at]).decode()


def test_logprobs_are_one_entry_a_token(shared: Harness):
    shared.submit("life-lp", "hello", max_tokens=20, logprobs=1)
    record = shared.check_stream("life-lp")
    assert [entry["id"] for entry in record.logprobs] == list(record.token_ids)
    assert record.logprobs[0]["b"] == [record.token_ids[0]]
    streamed = [e for _, entry in shared.entries("life-lp") if isinstance(entry, Chunk) for e in entry.logprobs or ()]
    assert streamed == list(record.logprobs)


def test_warm_job_computes_the_prompt_and_generates_nothing(shared: Harness):
    shared.submit_raw("life-warm", json.dumps({"kind": "warm", "request": {"prompt": "hello there"}}))
    record = shared.check_stream("life-warm")
    assert record.state == State.DONE
    assert record.usage.completion == 0
    assert record.usage.prompt == 11


def test_lanes_are_all_served(shared: Harness):
    for lane in ("high", "normal", "low"):
        shared.submit(f"life-{lane}", max_tokens=2, lane=lane)
    for lane in ("high", "normal", "low"):
        assert shared.result(f"life-{lane}").state == State.DONE
    shared.check_nothing_left()


def test_heartbeat_and_info_tell_what_is_served(shared: Harness):
    info = shared.redis.hgetall(shared.keys.info)
    assert info[b"protocol"] == b"1"
    assert info[b"model"] == b"scripted"
    (key,) = shared.redis.keys(shared.keys.workers_pattern)
    assert shared.redis.hget(key, "status") == b"ready"
    assert 0 < shared.redis.pttl(key) <= 600


def test_prompt_text_is_in_no_log_line(harness: Harness):
    worker = harness.start_worker()
    canary = "canary-5f1d"
    harness.submit("c1", canary, max_tokens=3)
    harness.submit("c2", canary, max_tokens=3, temperature=canary)
    harness.submit("c3", canary, max_tokens=3, no_such_field=canary)
    harness.submit_raw("c4", f'{{"kind": "{canary}"')
    harness.submit_raw("c5", json.dumps({"kind": "chat", "request": {"messages": [{"role": canary}]}}))
    for job_id in ("c1", "c2", "c3", "c4", "c5"):
        harness.result(job_id)
    worker.stop()
    assert '"id":"c5"' in worker.log
    assert canary not in worker.log
