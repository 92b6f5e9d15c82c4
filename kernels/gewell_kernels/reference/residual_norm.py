"""Norm of a branch, sum with the residual stream, next layer's norm; naive, in float64."""

import torch
from torch import Tensor

from gewell_kernels.reference.rms_norm import rms_norm


def residual_norm(
    residual: Tensor,
    branch: Tensor,
    post_weight: Tensor,
    next_weight: Tensor | None,
    eps: float,
    layer_scalar: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Both results of `ops.residual_norm` as new float64 tensors; residual is left alone.

    The sum is rounded to residual's dtype, since the op's second norm reads the rounded value.
    """
    exact = (residual.to(torch.float64) + rms_norm(branch, post_weight, eps)) * layer_scalar
    return exact, rms_norm(exact.to(residual.dtype), next_weight, eps)
