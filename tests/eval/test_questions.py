"""A user's file is read as it is meant, and a faulty line is named."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from gewell.errors import ConfigError
from gewell.eval.questions import Question, file_questions, from_sample, niah_questions, task_questions
from gewell.eval.scorers import Scorer
from gewell.eval.tasks.sample import Sample, user


def read(path: Path, *entries: Any) -> list[Question]:
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries))
    return list(file_questions(path, count=len))


def test_a_line_needs_a_prompt_and_an_answer_only(tmp_path: Path) -> None:
    (question,) = read(tmp_path / "q.jsonl", {"prompt": "2+2?", "answer": "4"}, "")
    assert question.messages == [user("2+2?")]
    assert (question.expected, question.scorer, question.group) == ("4", Scorer.EXACT, "data")


def test_all_fields_are_taken(tmp_path: Path) -> None:
    (tmp_path / "dot.png").write_bytes(b"\x89PNG")
    line = {"messages": [user("Which?")], "answer": "red", "scorer": "contains", "image": "dot.png", "group": "see"}
    (question,) = read(tmp_path / "q.jsonl", {**line, "max_tokens": 9, "thinking": True})
    image, text = question.messages[0]["content"]
    assert image["image_url"]["url"] == "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()
    assert text == {"type": "text", "text": "Which?"}
    assert (question.scorer, question.group, question.max_tokens) == (Scorer.CONTAINS, "see", 9)
    assert question.thinking


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "q.jsonl:2"),
        ({"answer": "4"}, "q.jsonl:2"),
        ({"prompt": "a", "messages": [], "answer": "4"}, "q.jsonl:2"),
        ({"prompt": "a", "answer": 4}, "answer"),
        ({"prompt": "a", "answer": "4", "scorer": "fuzzy"}, "scorer"),
        ({"prompt": "a", "answer": "4", "anwser": "4"}, "anwser"),
        ({"prompt": "a", "answer": "4", "image": "missing.png"}, "image"),
        ({"messages": [], "answer": "4"}, "messages"),
        ({"messages": "a", "answer": "4"}, "messages"),
        ({"messages": [{"role": "user"}], "answer": "4", "image": "dot.png"}, "image"),
        ({"prompt": "a", "answer": "4", "max_tokens": "9"}, "max_tokens"),
        ({"prompt": "a", "answer": "4", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "answer": "4", "thinking": "no"}, "thinking"),
    ],
)
def test_a_faulty_line_is_named(tmp_path: Path, line: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(tmp_path / "q.jsonl", {"prompt": "a", "answer": "b"}, line)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match=r"q\.jsonl"):
        list(file_questions(tmp_path / "q.jsonl", count=len))


def test_a_missing_file_and_an_unknown_task_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        list(file_questions(tmp_path / "none.jsonl", count=len))
    with pytest.raises(ConfigError, match="poetry"):
        list(task_questions(["poetry"], 1, count=len))


def test_a_tool_call_is_expected_as_json() -> None:
    call = {"name": "get_time", "arguments": {"city": "Rome"}}
    question = from_sample(Sample(task="tool", messages=[user("Time in Rome?")], call=call), "tool", len)
    assert question.scorer is Scorer.JSON
    assert json.loads(question.expected) == call


def test_lengths_beyond_the_context_are_left_out() -> None:
    asked = list(niah_questions(2, count=lambda text: len(text) // 3, max_context=2048))
    assert [question.group for question in asked] == ["niah 1024"] * 2 + ["niah 2048"] * 2
