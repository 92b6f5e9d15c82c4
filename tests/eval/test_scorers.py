"""A scorer that is too kind hides a broken cache."""

import pytest

from gewell.eval.scorers import Scorer, score


@pytest.mark.parametrize(
    ("scorer", "expected", "answer", "points"),
    [
        (Scorer.EXACT, "blue", " blue\n", 1),
        (Scorer.EXACT, "blue", "Blue", 0),
        (Scorer.NUMBER, "932", "347 + 585 = 932.", 1),
        (Scorer.NUMBER, "932", "932 is wrong, 933 is right", 0),
        (Scorer.NUMBER, "1250", "It is 1,250", 1),
        (Scorer.NUMBER, "7", "none", 0),
        (Scorer.CONTAINS, "Oslo", "You live in oslo.", 1),
        (Scorer.CONTAINS, "Oslo", "You live in Rome.", 0),
        (Scorer.LINES, "a=1\nb=2\nc=3\nd=4", "a=1\nb=9\nc=3", 0.5),
        (Scorer.LINES, "a=1\nb=2", "b=2\na=1", 0),
        (Scorer.LINES, "a=1", "", 0),
        (Scorer.JSON, '{"a":1,"b":[2]}', '{ "b": [2], "a": 1 }', 1),
        (Scorer.JSON, '{"a":1}', '{"a":1', 0),
    ],
)
def test_points(scorer: Scorer, expected: str, answer: str, points: float) -> None:
    assert score(scorer, expected, answer) == points
