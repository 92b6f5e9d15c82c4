"""The shape of gewell-nano, and its files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from gewell.config import ModelConfig
from gewell_training.tokenizer import FIXED_IDS, VOCAB_SIZE

ROW_TOKENS = 8192
PREFIX = "model.language_model."  # of the text model's tensors in the checkpoint


def config_dict(**changes: int) -> dict[str, Any]:
    """`config.json` of nano: every feature that the 31B's text model has. `changes` go into `text_config`."""
    num_layers = changes.get("num_hidden_layers", 12)
    text = {
        "model_type": "gemma4_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 2,
        "head_dim": 64,
        "global_head_dim": 128,
        "attention_k_eq_v": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": 128,
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(num_layers)],
        "max_position_embeddings": ROW_TOKENS,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "use_bidirectional_attention": "vision",
        "tie_word_embeddings": True,
        "pad_token_id": FIXED_IDS["<pad>"],
        "bos_token_id": FIXED_IDS["<bos>"],
        "eos_token_id": FIXED_IDS["<eos>"],
        "dtype": "bfloat16",
    }
    first_media_id = VOCAB_SIZE - 7
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": {**text, **changes},
        "vision_config": None,
        "audio_config": None,
        "boi_token_id": first_media_id,
        "image_token_id": first_media_id + 2,
        "eoi_token_id": first_media_id + 4,
        "video_token_id": first_media_id + 6,
        "eos_token_id": [FIXED_IDS["<eos>"], FIXED_IDS["<turn|>"]],
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


GENERATION_CONFIG = {
    "bos_token_id": FIXED_IDS["<bos>"],
    "pad_token_id": FIXED_IDS["<pad>"],
    "eos_token_id": [FIXED_IDS["<eos>"], FIXED_IDS["<turn|>"], FIXED_IDS["<|tool_response>"]],
    "do_sample": False,
}


def drafter_config_dict(**changes: int) -> dict[str, Any]:
    """`config.json` of nano's drafter: four query-only layers over the keys and values of nano's last layers."""
    target = config_dict(**changes)
    text = dict(target["text_config"])
    text |= {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "final_logit_softcapping": None,
        "use_bidirectional_attention": None,
    }
    shared = ("boi_token_id", "image_token_id", "eoi_token_id", "tie_word_embeddings", "dtype")
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": target["text_config"]["hidden_size"],
        "use_ordered_embeddings": False,
        "text_config": text,
        **{name: target[name] for name in shared},
    }


def drafter_config(**changes: int) -> ModelConfig:
    return ModelConfig.from_dict(drafter_config_dict(**changes))


def model_config(**changes: int) -> ModelConfig:
    return ModelConfig.from_dict(config_dict(**changes), GENERATION_CONFIG)


def export(state: Mapping[str, Tensor], out: Path, *, dtype: torch.dtype = torch.bfloat16, **changes: int) -> None:
    """Write config, generation config and weights of a twin's state dict as a checkpoint folder."""
    named = {f"{PREFIX}{name}": tensor for name, tensor in state.items()}
    _write_folder(named, config_dict(**changes), out, dtype)


def export_drafter(
    state: Mapping[str, Tensor], out: Path, *, dtype: torch.dtype = torch.bfloat16, **changes: int
) -> None:
    """The same for a drafter's twin."""
    projections = ("pre_projection.", "post_projection.")
    named = {name if name.startswith(projections) else f"model.{name}": tensor for name, tensor in state.items()}
    _write_folder(named, drafter_config_dict(**changes), out, dtype)


def _write_folder(tensors: Mapping[str, Tensor], config: Mapping[str, Any], out: Path, dtype: torch.dtype) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (out / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=1) + "\n")
    stored = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    save_file(stored, str(out / "model.safetensors"), metadata={"format": "pt"})
