"""The model computes what the reference implementation computed, however a prompt is cut and whoever shares the step.

A wrong answer here is a wrong answer to every user: silently worse text, not an error.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from gewell_kernels.batch import AttentionBatch
from gewell_kernels.cpu import step as cpu_step
from gewell_kernels.layout import LayerKV
from typer.testing import CliRunner

import gewell.cli.verify
from gewell.cache.geometry import KVGeometry
from gewell.cache.page_pool import PagePool
from gewell.cache.sequence_pages import SequencePages
from gewell.config import LayerKind, ModelConfig
from gewell.engine.findings import Verification
from gewell.engine.golden import GoldenFolder
from gewell.engine.verify import pages_for, verify
from gewell.errors import ConfigError
from gewell.model.kv_plan import plan_kv
from tests.model.golden_folders import FIXTURES, TEXT_FOLDERS

FEW_WAYS = ["whole", "interleaved"]


@pytest.fixture(scope="module")
def verified() -> dict[str, Verification]:
    return {}


def _verified(cache: dict[str, Verification], name: str) -> Verification:
    if name not in cache and "drafter" in name:
        cache[name] = verify(FIXTURES / name)
    if name not in cache:
        cache[name] = verify(FIXTURES / name, only_layouts=["v_only"] if _has_layouts(name) else [])
        if _has_layouts(name):  # the default layout in every way, the others in the most different ones
            others = verify(FIXTURES / name, only_layouts=["plain", "v_rotk"], only_ways=FEW_WAYS)
            cache[name].findings += others.findings
    return cache[name]


def _has_layouts(name: str) -> bool:
    return any(layer.k_eq_v for layer in ModelConfig.from_dir(FIXTURES / name).layers)


@pytest.mark.parametrize("name", TEXT_FOLDERS)
def test_logits_and_greedy_ids_agree_in_every_way(name, verified):
    findings = [f for f in _verified(verified, name).findings if f.what in ("logits", "greedy ids")]
    config = ModelConfig.from_dir(FIXTURES / name)
    window = config.sliding_window
    cuts = {f"chunks of {size}" for size in (1, 3, window - 1, window, window + 1)}
    assert {f.way for f in findings} == {"whole", "one by one", "together", "interleaved"} | cuts
    has_layouts = _has_layouts(name)
    assert {f.layout for f in findings} == ({"v_only", "plain", "v_rotk"} if has_layouts else {"plain"})
    num_cases = len(GoldenFolder.read(FIXTURES / name).cases)
    assert len(findings) == 2 * num_cases * (9 + 2 * len(FEW_WAYS) * has_layouts)
    assert [f for f in findings if not f.is_ok] == []


@pytest.mark.parametrize("name", [name for name in TEXT_FOLDERS if name != "gemma4-vision"])
def test_states_agree_layer_by_layer(name, verified):
    config = ModelConfig.from_dir(FIXTURES / name)
    states = [f for f in _verified(verified, name).findings if f.what not in ("logits", "greedy ids")]
    compared = {f.what for f in states}
    expected = {"hidden.embed", "hidden.final"} | {f"hidden.{i}" for i in range(config.num_layers)}
    writers = [layer.layer_idx for layer in config.layers if layer.writes_kv]
    expected |= {f"{what}.{i}" for what in ("key", "value") for i in writers}
    if config.moe:
        expected |= {f"router_{what}.{i}" for what in ("index", "weight") for i in range(config.num_layers)}
    assert compared == expected
    assert [f for f in states if not f.is_ok] == []


def test_the_vision_tower_agrees_from_patches_to_the_projector(verified):
    states = [f for f in _verified(verified, "gemma4-vision").findings if f.way == "tower"]
    compared = {f.what for f in states}
    assert compared == {"vision_hidden.0", "vision_hidden.1", "vision_soft_tokens", "vision_projected"}
    assert {f.case for f in states} == {"one", "two", "wide"}
    assert [f for f in states if not f.is_ok] == []


@pytest.mark.parametrize("name", ["gemma4-drafter", "gemma4-drafter-ordered"])
def test_drafters_agree_step_by_step_and_in_rounds(name, verified):
    result = _verified(verified, name)
    kinds = {f.what.split(".")[0] for f in result.findings}
    assert kinds == {"key", "value", "step_hidden_in", "step_logits", "step_hidden_out", "drafted ids", "accepted"}
    assert {f.layout for f in result.findings} == {"plain", "v_only", "v_rotk"}
    assert [f for f in result.findings if not f.is_ok] == []


@pytest.mark.parametrize("name", ["gemma4-dense", "gemma4-moe", "gemma4-edge"])
@pytest.mark.parametrize("kind", list(LayerKind))
def test_rotary_tables_agree_up_to_the_last_position(name, kind, monkeypatch):
    golden = GoldenFolder.read(FIXTURES / name)
    config = ModelConfig.from_dir(FIXTURES / name)
    positions = torch.tensor(golden.about["rope"]["positions"], dtype=torch.int32)
    layer_idx = config.layers_of(kind)[0].layer_idx
    layer = plan_kv(config, dtype_bytes=4).layers[layer_idx]
    monkeypatch.setattr(cpu_step, "_tables", {})  # tables up to the last position are large: forget them afterwards
    cos, sin = cpu_step.Step(_positions_only(positions)).rotary(layer)
    half, live = layer.head_dim // 2, layer.num_live_pairs
    frequencies = golden.tensors[f"rope.{kind}.inv_freq"]
    torch.testing.assert_close(torch.tensor(layer.inv_freq).float(), frequencies[:live], rtol=1e-6, atol=0)
    assert not frequencies[live:].any()
    near = positions <= 65536
    for ours, what in ((cos, "cos"), (sin, "sin")):
        table = golden.tensors[f"rope.{kind}.{what}"]
        dead = torch.ones(len(positions), half - live) if what == "cos" else torch.zeros(len(positions), half - live)
        full = torch.cat([torch.cat((ours[:, 0], dead), dim=1)] * 2, dim=1)
        torch.testing.assert_close(full[near], table[near], rtol=0, atol=1e-2)
        torch.testing.assert_close(full[~near], table[~near], rtol=0, atol=2e-2)
        torch.testing.assert_close(full[:5], table[:5], rtol=0, atol=1e-5)


def _positions_only(positions: torch.Tensor) -> AttentionBatch:
    nothing = torch.zeros(0, dtype=torch.int32)
    return AttentionBatch(
        cu_seqlens_q=nothing,
        kv_lens=nothing,
        positions=positions,
        page_table=nothing,
        table_start=nothing,
        slot_mapping=nothing,
        visible_end=None,
        sliding_window=None,
        max_q_len=1,
        max_kv_len=int(positions.max()) + 1,
        num_decode_seqs=0,
    )


def test_bf16_loses_what_the_reference_loses():
    result = verify(
        FIXTURES / "gemma4-dense", dtype=torch.bfloat16, only_ways=["whole", "interleaved"], only_layouts=["v_only"]
    )
    assert {f.what for f in result.findings} == {"mean of logits"}
    assert len(result.findings) == 6
    assert [f for f in result.findings if not f.is_ok] == []
    assert all(f.difference > 0.05 for f in result.findings)  # bf16 does lose something: the comparison is real


def test_partial_rotary_turns_a_quarter_of_the_pairs_of_the_full_head():
    layer = _full_layer("gemma4-dense")
    assert (layer.num_live_pairs, layer.head_dim) == (64, 512)
    assert layer.inv_freq[1] == 1e6 ** (-2 / 512)  # the whole head size below, not the turning part's 128


def _full_layer(name: str) -> LayerKV:
    return plan_kv(ModelConfig.from_dir(FIXTURES / name), dtype_bytes=4).layers[1]


# --- the command -------------------------------------------------------------------------------------------------


def _run(*arguments: str):
    import typer

    app = typer.Typer()
    app.command()(gewell.cli.verify.verify)
    return CliRunner().invoke(app, list(arguments))


def test_verify_prints_every_comparison_as_json():
    result = _run(str(FIXTURES / "gemma3-text"), "--case", "short", "--way", "whole", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["is_ok"] is True
    comparisons = report["folders"][0]["comparisons"]
    assert {(c["case"], c["way"]) for c in comparisons} == {("short", "whole")}
    assert {"logits", "greedy ids", "hidden.0", "key.3"} <= {c["what"] for c in comparisons}


@pytest.mark.parametrize("option", ["--case", "--way", "--layout"])
def test_verify_refuses_a_name_that_it_does_not_know(option: str):
    result = _run(str(FIXTURES / "gemma3-text"), option, "no-such")
    assert isinstance(result.exception, ConfigError)
    assert (result.exception.field, result.exception.value) == (option, "no-such")


def test_verify_exits_1_when_a_weight_differs(tmp_path: Path):
    folder = tmp_path / "broken"
    shutil.copytree(FIXTURES / "gemma3-text", folder)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2:] = b"\x80\x40"  # the last tensor's last number becomes 4.0
    file.write_bytes(data)
    result = _run(str(folder), "--case", "short", "--way", "whole")
    assert result.exit_code == 1
    assert "NO" in result.stdout


@pytest.mark.parametrize("window", [16, 100, 512])
@pytest.mark.parametrize("num_tokens", [5, 700, 903])
def test_any_cut_of_a_long_prompt_fits_its_pages(window, num_tokens):
    geometry = KVGeometry.build(sliding_bytes_per_token=30, full_bytes_per_token=6, sliding_window=window)
    for size in (1, 3, window - 1, window, window + 1, num_tokens):
        sequence = SequencePages(PagePool(pages_for(geometry, num_tokens)), geometry)
        for start in range(0, num_tokens, size):
            assert sequence.append(min(size, num_tokens - start)) is not None, f"chunks of {size} at {start}"
            sequence.trim()
