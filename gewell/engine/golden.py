"""Folders of golden outputs: what a reference implementation computed from a checkpoint, case by case.

`golden.json` says what was run and how far an engine may be off; `golden.safetensors` holds tensors `<case>.<what>`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gewell.errors import CheckpointError
from gewell.weights.checkpoint import Checkpoint


class Gap(NamedTuple):
    """Distance between two sets of numbers: the largest, their sum and how many there are."""

    largest: float = 0.0
    total: float = 0.0
    num_numbers: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.num_numbers if self.num_numbers else 0.0

    def joined(self, a: Tensor, b: Tensor) -> "Gap":
        """With the distances of two tensors of the same shape added."""
        if not a.numel():
            return self
        distance = (a.float() - b.float()).abs()
        return self.merged(Gap(_largest(a, b), float(distance.sum()), distance.numel()))

    def merged(self, other: "Gap") -> "Gap":
        num_numbers = self.num_numbers + other.num_numbers
        return Gap(max(self.largest, other.largest), self.total + other.total, num_numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One prompt with its continuation. `tensors` are the case's golden tensors by name, without the case's."""

    name: str
    tensors: Mapping[str, Tensor]
    atol: float
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt_ids(self) -> list[int]:
        ids: list[int] = self.tensors["input_ids"].tolist()
        return ids

    @property
    def greedy_ids(self) -> list[int]:
        ids: list[int] = self.tensors["greedy_ids"].tolist() if "greedy_ids" in self.tensors else []
        return ids

    @property
    def bf16_mean(self) -> float | None:
        """What the reference implementation itself loses in bfloat16: mean distance of its logits."""
        reference = self.about.get("bf16_reference")
        return float(reference["mean_abs"]) if reference else None

    def logit_gap(self, position: int, logits: Tensor) -> "Gap":
        """Distance of rows [n, vocab] for positions [position, position + n) from whatever golden logits there are.

        NaN counts as infinitely far.
        Some folders keep all logits, others the best few of each position and the logarithm of the sum.
        """
        gap = Gap()
        # The first greedy id was chosen from the logits of the prompt's last position.
        for name, golden_start in (("logits", 0), ("greedy_logits", len(self.prompt_ids) - 1)):
            if name in self.tensors:
                gap = gap.joined(*_overlap(self.tensors[name], golden_start, logits, position))
        if "top_logits" in self.tensors:
            kept, ids = _overlap(self.tensors["top_ids"], 0, logits, position)
            gap = gap.joined(*_overlap(self.tensors["top_logits"], 0, kept.gather(1, ids.long()), position))
            gap = gap.joined(*_overlap(self.tensors["logsumexp"], 0, torch.logsumexp(kept, dim=-1), position))
        return gap

    def wrong_greedy_ids(self, position: int, logits: Tensor) -> int:
        """How many rows for positions [position, position + n) would choose another id than the golden one."""
        first = max(position, len(self.prompt_ids) - 1)
        chosen = (
            logits[max(0, first - position) :].argmax(dim=-1).tolist() if first < position + logits.shape[0] else []
        )
        start = first - len(self.prompt_ids) + 1
        golden = self.greedy_ids[start : start + len(chosen)]
        return sum(a != b for a, b in zip(chosen, golden, strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenFolder:
    path: Path
    about: Mapping[str, Any]
    cases: tuple[Case, ...]
    tensors: Mapping[str, Tensor]  # those that belong to no case: rotary tables, the image processor's

    @property
    def name(self) -> str:
        return self.path.name

    @classmethod
    def read(cls, path: Path) -> "GoldenFolder":
        """Raises CheckpointError when the folder is not of this layout."""
        file = path / "golden.json"
        try:
            about = json.loads(file.read_text(encoding="utf-8"))
            cases = about["cases"]
            tolerance = about.get("tolerance", {})
        except FileNotFoundError:
            raise CheckpointError(f"{path} holds no golden outputs: it has no golden.json") from None
        except (OSError, ValueError, KeyError, AttributeError) as e:
            raise CheckpointError(f"{file} is not a description of golden outputs: {e}") from e
        golden = Checkpoint.open_file(path / "golden.safetensors")
        tensors = {name: golden.tensor(name) for name in golden.tensors}
        atol = float(tolerance.get("atol", tolerance.get("top_logits", 1e-3)))
        found = []
        for name, case in cases.items():
            own = {key[len(name) + 1 :]: value for key, value in tensors.items() if key.startswith(f"{name}.")}
            if "input_ids" not in own:
                raise CheckpointError(f"{path / 'golden.safetensors'} has no {name}.input_ids")
            found.append(Case(name=name, tensors=own, atol=float(case.get("float32_atol", atol)), about=case))
        rest = {key: value for key, value in tensors.items() if key.split(".")[0] not in cases}
        return cls(path=path, about=about, cases=tuple(found), tensors=rest)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """max |a - b|; infinite when the shapes differ or a number is missing on one side only."""
    if a.shape != b.shape:
        return float("inf")
    return _largest(a, b)


def _overlap(golden: Tensor, golden_start: int, ours: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """The rows that both have, where row i of each stands for position start + i."""
    first, last = max(start, golden_start), min(start + ours.shape[0], golden_start + golden.shape[0])
    if first >= last:
        return ours[:0], golden[:0]
    return ours[first - start : last - start], golden[first - golden_start : last - golden_start]


def _largest(a: Tensor, b: Tensor) -> float:
    if not a.numel():
        return 0.0
    difference = (a.float() - b.float()).abs()
    return float("inf") if bool(difference.isnan().any()) else float(difference.max())
