"""RMS norm, naive, in float64."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight; float64, nothing is rounded."""
    wide = x.to(torch.float64)
    normed = wide * (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return normed if weight is None else normed * weight.to(torch.float64)
