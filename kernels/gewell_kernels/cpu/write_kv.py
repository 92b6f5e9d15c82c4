"""Norm, rotation and KV write in torch."""

import torch
from torch import Tensor

from gewell_kernels.batch import AttentionBatch
from gewell_kernels.cpu.step import step_of
from gewell_kernels.layout import KVLayout, LayerKV


def write_kv(
    qkv: Tensor,
    num_q_heads: int,
    q_weight: Tensor,
    k_weight: Tensor | None,
    eps: float,
    q_scale: float,
    has_v_norm: bool,
    pages: Tensor,
    layer: LayerKV,
    batch: AttentionBatch,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As `ops.write_kv`."""
    step = step_of(batch)
    num_kv_heads = layer.num_kv_heads
    heads = qkv.view(qkv.shape[0], -1, layer.head_dim)
    num_kv_parts = (heads.shape[1] - num_q_heads) // num_kv_heads
    # All heads are normed in one pass, in float32; the weights differ, and a value has none.
    wide = heads.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True).add_(eps))
    num_turning_heads = num_q_heads + (num_kv_heads if num_kv_parts else 0)
    weights = (q_weight * q_scale).expand(num_q_heads, -1)
    if num_kv_parts:
        assert k_weight is not None
        weights = torch.cat((weights, k_weight.expand(num_kv_heads, -1)))
    turned = rotate(normed[:, :num_turning_heads] * weights, *step.rotary(layer))

    q = turned[:, :num_q_heads]
    if layer.layout is not KVLayout.PLAIN:
        assert k_weight is not None
        q = _fold(q, k_weight, layer.num_live_pairs)
    q = q.to(qkv.dtype)
    if not num_kv_parts:
        return q, None, None

    k = turned[:, num_q_heads:]
    source = normed if has_v_norm else wide
    v = source[:, num_q_heads + num_kv_heads * (num_kv_parts - 1) :]
    if layer.layout is KVLayout.PLAIN:
        kv = torch.stack((k, v), dim=1).to(pages.dtype)
    else:
        stored = to_turning_first(v, layer.num_live_pairs)
        if layer.layout is KVLayout.V_ROTK:
            n, half = layer.num_live_pairs, layer.head_dim // 2
            stored = torch.cat((stored, k[..., :n], k[..., half : half + n]), dim=-1)
        kv = stored.unsqueeze(1).to(pages.dtype)  # [num_tokens, planes, num_kv_heads, row_elems]
    rows, unit = step.written_rows(layer, pages.shape[1])
    written = kv if step.written_tokens is None else kv[step.written_tokens]
    rows = rows + layer.layer_offset // unit
    pages.view(-1, unit).index_copy_(0, rows.view(-1), written.view(-1, unit))
    if batch.sliding_window is None:
        return q, None, None
    return q, kv[:, 0], kv[:, 1]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs (i, i + head_dim/2), i < cos.shape[-1]; the rest passes. x [..., head_dim] float32, may be changed."""
    n, half = cos.shape[-1], x.shape[-1] // 2
    a, b = x[..., :n], x[..., half : half + n]
    if n == half:
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    turned_a = a * cos - b * sin
    turned_b = b * cos + a * sin
    x[..., :n] = turned_a
    x[..., half : half + n] = turned_b
    return x


def _fold(q: Tensor, k_weight: Tensor, num_live_pairs: int) -> Tensor:
    """q [num_tokens, heads, head_dim] in turning-first order, the key's norm weight in the dims that do not turn."""
    n, half = num_live_pairs, q.shape[-1] // 2
    return torch.cat(
        (
            q[..., :n],
            q[..., half : half + n],
            q[..., n:half] * k_weight[n:half],
            q[..., half + n :] * k_weight[half + n :],
        ),
        dim=-1,
    )


def to_turning_first(x: Tensor, num_live_pairs: int) -> Tensor:
    n, half = num_live_pairs, x.shape[-1] // 2
    return torch.cat((x[..., :n], x[..., half : half + n], x[..., n:half], x[..., half + n :]), dim=-1)


def from_turning_first(x: Tensor, num_live_pairs: int) -> Tensor:
    n, half = num_live_pairs, x.shape[-1] // 2
    return torch.cat((x[..., :n], x[..., 2 * n : half + n], x[..., n : 2 * n], x[..., half + n :]), dim=-1)
