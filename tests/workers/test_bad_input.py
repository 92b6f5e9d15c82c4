"""A user's mistake becomes that job's error record, names the field, and disturbs nobody else."""

import json

import pytest
from gewell_workers import ingest
from gewell_workers.claim import Taken
from harness import Harness, wait_for

from gewell.job import Job
from gewell.protocol import ErrorCode, FinalRecord, Lane, State

pytestmark = pytest.mark.redis


def completion(**request: object) -> str:
    return json.dumps({"kind": "completion", "request": {"prompt": "hi", "max_tokens": 3, **request}})


def chat(*messages: object) -> str:
    return json.dumps({"kind": "chat", "request": {"messages": list(messages), "max_tokens": 3}})


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

BAD = {
    "not-json": (b"{", "invalid_json", None),
    "not-utf8": (b'{"kind": "\xff"}', "invalid_json", None),
    "a-list": (b"[]", "invalid_json", None),
    "empty": (b"", "invalid_json", None),
    "deep": (b"[" * 5_000 + b"]" * 5_000, "invalid_json", None),
    "deep-in-a-field": (completion(user=json.loads("[" * 300 + "]" * 300)), "invalid_json", "request"),
    "no-kind": (b"{}", "invalid_request", "kind"),
    "wrong-kind": (b'{"kind": "chatt"}', "invalid_request", "kind"),
    "no-request": (b'{"kind": "chat"}', "invalid_request", "request"),
    "wrong-type": (completion(temperature="hot"), "invalid_request", "request.temperature"),
    "true-is-no-number": (completion(temperature=True), "invalid_request", "request.temperature"),
    "nan": (completion(temperature=float("nan")), "invalid_request", "request.temperature"),
    "infinite": (completion(top_p=float("inf")), "invalid_request", "request.top_p"),
    "nan-elsewhere": (completion(user={"x": [float("nan")]}), "invalid_request", "request.user.x[0]"),
    "negative": (completion(temperature=-1), "invalid_request", "request.temperature"),
    "huge-max-tokens": (completion(max_tokens=10**30), "invalid_request", "request.max_tokens"),
    "zero-max-tokens": (completion(max_tokens=0), "invalid_request", "request.max_tokens"),
    "empty-prompt": (completion(prompt=""), "empty_prompt", "request.prompt"),
    "empty-ids": (completion(prompt=[]), "empty_prompt", "request.prompt"),
    "no-messages": (chat(), "empty_prompt", "request.messages"),
    "bad-role": (chat({"role": "robot", "content": "x"}), "invalid_request", "request.messages[0].role"),
    "no-content": (chat({"role": "user"}), "invalid_request", "request.messages[0].content"),
    "too-long": (completion(prompt="x" * 20_000), "prompt_too_long", "request.prompt"),
    "no-such-token": (completion(prompt=[70_000]), "invalid_request", "request.prompt[0]"),
    "no-such-stop-id": (completion(stop_token_ids=[70_000]), "invalid_request", "request.stop_token_ids"),
    "image": (chat({"role": "user", "content": [IMAGE]}), "image_unsupported", "request.messages[0].content[0]"),
    "n": (completion(n=2), "unsupported", "request.n"),
    "no-regex": (completion(guided_regex="a("), "invalid_request", "request.guided_regex"),
    "no-grammar": (completion(guided_grammar="start: nowhere"), "invalid_request", "request.guided_grammar"),
    "schema-keyword": (completion(guided_json={"not": {}}), "invalid_request", "request.guided_json"),
    "gbnf": (completion(grammar='root ::= "a"'), "unsupported", "request.grammar"),
    "score-nothing": (
        b'{"kind":"score","request":{"prompt":"a","continuations":[""]}}',
        "empty_prompt",
        "request.continuations[0]",
    ),
    "score-too-much": (
        json.dumps({"kind": "score", "request": {"prompt": "a", "continuations": ["b", "x" * 20_000]}}),
        "prompt_too_long",
        "request.continuations[1]",
    ),
    "score-no-token": (
        b'{"kind":"score","request":{"prompt":"a","continuations":[[70000]]}}',
        "invalid_request",
        "request.continuations[0][0]",
    ),
}


def test_every_mistake_is_an_error_record_and_the_neighbour_is_served(shared: Harness):
    for name, (body, _, _) in BAD.items():
        shared.submit_raw(f"bad-{name}", body)
        shared.submit(f"good-{name}", max_tokens=3)
    for name, (_, code, field) in BAD.items():
        record = shared.check_stream(f"bad-{name}")
        assert record.state == State.ERROR, name
        assert record.finish_reason == "error", name
        assert (record.error.code, record.error.field) == (code, field), name
        assert record.error.message, name
        assert shared.result(f"good-{name}").state == State.DONE, name
    shared.check_nothing_left()


@pytest.mark.parametrize("field", ["temperature", "prompt"])
def test_a_limit_is_named_with_the_value(shared: Harness, field: str):
    body = completion(temperature=-3.5) if field == "temperature" else completion(prompt="x" * 20_000)
    shared.submit_raw(f"limit-{field}", body)
    message = shared.result(f"limit-{field}").error.message
    assert f"request.{field}" in message
    assert ("-3.5" in message and "0 to 100" in message) if field == "temperature" else "20000 tokens" in message


def test_unknown_field_is_a_warning_and_with_strict_an_error(shared: Harness):
    shared.submit("unknown-1", max_tokens=3, temprature=0.5)
    record = shared.result("unknown-1")
    assert record.state == State.DONE
    assert record.warnings == ("request.temprature: unknown field, ignored",)
    shared.submit("unknown-2", max_tokens=3, temprature=0.5, job={"strict": True})
    record = shared.result("unknown-2")
    assert (record.error.code, record.error.field) == ("unknown_field", "request.temprature")


def test_max_tokens_beyond_the_context_is_clamped_and_said(shared: Harness):
    shared.submit("clamp", max_tokens=100_000, stop_token_ids=list(range(32, 127)))
    record = shared.result("clamp")
    assert record.state == State.DONE
    assert record.warnings == ("request.max_tokens: 100000 clamped to 8190, what the context leaves",)


def test_refusal_reaches_the_inbox_with_metadata(shared: Harness):
    body = {"kind": "completion", "request": {"prompt": ""}, "reply_to": "refused", "metadata": {"row": 3}}
    shared.submit_raw("refused-1", json.dumps(body))
    ((_, fields),) = wait_for(lambda: shared.redis.xrange(shared.keys.inbox("refused")))
    record = FinalRecord.from_json(fields[b"res"])
    assert record.error.code == "empty_prompt"
    assert record.metadata == {"row": 3}


def test_entry_of_another_version_is_not_read_as_one_of_ours(shared: Harness):
    jobs, body = shared.keys.jobs("normal"), json.loads(completion()) | {"reply_to": "newer"}
    for job_id, version in (("v-99", {"v": 99}), ("v-word", {"v": "new"}), ("v-none", {}), ("v-ours", {"v": 1})):
        shared.job_ids.add(job_id)
        shared.redis.xadd(jobs, {**version, "id": job_id, "body": json.dumps(body)})
    for job_id in ("v-99", "v-word"):
        error = shared.check_stream(job_id).error
        assert (error.code, error.field, error.retryable) == (ErrorCode.UNSUPPORTED, "v", False)
    assert "'99' is not 1" in shared.result("v-99").error.message
    assert shared.result("v-none").state == shared.result("v-ours").state == State.DONE
    assert shared.redis.xlen(shared.keys.inbox("newer")) == 4


def test_entry_without_a_usable_id_goes_to_dead(shared: Harness):
    jobs = shared.keys.jobs("normal")
    before = shared.redis.xlen(shared.keys.dead)
    shared.redis.xadd(jobs, {"v": 1, "body": completion()})
    shared.redis.xadd(jobs, {"v": 1, "id": "a job:*", "body": completion()})
    shared.redis.xadd(jobs, {"v": 1, "id": "x" * 129, "body": completion()})
    wait_for(lambda: shared.redis.xlen(shared.keys.dead) == before + 3)
    entry = shared.redis.xrange(shared.keys.dead)[-1][1]
    assert entry[b"reason"] == b"the entry has no usable id"
    assert json.loads(entry[b"body"])["kind"] == "completion"
    wait_for(lambda: shared.redis.xlen(jobs) == 0)
    assert shared.redis.xpending(jobs, "gpu")["pending"] == 0


def test_a_body_that_breaks_its_reader_ends_its_job_alone_and_is_not_quoted(monkeypatch: pytest.MonkeyPatch, caplog):
    """Else it would be taken over by one worker after the other, and kill them all."""

    def broken(raw: bytes) -> Job:
        raise KeyError(raw.decode())

    monkeypatch.setattr(ingest, "parse_job", broken)
    draft = ingest._draft(Taken(lane=Lane.NORMAL, entry_id="1-1", job_id="odd", body=b"canary"))
    assert draft.refusal is not None
    assert draft.refusal.code == ErrorCode.INTERNAL
    assert "KeyError at" in caplog.text
    assert "broken" in caplog.text
    assert "canary" not in caplog.text


def test_garbage_in_the_workers_own_keys_ends_that_job_alone(harness: Harness):
    """Left pending it would be taken over, and end one worker after the other."""
    worker = harness.start_worker()
    for _ in range(2):
        harness.redis.xadd(harness.keys.out("torn-stream"), {"entry": "of a version to come"})
    harness.redis.hset(harness.keys.job("torn-hash"), "epoch", "many")
    harness.submit("before", max_tokens=3)
    harness.submit("torn-stream", max_tokens=3, job={"reply_to": "box"})
    harness.submit("torn-hash", max_tokens=3)
    harness.submit("after", max_tokens=3)
    for job_id in ("torn-stream", "torn-hash"):
        record = harness.result(job_id)
        assert (record.state, record.error.code) == (State.ERROR, ErrorCode.INTERNAL)
    ((_, fields),) = harness.redis.xrange(harness.keys.inbox("box"))
    assert fields[b"id"] == b"torn-stream"
    assert harness.redis.xlen(harness.keys.dead) == 2
    for job_id in ("before", "after"):
        assert harness.check_stream(job_id).state == State.DONE
    assert worker.process.poll() is None
    harness.check_nothing_left()


def test_no_text_of_a_request_gets_into_the_log(harness: Harness):
    worker = harness.start_worker()
    word = "canary"
    bodies = [
        completion(prompt=word),
        completion(prompt=word, temperature=word),
        completion(logit_bias={word: 1}),
        completion(user={word: float("nan")}),
        json.dumps({"kind": "completion", "request": {"prompt": word, word: 1}, "strict": True}),
        json.dumps({"kind": word, "request": {}}),
        chat({"role": word, "content": word}),
        "{" + word,
    ]
    for idx, body in enumerate(bodies):
        harness.submit_raw(f"quiet-{idx}", body)
    for idx in range(len(bodies)):
        harness.result(f"quiet-{idx}")
    wait_for(lambda: worker.log.count('"event":"job"') == len(bodies))
    assert word not in worker.log
    assert "request.temperature" in worker.log  # the field itself is told
