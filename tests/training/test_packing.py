"""Packed rows lose nothing and mix nothing up."""

from itertools import islice

import numpy as np
import pytest
from gewell_training.encode import HISTORY, NOT_LEARNED, Encoded, SampleEncoder
from gewell_training.loading import HeldOut, make_batch
from gewell_training.packing import MIXTURE, TASK_NAMES, Packer, training_rows
from gewell_training.tokenizer import WordEncoder

from gewell.text.tokenizer import HFTokenizer

N, H = NOT_LEARNED, HISTORY


def test_a_row_says_for_each_token_whether_the_next_one_is_learned() -> None:
    packer = Packer(10)
    assert packer.add(Encoded([2, 11, 12, 13], [N, H, N, 0]), "copy")
    assert packer.add(Encoded([2, 21, 22, 23], [N, 0, 1, 1]), "sort")
    assert not packer.add(Encoded([2, 31, 32], [N, N, 0]), "copy")
    row = packer.row()
    assert row.ids.tolist() == [2, 11, 12, 13, 2, 21, 22, 23, 0, 0]
    assert row.document.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert row.position.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert row.group.tolist() == [H, N, 0, N, 1, 2, 2, N, N, N]
    assert row.task[:8].tolist() == [TASK_NAMES.index("copy")] * 4 + [TASK_NAMES.index("sort")] * 4


def test_a_batch_asks_for_the_token_after_each_learned_place() -> None:
    packer = Packer(6)
    packer.add(Encoded([2, 11, 12, 13], [N, N, 0, 0]), "critic")
    row = packer.row()
    batch = make_batch([row, row], [row.task, row.task], 6, pin=False)
    assert batch.rows[:4].tolist() == [1, 2, 7, 8]
    assert batch.targets.tolist() == [12, 13, 12, 13, 0, 0]
    assert batch.weights.tolist() == [4, 4, 4, 4, 0, 0]
    assert batch.num_tokens == 8


def test_training_rows_are_nearly_full_and_follow_the_mixture(tokenizer: HFTokenizer) -> None:
    words = WordEncoder(tokenizer)
    rows = list(islice(training_rows(SampleEncoder(tokenizer, words), words.count, 2048, 1, lambda: 600), 60))
    ids = np.stack([row.ids for row in rows])
    assert (ids == 0).mean() < 0.05
    for row in rows:  # every sample is whole: it begins with <bos> at position 0
        starts = np.flatnonzero(np.diff(row.document, prepend=-1))
        assert (row.position[starts] == 0).all()
        assert (row.ids[starts[:-1]] == 2).all()
    tasks = np.stack([row.task for row in rows])[ids != 0]
    shares = np.bincount(tasks, minlength=len(TASK_NAMES)) / len(tasks)
    for name, share in MIXTURE.items():
        assert shares[TASK_NAMES.index(name)] == pytest.approx(share, rel=0.25, abs=0.01)


def test_a_test_counts_groups_without_a_wrong_token() -> None:
    import torch

    held_out = HeldOut(tests=("a", "b"), batches=[], test_of_group=torch.tensor([0, 0, 0, 1, 1]))
    assert held_out.scores(torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0])) == {"a": 0.6667, "b": 0.5}
