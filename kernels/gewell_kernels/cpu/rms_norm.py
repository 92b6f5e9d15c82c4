"""RMS norm in torch."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """As `ops.rms_norm`."""
    wide = x.float()
    out = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True).add_(eps))
    if weight is not None:
        out *= weight
    return out.to(x.dtype)
