"""The model in the package is the one that the log describes: small, whole, and found by its name."""

from pathlib import Path

import pytest

from gewell.config import LayerKind, ModelConfig
from gewell.model_store import SHIPPED_DIR, list_models, model_path

NANO = SHIPPED_DIR / "gewell-nano"


def test_it_is_found_by_name_on_a_machine_without_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEWELL_MODELS_DIR", str(tmp_path))
    assert model_path("gewell-nano") == NANO
    assert list_models() == ["gewell-nano"]


def test_a_stored_model_of_the_same_name_goes_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEWELL_MODELS_DIR", str(tmp_path))
    (tmp_path / "gewell-nano").mkdir()
    (tmp_path / "gewell-nano" / "config.json").write_text("{}")
    assert model_path("gewell-nano") == tmp_path / "gewell-nano"


def test_it_has_the_features_of_the_large_models_and_stays_small() -> None:
    config = ModelConfig.from_dir(NANO)
    kinds = [layer.kind for layer in config.layers]
    assert kinds == ([LayerKind.SLIDING] * 5 + [LayerKind.FULL]) * 2
    full = config.layers_of(LayerKind.FULL)[0]
    assert full.k_eq_v
    assert full.num_live_pairs == full.head_dim // 8  # partial rotary
    assert config.final_logit_softcap == 30
    assert config.max_position_embeddings == 8192
    assert config.sliding_window == 128
    assert sum(file.stat().st_size for file in SHIPPED_DIR.rglob("*") if file.is_file()) < 24_000_000
