"""Soft cap of logits, naive, in float64."""

import torch
from torch import Tensor


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap); float64."""
    return cap * torch.tanh(logits.to(torch.float64) / cap)
