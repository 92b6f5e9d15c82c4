"""Norm of a branch, residual sum and the next norm in torch."""

from torch import Tensor

from gewell_kernels.cpu.rms_norm import rms_norm


def residual_norm(
    residual: Tensor,
    branch: Tensor,
    post_weight: Tensor,
    next_weight: Tensor | None,
    eps: float,
    layer_scalar: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """As `ops.residual_norm`."""
    total = rms_norm(branch.float(), post_weight, eps).add_(residual)
    residual.copy_(total if layer_scalar == 1.0 else total.mul_(layer_scalar))
    return residual, rms_norm(residual, next_weight, eps)
