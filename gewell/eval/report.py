"""Scores by group, as a table, as JSON and as a picture."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gewell.errors import ConfigError
from gewell.eval.questions import Question
from gewell.eval.scorers import num_parts, score

NUM_KEPT_WRONG = 5  # wrong answers of each group that the JSON shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back for a question. A job that ended badly has the code of its `error` and earns nothing."""

    text: str
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def is_cut_off(self) -> bool:
        return self.error == "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScore:
    """`score` is the mean of the answers' points; [low, high] holds it with 95 % confidence (Wilson's interval).

    num_values   what the interval counts as trials: an answer's lines where lines are scored one by one, else answers
    """

    name: str
    num_questions: int
    num_values: int
    score: float
    low: float
    high: float
    num_errors: int
    num_cut_off: int
    prompt_tokens: float  # mean
    wrong: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    model: str
    about: Mapping[str, Any]  # what was run: seed, number of questions, seconds, the worker's settings
    groups: tuple[GroupScore, ...]

    @property
    def mean(self) -> float:
        return sum(group.score for group in self.groups) / max(1, len(self.groups))

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, **self.about, "mean": self.mean, "groups": [asdict(g) for g in self.groups]}

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def write_png(self, path: Path) -> None:
        """Raises ConfigError when matplotlib is not installed."""
        try:
            import matplotlib
        except ImportError as e:
            raise ConfigError(
                "png", str(path), "needs matplotlib: pip install 'gewell[plots]' (in a checkout: '.[plots]')"
            ) from e
        matplotlib.use("Agg")
        from matplotlib import pyplot

        names = [group.name for group in self.groups]
        scores = [100 * group.score for group in self.groups]
        below = [100 * (group.score - group.low) for group in self.groups]
        above = [100 * (group.high - group.score) for group in self.groups]
        figure, axes = pyplot.subplots(figsize=(7, 0.4 * len(names) + 1.2), layout="constrained")
        axes.barh(names, scores, xerr=[below, above], color="#4477aa", error_kw={"ecolor": "#333333", "capsize": 2})
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("right, % (95 % interval)")
        axes.set_title(self.model)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def make_report(model: str, answered: Iterable[tuple[Question, Answer]], about: Mapping[str, Any]) -> Report:
    by_group: dict[str, list[tuple[Question, Answer, float]]] = {}
    for question, answer in answered:
        points = (
            0.0 if answer.error and not answer.is_cut_off else score(question.scorer, question.expected, answer.text)
        )
        by_group.setdefault(question.group, []).append((question, answer, points))
    return Report(model=model, about=about, groups=tuple(_group(name, rows) for name, rows in by_group.items()))


def _group(name: str, rows: list[tuple[Question, Answer, float]]) -> GroupScore:
    num = len(rows)
    mean = sum(points for _, _, points in rows) / num
    num_values = sum(num_parts(question.scorer, question.expected) for question, _, _ in rows)
    low, high = wilson_interval(mean, num_values)
    wrong = [
        {"expected": question.expected, "answer": answer.text, "error": answer.error or ""}
        for question, answer, points in rows
        if points < 1
    ]
    return GroupScore(
        name=name,
        num_questions=num,
        num_values=num_values,
        score=mean,
        low=low,
        high=high,
        num_errors=sum(answer.error is not None and not answer.is_cut_off for _, answer, _ in rows),
        num_cut_off=sum(answer.is_cut_off for _, answer, _ in rows),
        prompt_tokens=sum(answer.num_prompt_tokens for _, answer, _ in rows) / num,
        wrong=tuple(wrong[:NUM_KEPT_WRONG]),
    )


def wilson_interval(share: float, num: int, z: float = 1.96) -> tuple[float, float]:
    """Where the true share lies, with 95 % confidence, when `num` trials gave `share`."""
    centre = share + z * z / (2 * num)
    spread = z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    scale = 1 + z * z / num
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
