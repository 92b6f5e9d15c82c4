"""Score jobs and log-probabilities of prompts, through the queue. Evaluations rank by these numbers."""

import json

import pytest
from gewell_workers.prepare import Preparer, load_renderer
from harness import Harness, expected_ids, wait_for

from gewell.config import SamplingDefaults
from gewell.engine.scripted import build_scripted_engine, scripted_logprob
from gewell.job import parse_job
from gewell.protocol import State

pytestmark = pytest.mark.redis


def score(prompt: object, *continuations: object, **request: object) -> str:
    return json.dumps({"kind": "score", "request": {"prompt": prompt, "continuations": continuations, **request}})


def test_each_continuation_is_scored_behind_the_prompt(shared: Harness):
    shared.submit_raw("score", score("The sky is", " blue", [32, 103], " é"))
    record = shared.check_stream("score")
    assert (record.state, record.finish_reason, record.text, record.token_ids) == (State.DONE, "stop", "", ())
    assert (record.usage.prompt, record.usage.completion) == (10, 0)
    assert record.scores is not None
    assert ["".join(token["t"] for token in each["tokens"]) for each in record.scores[:2]] == [" blue", " g"]
    assert [token["id"] for token in record.scores[2]["tokens"]] == list(" é".encode())
    for each in record.scores:
        expected = [scripted_logprob(10 + i, token["id"]) for i, token in enumerate(each["tokens"])]
        assert [token["lp"] for token in each["tokens"]] == expected
        assert each["logprob"] == pytest.approx(sum(expected))
        assert each["is_greedy"] is True  # the script's best is the given one
    shared.check_nothing_left()


def test_a_prompt_may_be_scored_with_nothing_to_follow(shared: Harness):
    shared.submit("echo-0", "hello", prompt_logprobs=1, max_tokens=0)
    shared.submit("echo-3", "hello", prompt_logprobs=0, max_tokens=3, logprobs=0)
    shared.submit("echo-one", "h", prompt_logprobs=0, max_tokens=0)
    nothing, more, one = (shared.check_stream(name) for name in ("echo-0", "echo-3", "echo-one"))
    expected = [None] + [scripted_logprob(i, token) for i, token in enumerate(b"hello") if i]
    for record in (nothing, more):
        assert record.prompt_logprobs is not None
        assert [entry["lp"] for entry in record.prompt_logprobs] == expected
        assert [entry["t"] for entry in record.prompt_logprobs] == list("hello")
    assert nothing.token_ids == ()
    assert nothing.prompt_logprobs is not None
    assert [len(entry["top"]) for entry in nothing.prompt_logprobs] == [0, 1, 1, 1, 1]
    assert list(more.token_ids) == expected_ids(b"hello", 7, 3)
    assert [entry["lp"] for entry in one.prompt_logprobs or ()] == [None]


def test_a_cancelled_score_job_ends_cancelled(harness: Harness):
    harness.start_worker(step_s=0.2)
    harness.submit_raw("long", score("x" * 3_000, *(f"{n}" for n in range(40))))
    wait_for(lambda: harness.redis.hget(harness.keys.job("long"), "started_at_ms"), what="its start")
    harness.redis.xadd(harness.keys.cancel, {"id": "long"})
    record = harness.check_stream("long")
    assert (record.state, record.scores) == (State.CANCELLED, None)


def test_a_killed_workers_scores_are_made_by_the_next(harness: Harness):
    first = harness.start_worker(step_s=0.1)
    harness.submit_raw("again", score("x" * 2_000, "a", "b"))
    harness.submit("echo", "hello", prompt_logprobs=0, max_tokens=40)
    wait_for(lambda: harness.num_streamed("echo") >= 2, what="the first tokens")
    first.kill_group()
    harness.start_worker()
    scored, echoed = harness.check_stream("again"), harness.check_stream("echo")
    assert [each["logprob"] for each in scored.scores or ()] == [scripted_logprob(2_000, t) for t in b"ab"]
    assert echoed.epoch == 2
    assert list(echoed.token_ids) == expected_ids(b"hello", 7, 40)
    assert [entry["lp"] for entry in echoed.prompt_logprobs or ()][1:] == [
        scripted_logprob(i, token) for i, token in enumerate(b"hello") if i
    ]


def test_what_a_request_leaves_out_is_as_the_models_publisher_advises():
    info = build_scripted_engine().info
    advised = SamplingDefaults(temperature=0.7, top_k=64)
    preparer = Preparer(type(info)(**{**_fields(info), "sampling": advised}), load_renderer(None))

    def sampling(**request: object) -> tuple[float, int, float]:
        body = {"kind": "completion", "request": {"prompt": "hi", **request}}
        found = preparer.prepare(parse_job(json.dumps(body).encode())).sampling
        return (found.temperature, found.top_k, found.top_p)

    assert sampling() == (0.7, 64, 1.0)
    assert sampling(temperature=1, top_k=0, top_p=0.5) == (1.0, 0, 0.5)
    assert sampling(top_k=-1, temperature=None) == (0.7, 0, 1.0)


def _fields(info: object) -> dict[str, object]:
    return {name: getattr(info, name) for name in type(info).__dataclass_fields__}
