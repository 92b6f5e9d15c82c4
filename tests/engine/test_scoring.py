"""Log-probabilities of given tokens. A position off by one, or a cached prefix served where its last state was needed,
gives evaluations that look plausible and rank wrongly."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gewell.engine.api import Event, FinishedEvent, FinishReason, TokenLogprobs, TokensEvent
from gewell.engine.build import EngineOptions, build_engine
from gewell.engine.engine import PagedEngine
from gewell.engine.score import score_tokens
from gewell.engine.scoring import ScoringEngine
from gewell.engine.scripted import build_scripted_engine, scripted_logprob
from gewell.protocol import ErrorCode
from gewell.request import EngineRequest
from gewell.sampling import SamplingParams

DENSE = Path(__file__).parents[1] / "fixtures" / "gemma4-dense"


def make_engine(**options: Any) -> PagedEngine:
    chosen = {"device": "cpu", "dtype": torch.float32, "kv_memory_bytes": 1 << 25, "poison_freed_pages": True}
    return build_engine(DENSE, EngineOptions(**{**chosen, **options}))


def request(name: str, ids: Sequence[int], **kwargs: Any) -> EngineRequest:
    params = {key: kwargs.pop(key) for key in list(kwargs) if key in SamplingParams.__dataclass_fields__}
    sampling = SamplingParams(**{"max_tokens": 0, "temperature": 0.0, **params})
    return EngineRequest(request_id=name, prompt_ids=list(ids), sampling=sampling, **kwargs)


def run(engine: PagedEngine | ScoringEngine, *requests: EngineRequest) -> tuple[dict[str, FinishedEvent], list[Event]]:
    for req in requests:
        engine.add(req)
    events: list[Event] = []
    while engine.has_work():
        events += engine.step()
    return {event.request_id: event for event in events if isinstance(event, FinishedEvent)}, events


def logprobs(entries: Sequence[TokenLogprobs] | None) -> list[float]:
    assert entries is not None
    return [entry.logprob for entry in entries]


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(DENSE / "golden.safetensors")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 17, "max_num_seqs": 3},
        {"max_num_batched_tokens": 9, "max_num_seqs": 3, "kv_memory_bytes": 1 << 21},  # rows are preempted
        {"has_prefix_cache": False},
    ],
    ids=["one piece", "chunks", "few pages", "no cache"],
)
def test_scores_are_those_of_the_golden_logits(options: dict[str, Any], golden: dict[str, torch.Tensor]) -> None:
    cases = ("short", "window", "long")
    ids = {case: golden[f"{case}.input_ids"].flatten().tolist() for case in cases}
    wanted = [request(f"{case}.{at}", ids[case], score_from=at, num_score_top=3) for case in cases for at in (1, 7)]
    ends, _ = run(make_engine(**options), *wanted)
    for req in wanted:
        case, at = req.request_id.split(".")[0], req.score_from
        assert at is not None
        expected = golden[f"{case}.logits"].reshape(len(ids[case]), -1).double().log_softmax(-1)
        found = ends[req.request_id].prompt_logprobs
        assert found is not None
        assert [entry.token_id for entry in found] == ids[case][at:]
        for position, entry in enumerate(found, start=at):
            row = expected[position - 1]
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=2e-3)
            assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()


def test_tokens_score_as_they_were_drawn_also_behind_a_warm_prefix(golden: dict[str, torch.Tensor]) -> None:
    engine, prompt = make_engine(), golden["long.input_ids"].flatten().tolist()
    _, events = run(engine, request("drawn", prompt, max_tokens=8, logprobs=0, ignore_eos=True))
    drawn = [event for event in events if isinstance(event, TokensEvent)]
    tokens = [event.token_ids[0] for event in drawn]
    expected = [entry.logprob for event in drawn for entry in event.logprobs or ()]
    ends, _ = run(engine, request("scored", [*prompt, *tokens], score_from=len(prompt)))
    assert logprobs(ends["scored"].prompt_logprobs) == pytest.approx(expected, abs=1e-4)
    assert ends["scored"].cache.cached_tokens > len(prompt) // 2
    again, _ = run(engine, request("again", prompt, max_tokens=8, logprobs=0, ignore_eos=True))
    assert again["again"].num_output_tokens == 8


def test_a_prompt_is_scored_and_then_gone_on_with(golden: dict[str, torch.Tensor]) -> None:
    prompt = golden["short.input_ids"].flatten().tolist()
    ends, events = run(make_engine(), request("a", prompt, score_from=1, max_tokens=6))
    tokens = [token for event in events if isinstance(event, TokensEvent) for token in event.token_ids]
    assert tokens == golden["short.greedy_ids"].flatten().tolist()[: len(tokens)]
    assert len(logprobs(ends["a"].prompt_logprobs)) == len(prompt) - 1


def test_continuations_share_the_prompt_and_come_back_together(golden: dict[str, torch.Tensor]) -> None:
    prompt = 4 * golden["long.input_ids"].flatten().tolist()  # long enough to be worth waiting for
    continuations = ((5, 6, 7), (8,), (5, 6, 9, 10))
    engine = ScoringEngine(make_engine())
    started: list[str] = []
    engine.on_started = started.extend
    ends, events = run(engine, request("a", prompt, continuations=continuations, num_score_top=1))
    assert events == [ends["a"]]
    assert started == ["a"]
    end = ends["a"]
    assert (end.reason, end.num_prompt_tokens, end.num_output_tokens) == (FinishReason.STOP, len(prompt), 0)
    assert end.scores is not None
    assert [[entry.token_id for entry in score] for score in end.scores] == [list(c) for c in continuations]
    for score, continuation in zip(end.scores, continuations, strict=True):
        alone, _ = run(make_engine(), request("b", [*prompt, *continuation], score_from=len(prompt)))
        assert logprobs(score) == pytest.approx(logprobs(alone["b"].prompt_logprobs), abs=1e-4)
    assert engine.stats().computed_tokens < 2 * len(prompt)
    assert not engine._groups
    assert not engine._group_of


def test_scripted_scores_survive_preemption_and_depth() -> None:
    engine = ScoringEngine(build_scripted_engine(num_pages=24, depth=1, max_num_batched_tokens=16, max_num_seqs=8))
    prompt = list(b"a prompt of some length, as prompts are")
    jobs = [request(f"s{n}", [*prompt, n], continuations=((1, 2, 3, 4), (1, 9))) for n in range(4)]
    free = [request(f"f{n}", [*prompt, n], max_tokens=40) for n in range(4)]
    ends, _ = run(engine, *jobs, *free)
    start = len(prompt) + 1
    for job in jobs:
        assert [logprobs(score) for score in ends[job.request_id].scores or ()] == [
            [scripted_logprob(start + i, token) for i, token in enumerate(c)] for c in job.continuations
        ]


def test_a_cancelled_score_job_ends_once() -> None:
    engine = ScoringEngine(build_scripted_engine(max_num_batched_tokens=17))
    engine.add(request("a", b"x" * 300, continuations=((1,), (2,), (3,))))
    engine.step()
    engine.cancel("a")
    ends, events = run(engine)
    assert [event.request_id for event in events] == ["a"]
    assert (ends["a"].reason, ends["a"].scores) == (FinishReason.CANCELLED, None)


def test_one_refused_part_refuses_the_job() -> None:
    engine = ScoringEngine(build_scripted_engine(max_context=64))
    ends, _ = run(engine, request("a", b"x" * 60, continuations=((1,), (1,) * 30)))
    assert (ends["a"].reason, ends["a"].error_code) == (FinishReason.ERROR, ErrorCode.PROMPT_TOO_LONG)
    bad, _ = run(build_scripted_engine(), replace(request("b", b"xyz"), score_from=0))
    assert bad["b"].error_code == ErrorCode.INVALID_REQUEST


def test_logits_of_a_long_prompt_never_exist_at_once() -> None:
    weight = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    hidden, targets = torch.randn(101, 8), torch.arange(101) % 50
    sizes: list[int] = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return rows @ weight.T

    found = score_tokens(head, hidden, targets, 2, max_bytes=4 * 50 * 16).on_host()
    assert max(sizes) == 16
    assert sum(sizes) == 101
    expected = (hidden @ weight.T).log_softmax(-1)[torch.arange(101), targets]
    assert logprobs(found) == pytest.approx(expected.tolist(), abs=1e-5)


def test_scores_that_are_no_numbers_are_told_apart_from_impossible_tokens() -> None:
    def score(logits: list[float]) -> list[TokenLogprobs] | None:
        return score_tokens(lambda rows: torch.tensor([logits]), torch.zeros(1, 2), torch.tensor([0]), 0).on_host()

    assert score([float("nan"), 1.0]) is None
    assert logprobs(score([float("-inf"), 1.0])) == [-9999.0]
