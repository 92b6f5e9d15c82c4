"""The golden fixtures through the engine on a GPU: graphs, padding rows and a host one step behind."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gewell.engine.build import EngineOptions, build_engine
from gewell.engine.engine import PagedEngine
from gewell.engine.graphs import padded_rows
from gewell.request import EngineRequest
from gewell.sampling import SamplingParams

FIXTURES = Path(__file__).parents[1] / "fixtures"


def make_engine(folder: str, **options: object) -> PagedEngine:
    chosen = {"device": "cuda", "dtype": torch.float32, "kv_memory_bytes": 1 << 26, **options}
    return build_engine(FIXTURES / folder, EngineOptions(**chosen))


def run(engine: PagedEngine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_work():
        for event in engine.step():
            if hasattr(event, "token_ids"):
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
            else:
                assert event.error_code is None, event
    return tokens


def request(name: str, ids: torch.Tensor, **params: object) -> EngineRequest:
    sampling = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})
    return EngineRequest(request_id=name, prompt_ids=ids.flatten().tolist(), sampling=sampling)


@pytest.mark.gpu
@pytest.mark.parametrize("folder", ["gemma4-dense", "gemma3-text"])
@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 33, "max_num_seqs": 20}], ids=["large", "chunks"])
def test_greedy_ids_are_the_golden_ones(folder: str, limits: dict[str, int]) -> None:
    golden = load_file(FIXTURES / folder / "golden.safetensors")
    cases = sorted({name.split(".")[0] for name in golden if name.endswith(".greedy_ids")})
    engine = make_engine(folder, poison_freed_pages=True, **limits)
    assert engine._runner.depth == 1
    for copy in range(6):  # 18 rows: two sizes of graphs
        for case in cases:
            num = golden[f"{case}.greedy_ids"].numel()
            engine.add(request(f"{case}.{copy}", golden[f"{case}.input_ids"], max_tokens=num))
    tokens = run(engine)
    for name, ids in tokens.items():
        assert ids == golden[f"{name.split('.')[0]}.greedy_ids"].flatten().tolist(), name
    assert engine._runner.graphs.recorded


@pytest.mark.gpu
def test_penalties_see_tokens_that_the_host_does_not_know_yet() -> None:
    golden = load_file(FIXTURES / "gemma4-dense" / "golden.safetensors")
    outputs = []
    for device in ("cpu", "cuda"):
        engine = make_engine("gemma4-dense", device=device)
        engine.add(request("x", golden["short.input_ids"], max_tokens=30, presence_penalty=1.5, logprobs=2))
        outputs.append(run(engine)["x"])
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
def test_a_seed_draws_the_same_tokens_on_both_devices() -> None:
    golden = load_file(FIXTURES / "gemma4-dense" / "golden.safetensors")
    outputs = []
    for device in ("cpu", "cuda"):
        engine = make_engine("gemma4-dense", device=device)
        for seed in range(8):
            engine.add(
                request(str(seed), golden["short.input_ids"], max_tokens=20, temperature=1.0, top_k=40, seed=seed)
            )
        outputs.append(run(engine))
    same = sum(outputs[0][name] == outputs[1][name] for name in outputs[0])
    assert same >= 7, "a draw flips only where logits differ by rounding and noise by as little"


@pytest.mark.parametrize(
    ("rows", "padded"), [(1, 16), (16, 16), (17, 32), (128, 128), (129, 160), (256, 256), (257, 320), (512, 512)]
)
def test_rows_are_padded_to_few_sizes(rows: int, padded: int) -> None:
    assert padded_rows(rows) == padded


def test_padding_stays_below_a_quarter_and_the_sizes_are_few() -> None:
    for rows in range(65, 1025):
        assert rows <= padded_rows(rows) < rows * 1.25
    assert len({padded_rows(rows) for rows in range(1, 513)}) == 16
