"""Bodies: what a producer may send. A value taken for another here is a wrong answer that nobody notices."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gewell.errors import InvalidRequest
from gewell.job import UNBOUNDED_TOKENS, Job, Kind, parse_job, read_envelope
from gewell.protocol import MAX_BODY_BYTES, MAX_BODY_DEPTH, ErrorCode


def parse(**request: Any) -> Job:
    return parse_job(orjson.dumps({"kind": "completion", "request": {"prompt": "hi", **request}}))


def refusal(raw: bytes | dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_job(raw if isinstance(raw, bytes) else json.dumps(raw).encode())
    return caught.value


def test_defaults():
    job = parse()
    assert job.kind is Kind.COMPLETION
    assert (job.sampling.temperature, job.sampling.top_k, job.sampling.top_p) == (1.0, 0, 1.0)
    assert job.sampling.max_tokens == UNBOUNDED_TOKENS
    assert job.seed is None
    assert (job.stream, job.reply_to, job.tenant, job.max_crashes) == (True, None, "default", 2)
    assert job.warnings == ()


def test_openai_shapes_become_sampling_parameters():
    job = parse(
        temperature=0,
        top_k=-1,
        top_p=0.5,
        max_completion_tokens=16.0,
        seed=5,
        stop="END",
        logit_bias={"7": -100},
        include_stop_str_in_output=True,
        presence_penalty=-2,
    )
    sampling = job.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 0, 0.5)
    assert (sampling.max_tokens, sampling.seed, job.seed) == (16, 5, 5)
    assert sampling.stop == ("END",)
    assert sampling.logit_bias == {7: -100.0}
    assert sampling.include_stop


@pytest.mark.parametrize(
    ("request_fields", "expected"),
    [({"logprobs": 3}, 3), ({"logprobs": True}, 0), ({"logprobs": False}, None), ({}, None)],
)
def test_logprobs_of_completions(request_fields, expected):
    assert parse(**request_fields).sampling.logprobs == expected


def test_logprobs_of_chats_need_both_fields_in_order():
    def chat(**fields: Any) -> dict[str, Any]:
        return {"kind": "chat", "request": {"messages": [{"role": "user", "content": "x"}], **fields}}

    assert parse_job(orjson.dumps(chat(logprobs=True, top_logprobs=5))).sampling.logprobs == 5
    assert refusal(chat(top_logprobs=5)).field == "request.top_logprobs"
    assert refusal(chat(logprobs=5)).field == "request.logprobs"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", [1]),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", -1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", 10**30),
        ("min_tokens", -1),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop", [""]),
        ("stop", ["x"] * 33),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "1"),
        ("logprobs", 21),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": None}),
        ("logit_bias", {"٣": 1}),
        ("repetition_penalty", 0),
        ("repetition_penalty", 5e-324),
        ("frequency_penalty", 3),
        ("ignore_eos", 1),
        ("tools", {}),
        ("chat_template_kwargs", {"enable_thinking": "yes"}),
        ("reasoning_effort", "extreme"),
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any):
    error = refusal({"kind": "completion", "request": {"prompt": "hi", field: value}})
    assert error.code == ErrorCode.INVALID_REQUEST
    assert error.field is not None
    assert error.field.startswith(f"request.{field}")
    assert error.field in error.message


def test_min_tokens_beyond_max_tokens_is_refused():
    error = refusal({"kind": "completion", "request": {"prompt": "hi", "min_tokens": 5, "max_tokens": 4}})
    assert error.field == "request.min_tokens"
    assert "4" in error.message


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused_wherever_they_stand(constant: str):
    error = refusal(f'{{"kind":"completion","request":{{"prompt":"a","temperature":{constant}}}}}'.encode())
    assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, "request.temperature")
    error = refusal(f'{{"kind":"completion","request":{{"prompt":"a"}},"metadata":{{"x":[1,{constant}]}}}}'.encode())
    assert error.field == "metadata.x[1]"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("grammar", 'root ::= "a"'),
        ("structural_tag", {"begin": "<a>"}),
        ("parallel_tool_calls", False),
        ("n", 2),
        ("n", True),
        ("best_of", 3),
        ("echo", True),
        ("bad_words", ["x"]),
        ("use_beam_search", True),
    ],
)
def test_a_constraint_we_cannot_keep_is_an_error_even_without_strict(field: str, value: Any):
    error = refusal({"kind": "completion", "request": {"prompt": "hi", field: value}})
    assert (error.code, error.field) == (ErrorCode.UNSUPPORTED, f"request.{field}")


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("given", "kind", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}}},
            "json_schema",
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "structured_outputs.regex"),
        ({"guided_json": '{"type": "object"}'}, "json_schema", "guided_json"),
        ({"guided_choice": ["a", "b"]}, "choice", "guided_choice"),
        ({"guided_grammar": "start: /a/"}, "lark", "guided_grammar"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_call", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "none", "guided_regex": "a"}, "regex", "guided_regex"),
    ],
)
def test_a_form_asked_for_becomes_the_jobs_constraint(given: dict[str, Any], kind: str, field: str):
    body = {"kind": "chat", "request": {"messages": [{"role": "user", "content": "hi"}], **given}, "strict": True}
    constraint = parse_job(json.dumps(body).encode()).constraint
    assert constraint is not None
    assert (constraint.kind, constraint.field) == (kind, f"request.{field}")


@pytest.mark.parametrize(
    ("given", "code", "field"),
    [
        ({"response_format": "json"}, "invalid_request", "response_format"),
        ({"response_format": {"type": "yaml"}}, "invalid_request", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "invalid_request", "response_format.json_schema.schema"),
        ({"guided_regex": 5}, "invalid_request", "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "invalid_request", "guided_choice"),
        ({"guided_regex": "a", "min_tokens": 3}, "invalid_request", "min_tokens"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "invalid_request", "structured_outputs"),
        ({"tool_choice": "required"}, "invalid_request", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "sub"}}}, "invalid_request", "tool_choice"),
        ({"tools": TOOLS, "guided_regex": "a"}, "unsupported", "guided_regex"),
    ],
)
def test_a_form_that_cannot_be_meant_is_refused_by_name(given: dict[str, Any], code: str, field: str):
    error = refusal({"kind": "chat", "request": {"messages": [{"role": "user", "content": "hi"}], **given}})
    assert (error.code, error.field) == (code, f"request.{field}")


def test_loops_end_constrained_jobs_unless_told_otherwise():
    assert not parse().ends_loops
    assert parse(guided_regex="a+").ends_loops
    assert parse(repetition_detection=True).ends_loops
    assert not parse(guided_regex="a+", repetition_detection=False).ends_loops


def test_values_that_ask_for_nothing_pass():
    job = parse(n=1, response_format={"type": "text"}, echo=False, user="u", stream=True, suffix=None, best_of=1)
    assert job.warnings == ()


def test_unknown_fields_of_every_level_are_listed():
    body = {
        "kind": "chat",
        "request": {"messages": [{"role": "user", "content": "x", "mood": "good"}], "temprature": 1},
        "cache": {"md": "auto", "expect": {"before": "x"}},
        "conversation": {"id": "c", "title": "t"},
        "prio": 1,
    }
    job = parse_job(orjson.dumps(body))
    assert sorted(warning.partition(":")[0] for warning in job.warnings) == [
        "cache.expect.before",
        "cache.md",
        "conversation.title",
        "prio",
        "request.messages[0].mood",
        "request.temprature",
    ]
    assert refusal(body | {"strict": True}).code == ErrorCode.UNKNOWN_FIELD


def test_digest_is_of_what_decides_the_answer_only():
    base = {"kind": "completion", "request": {"prompt": "hi", "seed": 1}, "conversation": {"id": "c"}}

    def digest(**changes: Any) -> str:
        return parse_job(orjson.dumps(base | changes)).digest

    same = digest()
    assert digest(metadata={"a": 1}, traceparent="t", deadline_ms=5, reply_to="r", stream=False) == same
    assert digest(cache={"mode": "off"}) == same
    assert digest(request={"seed": 1, "prompt": "hi"}) == same  # the order of fields says nothing
    assert digest(request={"prompt": "hi", "seed": 2}) != same
    assert digest(conversation={"id": "d"}) != same
    assert digest(cache={"salt": "s"}) != same
    assert digest(kind="warm") != same


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "system", "content": 5}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "audio"}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "assistant", "content": None}],
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}],
        [5],
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(messages: Any):
    assert "request.messages" in str(refusal({"kind": "chat", "request": {"messages": messages}}).field)


def test_assistant_without_text_beside_tool_calls_is_right():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "y"},
    ]
    assert parse_job(orjson.dumps({"kind": "chat", "request": {"messages": messages}})).messages == tuple(messages)


def test_kinds_take_their_own_prompt():
    assert refusal({"kind": "chat", "request": {"prompt": "x"}}).field == "request.messages"
    assert refusal({"kind": "completion", "request": {"messages": []}}).field == "request.prompt"
    assert refusal({"kind": "warm", "request": {}}).field == "request"
    assert refusal({"kind": "score", "request": {"prompt": "x"}}).field == "request.continuations"
    assert parse_job(b'{"kind":"warm","request":{"prompt":[1,2]}}').prompt == (1, 2)


def test_sizes_are_bounded():
    assert refusal(b" " * (MAX_BODY_BYTES + 1)).code == ErrorCode.BODY_TOO_LARGE
    assert refusal({"kind": "completion", "request": {"prompt": "x"}, "metadata": "m" * 70_000}).field == "metadata"


def test_refused_body_still_tells_where_to_answer():
    envelope = read_envelope(orjson.dumps({"kind": "?", "reply_to": "r", "metadata": 5, "result_ttl_s": 60}))
    assert (envelope.reply_to, envelope.metadata, envelope.result_ttl_s) == ("r", 5, 60.0)
    assert read_envelope(b'{"reply_to": "not an id", "kind": 1}').reply_to is None
    assert read_envelope(b"{").digest != read_envelope(b"[").digest


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
MORE = st.dictionaries(st.text(max_size=8), JSON, max_size=3)
FIELDS = st.sampled_from(
    ["temperature", "max_tokens", "stop", "logit_bias", "messages", "tools", "seed", "logprobs", "prompt", "n", "top_k"]
)


@given(
    st.sampled_from(list(Kind)), st.dictionaries(FIELDS, JSON), st.dictionaries(st.text(max_size=8), JSON, max_size=3)
)
def test_any_json_gives_a_job_or_a_typed_refusal(kind: str, request: dict[str, Any], extra: dict[str, Any]):
    raw = json.dumps({"kind": kind, "request": request} | {"cache": request} | extra).encode()
    code = None
    try:
        parse_job(raw)
    except InvalidRequest as error:  # nothing else may come out
        code = error.code
    assert code is None or code in set(ErrorCode)
    read_envelope(raw)


@given(st.binary(max_size=60))
def test_any_bytes_give_a_typed_refusal(raw: bytes):
    with pytest.raises(InvalidRequest):
        parse_job(raw)
    read_envelope(raw)


# orjson reads 1024 levels and writes 254: what lies between is JSON that could never be written again
@pytest.mark.parametrize("depth", [MAX_BODY_DEPTH + 1, 253, 254, 255, 300, 1_000])
@pytest.mark.parametrize("field", ["metadata", "cache", "reply_to", "request.user", "request.tools", "request.prompt"])
def test_nesting_beyond_the_limit_is_refused_and_the_envelope_stays_readable(field: str, depth: int):
    nested = '{"a":[' * (depth // 2) + "[" * (depth % 2) + "]" * (depth % 2) + "]}" * (depth // 2)
    body: dict[str, Any] = {"kind": "completion", "request": {"prompt": "hi"}, "reply_to": "box"}
    outer, _, inner = field.partition(".")
    if inner:
        body[outer][inner] = "nested"
    else:
        body[outer] = "nested"
    raw = json.dumps(body).replace('"nested"', nested).encode()
    error = refusal(raw)
    assert (error.code, error.field) == (ErrorCode.INVALID_JSON, outer)
    assert str(MAX_BODY_DEPTH) in error.message
    envelope = read_envelope(raw)
    assert envelope.reply_to == (None if field == "reply_to" else "box")
    assert envelope.metadata is None
    assert envelope.digest == read_envelope(raw).digest


def test_nesting_up_to_the_limit_is_taken():
    nested = json.loads("[" * (MAX_BODY_DEPTH - 1) + "]" * (MAX_BODY_DEPTH - 1))
    raw = json.dumps({"kind": "completion", "request": {"prompt": "hi"}, "metadata": nested}).encode()
    assert parse_job(raw).metadata == nested
    assert read_envelope(raw).metadata == nested


@pytest.mark.parametrize("depth", [90, 400, 900])
def test_no_number_deep_inside_is_refused_whatever_the_depth(depth: int):
    raw = '{"kind":"completion","request":{"prompt":"hi","user":' + "[" * depth + "NaN" + "]" * depth + "}}"
    assert refusal(raw.encode()).code in (ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_JSON)
