"""Tuning tables must never break a start: a foreign device or a broken file means default tiles."""

import json

import pytest
import torch
from gewell_kernels import _tuning


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(_tuning, "_FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    _tuning._entries.cache_clear()
    yield tmp_path
    _tuning._entries.cache_clear()


CUDA = torch.device("cuda")


def test_the_first_entry_of_the_shape_wins(folder):
    entries = [
        {"shape": {"head_dim": 256}, "tiles": {"keys": 16}},
        {"shape": {"head_dim": 512}, "tiles": {"keys": 32}},
        {"shape": {"head_dim": 512}, "tiles": {"keys": 64}},
    ]
    (folder / "attend,device=Some_GPU.json").write_text(json.dumps({"entries": entries}))
    assert _tuning.tuned("attend", CUDA, head_dim=512) == {"keys": 32}
    assert _tuning.tuned("attend", CUDA, head_dim=128) is None
    assert _tuning.tuned("attend", torch.device("cpu"), head_dim=512) is None


def test_a_device_without_a_table_has_defaults(folder):
    assert _tuning.tuned("attend", CUDA, head_dim=512) is None


@pytest.mark.parametrize("text", ["", "{}", '{"entries": [{"tiles": {}}]}'])
def test_a_broken_table_warns_once_and_means_defaults(folder, text):
    (folder / "attend,device=Some_GPU.json").write_text(text)
    with pytest.warns(UserWarning, match="no tuning table"):
        assert _tuning.tuned("attend", CUDA, head_dim=512) is None
    assert _tuning.tuned("attend", CUDA, head_dim=512) is None  # no second warning


def test_the_shipped_tables_name_tiles_that_exist():
    from gewell_kernels.paged_attention import DecodeTiles, PrefillTiles

    for path in _tuning._FOLDER.glob("paged_attention,*.json"):
        for entry in json.loads(path.read_text())["entries"]:
            kind = DecodeTiles if entry["shape"]["part"] == "decode" else PrefillTiles
            kind(**entry["tiles"])
