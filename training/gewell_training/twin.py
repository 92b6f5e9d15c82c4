"""Gemma 4's text model once more, in plain PyTorch and differentiable: what nano is trained with.

Parameters have the names of the published checkpoints, so a state dict is a checkpoint. Checked against the engine's
model after export (tests/training/test_twin.py).
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gewell.config import LayerConfig, LayerKind, ModelConfig


class Masks(NamedTuple):
    """What a query may see, for each kind of layer: dense bool [B, 1, T, T], or flex attention's block masks."""

    sliding: object
    full: object

    def of(self, kind: LayerKind) -> object:
        return self.sliding if kind is LayerKind.SLIDING else self.full


Attend = Callable[[Tensor, Tensor, Tensor, object], Tensor]


def attend_dense(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
    """q [B, Hq, T, D], k, v [B, Hkv, T, D] -> [B, Hq, T, D]; for tests and small runs."""
    assert isinstance(mask, Tensor)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0, enable_gqa=True)


def dense_masks(document: Tensor, window: int) -> Masks:
    """document [B, T] -> masks in which a token sees its own document, and nothing after itself."""
    steps = torch.arange(document.shape[1], device=document.device)
    distance = steps[:, None] - steps[None, :]
    same = (document[:, :, None] == document[:, None, :]) & (distance >= 0)
    return Masks((same & (distance < window))[:, None], same[:, None])


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, initial: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), initial))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (_unit_rms(x, self.eps) * self.weight).to(x.dtype)


def _unit_rms(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)


class Linear(nn.Module):
    """Weights stay float32; the product is computed in the input's type."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) * in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    def __init__(self, layer: LayerConfig, config: ModelConfig) -> None:
        super().__init__()
        self.kind = layer.kind
        self.num_q_heads, self.num_kv_heads, self.head_dim = layer.num_q_heads, layer.num_kv_heads, layer.head_dim
        self.eps = config.rms_norm_eps
        hidden = config.hidden_size
        self.q_proj = Linear(layer.num_q_heads * layer.head_dim, hidden)
        self.k_proj = Linear(layer.num_kv_heads * layer.head_dim, hidden)
        self.v_proj = None if layer.k_eq_v else Linear(layer.num_kv_heads * layer.head_dim, hidden)
        self.o_proj = Linear(hidden, layer.num_q_heads * layer.head_dim)
        # Scores have no factor of their own: with weights of 1 they would start sqrt(head_dim) times too sharp.
        self.q_norm = RMSNorm(layer.head_dim, config.rms_norm_eps, layer.head_dim**-0.25)
        self.k_norm = RMSNorm(layer.head_dim, config.rms_norm_eps, layer.head_dim**-0.25)

    def forward(self, x: Tensor, rope: "Rope", mask: object, attend: Attend) -> Tensor:
        """x [B, T, hidden] -> [B, T, hidden]"""
        batch, length, _ = x.shape
        parts: list[Tensor] = [p.weight for p in (self.q_proj, self.k_proj, self.v_proj) if p is not None]
        qkv = F.linear(x, torch.cat(parts).to(x.dtype)).view(batch, length, -1, self.head_dim)
        heads = [self.num_q_heads] + [self.num_kv_heads] * (len(parts) - 1)
        q, k_raw, *rest = torch.split(qkv, heads, dim=2)
        v_raw = rest[0] if rest else k_raw
        q = rope.turn(self.q_norm(q))
        k = rope.turn(self.k_norm(k_raw))
        v = _unit_rms(v_raw, self.eps).to(x.dtype)
        out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected

    def keys_values(self, x: Tensor, rope: "Rope") -> tuple[Tensor, Tensor]:
        """What `forward` attends to, once more: [B, num_kv_heads, T, head_dim] each."""
        shape = (*x.shape[:2], self.num_kv_heads, self.head_dim)
        k_raw = self.k_proj(x).view(shape)
        v_raw = k_raw if self.v_proj is None else self.v_proj(x).view(shape)
        k = rope.turn(self.k_norm(k_raw))
        return k.transpose(1, 2), _unit_rms(v_raw, self.eps).to(x.dtype).transpose(1, 2)


class Rope(NamedTuple):
    """cos and sin of this step's positions, [B, T, 1, head_dim / 2]."""

    cos: Tensor
    sin: Tensor

    def turn(self, x: Tensor) -> Tensor:
        """x [B, T, heads, head_dim]: pairs (i, i + head_dim / 2)."""
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), dim=-1).to(x.dtype)


class RopeTable(nn.Module):
    """cos and sin of all positions for one kind of layer."""

    cos: Tensor
    sin: Tensor

    def __init__(self, layer: LayerConfig, num_positions: int) -> None:
        super().__init__()
        pairs = torch.arange(layer.head_dim // 2, dtype=torch.float64)
        inv_freq = layer.rope_theta ** (-2 * pairs / layer.head_dim)
        inv_freq[layer.num_live_pairs :] = 0
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq.float()[None, :]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, positions: Tensor) -> Rope:
        return Rope(self.cos[positions][:, :, None], self.sin[positions][:, :, None])


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(intermediate_size, hidden_size)
        self.up_proj = Linear(intermediate_size, hidden_size)
        self.down_proj = Linear(hidden_size, intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, torch.cat((self.gate_proj.weight, self.up_proj.weight)).to(x.dtype)).chunk(2, dim=-1)
        down: Tensor = self.down_proj(F.gelu(gate, approximate="tanh") * up)
        return down


class Layer(nn.Module):
    def __init__(self, layer: LayerConfig, config: ModelConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.kind = layer.kind
        self.input_layernorm = RMSNorm(hidden, eps)
        # A branch enters the stream with the size of this weight: small at first, so that the embedding is heard.
        self.post_attention_layernorm = RMSNorm(hidden, eps, 0.25)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps, 0.25)
        self.self_attn = Attention(layer, config)
        self.mlp = MLP(hidden, layer.intermediate_size)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, rope: Rope, mask: object, attend: Attend) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rope, mask, attend))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar.to(x.dtype)


class Twin(nn.Module):
    """ids, positions [B, T] int64 -> hidden [B, T, hidden_size] after the final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=config.hidden_size**-0.5)
        self.layers = nn.ModuleList(Layer(layer, config) for layer in config.layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        firsts = {layer.kind: layer for layer in reversed(config.layers)}
        self.ropes = nn.ModuleDict(
            {str(kind): RopeTable(layer, config.max_position_embeddings) for kind, layer in firsts.items()}
        )

    def forward(
        self, ids: Tensor, positions: Tensor, masks: Masks, attend: Attend, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        return self.run(ids, positions, masks, attend, dtype)[0]

    def run(
        self, ids: Tensor, positions: Tensor, masks: Masks, attend: Attend, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, dict[LayerKind, tuple[Tensor, Tensor]]]:
        """The hidden states, and keys and values [B, heads, T, head_dim] of the last layer of each kind."""
        x = self.embed(ids, dtype)
        ropes = self.turns(positions)
        last_kv = {}
        layers = list(self.each_layer())
        for i, layer in enumerate(layers):
            if all(later.kind is not layer.kind for later in layers[i + 1 :]):
                last_kv[layer.kind] = layer.self_attn.keys_values(layer.input_layernorm(x), ropes[layer.kind])
            x = layer(x, ropes[layer.kind], masks.of(layer.kind), attend)
        return self.norm(x), last_kv

    def each_layer(self) -> Iterator[Layer]:
        for layer in self.layers:
            assert isinstance(layer, Layer)
            yield layer

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(ids, self.embed_tokens.weight).to(dtype) * math.sqrt(self.config.hidden_size)

    def turns(self, positions: Tensor) -> dict[LayerKind, Rope]:
        return {kind: self.ropes[str(kind)](positions) for kind in LayerKind if str(kind) in self.ropes}

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden_size] -> [rows, vocab_size] float32, after the soft-cap."""
        logits = F.linear(hidden.float(), self.embed_tokens.weight)
        cap = self.config.final_logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)
