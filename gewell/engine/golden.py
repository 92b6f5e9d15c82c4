"""Folders of golden outputs: what a reference implementation computed from a checkpoint, case by case.

`golden.json` says what was run and how far an engine may be off; `golden.safetensors` holds tensors `<case>.<what>`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gewell.errors import CheckpointError
from gewell.weights.checkpoint import Checkpoint


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

    def logit_difference(self, position: int, logits: Tensor) -> float:
        """Largest distance of rows [n, vocab] for positions [position, position + n); NaN counts as infinite.

        Some folders keep all logits, others the best few of each position and the logarithm of the sum.
        """
        rows, differences = logits.shape[0], [0.0]
        num_prompt = len(self.prompt_ids)
        if "logits" in self.tensors:
            golden = self.tensors["logits"][position : position + rows]
            differences.append(_largest(logits[: golden.shape[0]], golden))
        elif "top_logits" in self.tensors:
            golden = self.tensors["top_logits"][position : position + rows]
            kept = logits[: golden.shape[0]]
            ids = self.tensors["top_ids"][position : position + rows].long()
            differences.append(_largest(kept.gather(1, ids), golden))
            sums = self.tensors["logsumexp"][position : position + rows]
            differences.append(_largest(torch.logsumexp(kept, dim=-1), sums))
        if "greedy_logits" in self.tensors:
            first = max(position, num_prompt - 1)  # the logits that the first greedy id was chosen from
            golden = self.tensors["greedy_logits"][first - num_prompt + 1 : position + rows - num_prompt + 1]
            if first < position + rows and golden.shape[0]:
                differences.append(_largest(logits[first - position :], golden))
        return max(differences)

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


def _largest(a: Tensor, b: Tensor) -> float:
    if not a.numel():
        return 0.0
    difference = (a.float() - b.float()).abs()
    return float("inf") if bool(difference.isnan().any()) else float(difference.max())
