"""`gewell eval` from its command line to its files, through a server and a worker of its own."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from gewell_producers.cli.evaluate import _table
from rich.console import Console

from gewell.eval.report import GroupScore, Report

GEWELL = Path(sys.executable).with_name("gewell")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([GEWELL, "eval", *arguments], capture_output=True, text=True, timeout=110)


@pytest.mark.redis
@pytest.mark.slow
def test_a_file_of_questions_is_answered_scored_and_drawn(tmp_path: Path) -> None:
    questions = [
        {"prompt": "What is 347+585?", "answer": "932", "scorer": "number", "group": "sums"},
        {"prompt": "What is 208+91?", "answer": "300", "scorer": "number", "group": "sums"},
        {"prompt": "Copy:\nlamp oak river", "answer": "lamp oak river", "group": "copies"},
    ]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, questions)))
    files = ("--json", str(tmp_path / "r.json"), "--png", str(tmp_path / "r.png"))
    ran = run("tasks", "gewell-nano", "--data", str(tmp_path / "q.jsonl"), "--least", "0.9", *files)
    assert ran.returncode == 1, ran.stderr  # one expected answer is wrong on purpose
    assert "below 90%: sums" in ran.stdout
    groups = {group["name"]: group for group in json.loads((tmp_path / "r.json").read_text())["groups"]}
    assert groups["sums"]["score"] == 0.5
    assert groups["sums"]["wrong"] == [{"expected": "300", "answer": "299", "error": ""}]
    assert groups["copies"]["score"] == 1
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("tasks", "no-such-model"), "no-such-model"),
        (("tasks", "gewell-nano", "--tasks", "poetry"), "poetry"),
        (("tasks", "gewell-nano", "--data", "/no/such/file"), "/no/such/file"),
        (("niah", "gewell-nano", "--lengths", "many"), "many"),
        (("niah", "gewell-nano", "--lengths", "9000"), "nothing to ask"),
    ],
)
def test_what_cannot_be_asked_is_said_before_anything_is_started(arguments: tuple[str, ...], named: str) -> None:
    ran = run(*arguments)
    assert ran.returncode == 2
    assert named in ran.stderr
    assert "Traceback" not in ran.stderr


def test_on_a_narrow_screen_no_header_and_no_number_of_the_table_is_cut() -> None:
    group = GroupScore(
        name="niah, 131072 tokens", num_questions=16, num_values=256, score=0.99, low=0.975, high=1.0,
        num_errors=0, num_cut_off=10, prompt_tokens=131072.0, wrong=(),
    )  # fmt: skip
    console = Console(width=80, file=io.StringIO())
    console.print(_table(Report(model="m", about={}, groups=(group,))))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\u2026" not in shown
    for text in ("asked", "failed", "97.5 - 100.0", "131072"):
        assert text in shown
