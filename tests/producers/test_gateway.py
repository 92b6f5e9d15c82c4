"""The OpenAI surface, byte for byte where clients are picky, against a worker without an engine."""

import contextlib
import http.client
import json
import threading
import time
from pathlib import Path

import pytest
import uvicorn
from gewell_producers.connection import Patience
from gewell_producers.gateway.access import Access, Caller
from gewell_producers.gateway.app import GatewaySettings, create_app

from gewell.errors import ConfigError
from gewell.protocol import Channel, ErrorCode, ErrorInfo, Lane, State, ToolDelta

pytestmark = pytest.mark.redis

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "say it backwards"}]}


class Gateway:
    """A gateway in a thread, and the plainest of clients."""

    def __init__(self, settings):
        config = uvicorn.Config(create_app(settings), port=0, log_level="error", lifespan="on")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def stop(self):
        self.server.should_exit = True
        self.thread.join(10)

    def open(self, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, raw, headers or {})
        return connection

    def call(self, path, body=None, headers=None):
        with contextlib.closing(self.open(path, body, headers)) as connection:
            response = connection.getresponse()
            raw = response.read()
            is_json = response.headers["content-type"].startswith("application/json")
            return response.status, json.loads(raw) if is_json else raw.decode(), response.headers


@pytest.fixture
def settings(server, ns):
    return {"url": server.url, "namespace": ns, "patience": Patience(connect_s=0.3, no_worker_s=1, queue_full_s=0)}


@pytest.fixture
def gateway(settings, worker):
    made = Gateway(GatewaySettings(**settings))
    yield made
    made.stop()


def answered_by_hand(worker, work):
    """Runs `work(job)` on the next job while the test's own thread waits for its answer."""

    def serve():
        work(worker.take().claim())

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


# --- whole answers ----------------------------------------------------------------------------------------------------


def test_chat_completion_has_the_shape_that_clients_parse(gateway, worker):
    worker.serve()
    status, body, headers = gateway.call("/v1/chat/completions", CHAT)
    assert status == 200
    assert headers["content-type"] == "application/json"
    assert body.pop("id").startswith("chatcmpl-")
    assert abs(body.pop("created") - time.time()) < 60
    body.pop("x_jobs")
    assert body == {
        "object": "chat.completion",
        "model": "fake",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "backwards it say", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 16,
            "total_tokens": 19,
            "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        },
    }


def test_completions_take_texts_ids_and_lists_of_both(gateway, worker):
    worker.serve()
    status, body, _ = gateway.call("/v1/completions", {"prompt": ["a b", "c d"], "n": 2, "model": "fake"})
    assert status == 200
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "b a"), (1, "b a"), (2, "d c"), (3, "d c")]
    assert body["usage"]["prompt_tokens"] == 12


def test_an_echo_is_the_prompt_with_its_logprobs_before_the_answer(gateway, worker):
    def token(text: str, lp: float | None) -> dict[str, object]:
        top = [] if lp is None else [{"id": 9, "t": "x", "b": [120], "lp": -0.5}]
        return {"id": 1, "t": text, "b": list(text.encode()), "lp": lp, "top": top}

    asked = []

    def work(job):
        asked.append(job.body["request"])
        job.finish(
            text="!", token_ids=(3,), logprobs=(token("!", -3.0),), prompt_logprobs=(token("a", None), token("é", -2.0))
        )

    thread = answered_by_hand(worker, work)
    status, body, _ = gateway.call("/v1/completions", {"prompt": "aé", "echo": True, "logprobs": 1, "max_tokens": 1})
    thread.join()
    assert status == 200
    assert asked == [{"prompt": "aé", "logprobs": 1, "max_tokens": 1, "prompt_logprobs": 1}]
    (choice,) = body["choices"]
    assert choice["text"] == "aé!"
    assert choice["logprobs"] == {
        "tokens": ["a", "é", "!"],
        "token_logprobs": [None, -2.0, -3.0],
        "top_logprobs": [None, {"x": -0.5}, {"x": -0.5}],
        "text_offset": [0, 1, 2],
    }
    status, body, _ = gateway.call("/v1/completions", {"prompt": "a", "echo": True, "stream": True})
    assert (status, body["error"]["param"]) == (400, "echo")


def test_request_reaches_the_worker_with_hints_lane_and_conversation(gateway, worker):
    seen = []
    thread = answered_by_hand(worker, lambda job: (seen.append((job.lane, job.body, job.id)), job.finish()))
    body = CHAT | {
        "temperature": 0.5, "max_completion_tokens": 9, "seed": 4, "user": "u", "stream_options": None, "priority": -1,
        "prompt_cache_key": "a key with spaces",
        "x_job": {"id": "mine-1", "cache": {"pin": True}, "metadata": {"row": 3}, "deadline_ms": 2**52},
    }  # fmt: skip
    headers = {"traceparent": "00-1-2-01", "X-Conversation-Id": "story:1"}
    assert gateway.call("/v1/chat/completions", body, headers)[0] == 200
    thread.join()
    ((lane, sent, job_id),) = seen
    assert (lane, job_id) == (Lane.HIGH, "mine-1")
    assert sent == {
        "kind": "chat",
        "request": {"messages": CHAT["messages"], "temperature": 0.5, "max_completion_tokens": 9, "seed": 4},
        "conversation": {"id": "story:1"},
        "cache": {"pin": True},
        "stream": False,
        "tenant": "default",
        "deadline_ms": 2**52,
        "metadata": {"row": 3},
        "traceparent": "00-1-2-01",
    }


def test_samples_of_one_request_have_ids_and_seeds_of_their_own(gateway, worker):
    seen = []

    def work(job):
        seen.append((job.id.rpartition(".")[2], job.body["request"]["seed"]))
        job.finish(text=job.id)

    def serve():
        for _ in range(3):
            work(worker.take().claim())

    thread = threading.Thread(target=serve)
    thread.start()
    status, body, _ = gateway.call("/v1/chat/completions", CHAT | {"n": 3, "seed": 10})
    thread.join()
    assert status == 200
    assert sorted(seen) == [("0", 10), ("1", 11), ("2", 12)]
    assert [c["message"]["content"][-2:] for c in body["choices"]] == [".0", ".1", ".2"]


def test_tools_reasoning_and_logprobs_have_their_places(gateway, worker):
    token = {"id": 5, "t": "é", "b": [195, 169], "lp": -0.5, "top": [{"id": 5, "t": "é", "b": [195, 169], "lp": -0.5}]}
    call = {"id": "call_1", "name": "add", "arguments": '{"a":1}'}
    thread = answered_by_hand(
        worker,
        lambda job: job.finish(
            text="", reasoning="hm", tool_calls=(call,), finish_reason="tool_calls", logprobs=(token,)
        ),
    )
    _, body, _ = gateway.call("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1})
    thread.join()
    choice = body["choices"][0]
    assert choice["message"] == {
        "role": "assistant", "content": None, "refusal": None, "reasoning": "hm", "reasoning_content": "hm",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}],
    }  # fmt: skip
    assert choice["finish_reason"] == "tool_calls"
    entry = {"token": "é", "logprob": -0.5, "bytes": [195, 169]}
    assert choice["logprobs"] == {"content": [entry | {"top_logprobs": [entry]}], "refusal": None}


def test_reason_that_openai_does_not_know_stands_beside(gateway, worker):
    thread = answered_by_hand(worker, lambda job: job.finish(finish_reason="repetition"))
    choice = gateway.call("/v1/chat/completions", CHAT)[1]["choices"][0]
    thread.join()
    assert (choice["finish_reason"], choice["x_finish"]) == ("stop", "repetition")


# --- streams ----------------------------------------------------------------------------------------------------------


def events_of(text):
    """The events of a stream, its comments dropped: (id or None, data)."""
    events = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":"))
        if fields:
            data = fields["data"]
            events.append((fields.get("id"), data if data == "[DONE]" else json.loads(data)))
    return events


def test_chat_stream_is_role_deltas_finish_usage_done(gateway, worker):
    worker.serve()
    status, text, headers = gateway.call(
        "/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    )
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = events_of(text)
    assert events.pop()[1] == "[DONE]"
    head = {key: events[0][1][key] for key in ("id", "object", "created", "model")}
    assert head["object"] == "chat.completion.chunk"
    assert all({key: data[key] for key in head} == head for _, data in events)
    usage = events.pop()[1]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 16
    assert all(data["usage"] is None for _, data in events)
    assert [(entry, data["choices"]) for entry, data in events] == [
        (None, [_choice({"role": "assistant", "content": ""})]),
        ("1-2", [_choice({"content": "backwards"})]),
        ("1-3", [_choice({"content": " it"})]),
        ("1-4", [_choice({"content": " say"})]),
        (None, [_choice({}, "stop")]),
    ]


def _choice(delta, finish_reason=None):
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def test_tool_call_stream_names_the_call_once(gateway, worker):
    def work(job):
        job.chunk("hm", channel=Channel.REASONING)
        job.chunk("", [1], channel=Channel.TOOL, tool=ToolDelta(index=0, id="c1", name="add", arguments_delta=""))
        job.chunk("", [2], channel=Channel.TOOL, tool=ToolDelta(index=0, arguments_delta='{"a":1}'))
        job.finish(finish_reason="tool_calls")

    thread = answered_by_hand(worker, work)
    events = events_of(gateway.call("/v1/chat/completions", CHAT | {"stream": True})[1])
    thread.join()
    deltas = [data["choices"][0]["delta"] for _, data in events[:-1]]
    function = {"arguments": "", "name": "add"}
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning": "hm", "reasoning_content": "hm"},
        {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": function}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":1}'}}]},
        {},
    ]
    assert events[-2][1]["choices"][0]["finish_reason"] == "tool_calls"


def test_completion_stream_counts_text_offsets(gateway, worker):
    def work(job):
        for word in ("ab", "c"):
            job.chunk(word, [1], logprobs=({"id": 1, "t": word, "b": [], "lp": -1.0, "top": []},))
        job.finish()

    thread = answered_by_hand(worker, work)
    text = gateway.call("/v1/completions", {"prompt": "x", "stream": True, "logprobs": 0})[1]
    thread.join()
    choices = [data["choices"][0] for _, data in events_of(text)[:-1]]
    assert [choice["text"] for choice in choices] == ["ab", "c", ""]
    assert [choice["logprobs"]["text_offset"] for choice in choices[:2]] == [[0], [2]]
    assert choices[-1]["finish_reason"] == "stop"


def test_streamed_samples_are_told_apart_by_their_index(gateway, worker):
    worker.serve()
    events = events_of(gateway.call("/v1/chat/completions", CHAT | {"stream": True, "n": 3})[1])
    texts = ["", "", ""]
    for _, data in events[:-1]:
        choice = data["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["backwards it say"] * 3


def test_stream_that_was_cut_resumes_behind_its_last_event(gateway, worker):
    def work(job):
        for word in "abc":
            job.chunk(word)
        job.finish()

    body = CHAT | {"stream": True, "x_job": {"id": "resumed"}}
    thread = answered_by_hand(worker, work)
    events = events_of(gateway.call("/v1/chat/completions", body)[1])
    thread.join()
    again = events_of(gateway.call("/v1/chat/completions", body, {"Last-Event-ID": events[1][0]})[1])
    assert again == [*events[2:4], (None, again[-2][1]), (None, "[DONE]")]
    assert gateway.call("/v1/chat/completions", body, {"Last-Event-ID": "nonsense"})[0] == 400


def test_silence_is_filled_with_comments(settings, worker):
    gateway = Gateway(GatewaySettings(**settings, keep_alive_s=0.1))
    try:
        thread = answered_by_hand(worker, lambda job: (time.sleep(0.5), job.chunk("x"), job.finish()))
        text = gateway.call("/v1/chat/completions", CHAT | {"stream": True})[1]
        thread.join()
        assert text.startswith(": waiting\n\n: waiting\n\n")
        assert len(events_of(text)) == 4
    finally:
        gateway.stop()


def test_error_before_the_first_event_has_its_status_and_a_later_one_is_an_event(gateway, worker):
    error = ErrorInfo(code=ErrorCode.PROMPT_TOO_LONG, message="request.messages: 9 tokens", field="request.messages")
    early = lambda job: job.finish(State.ERROR, finish_reason="error", error=error)  # noqa: E731
    thread = answered_by_hand(worker, early)
    status, body, headers = gateway.call("/v1/chat/completions", CHAT | {"stream": True})
    thread.join()
    assert (status, headers["x-should-retry"]) == (400, "false")
    assert body["error"] == {
        "message": "messages: 9 tokens",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "prompt_too_long",
    }
    failing = ErrorInfo(code=ErrorCode.NUMERICS, message="not numbers", retryable=True)
    thread = answered_by_hand(
        worker, lambda job: (job.chunk("x"), job.finish(State.ERROR, finish_reason="error", error=failing))
    )
    status, text, _ = gateway.call("/v1/chat/completions", CHAT | {"stream": True})
    thread.join()
    assert status == 200
    assert events_of(text)[-1][1]["error"]["code"] == "numerics"


# --- callers that leave, come twice or should not be here -------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("x_job", "stays"),
    [
        ({}, False),
        ({"on_disconnect": "continue"}, True),
        ({"id": "back-later"}, True),  # it can come back for the answer
        ({"id": "not-back", "on_disconnect": "cancel"}, False),
    ],
)
def test_caller_that_leaves_cancels_its_job_unless_it_can_come_back(gateway, worker, raw, keys, stream, x_job, stays):
    connection = gateway.open("/v1/chat/completions", CHAT | {"stream": stream, "x_job": x_job})
    job = worker.take().claim()
    job.chunk("a")
    time.sleep(0.2)
    connection.close()
    deadline = time.monotonic() + (0.5 if stays else 5)
    while not raw.xlen(keys.cancel) and time.monotonic() < deadline:
        time.sleep(0.02)
    cancelled = [fields[b"id"].decode() for _, fields in raw.xrange(keys.cancel)]
    assert cancelled == ([] if stays else [job.id])


def test_same_idempotency_key_is_one_job_with_one_answer(gateway, worker):
    worker.serve()
    headers = {"Idempotency-Key": "k 1"}
    first = gateway.call("/v1/chat/completions", CHAT, headers)[1]
    second = gateway.call("/v1/chat/completions", CHAT, headers)[1]
    assert first["id"] == second["id"]
    assert first["choices"] == second["choices"]
    assert gateway.call("/v1/chat/completions", CHAT)[1]["id"] != first["id"]
    for stream in (True, False):  # another request under the same key must not get the first one's answer
        status, body, answer_headers = gateway.call(
            "/v1/chat/completions", CHAT | {"seed": 1, "stream": stream}, headers
        )
        assert (status, body["error"]["code"], answer_headers["x-should-retry"]) == (409, "id_conflict", "false")


def test_keys_have_tenants_and_quotas(settings, worker):
    keys = {"sk-a": Caller(tenant="a", max_in_flight=1), "sk-b": Caller(tenant="b")}
    gateway = Gateway(GatewaySettings(**settings, access=Access(keys)))
    try:
        assert gateway.call("/v1/chat/completions", CHAT)[0] == 401
        assert gateway.call("/v1/models", headers={"Authorization": "Bearer sk-x"})[0] == 401
        held = gateway.open("/v1/chat/completions", CHAT | {"stream": True}, {"Authorization": "Bearer sk-a"})
        job = worker.take().claim()
        assert job.body["tenant"] == "a"
        status, body, headers = gateway.call("/v1/chat/completions", CHAT, {"Authorization": "Bearer sk-a"})
        assert (status, body["error"]["code"], headers["retry-after"]) == (429, "quota", "5")
        job.finish()
        assert held.getresponse().read().endswith(b"data: [DONE]\n\n")
        held.close()
        worker.serve()
        assert gateway.call("/v1/chat/completions", CHAT, {"Authorization": "Bearer sk-a"})[0] == 200
        assert gateway.call("/v1/chat/completions", CHAT, {"authorization": "bearer sk-b"})[0] == 200
    finally:
        gateway.stop()


def test_key_files_are_checked(tmp_path):
    file = tmp_path / "keys.json"
    for text, message in [
        ("{", "readable JSON"),
        ("{}", "JSON object of keys"),
        ('{"k": {}}', "tenant"),
        ('{"k": {"tenant": "a", "max_in_flight": 0}}', "whole number from 1"),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            Access.from_file(file)
    file.write_text('{"k": {"tenant": "a", "max_in_flight": 2}}')
    assert Access.from_file(file).caller("Bearer k") == Caller(tenant="a", max_in_flight=2)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{no", 400, None),
        (b"[]", 400, None),
        ({"messages": [], "model": "fake"}, 400, "messages"),
        (CHAT | {"temperature": -1}, 400, "temperature"),
        (CHAT | {"temperature": "hot"}, 400, "temperature"),
        (CHAT | {"n": 0}, 400, "n"),
        (CHAT | {"stream": "yes"}, 400, "stream"),
        (CHAT | {"response_format": {"type": "nonsense"}}, 400, "response_format.type"),
        (CHAT | {"x_job": {"nope": 1}}, 400, "x_job.nope"),
        (CHAT | {"x_job": {"id": "not usable"}}, 400, "x_job.id"),
        (CHAT | {"model": "gpt-9"}, 404, "model"),
        (b'{"messages": "' + b"x" * 9_000_000 + b'"}', 413, None),
    ],
)
def test_faulty_request_is_refused_with_its_field(gateway, body, status, param):
    got, answer, headers = gateway.call("/v1/chat/completions", body)
    assert (got, answer["error"]["param"], headers["x-should-retry"]) == (status, param, "false")
    assert answer["error"]["message"]


def test_unknown_paths_and_methods_have_the_same_form(gateway):
    for path, body, status in [("/v1/nothing", None, 404), ("/v1/chat/completions", None, 405)]:
        got, answer, _ = gateway.call(path, body)
        assert (got, set(answer["error"])) == (status, {"message", "type", "param", "code"})


def test_absent_worker_full_queue_and_absent_server_say_when_to_come_back(gateway, worker, raw, keys, settings):
    raw.hset(keys.info, "max_queue_len", 1)
    raw.xadd(keys.jobs(Lane.NORMAL), {"id": "waiting", "v": 1, "body": "{}"})
    raw.xadd(keys.jobs(Lane.NORMAL), {"id": "waiting2", "v": 1, "body": "{}"})
    status, body, headers = gateway.call("/v1/chat/completions", CHAT)
    assert (status, body["error"]["code"], headers["retry-after"]) == (429, "queue_full", "5")
    worker.die()
    time.sleep(2.1)  # what was known of workers is forgotten
    assert gateway.call("/health")[0] == 503
    status, body, headers = gateway.call("/v1/chat/completions", CHAT)
    assert (status, body["error"]["code"], headers["x-should-retry"]) == (503, "no_worker", "true")
    alone = Gateway(GatewaySettings(**settings | {"url": "redis://127.0.0.1:1"}))
    try:
        assert alone.call("/health")[0] == 503
        assert alone.call("/v1/chat/completions", CHAT)[1]["error"]["code"] == "no_queue"
        assert "gewell_redis_up 0.0" in alone.call("/metrics")[1]
    finally:
        alone.stop()


def test_facts_are_served(gateway, worker):
    worker.serve()
    models = gateway.call("/v1/models")[1]
    assert [model["id"] for model in models["data"]] == ["fake"]
    assert gateway.call("/v1/models/fake")[1]["object"] == "model"
    assert gateway.call("/v1/models/other")[0] == 404
    assert gateway.call("/health")[:2] == (200, {"status": "ok", "workers": 1})
    assert gateway.call("/version")[1]["version"]
    gateway.call("/v1/chat/completions", CHAT)
    metrics = gateway.call("/metrics")[1]
    assert 'gewell_gateway_requests_total{path="/v1/chat/completions",status="200"} 1.0' in metrics
    assert 'gewell_gateway_tokens_total{kind="generated"} 16.0' in metrics
    assert 'gewell_queue_depth{lane="normal"} 0.0' in metrics
    assert "gewell_workers 1.0" in metrics


def test_text_is_tokenised_as_the_worker_would(settings, worker):
    fixture = Path(__file__).parents[1] / "fixtures" / "gemma4-dense"  # ids are bytes
    gateway = Gateway(GatewaySettings(**settings, model_folder=fixture))
    try:
        status, body, _ = gateway.call("/tokenize", {"prompt": "hé", "add_special_tokens": False})
        assert (status, body["tokens"], body["count"]) == (200, list("hé".encode()), 3)
        assert gateway.call("/detokenize", {"tokens": body["tokens"]})[1] == {"prompt": "hé"}
        chat = gateway.call("/tokenize", {"messages": CHAT["messages"]})[1]
        assert b"say it backwards" in bytes(token for token in chat["tokens"] if token < 256)
        assert gateway.call("/tokenize", {"prompt": 5})[0] == 400
        assert gateway.call("/detokenize", {"tokens": ["x"]})[0] == 400
    finally:
        gateway.stop()


def test_absent_vocabulary_is_told(gateway):
    status, body, _ = gateway.call("/tokenize", {"prompt": "x"})
    assert (status, body["error"]["code"]) == (501, "unsupported")
