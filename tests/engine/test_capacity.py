"""Plans of memory. A wrong figure sends somebody to buy the wrong card."""

from pathlib import Path

import pytest
from gewell_kernels.layout import KVLayout

from gewell.config import ModelConfig
from gewell.engine.capacity import Capacity, capacity, num_parameters
from gewell.errors import CheckpointError

SHAPES = Path(__file__).parents[2] / "kernels" / "bench"


def config(name: str) -> ModelConfig:
    return ModelConfig.from_file(SHAPES / f"{name}.json")


def fit(name: str, **kwargs: object) -> Capacity:
    return capacity(
        config(name),
        **{"memory_bytes": 141 * 10**9, "other_bytes": 6 << 30, **kwargs},
    )


@pytest.mark.parametrize(("name", "parameters"), [("gemma4-31b", 30.696e9), ("gemma4-26b-a4b", 25.232e9)])
def test_parameters_are_the_published_ones(name: str, parameters: float) -> None:
    assert num_parameters(config(name)) == pytest.approx(parameters, rel=1e-3)


def test_the_31b_stores_half_of_what_k_and_v_would_take_in_full_layers() -> None:
    v_only, plain = (fit("gemma4-31b", full_layout=layout).geometry for layout in (KVLayout.V_ONLY, KVLayout.PLAIN))
    assert v_only.full is not None
    assert plain.full is not None
    assert (v_only.full.bytes_per_token, plain.full.bytes_per_token) == (40_960, 81_920)
    assert (v_only.page_bytes, v_only.full.page_tokens) == (13_107_200, 320)


def test_a_window_of_the_31b_takes_800_mib() -> None:
    assert fit("gemma4-31b").window_bytes == 800 << 20


def test_sequences_of_40k_tokens_side_by_side() -> None:
    """64.7 GiB are 5,300 pages; 40,960 tokens take 128 full pages and a window of 64: 27 of them fit."""
    memory = int(64.7 * 2**30) + 2 * num_parameters(config("gemma4-31b")) + (6 << 30)
    assert fit("gemma4-31b", memory_bytes=memory).num_pages == 5_300
    assert fit("gemma4-31b", memory_bytes=memory).rows(40_960) == 27
    assert fit("gemma4-31b", memory_bytes=memory, kv_bytes=1).rows(40_960) == 55


def test_a_memory_smaller_than_the_weights_holds_nothing() -> None:
    found = fit("gemma4-31b", memory_bytes=24 * 10**9)
    assert (found.num_pages, found.longest_alone, found.rows(2048)) == (0, 0, 0)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_damaged_file_is_named_and_no_traceback(tmp_path: Path, text: str) -> None:
    (tmp_path / "shape.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"shape\.json"):
        ModelConfig.from_file(tmp_path / "shape.json")
