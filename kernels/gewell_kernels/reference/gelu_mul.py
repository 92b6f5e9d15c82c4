"""Gated GELU (tanh form), naive, in float64."""

import math

import torch
from torch import Tensor


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu_tanh(first half) * second half of the last axis; float64."""
    gate, up = gate_up.to(torch.float64).chunk(2, dim=-1)
    inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1.0 + torch.tanh(inner)) * up
