"""Rotary constants on the device, made once per layer kind and kept: kernels must not allocate while serving."""

from functools import cache

import torch
from torch import Tensor

from gewell_kernels._device import refuse_capture
from gewell_kernels.layout import LayerKV

_MIN_POSITIONS = 1 << 18  # Gemma 4's longest context, so that a table made at warm-up never grows under a CUDA graph


def inv_freq_tensor(layer: LayerKV, device: torch.device) -> Tensor:
    """[num_live_pairs] float32."""
    return _inv_freq(layer.rope_theta, layer.rope_factor, layer.head_dim, layer.num_live_pairs, device)


def rotary_table(layer: LayerKV, device: torch.device, num_positions: int, kv_dtype: torch.dtype) -> Tensor:
    """[>= num_positions, 2 * num_live_pairs]: cosines of all live pairs, then sines, of float32(pos) * inv_freq.

    float16 keeps 11 bits of a value in [-1, 1], bf16 keys keep 8; only float32 keys get a float32 table. On a GPU a row
    per position of the longest context is made at once: 64 MiB for 64 pairs.
    """
    floor = _MIN_POSITIONS if device.type == "cuda" else 16
    num_rows = max(floor, 1 << (num_positions - 1).bit_length())
    dtype = torch.float32 if kv_dtype == torch.float32 else torch.float16
    return _table(layer.rope_theta, layer.rope_factor, layer.head_dim, layer.num_live_pairs, device, num_rows, dtype)


@cache
def _inv_freq(theta: float, factor: float, head_dim: int, num_live_pairs: int, device: torch.device) -> Tensor:
    refuse_capture("rotary frequencies")
    exact = [theta ** (-2 * i / head_dim) / factor for i in range(num_live_pairs)]
    return torch.tensor(exact, dtype=torch.float64).to(torch.float32).to(device)


@cache
def _table(
    theta: float,
    factor: float,
    head_dim: int,
    num_live_pairs: int,
    device: torch.device,
    num_rows: int,
    dtype: torch.dtype,
) -> Tensor:
    inv_freq = _inv_freq(theta, factor, head_dim, num_live_pairs, device)
    refuse_capture("the rotary table")
    angle = torch.arange(num_rows, dtype=torch.float32, device=device)[:, None] * inv_freq
    return torch.cat((angle.cos(), angle.sin()), dim=-1).to(dtype)
