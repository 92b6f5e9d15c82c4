"""A fine-tune with turns of its own is served by its own template, or it answers to prompts it was never trained on."""

import json
from pathlib import Path

import pytest
from harness import Harness, expected_ids

from gewell.protocol import State, job_entry

TURNS = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<answer>"


@pytest.mark.redis
def test_template_of_the_flag_renders_the_chat(harness: Harness, tmp_path: Path):
    template = tmp_path / "turns.jinja"
    template.write_text(TURNS)
    harness.start_worker("--chat-template", str(template))
    request = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "seed": 3}
    harness.redis.xadd(harness.keys.jobs("normal"), job_entry("a", json.dumps({"kind": "chat", "request": request})))
    record = harness.result("a")
    assert record.state == State.DONE
    prompt = b"<user> hello\n<answer>"
    assert record.usage.prompt == len(prompt)
    assert list(record.token_ids) == expected_ids(prompt, 3, 5)


@pytest.mark.redis
def test_template_that_cannot_be_parsed_is_one_clear_line(harness: Harness, tmp_path: Path):
    template = tmp_path / "broken.jinja"
    template.write_text("{% for m in messages %}")
    worker = harness.start_worker("--chat-template", str(template), wait=False)
    assert worker.process.wait(30) != 0
    assert "broken.jinja" in worker.log
    assert "Traceback" not in worker.log
