"""The model behind the engine, on the golden fixtures: greedy ids must come out whatever shares the step with them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gewell.engine.api import FinishedEvent, TokenLogprobs, TokensEvent
from gewell.engine.build import EngineOptions, build_engine, model_fingerprint
from gewell.engine.engine import PagedEngine
from gewell.errors import ConfigError
from gewell.request import EngineRequest
from gewell.sampling import SamplingParams

FIXTURES = Path(__file__).parents[1] / "fixtures"
CASES = ("short", "window", "long")


def make_engine(folder: str = "gemma4-dense", **options: object) -> PagedEngine:
    chosen = {
        "device": "cpu",
        "dtype": torch.float32,
        "kv_memory_bytes": 1 << 25,
        "poison_freed_pages": True,
        **options,
    }
    return build_engine(FIXTURES / folder, EngineOptions(**chosen))


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(FIXTURES / "gemma4-dense" / "golden.safetensors")


class Run:
    def __init__(self, engine: PagedEngine) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.ends: dict[str, FinishedEvent] = {}
        while engine.has_work():
            for event in engine.step():
                if isinstance(event, TokensEvent):
                    self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
                    self.logprobs.setdefault(event.request_id, []).extend(event.logprobs or ())
                else:
                    self.ends[event.request_id] = event


def greedy(name: str, ids: torch.Tensor, **params: object) -> EngineRequest:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **params})
    return EngineRequest(request_id=name, prompt_ids=ids.flatten().tolist(), sampling=sampling)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 17, "max_num_seqs": 3},
        {"max_num_batched_tokens": 9, "max_num_seqs": 3, "kv_memory_bytes": 1 << 21},  # 16 pages: rows are preempted
        {"max_num_batched_tokens": 5, "max_num_seqs": 4, "has_prefix_cache": False},
    ],
    ids=["one piece", "chunks", "few pages", "no cache"],
)
def test_greedy_ids_are_the_golden_ones(options: dict[str, object], golden: dict[str, torch.Tensor]) -> None:
    engine = make_engine(**options)
    for copy in range(3):
        for case in CASES:
            engine.add(greedy(f"{case}.{copy}", golden[f"{case}.input_ids"]))
    run = Run(engine)
    for name, tokens in run.tokens.items():
        assert tokens == golden[f"{name.split('.')[0]}.greedy_ids"].flatten().tolist()
    assert len(run.tokens) == 9


@pytest.mark.parametrize("folder", ["gemma3-text", "gemma4-moe", "gemma4-edge"])
def test_other_families_run_through_the_engine(folder: str) -> None:
    expected = load_file(FIXTURES / folder / "golden.safetensors")
    engine = make_engine(folder, max_num_batched_tokens=33, max_num_seqs=4)
    cases = sorted({name.split(".")[0] for name in expected if name.endswith(".greedy_ids")})
    for case in cases:
        num = expected[f"{case}.greedy_ids"].numel()
        engine.add(greedy(case, expected[f"{case}.input_ids"], max_tokens=num, ignore_eos=True))
    run = Run(engine)
    assert run.tokens == {case: expected[f"{case}.greedy_ids"].flatten().tolist() for case in cases}


def test_a_warm_run_gives_the_logits_of_a_cold_one(golden: dict[str, torch.Tensor]) -> None:
    engine = make_engine()
    ids = golden["long.input_ids"]
    engine.add(greedy("cold", ids, logprobs=5))
    cold = Run(engine)
    engine.add(greedy("warm", ids, logprobs=5))
    warm = Run(engine)
    assert warm.ends["warm"].cache.cached_tokens > 60
    for a, b in zip(cold.logprobs["cold"], warm.logprobs["warm"], strict=True):
        assert a.token_id == b.token_id
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert [token for token, _ in a.top] == [token for token, _ in b.top]


def test_pages_that_went_to_host_memory_come_back_whole(golden: dict[str, torch.Tensor]) -> None:
    """A pool of 16 pages holds one long prompt; the first turn's checkpoint moves out while others pass, and back."""
    engine = make_engine(max_num_batched_tokens=40, max_num_seqs=1, kv_memory_bytes=1 << 21, host_memory_bytes=1 << 24)
    ids = golden["long.input_ids"].flatten()
    first = replace(greedy("first", ids[:50], max_tokens=1), conversation_id="c", stable_lengths=(49,))
    second = replace(greedy("second", ids), conversation_id="c", stable_lengths=(74,))
    engine.add(first)
    Run(engine)
    for shift in range(1, 9):  # rotated prompts: same length, nothing in common
        other = greedy(f"other{shift}", torch.roll(ids, shift), max_tokens=4)
        engine.add(replace(other, conversation_id=other.request_id, stable_lengths=(70,)))
    Run(engine)
    engine.add(second)
    run = Run(engine)
    answer = run.ends["second"].cache
    assert (answer.restored_from, answer.cached_tokens) == ("host", 49)
    assert run.tokens["second"] == golden["long.greedy_ids"].flatten().tolist()


def test_logprobs_are_those_of_the_golden_logits(golden: dict[str, torch.Tensor]) -> None:
    engine = make_engine()
    engine.add(greedy("short", golden["short.input_ids"], logprobs=3))
    expected = torch.log_softmax(golden["short.greedy_logits"].reshape(24, -1).float(), dim=1)
    for i, lp in enumerate(Run(engine).logprobs["short"]):
        assert lp.logprob == pytest.approx(float(expected[i, lp.token_id]), abs=2e-3)
        assert [token for token, _ in lp.top] == expected[i].topk(3).indices.tolist()


def test_a_seeded_sample_does_not_depend_on_what_else_runs(golden: dict[str, torch.Tensor]) -> None:
    params = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 77}
    alone = make_engine()
    alone.add(greedy("x", golden["window.input_ids"], **params))
    expected = Run(alone).tokens["x"]
    crowd = make_engine(max_num_batched_tokens=11, max_num_seqs=5)
    for i in range(4):
        crowd.add(greedy(f"other{i}", golden["long.input_ids"], temperature=1.0, seed=i))
    crowd.add(greedy("x", golden["window.input_ids"], **params))
    assert Run(crowd).tokens["x"] == expected


def run_under_pressure(golden: dict[str, torch.Tensor], **options: object) -> tuple[Run, int]:
    """Short answers teach the scheduler to admit many rows; then eight come that are long, and the pages run out.

    Returns what those eight said, and how often one of them was preempted.
    """
    engine = make_engine(max_num_batched_tokens=24, max_num_seqs=8, **options)
    ids = golden["short.input_ids"].flatten()
    for i in range(16):
        engine.add(greedy(f"short{i}", ids[:4], max_tokens=100, stop_token_ids=tuple(range(engine.info.vocab_size))))
    Run(engine)
    for i in range(8):
        params: dict[str, object] = {"max_tokens": 100, "ignore_eos": True, "logprobs": 1}
        if i % 2:
            params |= {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": i}
        if i >= 6:  # what was generated before a preemption must be counted again after it
            params |= {"repetition_penalty": 1.2, "frequency_penalty": 0.2, "min_tokens": 50}
        engine.add(greedy(f"row{i}", torch.roll(ids, i)[: 5 + i % 3], **params))
    return Run(engine), engine.stats().num_preemptions


@pytest.fixture(scope="module")
def without_pressure(golden: dict[str, torch.Tensor]) -> Run:
    run, num_preemptions = run_under_pressure(golden)
    assert num_preemptions == 0
    return run


@pytest.mark.parametrize("has_prefix_cache", [True, False])
@pytest.mark.parametrize("num_pages", [12, 14, 18])
def test_preempted_rows_say_what_they_would_have_said(
    num_pages: int, has_prefix_cache: bool, golden: dict[str, torch.Tensor], without_pressure: Run
) -> None:
    options = {"kv_memory_bytes": num_pages << 17, "has_prefix_cache": has_prefix_cache}
    run, num_preemptions = run_under_pressure(golden, **options)
    assert num_preemptions >= 4
    assert run.tokens == without_pressure.tokens
    for name, entries in run.logprobs.items():
        expected = [entry.logprob for entry in without_pressure.logprobs[name]]
        assert [entry.logprob for entry in entries] == pytest.approx(expected, abs=1e-3)


def test_the_next_epoch_continues_the_same_sample(golden: dict[str, torch.Tensor]) -> None:
    engine = make_engine()
    ids, params = golden["short.input_ids"], {"temperature": 1.0, "seed": 5}
    engine.add(greedy("whole", ids, **params))
    whole = Run(engine).tokens["whole"]
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=24)
    engine.add(
        EngineRequest(
            request_id="rest", prompt_ids=ids.flatten().tolist(), emitted_ids=tuple(whole[:10]), sampling=sampling
        )
    )
    assert Run(engine).tokens["rest"] == whole[10:]


def test_different_seeds_give_different_samples(golden: dict[str, torch.Tensor]) -> None:
    engine = make_engine()
    for seed in range(4):
        engine.add(greedy(str(seed), golden["short.input_ids"], temperature=1.5, seed=seed))
    assert len({tuple(tokens) for tokens in Run(engine).tokens.values()}) == 4


def test_nan_in_one_rows_memory_ends_that_row_alone(golden: dict[str, torch.Tensor]) -> None:
    engine = make_engine(has_prefix_cache=False)
    for case in ("short", "window"):
        engine.add(greedy(case, golden[f"{case}.input_ids"]))
    engine.step()
    (victim,) = [req for req in engine._scheduler.running() if req.request_id == "window"]
    assert victim.pages is not None
    engine._runner.store.pages[victim.pages.full_pages[0]] = torch.nan
    run = Run(engine)
    assert run.ends["window"].error_code == "numerics"
    assert run.ends["short"].error_code is None
    expected = golden["short.greedy_ids"].flatten().tolist()
    assert run.tokens["short"] == expected[1:]  # the first came from the step above


def test_bf16_runs_and_mostly_agrees(golden: dict[str, torch.Tensor]) -> None:
    """bf16 may flip a token whose lead is small; the fixture's first tokens lead by more than what bf16 loses."""
    engine = make_engine(dtype=torch.bfloat16)
    engine.add(greedy("short", golden["short.input_ids"]))
    tokens = Run(engine).tokens["short"]
    expected = golden["short.greedy_ids"].flatten().tolist()
    assert tokens[:4] == expected[:4]


def test_the_fingerprint_tells_weights_and_formats_apart(tmp_path: Path) -> None:
    from gewell_kernels.layout import KVLayout

    folder = FIXTURES / "gemma4-dense"
    base = model_fingerprint(folder, torch.float32, KVLayout.V_ONLY)
    assert base == model_fingerprint(folder, torch.float32, KVLayout.V_ONLY)
    others = {
        model_fingerprint(folder, torch.bfloat16, KVLayout.V_ONLY),
        model_fingerprint(folder, torch.float32, KVLayout.PLAIN),
        model_fingerprint(FIXTURES / "gemma3-text", torch.float32, KVLayout.V_ONLY),
    }
    assert len(others | {base}) == 4


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"kv_memory_bytes": 100}, "kv_memory_bytes"),
        ({"kv_memory_bytes": 1 << 18}, "kv_memory_bytes"),
        ({"kv_memory_bytes": 1 << 60}, "kv_memory_bytes"),
        ({"host_memory_bytes": 1 << 60}, "host_memory_bytes"),
        ({"dtype": torch.float16}, "dtype"),
        ({"max_context": 1}, "max_context"),
    ],
)
def test_options_that_cannot_be_used_name_their_field(options: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_engine(**options)
    assert caught.value.field == field
