"""Keyed records among distractors: some are overwritten, some are asked for, in an order of the asker's choice.

What a compressed cache, a quantiser or a wrong page table breaks first: every value is four digits that can be known
only from one line, far back.
"""

from random import Random
from typing import Any

from gewell.eval.scorers import Scorer
from gewell.eval.tasks.sample import CountTokens, Request, Sample, assistant, user
from gewell.eval.tasks.words import ADJECTIVES, CITIES, DAYS, FIRST_NAMES, ITEMS, NOUNS

HEAD = "Records:\n"
ASK_ONE = ("What is the value of {key}?", "Value of {key}?", "Tell me the value of {key}.")
ASK_MANY = ("Give the values of these keys in this order:\n{keys}", "Values of these keys, in order:\n{keys}")
UNKNOWN = "unknown"


def record_line(key: str, value: str, *, is_update: bool = False) -> str:
    """An update takes the place of the record above it that has the same key."""
    return f"{'update ' if is_update else ''}{key}={value}\n"


class RecordBook:
    """A text of records in random order, with the value that counts for every key."""

    def __init__(
        self, rng: Random, num_tokens: int, count: CountTokens, *, filler_share: float, update_share: float
    ) -> None:
        """
        num_tokens     length of the text, reached to within a line
        filler_share   of lines that are no records
        update_share   of record lines that overwrite an earlier one
        """
        self._rng = rng
        self.values: dict[str, str] = {}
        self._is_updated: set[str] = set()
        lines: list[str] = []
        length = 0
        while length < num_tokens or len(self.values) < 2:
            if rng.random() < filler_share:
                line = filler_line(rng)
            elif self.values and rng.random() < update_share:
                line = self._update()
            else:
                line = self._record()
            length += count(line)
            lines.append(line)
        self.text = "".join(lines)

    def _record(self) -> str:
        key = self.unused_key()
        self.values[key] = _value(self._rng)
        return record_line(key, self.values[key])

    def _update(self) -> str:
        key = self._rng.choice(list(self.values))
        if key in self._is_updated:  # one update a key: the text alone says which value is the newer one
            return self._record()
        self._is_updated.add(key)
        self.values[key] = _value(self._rng)
        return record_line(key, self.values[key], is_update=True)

    def unused_key(self) -> str:
        while True:
            key = f"{self._rng.choice(ADJECTIVES)}-{self._rng.choice(NOUNS)}"
            if key not in self.values:
                return key

    def some_keys(self, num_keys: int) -> list[str]:
        """Distinct keys in random order; fewer when the text has fewer. Updated ones come as often as others."""
        keys = list(self.values)
        return self._rng.sample(keys, min(num_keys, len(keys)))


def filler_line(rng: Random) -> str:
    name, city, day = rng.choice(FIRST_NAMES), rng.choice(CITIES), rng.choice(DAYS)
    item, number = rng.choice(ITEMS), rng.randrange(2, 100)
    return rng.choice(_FILLERS).format(name=name, city=city, day=day, item=item, number=number)


_FILLERS = (
    "On {day} {name} moved {number} boxes to {city}.\n",
    "{name} saw a {item} in {city} and bought it.\n",
    "The train to {city} leaves on {day}.\n",
    "Note: ask {name} about the {item}.\n",
    "{number} people came to the market in {city} on {day}.\n",
)


def make_records(request: Request) -> Sample:
    """Records, then one or more questions, each for one key or for several; all of it about `num_tokens` long."""
    rng, num_tokens = request.rng, request.num_tokens
    num_turns = 1 if num_tokens < 200 else rng.randint(1, 4) if num_tokens < 1500 else rng.randint(1, 8)
    most_keys = min(32, max(2, num_tokens // 40))
    sizes = [1 if rng.random() < 0.2 else rng.randint(2, most_keys) for _ in range(num_turns)]
    num_other_tokens = sum(sizes) * request.count("cold-apple\ncold-apple=1234\n") + 30 * num_turns
    book = RecordBook(
        rng,
        max(24, num_tokens - num_other_tokens),
        request.count,
        filler_share=rng.choice((0.0, 0.0, 0.25, 0.5, 0.75)),
        update_share=rng.choice((0.0, 0.1, 0.25)),
    )
    messages: list[dict[str, Any]] = []
    for turn, num_keys in enumerate(sizes):
        question, answer, keys = _question(rng, book, num_keys)
        messages.append(user(f"{HEAD}{book.text}\n{question}" if turn == 0 else question))
        if turn < num_turns - 1:
            messages.append(assistant(answer))
    thinking = rng.random() < 0.15
    thought = f"Look up {keys[0]}." if len(keys) == 1 else f"Look up {len(keys)} keys, from {keys[0]} on."
    return Sample(
        task="records",
        messages=messages,
        answer=answer,
        thinking=thinking,
        thought=thought if thinking else "",
        scorer=Scorer.LINES,
    )


def make_torture(request: Request, *, num_keys: int = 16) -> Sample:
    """Sixteen requested keys in order, half of the lines no records, one record in ten overwritten.

    Prompt and answer together stay below `num_tokens`.
    """
    rng = request.rng
    num_other_tokens = num_keys * request.count(record_line("cold-apple", "1234")) * 2 + 64
    book = RecordBook(
        rng, max(64, request.num_tokens - num_other_tokens), request.count, filler_share=0.5, update_share=0.1
    )
    keys = book.some_keys(num_keys)
    question = ASK_MANY[0].format(keys="\n".join(keys))
    return Sample(
        task="niah",
        messages=[user(f"{HEAD}{book.text}\n{question}")],
        answer=_values_answer(book, keys),
        scorer=Scorer.LINES,
    )


def _question(rng: Random, book: RecordBook, num_keys: int) -> tuple[str, str, list[str]]:
    if num_keys == 1:
        key = book.some_keys(1)[0] if rng.random() < 0.85 else book.unused_key()
        return rng.choice(ASK_ONE).format(key=key), book.values.get(key, UNKNOWN), [key]
    keys = book.some_keys(num_keys)
    return rng.choice(ASK_MANY).format(keys="\n".join(keys)), _values_answer(book, keys), keys


def _values_answer(book: RecordBook, keys: list[str]) -> str:
    return "\n".join(f"{key}={book.values[key]}" for key in keys)


def _value(rng: Random) -> str:
    return f"{rng.randrange(10000):04d}"
