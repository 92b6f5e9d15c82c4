"""Rows of a fixed length filled with whole samples. No torch: this runs in many processes at once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gewell.eval.tasks.sample import Split
from gewell.eval.tasks.suite import TASKS, make_sample
from gewell_training.encode import HISTORY, NOT_LEARNED, Encoded

TASK_NAMES = tuple(TASKS)

# Share of tokens. Records come in all lengths up to the curriculum's, so their share of samples is far smaller.
MIXTURE = {
    "records": 0.42,
    "niah": 0.12,
    "recall": 0.09,
    "writer": 0.06,
    "critic": 0.08,
    "json": 0.05,
    "arithmetic": 0.10,
    "sort": 0.025,
    "copy": 0.02,
    "tool": 0.025,
    "smalltalk": 0.005,
}


# How much a token of a task's answers counts. Short answers to long prompts would be drowned by long copies.
WEIGHTS = {"critic": 4.0, "tool": 2.0, "recall": 2.0, "records": 1.5, "niah": 1.5}


class Row(NamedTuple):
    """One packed row; all arrays are [row_tokens].

    ids       token ids, pad 0 after the last sample
    document  number of the sample within the row
    position  of the token within its sample
    group     as in `Encoded`, but numbered through the row; shifted so that entry t speaks of predicting ids[t + 1]
    task      index into TASK_NAMES of the token's sample
    """

    ids: NDArray[np.int32]
    document: NDArray[np.int32]
    position: NDArray[np.int32]
    group: NDArray[np.int32]
    task: NDArray[np.int32]


class Packer:
    """Collects samples until no more fit, then gives out the row."""

    def __init__(self, row_tokens: int) -> None:
        self.row_tokens = row_tokens
        self._samples: list[tuple[Encoded, str]] = []
        self.num_free = row_tokens

    def add(self, encoded: Encoded, task: str) -> bool:
        """Whether it fitted."""
        if len(encoded.ids) > self.num_free:
            return False
        self._samples.append((encoded, task))
        self.num_free -= len(encoded.ids)
        return True

    def row(self) -> Row:
        """The samples so far as a row; the packer is empty afterwards."""
        columns = np.zeros((5, self.row_tokens), dtype=np.int32)
        columns[3] = NOT_LEARNED
        start, num_groups = 0, 0
        for n, (encoded, task) in enumerate(self._samples):
            end = start + len(encoded.ids)
            group = np.array(encoded.group, dtype=np.int32)
            columns[0, start:end] = encoded.ids
            columns[1, start:end] = n
            columns[2, start:end] = np.arange(end - start)
            columns[3, start : end - 1] = np.where(group >= 0, group + num_groups, group)[1:]
            columns[4, start:end] = TASK_NAMES.index(task)
            num_groups += int(group.max()) + 1
            start = end
        columns[1, start:] = len(self._samples)
        columns[2, start:] = np.arange(self.row_tokens - start)
        self._samples, self.num_free = [], self.row_tokens
        return Row(*columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long record texts are: log-uniform up to `longest`, and a share of them at full length."""

    longest: int
    full_share: float = 0.35
    shortest: int = 48

    def draw(self, rng: Random) -> int:
        if rng.random() < self.full_share:
            return self.longest
        return int(self.shortest * (self.longest / self.shortest) ** rng.random())


def training_rows(
    encode: Callable[..., Encoded],
    count: Callable[[str], int],
    row_tokens: int,
    seed: int,
    longest: Callable[[], int],
    mixture: dict[str, float] = MIXTURE,
) -> Iterator[Row]:
    """Rows without end. `longest` is asked anew for every sample: the curriculum moves while rows are made."""
    rng = Random(f"rows/{seed}")
    used = dict.fromkeys(mixture, 0.0)
    packer, idx, held = Packer(row_tokens), 0, None
    fill = [name for name in mixture if name not in ("records", "niah")]
    while True:
        # The task that lags furthest behind its share of tokens, with some chance in it.
        task = held[1] if held else min(mixture, key=lambda name: used[name] / mixture[name] * rng.uniform(0.9, 1.1))
        if held:
            encoded, held = held[0], None
        else:
            num_tokens = min(Lengths(longest=longest()).draw(rng), row_tokens - 100)
            if task == "niah":
                num_tokens = max(num_tokens, 400)
            encoded = encode(make_sample(task, Split.TRAIN, seed, idx, count=count, num_tokens=num_tokens))
            idx += 1
            if len(encoded.ids) > row_tokens:
                continue
            used[task] += len(encoded.ids) + 1
        if not packer.add(encoded, task):
            held = (encoded, task)
            num_misses = 0
            while packer.num_free > 100 and num_misses < 6:  # what is left takes short samples
                name = min(fill, key=lambda name: used[name] / mixture[name] * rng.uniform(0.9, 1.1))
                short = encode(make_sample(name, Split.TRAIN, seed, idx, count=count, num_tokens=64))
                idx += 1
                used[name] += len(short.ids)  # also when it does not fit: else the same task is drawn again
                num_misses += not packer.add(short, name)
            yield packer.row()


def held_out_rows(
    encode: Callable[..., Encoded],
    count: Callable[[str], int],
    row_tokens: int,
    *,
    sizes: dict[str, tuple[str, int, int]],
    seed: int = 0,
) -> Iterator[tuple[Row, NDArray[np.int32]]]:
    """Rows of held-out samples, each with the index into `sizes` of every token's test.

    sizes   test name -> (task, tokens of the prompt, number of samples)
    """
    packer = Packer(row_tokens)
    tests: list[tuple[int, int]] = []  # (number of ids, test index) in the order of the row
    for test_idx, (task, num_tokens, num_samples) in enumerate(sizes.values()):
        for idx in range(num_samples):
            encoded = encode(make_sample(task, Split.HELD_OUT, seed, idx, count=count, num_tokens=num_tokens))
            scored = Encoded(encoded.ids, [NOT_LEARNED if g == HISTORY else g for g in encoded.group])
            if not packer.add(scored, task):
                yield packer.row(), _spread(tests, row_tokens)
                tests = []
                if not packer.add(scored, task):
                    raise ValueError(f"a sample of {task} has {len(scored.ids)} tokens; a row has {row_tokens}")
            tests.append((len(scored.ids), test_idx))
    yield packer.row(), _spread(tests, row_tokens)


def _spread(tests: list[tuple[int, int]], row_tokens: int) -> NDArray[np.int32]:
    column = np.full(row_tokens, -1, dtype=np.int32)
    start = 0
    for length, test_idx in tests:
        column[start : start + length] = test_idx
        start += length
    return column
