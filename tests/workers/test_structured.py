"""Answers that must have a form, through the queue. A caller parses them without looking: cut ones must say so."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from harness import Harness, expected_ids, wait_for

from gewell.protocol import ErrorCode, State

pytestmark = pytest.mark.redis

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 999}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
STRICT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
COMPLETE = {"valid": True, "reason": None}


def test_answers_have_the_form_that_was_asked_for(shared: Harness):
    shared.submit("form-json", response_format=STRICT, max_tokens=80)
    shared.submit("form-regex", structured_outputs={"regex": "[0-9]{4}-[0-9]{2}"}, max_tokens=80)
    shared.submit("form-choice", guided_choice=["red", "green"], max_tokens=80)
    shared.submit("form-lark", guided_grammar='start: "a" /b{3}/ "c"', max_tokens=80)
    shared.submit("form-free", max_tokens=30)
    records = {name: shared.check_stream(f"form-{name}") for name in ("json", "regex", "choice", "lark", "free")}
    assert set(json.loads(records["json"].text)) == {"name", "age"}
    year, month = records["regex"].text.split("-")
    assert (len(year), len(month)) == (4, 2)
    assert records["choice"].text in ("red", "green")
    assert records["lark"].text == "abbbc"
    assert list(records["free"].token_ids) == expected_ids(b"hi", 7, 30)
    for name, record in records.items():
        assert record.state == State.DONE
        assert record.structured == (None if name == "free" else COMPLETE)
        assert record.finish_reason == ("length" if name == "free" else "stop")


def test_an_answer_cut_off_says_so(shared: Harness):
    shared.submit("cut-length", response_format=STRICT, max_tokens=5)
    shared.submit("cut-stop", guided_regex="abcdef", stop="cd")
    length, stop = shared.check_stream("cut-length"), shared.check_stream("cut-stop")
    assert (length.finish_reason, length.structured) == ("length", {"valid": False, "reason": "truncated"})
    assert (stop.text, stop.structured) == ("ab", {"valid": False, "reason": "stop"})


@pytest.mark.parametrize("stream", [True, False])
def test_a_constrained_answer_that_loops_is_ended(shared: Harness, stream: bool):
    name = f"loop-{stream}"
    shared.submit(name, guided_regex="(ab){900}", max_tokens=2_000, job={"stream": stream}, logprobs=0)
    record = shared.check_stream(name)
    assert (record.state, record.finish_reason) == (State.DONE, "repetition")
    assert record.structured == {"valid": False, "reason": "repetition"}
    assert 250 <= len(record.token_ids) <= 260
    assert record.text == "ab" * (len(record.token_ids) // 2) + "a" * (len(record.token_ids) % 2)
    assert record.logprobs is not None
    assert len(record.logprobs) == len(record.token_ids)


def test_a_loop_may_be_wanted(shared: Harness):
    shared.submit("wanted", guided_regex="(ab){400}", max_tokens=2_000, repetition_detection=False)
    record = shared.check_stream("wanted")
    assert (record.text, record.structured) == ("ab" * 400, COMPLETE)


def test_tool_calls_need_a_model_that_has_them(shared: Harness):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    request = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "tool_choice": "required"}
    shared.submit_raw("tool-bytes", json.dumps({"kind": "chat", "request": request}))
    error = shared.result("tool-bytes").error
    assert error is not None
    assert (error.code, error.field) == (ErrorCode.UNSUPPORTED, "request.tools")


def test_a_killed_workers_constrained_answer_is_the_same_under_the_next(harness: Harness):
    first = harness.start_worker(step_s=0.02)
    harness.submit("whole", response_format=STRICT, max_tokens=80)
    whole = harness.check_stream("whole")
    harness.submit("killed", response_format=STRICT, max_tokens=80)
    wait_for(lambda: harness.num_streamed("killed") >= 5, what="the first tokens")
    first.kill_group()
    harness.start_worker()
    killed = harness.check_stream("killed")
    assert killed.epoch == 2
    assert (killed.text, killed.structured) == (whole.text, COMPLETE)
    harness.check_nothing_left()


WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Forecast.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]


@pytest.fixture(scope="module")
def nano(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """A worker with the shipped model: a real vocabulary, tool calls and thoughts."""
    harness = Harness(server, "nano", tmp_path_factory.mktemp("nano"))
    worker = harness.start_worker("--model", "gewell-nano", "--device", "cpu", wait=False)
    wait_for(lambda: "send a job" in worker.log or worker.process.poll(), timeout_s=90, what="worker with a real model")
    assert worker.process.poll() is None, worker.log
    yield harness
    harness.close()


def chat(harness: Harness, name: str, **request: Any) -> Any:
    asked = {"messages": [{"role": "user", "content": "What is 3+4?"}], "temperature": 0, "max_tokens": 120, **request}
    harness.submit_raw(name, json.dumps({"kind": "chat", "request": asked}))
    return harness.check_stream(name)


def test_a_demanded_tool_call_comes_and_fits_its_schema(nano: Harness):
    named = {"type": "function", "function": {"name": "weather"}}
    record = chat(nano, "named", tools=TOOLS, tool_choice=named)
    assert (record.finish_reason, record.text, record.structured) == ("tool_calls", "", COMPLETE)
    (call,) = record.tool_calls
    assert call["name"] == "weather"
    arguments = json.loads(call["arguments"])
    assert arguments["city"] in ("Oslo", "Rome")
    assert 1 <= arguments["days"] <= 9
    required = chat(nano, "required", tools=TOOLS, tool_choice="required")
    assert {call["name"] for call in required.tool_calls} <= {"weather", "stop"}
    assert required.tool_calls


@pytest.mark.parametrize("thinking", [False, True])
def test_a_chat_answers_in_its_form_thoughts_aside(nano: Harness, thinking: bool):
    kwargs = {"enable_thinking": thinking}
    record = chat(nano, f"chat-{thinking}", response_format=STRICT, chat_template_kwargs=kwargs, max_tokens=400)
    assert record.structured == COMPLETE
    assert set(json.loads(record.text)) == {"name", "age"}


def test_the_models_own_answer_scores_as_its_best(nano: Harness):
    prompt = "What is 3+4?"
    nano.submit("own", prompt, max_tokens=6, temperature=0, ignore_eos=True)
    ids = list(nano.check_stream("own").token_ids)
    other = [ids[0], (ids[1] + 1) % 2_000]
    nano.submit_raw("rank", json.dumps({"kind": "score", "request": {"prompt": prompt, "continuations": [ids, other]}}))
    scores = nano.check_stream("rank").scores
    assert scores is not None
    assert [each["is_greedy"] for each in scores] == [True, False]
    assert scores[0]["tokens"][1]["lp"] > scores[1]["tokens"][1]["lp"]
    assert scores[0]["tokens"][0]["lp"] == pytest.approx(scores[1]["tokens"][0]["lp"], abs=0.05)
