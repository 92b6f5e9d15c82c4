"""Compares a vision tower with golden states and gives the text model its soft tokens."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from gewell.engine.findings import Finding
from gewell.engine.golden import Case, largest_difference
from gewell.errors import CheckpointError
from gewell.model.vision import VisionTower


def image_runs(token_ids: Sequence[int], image_token: int | None) -> list[tuple[int, int]]:
    """[start, end) of each stretch of image tokens. Images never touch: each stands between tokens of its own."""
    runs, at = [], 0
    for token, same in groupby(token_ids):
        length = sum(1 for _ in same)
        if token == image_token:
            runs.append((at, at + length))
        at += length
    return runs


def see_images(tower: VisionTower | None, cases: Sequence[Case]) -> tuple[dict[str, Tensor], list[Finding]]:
    """Soft tokens of every case that has images, and how far they and the tower's inside are from golden."""
    embeds: dict[str, Tensor] = {}
    findings: list[Finding] = []
    for case in cases:
        if "pixel_values" not in case.tensors:
            continue
        if tower is None:
            raise CheckpointError(f"case {case.name} has images and the model no vision tower")
        embeds[case.name], differences = _see(tower, case)
        findings += [
            Finding(case=case.name, way="tower", layout="-", what=what, difference=difference, tolerance=case.atol)
            for what, difference in differences.items()
        ]
    return embeds, findings


def _see(tower: VisionTower, case: Case) -> tuple[Tensor, dict[str, float]]:
    seen: dict[str, list[Tensor]] = {}
    embeds, real = [], []
    for pixels, places in zip(case.tensors["pixel_values"], case.tensors["image_position_ids"], strict=True):
        is_real = (places >= 0).all(dim=-1)
        real.append(is_real)
        embeds.append(
            tower(
                pixels[is_real].to(tower.device),
                places[is_real].long().to(tower.device),
                lambda name, tensor: seen.setdefault(name, []).append(tensor.float().cpu().clone()),
            )
        )
    differences = {}
    for name, parts in seen.items():
        golden = case.tensors.get(name)
        if golden is not None:  # padded patches mean nothing; soft tokens of all images lie in a row
            expected = golden[torch.stack(real)] if golden.ndim == 3 else golden
            differences[name] = largest_difference(torch.cat(parts), expected)
    return torch.cat(embeds), differences
