"""A checkpoint that does not fit has to say which tensor is wrong, before anything runs with it."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gewell.errors import CheckpointError
from gewell.model.gemma import GemmaModel
from gewell.weights.checkpoint import LoadReport, load_drafter, load_model
from tests.model.golden_folders import FIXTURES, copy_of, edit_json


def _load(folder: Path) -> GemmaModel:
    return load_model(folder, dtype=torch.float32, device="cpu")


def _rewrite(folder: Path, change) -> None:
    """Load all tensors, let `change` edit the dict, store them as one file."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    changed = change(tensors)
    save_file(tensors if changed is None else changed, folder / "model.safetensors")


def _same_weights(a: GemmaModel, b: GemmaModel) -> bool:
    ours, theirs = dict(a.weight_slots()), dict(b.weight_slots())
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n].target, theirs[n].target) for n in ours)


# --- forms that load ---------------------------------------------------------------------------------------------


def test_one_file_loads_like_shards(tmp_path):
    folder = copy_of("gemma4-dense", tmp_path / "m")
    _rewrite(folder, lambda tensors: None)
    assert _same_weights(_load(folder), _load(FIXTURES / "gemma4-dense"))


@pytest.mark.parametrize("prefix", ["model.", "", "language_model.model."])
def test_other_prefixes_load_too(tmp_path, prefix):
    folder = copy_of("gemma4-dense", tmp_path / "m")
    nested = "model.language_model."
    _rewrite(folder, lambda tensors: {prefix + name.removeprefix(nested): t for name, t in tensors.items()})
    assert _same_weights(_load(folder), _load(FIXTURES / "gemma4-dense"))


def test_flat_config_with_text_only_names_loads(tmp_path):
    folder = copy_of("gemma4-dense", tmp_path / "m")
    nested = "model.language_model."
    _rewrite(folder, lambda tensors: {"model." + name.removeprefix(nested): t for name, t in tensors.items()})
    config = json.loads((folder / "config.json").read_text())["text_config"]
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Gemma4ForCausalLM"]}))
    assert _same_weights(_load(folder), _load(FIXTURES / "gemma4-dense"))


def test_a_stored_head_and_other_towers_are_left_alone(tmp_path):
    folder = copy_of("gemma4-vision", tmp_path / "m")

    def add(tensors):
        tensors["lm_head.weight"] = torch.zeros(256, 64)
        tensors["model.audio_tower.output.weight"] = torch.zeros(3)

    _rewrite(folder, add)
    assert _same_weights(_load(folder), _load(FIXTURES / "gemma4-vision"))


def test_keys_of_sharing_layers_are_left_alone(tmp_path):
    folder = copy_of("gemma4-edge", tmp_path / "m")

    def add(tensors):
        tensors["model.language_model.layers.3.self_attn.k_proj.weight"] = torch.zeros(512, 64)

    _rewrite(folder, add)
    assert _same_weights(_load(folder), _load(FIXTURES / "gemma4-edge"))


def test_gemma3_norms_get_their_one_back():
    stored = load_file(FIXTURES / "gemma3-text" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(_load(FIXTURES / "gemma3-text").final_norm, stored.float() + 1)


def test_every_byte_is_counted_once():
    reports: list[LoadReport] = []
    seen: list[tuple[int, int]] = []
    load_model(
        FIXTURES / "gemma3-text",
        dtype=torch.bfloat16,
        device="cpu",
        progress=lambda done, total: seen.append((done, total)),
        report=reports.append,
    )
    stored = load_file(FIXTURES / "gemma3-text" / "model.safetensors")
    total = sum(t.numel() * t.element_size() for t in stored.values())
    assert reports[0].num_bytes == total
    assert reports[0].num_tensors == len(stored)
    assert seen[-1] == (total, total)


# --- forms that are refused --------------------------------------------------------------------------------------


def test_a_missing_tensor_is_named(tmp_path):
    folder = copy_of("gemma3-text", tmp_path / "m")

    def drop(tensors):
        del tensors["model.layers.2.mlp.up_proj.weight"]

    _rewrite(folder, drop)
    with pytest.raises(CheckpointError, match=r"missing: layers\.2\.mlp\.up_proj\.weight"):
        _load(folder)


def test_an_unknown_tensor_is_named(tmp_path):
    folder = copy_of("gemma4-dense", tmp_path / "m")
    name = "model.language_model.layers.1.self_attn.v_proj.weight"  # a full layer's value is its key

    def add(tensors):
        tensors[name] = torch.zeros(512, 64)

    _rewrite(folder, add)
    with pytest.raises(CheckpointError, match="unknown: " + name.replace(".", r"\.")):
        _load(folder)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path):
    folder = copy_of("gemma3-text", tmp_path / "m")

    def shrink(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:32].clone()

    _rewrite(folder, shrink)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight \[32\] instead of \[64\]"):
        _load(folder)


def test_many_problems_are_told_at_once(tmp_path):
    folder = copy_of("gemma3-text", tmp_path / "m")

    def spoil(tensors):
        for i in range(4):
            del tensors[f"model.layers.{i}.mlp.gate_proj.weight"], tensors[f"model.layers.{i}.mlp.up_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)

    _rewrite(folder, spoil)
    with pytest.raises(CheckpointError, match=r"and 1 more; unknown: model\.layers\.9"):
        _load(folder)


@pytest.mark.parametrize("num_bytes", [0, 5, 100, 5000, 1_000_000])
def test_a_cut_off_file_is_named(tmp_path, num_bytes):
    folder = copy_of("gemma3-text", tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is cut off"):
        _load(folder)


def test_a_header_that_is_no_json_is_named(tmp_path):
    folder = copy_of("gemma3-text", tmp_path / "m")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"{{{{" + b"\0" * 64)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has a damaged header"):
        _load(folder)


def test_sizes_that_contradict_the_shape_are_named(tmp_path):
    folder = copy_of("gemma3-text", tmp_path / "m")
    header = json.dumps({"model.norm.weight": {"dtype": "BF16", "shape": [64], "data_offsets": [0, 64]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 128)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight of shape \(64,\) cannot lie in 64 bytes"):
        _load(folder)


def test_a_missing_shard_is_named(tmp_path):
    folder = copy_of("gemma4-dense", tmp_path / "m")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="not there: model-00002-of-00002"):
        _load(folder)


def test_a_broken_index_is_named(tmp_path):
    folder = copy_of("gemma4-dense", tmp_path / "m")
    edit_json(folder / "model.safetensors.index.json", lambda index: index.pop("weight_map"))
    with pytest.raises(CheckpointError, match="is not an index of weights"):
        _load(folder)


def test_a_folder_without_weights_is_named(tmp_path):
    folder = copy_of("gemma3-text", tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        _load(folder)


def test_a_config_of_another_size_names_the_tensors(tmp_path):
    folder = copy_of("gemma3-text", tmp_path / "m")
    edit_json(folder / "config.json", lambda config: config.update(hidden_size=32))
    with pytest.raises(CheckpointError, match=r"does not fit its config\.json: of another shape"):
        _load(folder)


def test_quantised_weights_are_refused_by_method(tmp_path):
    folder = copy_of("gemma4-dense", tmp_path / "m")
    quantization = {"quantization_config": {"quant_method": "compressed-tensors"}}
    edit_json(folder / "config.json", lambda config: config.update(quantization))
    with pytest.raises(CheckpointError, match=r"quantised weights \(compressed-tensors\)"):
        _load(folder)


def test_a_drafter_cannot_be_loaded_as_a_model():
    with pytest.raises(CheckpointError, match="is a drafter"):
        _load(FIXTURES / "gemma4-drafter")


def test_a_drafter_refuses_a_target_of_another_shape(tmp_path):
    target = _load(FIXTURES / "gemma4-moe")  # two heads in full layers, the drafter's target has one
    with pytest.raises(CheckpointError, match="key-value heads of full layers 1, this one has 2"):
        load_drafter(FIXTURES / "gemma4-drafter", target)


def test_a_model_is_no_drafter():
    target = _load(FIXTURES / "gemma4-dense")
    with pytest.raises(CheckpointError, match="is no drafter"):
        load_drafter(FIXTURES / "gemma4-moe", target)


def test_the_folder_is_not_changed_by_loading(tmp_path):
    folder = copy_of("gemma3-text", tmp_path / "m")
    before = (folder / "model.safetensors").read_bytes()
    _load(folder)
    assert (folder / "model.safetensors").read_bytes() == before
    shutil.rmtree(folder)
