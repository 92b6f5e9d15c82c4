"""Compares a drafter with golden drafts: single steps over the target's pages, and whole rounds of speculation."""

from collections.abc import Iterator, Sequence

from gewell_kernels.layout import KVLayout
from torch import Tensor

from gewell.config import LayerKind
from gewell.engine.findings import Finding
from gewell.engine.golden import Case, largest_difference
from gewell.engine.paged_batch import draft_batch
from gewell.engine.replay import Piece, Replay, Track
from gewell.engine.states import cached_keys_and_values
from gewell.model.drafter import Drafter

# Published code lets sliding layers see the last window + 1 cached tokens, two more than the target's next token reads.
_SLACK_TOKENS = 2


def drafter_findings(drafter: Drafter, cases: Sequence[Case], layout: KVLayout) -> Iterator[Finding]:
    geometry = drafter.target.kv_plan.geometry
    longest = max(len(_verified_ids(case)) for case in cases)
    replay = Replay(drafter.target, num_pages=2 * geometry.num_pages(longest) + 4)
    for case in cases:
        for what, difference, tolerance in _compare(replay, drafter, case):
            yield Finding(
                case=case.name,
                way="step by step",
                layout=str(layout),
                what=what,
                difference=difference,
                tolerance=tolerance,
            )


def _verified_ids(case: Case) -> list[int]:
    """The prompt, the target's first own token, and what each golden round adds."""
    ids = case.prompt_ids + case.greedy_ids[:1]
    for step in case.about.get("rounds", ()):
        ids += [*step["drafted"][: step["accepted"]], step["next"]]
    return ids


def _compare(replay: Replay, drafter: Drafter, case: Case) -> Iterator[tuple[str, float, float]]:
    track = Track(token_ids=_verified_ids(case), sequence=replay.new_sequence())
    state = _advance(replay, track, len(case.prompt_ids))
    for kind in LayerKind:
        source = drafter.target.config.layers_of(kind)[-1].layer_idx
        first, k, v = cached_keys_and_values(replay, track, source)
        if f"key.{kind}" in case.tensors:
            yield f"key.{kind}", largest_difference(k, case.tensors[f"key.{kind}"][first:]), case.atol
            yield f"value.{kind}", largest_difference(v, case.tensors[f"value.{kind}"][first:]), case.atol
    if "step_token" in case.tensors:
        for i, token in enumerate(case.tensors["step_token"].tolist()):
            yield (
                f"step_hidden_in.{i}",
                largest_difference(state[0].cpu(), case.tensors["step_hidden_in"][i]),
                case.atol,
            )
            logits, state = _draft(replay, drafter, track, token, state)
            yield f"step_logits.{i}", largest_difference(logits[0].cpu(), case.tensors["step_logits"][i]), case.atol
            difference = largest_difference(state[0].cpu(), case.tensors["step_hidden_out"][i])
            yield f"step_hidden_out.{i}", difference, case.atol
    for number, step in enumerate(case.about.get("rounds", ())):
        drafted, accepted = _round(replay, drafter, track, step["length"], len(step["drafted"]))
        wrong = sum(a != b for a, b in zip(drafted, step["drafted"], strict=True))
        yield f"drafted ids.{number}", float(wrong), 0.0
        yield f"accepted.{number}", float(abs(accepted - step["accepted"])), 0.0
    track.sequence.release()


def _round(replay: Replay, drafter: Drafter, track: Track, length: int, count: int) -> tuple[list[int], int]:
    """Draft `count` tokens after the first `length` verified ones: the drafts, and how many the target chooses too."""
    newest = track.token_ids[length - 1]
    state = _advance(replay, track, length - 1 - track.position)
    drafted: list[int] = []
    for _ in range(count):
        logits, state = _draft(replay, drafter, track, drafted[-1] if drafted else newest, state)
        drafted.append(int(logits[0].argmax()))
    accepted = 0
    for ours, targets in zip(drafted, track.token_ids[length:], strict=False):
        if ours != targets:
            break
        accepted += 1
    return drafted, accepted


def _advance(replay: Replay, track: Track, num_tokens: int) -> Tensor:
    """Run the target over the next tokens; its last hidden vector [1, hidden_size], which a first draft starts from."""
    if num_tokens:
        ((_, _, hidden),) = replay.step([Piece(track, num_tokens)], slack_tokens=_SLACK_TOKENS)
        track.last_hidden = hidden[-1:].clone()
    assert track.last_hidden is not None
    return track.last_hidden


def _draft(replay: Replay, drafter: Drafter, track: Track, token: int, state: Tensor) -> tuple[Tensor, Tensor]:
    batch = draft_batch([track.sequence], [token], replay.geometry, replay.model.device)
    return drafter.step(batch, state, replay.store.pages)
