"""How an answer is compared with the right one: 1 for right, 0 for wrong, a share where an answer has parts."""

import json
import re
from collections.abc import Callable
from enum import StrEnum

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Scorer(StrEnum):
    EXACT = "exact"  # the same text, apart from space around it
    NUMBER = "number"  # the last number in the answer is the expected one
    CONTAINS = "contains"  # the expected text occurs in the answer, whatever its case
    LINES = "lines"  # share of expected lines that stand at their place
    JSON = "json"  # the same value; the order of an object's keys is free


def score(scorer: Scorer, expected: str, answer: str) -> float:
    return _SCORERS[scorer](expected.strip(), answer.strip())


def num_parts(scorer: Scorer, expected: str) -> int:
    """How many parts of an answer are right or wrong by themselves."""
    return max(1, len(expected.strip().splitlines())) if scorer is Scorer.LINES else 1


def _exact(expected: str, answer: str) -> float:
    return float(expected == answer)


def _number(expected: str, answer: str) -> float:
    found = _NUMBER.findall(answer.replace(",", ""))
    try:
        return float(bool(found) and float(found[-1]) == float(expected))
    except ValueError:
        return 0.0


def _contains(expected: str, answer: str) -> float:
    return float(expected.casefold() in answer.casefold())


def _lines(expected: str, answer: str) -> float:
    wanted = expected.splitlines()
    got = answer.splitlines()
    num_right = sum(a.strip() == b.strip() for a, b in zip(wanted, got, strict=False))
    return num_right / max(1, len(wanted))


def _json(expected: str, answer: str) -> float:
    try:
        is_same: bool = json.loads(expected) == json.loads(answer)
    except ValueError:
        return 0.0
    return float(is_same)


_SCORERS: dict[Scorer, Callable[[str, str], float]] = {
    Scorer.EXACT: _exact,
    Scorer.NUMBER: _number,
    Scorer.CONTAINS: _contains,
    Scorer.LINES: _lines,
    Scorer.JSON: _json,
}
