"""A config read wrongly runs the wrong model without an error: heads, windows and rotary settings have to be exact."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gewell.config import Family, LayerKind, ModelConfig
from gewell.errors import CheckpointError, ConfigError
from tests.model.golden_folders import FIXTURES
from tests.model.published import TEXT_31B


def _fixture(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / name / "config.json").read_text())


# --- published shapes --------------------------------------------------------------------------------------------


def test_31b_reads_as_published():
    config = ModelConfig.from_dict({"model_type": "gemma4", "text_config": TEXT_31B, "image_token_id": 258880})
    assert config.num_layers == 60
    assert [layer.kind for layer in config.layers[:6]] == [LayerKind.SLIDING] * 5 + [LayerKind.FULL]
    sliding, full = config.layers[0], config.layers[5]
    assert (sliding.num_kv_heads, sliding.head_dim, sliding.sliding_window) == (16, 256, 1024)
    assert (sliding.rope_theta, sliding.num_live_pairs, sliding.k_eq_v) == (1e4, 128, False)
    assert (full.num_kv_heads, full.head_dim, full.sliding_window) == (4, 512, None)
    assert (full.rope_theta, full.num_live_pairs, full.k_eq_v) == (1e6, 64, True)
    assert config.q_scale == 1.0
    assert config.final_logit_softcap == 30.0
    assert config.has_bidirectional_images
    assert config.tokens.placeholders == (258880,)


def test_e2b_shares_keys_of_the_last_own_layer_of_each_kind():
    text = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 35,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_global_key_value_heads": 4,  # counts only with k_eq_v
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "intermediate_size": 6144,
        "hidden_size_per_layer_input": 256,
    }
    config = ModelConfig.from_dict(text)
    assert config.layers[15].kv_layer_idx == 13
    assert config.layers[19].kv_layer_idx == 14
    assert [layer.writes_kv for layer in config.layers] == [True] * 15 + [False] * 20
    assert config.layers[14].num_kv_heads == 1
    assert (config.layers[14].intermediate_size, config.layers[15].intermediate_size) == (6144, 12288)
    assert config.per_layer_input is not None
    assert config.per_layer_input.size == 256


def test_gemma3_270m_reads_from_its_old_rope_fields():
    config = ModelConfig.from_dict(
        {
            "model_type": "gemma3_text",
            "hidden_size": 640,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "_sliding_window_pattern": 6,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
        }
    )
    assert config.family is Family.GEMMA3
    assert [i for i, layer in enumerate(config.layers) if layer.kind is LayerKind.FULL] == [5, 11, 17]
    assert (config.layers[5].rope_theta, config.layers[5].num_live_pairs) == (1e6, 128)
    assert config.q_scale == 1 / 16
    assert config.norm_adds_one
    assert not config.has_v_norm


def test_gemma3_27b_scales_positions_of_full_layers_only():
    config = ModelConfig.from_dict(
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "query_pre_attn_scalar": 168,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
        }
    )
    assert config.layers[5].rope_factor == 8.0
    assert config.layers[0].rope_factor == 1.0
    assert config.q_scale == 168**-0.5
    assert config.vocab_size == 262208


# --- equal forms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma4-dense", "gemma4-moe", "gemma4-edge", "gemma4-drafter"])
def test_per_layer_config_reads_like_the_older_pair_of_fields(name):
    old = _fixture(name)
    new = _fixture(name)
    text = new["text_config"]
    override = {"head_dim": text.pop("global_head_dim")}
    heads = text.pop("num_global_key_value_heads")
    if heads is not None:
        override["num_key_value_heads"] = heads
    kinds = text["layer_types"]
    text["per_layer_config"] = {str(i): override for i, kind in enumerate(kinds) if kind == "full_attention"}
    assert ModelConfig.from_dict(new) == ModelConfig.from_dict(old)


def test_flat_text_config_reads_like_the_nested_one():
    nested = _fixture("gemma4-dense")
    flat = ModelConfig.from_dict(nested["text_config"])
    assert flat.layers == ModelConfig.from_dict(nested).layers
    assert flat.tokens.placeholders == ()


def test_new_rope_fields_read_like_the_old_ones():
    old = _fixture("gemma3-text")
    new = dict(old)
    del new["rope_theta"], new["rope_local_base_freq"], new["rope_scaling"]
    new["rope_parameters"] = {
        "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    assert ModelConfig.from_dict(new) == ModelConfig.from_dict(old)


def test_end_ids_come_from_generation_config_first():
    config = _fixture("gemma4-dense")
    assert ModelConfig.from_dict(config).tokens.eos == (1, 106)
    generation = {"eos_token_id": [1, 106, 50], "suppress_tokens": [258883, 258882], "top_k": 64}
    read = ModelConfig.from_dict(config, generation)
    assert read.tokens.eos == (1, 106, 50)
    assert read.tokens.suppressed == (258883, 258882)
    assert read.sampling.top_k == 64


# --- refusals ----------------------------------------------------------------------------------------------------


def _with(name: str, **text: Any) -> dict[str, Any]:
    config = _fixture(name)
    config.get("text_config", config).update(text)
    return config


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"model_type": "gemma4_unified"}, "12B unified"),
        ({"model_type": "llama"}, "model_type"),
        ({}, "model_type"),
        (_with("gemma4-dense", hidden_size="64"), "hidden_size"),
        (_with("gemma4-dense", hidden_size=0), "hidden_size"),
        (_with("gemma4-dense", hidden_size=True), "hidden_size"),
        (_with("gemma4-dense", rms_norm_eps=-1.0), "rms_norm_eps"),
        (_with("gemma4-dense", layer_types=["full_attention"]), "layer_types"),
        (_with("gemma4-dense", layer_types=["linear_attention"] * 4), "layer_types"),
        (_with("gemma4-dense", num_attention_heads=3), "num_attention_heads"),
        (_with("gemma4-dense", head_dim=255), "head_dim"),
        (_with("gemma4-dense", attention_bias=True), "attention_bias"),
        (_with("gemma4-dense", num_hidden_layers=10**9), "num_hidden_layers"),
        (_with("gemma4-dense", layer_types=[["full_attention"]] * 4), "layer_types"),
        (_with("gemma4-dense", sliding_window=1), "sliding_window"),
        (_with("gemma4-dense", per_layer_config={"1": {"sliding_window": 8}}), "sliding_window"),
        (_with("gemma4-dense", attention_k_eq_v="yes"), "attention_k_eq_v"),
        (_with("gemma4-dense", hidden_activation="silu"), "hidden_activation"),
        (_with("gemma4-dense", use_bidirectional_attention="all"), "use_bidirectional_attention"),
        (_with("gemma4-dense", num_kv_shared_layers=4), "num_kv_shared_layers"),
        (_with("gemma4-dense", num_kv_shared_layers=3), "num_kv_shared_layers"),
        (_with("gemma4-dense", num_kv_shared_layers=9), "num_kv_shared_layers"),
        (_with("gemma4-dense", tie_word_embeddings=False), "tie_word_embeddings"),
        (_with("gemma4-moe", top_k_experts=9), "top_k_experts"),
        (_with("gemma3-text", rope_scaling={"rope_type": "yarn", "factor": 2.0}), "rope_type"),
        (_with("gemma3-text", attn_logit_softcapping=50.0), "attn_logit_softcapping"),
        ({"model_type": "gemma4", "text_config": 3}, "text_config"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(config, field):
    with pytest.raises(ConfigError, match=field):
        ModelConfig.from_dict(config)


def test_a_folder_without_config_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)


def test_a_damaged_config_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        ModelConfig.from_dir(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
TEXT_FIELDS = sorted({*_fixture("gemma4-dense")["text_config"], "per_layer_config", "query_pre_attn_scalar"})


@given(name=st.sampled_from(["gemma4-dense", "gemma4-moe", "gemma4-edge", "gemma3-text"]), data=st.data())
def test_any_damage_is_read_or_refused_by_name(name, data):
    config = _fixture(name)
    text = config.get("text_config", config)
    field = data.draw(st.sampled_from(TEXT_FIELDS))
    text[field] = data.draw(JSON)
    with contextlib.suppress(ConfigError):
        read = ModelConfig.from_dict(config)
        assert read.num_layers == len(read.layers) > 0
