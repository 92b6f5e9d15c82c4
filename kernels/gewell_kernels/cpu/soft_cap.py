"""Soft-capped logits in torch."""

from torch import Tensor


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """As `ops.soft_cap`."""
    return logits.float().div(cap).tanh_().mul_(cap)
