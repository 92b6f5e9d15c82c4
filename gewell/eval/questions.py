"""What is asked and what must come back: from the generated tasks, or from the user's own file."""

import base64
import json
import mimetypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gewell.errors import ConfigError
from gewell.eval.scorers import Scorer
from gewell.eval.tasks.sample import CountTokens, Sample, user
from gewell.eval.tasks.suite import NIAH_LENGTHS, TASKS, held_out

THOUGHT_TOKENS = 128  # room for thinking before the answer
SPARE_TOKENS = 32  # room for a model that answers in more words than expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`group` is the line of the report that it counts for. A tool call is expected as JSON, {"name", "arguments"}."""

    group: str
    messages: Sequence[Mapping[str, Any]]
    expected: str
    scorer: Scorer
    max_tokens: int
    thinking: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None


def from_sample(sample: Sample, group: str, count: CountTokens) -> Question:
    scorer, expected = sample.scorer, sample.answer
    if sample.call is not None:
        scorer, expected = Scorer.JSON, json.dumps(sample.call)
    return Question(
        group=group,
        messages=sample.messages,
        expected=expected,
        scorer=scorer,
        max_tokens=2 * count(expected) + SPARE_TOKENS + (THOUGHT_TOKENS if sample.thinking else 0),
        thinking=sample.thinking,
        tools=sample.tools,
    )


def task_questions(names: Sequence[str], num: int, *, count: CountTokens, seed: int = 0) -> Iterator[Question]:
    """`num` held-out samples of each task. Raises ConfigError for a name that is none."""
    for name in names:
        if name not in TASKS:
            raise ConfigError("tasks", name, f"must be one of {', '.join(TASKS)}")
        for sample in held_out(name, num, count=count, seed=seed):
            yield from_sample(sample, name, count)


def niah_questions(
    num: int, *, count: CountTokens, max_context: int, lengths: Sequence[int] = NIAH_LENGTHS, seed: int = 0
) -> Iterator[Question]:
    """Sixteen keys asked for in order, `num` times for each length that the model can read."""
    for length in lengths:
        if length > max_context:
            continue
        for sample in held_out("niah", num, count=count, num_tokens=length, seed=seed):
            yield from_sample(sample, f"niah {length}", count)


_KNOWN = frozenset({"prompt", "messages", "answer", "scorer", "image", "group", "max_tokens", "thinking"})


def file_questions(path: Path, *, count: CountTokens) -> Iterator[Question]:
    """One question a line, an object with prompt or messages, answer and, if need be, the other known fields.

    scorer   exact (default), number, contains, lines, json
    image    a picture's path, relative to the file; it comes before the prompt
    Raises ConfigError that names the line and the field.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError("data", str(path), f"must be a readable file of UTF-8 text: {e}") from e
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _from_line(f"{path}:{number}", line, path.parent, count)


def _from_line(where: str, line: str, folder: Path, count: CountTokens) -> Question:
    try:
        entry = json.loads(line)
    except ValueError as e:
        raise ConfigError(where, line[:80], "must be a JSON object") from e
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ConfigError(where, line[:80], "must be an object with either prompt or messages")
    unknown = sorted(entry.keys() - _KNOWN)
    if unknown:
        raise ConfigError(f"{where}: {unknown[0]}", entry[unknown[0]], f"known fields are {', '.join(sorted(_KNOWN))}")
    if not isinstance(entry.get("answer"), str):
        raise ConfigError(f"{where}: answer", entry.get("answer"), "must be a text")
    try:
        scorer = Scorer(entry.get("scorer", "exact"))
    except ValueError:
        raise ConfigError(f"{where}: scorer", entry["scorer"], f"must be one of {', '.join(Scorer)}") from None
    max_tokens = entry.get("max_tokens", 2 * count(entry["answer"]) + SPARE_TOKENS)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise ConfigError(f"{where}: max_tokens", max_tokens, "must be a whole number of at least 1")
    if not isinstance(entry.get("thinking", False), bool):
        raise ConfigError(f"{where}: thinking", entry["thinking"], "must be true or false")
    messages = _messages(where, entry["messages"]) if "messages" in entry else [user(_text(where, entry["prompt"]))]
    if "image" in entry:
        messages = [*messages[:-1], _with_image(where, messages[-1], folder / _text(where, entry["image"]))]
    return Question(
        group=str(entry.get("group", "data")),
        messages=messages,
        expected=entry["answer"],
        scorer=scorer,
        max_tokens=max_tokens,
        thinking=entry.get("thinking", False),
    )


def _text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(where, value, "must be a text")
    return value


def _messages(where: str, value: object) -> list[dict[str, Any]]:
    """What is inside a message is the worker's to judge: its refusal is the question's answer."""
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise ConfigError(f"{where}: messages", value, "must be a list of messages, at least one")
    return value


def _with_image(where: str, message: Mapping[str, Any], file: Path) -> dict[str, Any]:
    if not isinstance(message.get("content"), str):
        raise ConfigError(f"{where}: image", str(file), "the last message must be a text to put it before")
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    try:
        encoded = base64.b64encode(file.read_bytes()).decode()
    except OSError as e:
        raise ConfigError(f"{where}: image", str(file), f"must be a readable file: {e.strerror}") from e
    image = {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{encoded}"}}
    return {**message, "content": [image, {"type": "text", "text": message["content"]}]}
