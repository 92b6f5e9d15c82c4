"""The table's numbers are what the answers earned."""

import json
from pathlib import Path

import pytest

from gewell.eval.questions import Question
from gewell.eval.report import Answer, make_report, wilson_interval
from gewell.eval.scorers import Scorer


def question(group: str, expected: str, scorer: Scorer = Scorer.EXACT) -> Question:
    return Question(group=group, messages=[], expected=expected, scorer=scorer, max_tokens=8)


ANSWERED = [
    (question("a", "1"), Answer(text="1", num_prompt_tokens=10)),
    (question("a", "2"), Answer(text="3", num_prompt_tokens=20)),
    (question("a", "4"), Answer(text="4", error="numerics")),
    (question("a", "5"), Answer(text="5", error="length")),
    (question("b", "x=1\ny=2", Scorer.LINES), Answer(text="x=1\ny=3")),
]


def test_scores_are_means_by_group_and_a_failed_job_earns_nothing() -> None:
    report = make_report("m", ANSWERED, {"seed": 1})
    a, b = report.groups
    assert (a.name, a.num_questions, a.num_values, a.score) == ("a", 4, 4, 0.5)
    assert (a.num_errors, a.num_cut_off) == (1, 1)
    assert (b.name, b.score, b.num_questions, b.num_values) == ("b", 0.5, 1, 2)
    assert a.prompt_tokens == 7.5
    assert report.mean == 0.5
    assert [wrong["answer"] for wrong in a.wrong] == ["3", "4"]


def test_the_files_hold_the_report(tmp_path: Path) -> None:
    report = make_report("m", ANSWERED, {"seed": 1})
    report.write_json(tmp_path / "r.json")
    read = json.loads((tmp_path / "r.json").read_text())
    assert (read["model"], read["seed"], read["groups"][1]["score"]) == ("m", 1, 0.5)
    pytest.importorskip("matplotlib")
    report.write_png(tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_intervals_shrink_with_more_questions_and_stay_within_0_and_1() -> None:
    few, many = wilson_interval(0.9, 20), wilson_interval(0.9, 2000)
    assert few[0] < many[0] < 0.9 < many[1] < few[1]
    assert wilson_interval(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-3)
    assert wilson_interval(0.0, 10)[0] == 0.0
