"""Compares a checkpoint with golden outputs in every way in which the engine may compute them.

Each case runs in one piece, in chunks around the window's size, token by token, and together with all others in ragged
steps, over pages that hold NaN when nobody wrote them, in each layout of the full layers. Works for any folder of the
layout that `gewell.engine.golden` describes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from gewell_kernels.layout import KVLayout
from torch import Tensor

from gewell.cache.geometry import KVGeometry
from gewell.config import Family, ModelConfig
from gewell.engine.findings import Finding, Verification
from gewell.engine.golden import Case, Gap, GoldenFolder
from gewell.engine.replay import Replay, Schedule, Track, in_mixed_pieces, in_pieces
from gewell.engine.states import compare_states
from gewell.engine.verify_drafter import drafter_findings
from gewell.engine.verify_vision import image_runs, see_images
from gewell.errors import CheckpointError, ConfigError
from gewell.model.gemma import GemmaModel
from gewell.model.kv_plan import plan_kv
from gewell.weights.checkpoint import load_drafter, load_model, load_vision

_LOGIT_ROWS = 64  # a large vocabulary is compared in blocks
# A bf16 engine may lose this much of what the reference itself loses in bf16, on average over all logits. Single logits
# tell little: where a router is undecided, one token goes to other experts.
_BF16_SHARE = 1.5


@dataclass(frozen=True, slots=True)
class Way:
    """`together`: all cases in the same steps; else one case after the other, in the same pool."""

    name: str
    schedules: tuple[Schedule, ...]  # by case number, in turn
    is_together: bool = False


def ways(sliding_window: int) -> list[Way]:
    window = sliding_window
    sizes = sorted({1, 3, max(1, window - 1), window, window + 1})
    mixed = [(3, window + 1, 1), (window - 1, 2), (1, window), (window + 1,)]
    return [
        Way("whole", (in_pieces(None),)),
        *[Way(f"chunks of {size}", (in_pieces(size),)) for size in sizes],
        Way("one by one", (in_pieces(1, as_decode=True),)),
        Way("together", (in_pieces(None),), is_together=True),
        Way("interleaved", tuple(in_mixed_pieces(m, i) for i, m in enumerate(mixed)), is_together=True),
    ]


def verify(
    folder: Path,
    *,
    model_dir: Path | None = None,
    target_dir: Path | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    only_cases: Sequence[str] = (),
    only_ways: Sequence[str] = (),
    only_layouts: Sequence[str] = (),
) -> Verification:
    """Run the cases of a folder, or some of them in some of the ways and layouts.

    model_dir    where the checkpoint lies, when not beside the golden outputs
    target_dir   a drafter's target; default: the folder beside this one that `golden.json` names
    Raises CheckpointError or ConfigError when the folder cannot be used at all.
    """
    golden = GoldenFolder.read(folder)
    cases = _chosen("case", only_cases, {case.name: case for case in golden.cases})
    model_dir = model_dir or folder
    verification = Verification(folder=str(folder))
    with torch.inference_mode():
        if ModelConfig.from_dir(model_dir).family is Family.GEMMA4_DRAFTER:
            if dtype is not torch.float32:
                raise ConfigError("--dtype", str(dtype), "drafters are compared in float32 alone")
            target = load_model(target_dir or _named_target(golden), dtype=dtype, device=device)
            drafter = load_drafter(model_dir, target)
            for layout in _chosen("layout", only_layouts, _layouts(target.config)):
                target.use_kv_plan(plan_kv(target.config, dtype_bytes=dtype.itemsize, full_layout=layout))
                drafter.use_target_plan()
                verification.findings += drafter_findings(drafter, cases, layout)
            return verification
        model = load_model(model_dir, dtype=dtype, device=device)
        images, findings = see_images(load_vision(model_dir, dtype=dtype, device=device), cases)
        verification.findings += findings if dtype is torch.float32 else []
        chosen = _chosen("way", only_ways, {way.name: way for way in ways(model.config.sliding_window)})
        for layout in _chosen("layout", only_layouts, _layouts(model.config)):
            model.use_kv_plan(plan_kv(model.config, dtype_bytes=dtype.itemsize, full_layout=layout))
            verification.findings += _run_layout(model, cases, images, chosen, layout)
    return verification


_Named = TypeVar("_Named")


def _chosen(what: str, wanted: Sequence[str], there: Mapping[str, _Named]) -> list[_Named]:
    unknown = [name for name in wanted if name not in there]
    if unknown:
        raise ConfigError(f"--{what}", unknown[0], f"must be one of {', '.join(there)}")
    return [thing for name, thing in there.items() if not wanted or name in wanted]


def _named_target(golden: GoldenFolder) -> Path:
    name = golden.about.get("target")
    if not isinstance(name, str) or not (golden.path.parent / name).is_dir():
        raise CheckpointError(f"{golden.path} needs its target: golden.json names {name!r}, which is not beside it")
    return golden.path.parent / name


def _layouts(config: ModelConfig) -> dict[str, KVLayout]:
    layouts = list(KVLayout) if any(layer.k_eq_v for layer in config.layers) else [KVLayout.PLAIN]
    return {str(layout): layout for layout in layouts}


def _run_layout(
    model: GemmaModel,
    cases: Sequence[Case],
    images: Mapping[str, Tensor],
    chosen: Sequence[Way],
    layout: KVLayout,
) -> Iterator[Finding]:
    geometry = model.kv_plan.geometry
    lengths = [len(case.prompt_ids) + len(case.greedy_ids) for case in cases]
    replay = Replay(model, num_pages=sum(pages_for(geometry, length) for length in lengths))
    for way in chosen:
        groups = [cases] if way.is_together else [[case] for case in cases]
        for group in groups:
            yield from _run_group(replay, group, images, way, layout)


def pages_for(geometry: KVGeometry, num_tokens: int) -> int:
    """Enough pages to compute a sequence in any cut: while a chunk is added, the window before it is still held."""
    return geometry.num_pages(num_tokens) + geometry.num_pages(min(num_tokens, geometry.sliding_window)) + 1


def _run_group(
    replay: Replay, cases: Sequence[Case], images: Mapping[str, Tensor], way: Way, layout: KVLayout
) -> Iterator[Finding]:
    tracks = [_track(replay, case, images.get(case.name)) for case in cases]
    case_of = {id(track): case for track, case in zip(tracks, cases, strict=True)}
    gaps = {case.name: Gap() for case in cases}
    wrong_ids = {case.name: 0 for case in cases}
    seen: dict[str, Tensor] = {}
    step = 0
    while any(track.num_left for track in tracks):
        pieces = []
        for i, (track, case) in enumerate(zip(tracks, cases, strict=True)):
            schedule = way.schedules[i % len(way.schedules)]
            piece = schedule(step, track, len(case.prompt_ids)) if track.num_left else None
            if piece is not None:
                pieces.append(piece)
        watches = way.name == "whole" and step == 0 and replay.model.dtype is torch.float32
        observe = (lambda name, tensor: seen.__setitem__(name, tensor.clone())) if watches else None
        for track, position, hidden in replay.step(pieces, observe):
            case = case_of[id(track)]
            for first in range(0, hidden.shape[0], _LOGIT_ROWS):
                logits = replay.model.logits(hidden[first : first + _LOGIT_ROWS]).cpu()
                gaps[case.name] = gaps[case.name].merged(case.logit_gap(position + first, logits))
                wrong_ids[case.name] += case.wrong_greedy_ids(position + first, logits)
        if watches:
            for what, difference in compare_states(replay, tracks[0], cases[0], seen):
                tolerance = 0.0 if what.startswith("router_index") else cases[0].atol
                yield Finding(
                    case=cases[0].name,
                    way=way.name,
                    layout=layout,
                    what=what,
                    difference=difference,
                    tolerance=tolerance,
                )
        step += 1
    for track in tracks:
        track.sequence.release()
    for case in cases:
        for what, difference, tolerance in _verdicts(case, gaps[case.name], wrong_ids[case.name], replay.model.dtype):
            yield Finding(
                case=case.name, way=way.name, layout=layout, what=what, difference=difference, tolerance=tolerance
            )


def _verdicts(case: Case, gap: Gap, num_wrong_ids: int, dtype: torch.dtype) -> Iterator[tuple[str, float, float]]:
    """What is held against what: in float32 every logit and id, else the mean against the reference's own loss."""
    if dtype is torch.float32:
        yield "logits", gap.largest, case.atol
        if case.greedy_ids:
            yield "greedy ids", float(num_wrong_ids), 0.0
        return
    if case.bf16_mean is None:
        raise ConfigError("--dtype", str(dtype), f"case {case.name} does not say what the reference loses in it")
    yield "mean of logits", gap.mean if gap.largest < float("inf") else gap.largest, _BF16_SHARE * case.bf16_mean


def _track(replay: Replay, case: Case, image_embeds: Tensor | None) -> Track:
    config = replay.model.config
    return Track(
        token_ids=case.prompt_ids + case.greedy_ids[:-1],  # the last greedy id is chosen, never fed back
        sequence=replay.new_sequence(),
        image_runs=image_runs(case.prompt_ids, config.tokens.image) if image_embeds is not None else (),
        image_embeds=image_embeds,
        are_images_bidirectional=config.has_bidirectional_images,
    )
