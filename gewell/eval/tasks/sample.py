"""One question with its one right answer, in the shape of a chat."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any, NamedTuple

from gewell.eval.scorers import Scorer

CountTokens = Callable[[str], int]


class Split(StrEnum):
    """Where a sample may be used. The two never draw the same random stream."""

    TRAIN = "train"
    HELD_OUT = "heldout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A conversation whose last message is the user's, and what the model must answer.

    History inside `messages` holds right answers only, so a trainer may learn from all of its assistant messages.
    """

    task: str
    messages: Sequence[Mapping[str, Any]]
    answer: str = ""
    thinking: bool = False
    thought: str = ""  # what a trained model thinks before the answer; only with `thinking`
    tools: Sequence[Mapping[str, Any]] | None = None
    call: Mapping[str, Any] | None = None  # {"name", "arguments"}: the answer is this tool call instead of text
    scorer: Scorer = Scorer.EXACT


class Request(NamedTuple):
    """What a task is asked to make.

    num_tokens   about how long the prompt shall be; tasks of one natural length ignore it
    count        tokens of a text, by the tokenizer of the model that will read it
    """

    rng: Random
    split: Split
    num_tokens: int
    count: CountTokens


Make = Callable[[Request], Sample]


def sample_rng(task: str, split: Split, seed: int, idx: int) -> Random:
    """The random stream of one sample: the same on every machine, another for every argument."""
    return Random(f"{task}/{split}/{seed}/{idx}")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}
