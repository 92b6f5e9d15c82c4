"""Rotation of live pairs, naive: the angle is a float32 product (as the models were trained), all else float64."""

import torch
from torch import Tensor

from gewell_kernels.layout import LayerKV


def rotate(x: Tensor, positions: Tensor, layer: LayerKV) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2), i < num_live_pairs, of x [num_tokens, heads, head_dim]; other dims pass."""
    n, half = layer.num_live_pairs, layer.head_dim // 2
    inv_freq = torch.tensor(layer.inv_freq, dtype=torch.float64).to(torch.float32).to(x.device)
    angle = (positions.to(torch.float32)[:, None] * inv_freq).to(torch.float64)[:, None, :]
    out = x.to(torch.float64).clone()
    a, b = out[..., :n].clone(), out[..., half : half + n].clone()
    out[..., :n] = a * angle.cos() - b * angle.sin()
    out[..., half : half + n] = b * angle.cos() + a * angle.sin()
    return out
