"""With `is_deterministic`, who else is in the step and how a prompt was cut change no bit; without, last bits may move.

A user who asks for it gets the same answer on a full and on an empty machine.
"""

import pytest
import torch
from gewell_kernels.layout import KVLayout

from gewell.engine.golden import Case, GoldenFolder
from gewell.engine.replay import Replay, Track
from gewell.engine.verify import Way, ways
from gewell.weights.checkpoint import load_model
from tests.model.golden_folders import FIXTURES


def _logits(replay: Replay, cases: list[Case], way: Way) -> dict[str, torch.Tensor]:
    """Logits of all positions by case, computed in this way."""
    tracks = [Track(token_ids=c.prompt_ids + c.greedy_ids[:6], sequence=replay.new_sequence()) for c in cases]
    found = {c.name: torch.full((len(t.token_ids), 256), torch.nan) for c, t in zip(cases, tracks, strict=True)}
    names = {id(t): c.name for c, t in zip(cases, tracks, strict=True)}
    step = 0
    while any(t.num_left for t in tracks):
        pieces = []
        for i, (track, case) in enumerate(zip(tracks, cases, strict=True)):
            schedule = way.schedules[i % len(way.schedules)]
            piece = schedule(step, track, len(case.prompt_ids)) if track.num_left else None
            pieces += [piece] if piece else []
        parts = list(replay.step(pieces))
        logits = replay.model.logits(torch.cat([hidden for _, _, hidden in parts]))
        for (track, position, _), rows in zip(parts, logits.split([len(h) for _, _, h in parts]), strict=True):
            found[names[id(track)]][position : position + len(rows)] = rows
        step += 1
    for track in tracks:
        track.sequence.release()
    return found


def _all_ways(name: str, dtype: torch.dtype, is_deterministic: bool) -> dict[str, dict[str, torch.Tensor]]:
    # The shortest and the longest prompt, and a few tokens of their continuations: enough to pass the window.
    ordered = sorted(GoldenFolder.read(FIXTURES / name).cases, key=lambda case: len(case.prompt_ids))
    cases = [ordered[0], ordered[-1]]
    model = load_model(
        FIXTURES / name, dtype=dtype, device="cpu", full_layout=KVLayout.V_ONLY, is_deterministic=is_deterministic
    )
    replay = Replay(model, num_pages=60)
    found = {}
    with torch.inference_mode():
        for way in ways(model.config.sliding_window):
            if way.name == "interleaved":
                found[way.name] = _logits(replay, cases, way)
            elif way.name in ("whole", "chunks of 3"):
                found[way.name] = {}
                for case in cases:
                    found[way.name] |= _logits(replay, [case], way)
    return found


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gemma3-text", torch.float32),
        ("gemma4-dense", torch.float32),
        ("gemma4-dense", torch.bfloat16),
        ("gemma4-moe", torch.float32),
        ("gemma4-edge", torch.bfloat16),
    ],
    ids=str,
)
def test_no_bit_depends_on_cuts_or_company(name, dtype):
    found = _all_ways(name, dtype, is_deterministic=True)
    whole = found.pop("whole")
    assert set(found) == {"chunks of 3", "interleaved"}
    for way, logits in found.items():
        for case, rows in logits.items():
            assert not rows.isnan().any()
            assert torch.equal(rows, whole[case]), f"{case}, {way}"


def test_the_ordinary_ops_are_not_that_strict():
    """The control: without the fixed tiles the same comparison does find differences, all at rounding level."""
    found = _all_ways("gemma4-dense", torch.float32, is_deterministic=False)
    whole = found.pop("whole")
    differences = [(rows - whole[case]).abs().max() for logits in found.values() for case, rows in logits.items()]
    assert 0 < max(differences) < 1e-3


def test_fixed_tiles_agree_with_golden():
    found = _all_ways("gemma4-moe", torch.float32, is_deterministic=True)
    for case in GoldenFolder.read(FIXTURES / "gemma4-moe").cases:
        assert case.logit_gap(0, found["whole"][case.name]).largest <= case.atol
