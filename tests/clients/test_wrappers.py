"""Libraries that wrap OpenAI's client and are pickier than it: litellm, langchain-openai."""

import pytest

WRITER = [
    {"role": "system", "content": "You are the writer. Keep the record and apply the critic's remarks."},
    {"role": "user", "content": "Write this record, one field per line.\nitem=mug; colour=red; count=7"},
]
RECORD = "item: mug\ncolour: red\ncount: 7"


def test_litellm_answers_and_streams(base_url):
    litellm = pytest.importorskip("litellm")
    given = {"model": "openai/gewell-nano", "api_base": base_url, "api_key": "unused", "messages": WRITER}
    answer = litellm.completion(**given, temperature=0)
    assert answer.choices[0].message.content == RECORD
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    parts = litellm.completion(**given, temperature=0, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == RECORD


def test_langchain_answers_and_streams(base_url):
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(
        model="gewell-nano", base_url=base_url, api_key="unused", temperature=0, stream_usage=True
    )
    turns = [(message["role"], message["content"]) for message in WRITER]
    answer = model.invoke(turns)
    assert answer.content == RECORD
    assert answer.usage_metadata["output_tokens"] > 5
    assert "".join(part.content for part in model.stream(turns)) == RECORD
