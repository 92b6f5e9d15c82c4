"""Batches for the training step: rows made by worker processes, put together by a thread, never waited for."""

import multiprocessing
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gewell.text.tokenizer import HFTokenizer
from gewell_training.encode import NOT_LEARNED, SampleEncoder
from gewell_training.packing import TASK_NAMES, WEIGHTS, Row, held_out_rows, training_rows
from gewell_training.tokenizer import WordEncoder

_TASK_WEIGHTS = np.array([WEIGHTS.get(name, 1.0) for name in TASK_NAMES])


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows side by side, and the places that are learned from, in a fixed number of slots."""

    ids: Tensor  # [B, T] int64
    positions: Tensor  # [B, T] int64
    document: Tensor  # [B, T] int32
    rows: Tensor  # [M] int64, index into the flattened [B * T]
    targets: Tensor  # [M] int64
    weights: Tensor  # [M] float32, by task; 0: the slot is not used
    labels: Tensor  # [M] int64: the task of a training batch, the group of a test batch
    num_tokens: int  # without padding

    def to(self, device: torch.device) -> "Batch":
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("ids", "positions", "document", "rows", "targets", "weights", "labels")
        }
        return Batch(**moved, num_tokens=self.num_tokens)


def make_batch(rows: list[Row], labels: list[NDArray[np.int32]], num_slots: int, *, pin: bool) -> Batch:
    """labels[i] is the label of each of row i's tokens. Learned places beyond `num_slots` are left out at random."""
    ids, document, position, group = (np.stack([row[i] for row in rows]) for i in range(4))
    chosen = np.flatnonzero(group != NOT_LEARNED)
    if len(chosen) > num_slots:
        chosen = np.sort(np.random.default_rng(0).choice(chosen, num_slots, replace=False))
    slots = np.zeros(num_slots, dtype=np.int64)
    slots[: len(chosen)] = chosen
    task = np.stack([row.task for row in rows]).reshape(-1)[slots]
    weights = np.where(np.arange(num_slots) < len(chosen), _TASK_WEIGHTS[task], 0).astype(np.float32)
    targets = ids.reshape(-1)[slots + 1]
    arrays = {
        "ids": ids.astype(np.int64),
        "positions": position.astype(np.int64),
        "document": document.astype(np.int32),
        "rows": slots,
        "targets": np.where(weights > 0, targets, 0).astype(np.int64),
        "weights": weights,
        "labels": np.stack(labels).reshape(-1)[slots].astype(np.int64),
    }
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    if pin:
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    return Batch(**tensors, num_tokens=int((ids != 0).sum()))


class TrainingBatches:
    """An endless iterator of batches. Make it before the device is first used: its processes are forks of this one."""

    def __init__(
        self,
        tokenizer: Path,
        *,
        num_workers: int,
        batch_rows: int,
        row_tokens: int,
        num_slots: int,
        seed: int,
        longest: int,
        pin: bool,
    ) -> None:
        context = multiprocessing.get_context("fork")  # a spawned worker would import torch first
        self._longest: Synchronized[int] = context.Value("i", longest)
        self._rows: Any = context.Queue(maxsize=batch_rows * 4)
        self._batches: queue.Queue[Batch] = queue.Queue(maxsize=3)
        self._batch_rows, self._num_slots, self._pin = batch_rows, num_slots, pin
        self._workers = [
            context.Process(
                target=_make_rows,
                args=(self._rows, tokenizer, row_tokens, seed * 1000 + i, self._longest),
                daemon=True,
            )
            for i in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()
        threading.Thread(target=self._collect, daemon=True).start()

    @property
    def longest(self) -> int:
        return self._longest.value

    @longest.setter
    def longest(self, num_tokens: int) -> None:
        self._longest.value = num_tokens

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self._batches.get(timeout=120)

    @property
    def num_ready(self) -> int:
        return self._batches.qsize()

    def _collect(self) -> None:
        while True:
            rows = [Row(*self._rows.get().astype(np.int32)) for _ in range(self._batch_rows)]
            self._batches.put(make_batch(rows, [row.task for row in rows], self._num_slots, pin=self._pin))

    def close(self) -> None:
        for worker in self._workers:
            worker.terminate()


def _make_rows(out: Any, tokenizer_file: Path, row_tokens: int, seed: int, longest: "Synchronized[int]") -> None:
    tokenizer = HFTokenizer.from_file(tokenizer_file)
    words = WordEncoder(tokenizer)
    for row in training_rows(SampleEncoder(tokenizer, words), words.count, row_tokens, seed, lambda: longest.value):
        out.put(np.stack(row).astype(np.int16))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Held-out samples as batches; a test's score is the share of its groups whose tokens are all right."""

    tests: tuple[str, ...]
    batches: list[Batch]
    test_of_group: Tensor  # [num_groups] int64

    @classmethod
    def build(
        cls,
        tokenizer_file: Path,
        sizes: dict[str, tuple[str, int, int]],
        *,
        batch_rows: int,
        row_tokens: int,
        num_slots: int,
    ) -> "HeldOut":
        tokenizer = HFTokenizer.from_file(tokenizer_file)
        words = WordEncoder(tokenizer)
        rows: list[Row] = []
        labels: list[NDArray[np.int32]] = []
        test_of_group: list[int] = []
        for row, test in held_out_rows(SampleEncoder(tokenizer, words), words.count, row_tokens, sizes=sizes):
            group = row.group
            num_groups = int(group.max()) + 1
            first = {int(g): int(np.flatnonzero(group == g)[0]) for g in range(num_groups)}
            rows.append(row)
            labels.append(np.where(group >= 0, group + len(test_of_group), 0))
            test_of_group += [int(test[first[g]]) for g in range(num_groups)]
        batches = []
        for start in range(0, len(rows), batch_rows):
            part = rows[start : start + batch_rows]
            if sum(int((row.group != NOT_LEARNED).sum()) for row in part) > num_slots:
                raise ValueError(f"more than {num_slots} scored tokens in a batch of held-out rows")
            blank = [part[0]._replace(group=np.full_like(part[0].group, NOT_LEARNED))] * (batch_rows - len(part))
            padded = labels[start : start + batch_rows] + [np.zeros_like(labels[0])] * len(blank)
            batches.append(make_batch(part + blank, padded, num_slots, pin=False))
        return cls(tests=tuple(sizes), batches=batches, test_of_group=torch.tensor(test_of_group))

    def scores(self, wrong: Tensor) -> dict[str, float]:
        """wrong [num_groups]: number of wrong tokens of each group."""
        right = (wrong.cpu() == 0).float()
        return {
            name: round(float(right[self.test_of_group == i].mean()), 4)
            for i, name in enumerate(self.tests)
            if bool((self.test_of_group == i).any())
        }
