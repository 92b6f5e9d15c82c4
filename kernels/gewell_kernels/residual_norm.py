"""The seam between two halves of a layer: norm the branch, add it, scale the stream, norm it for the next half."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gewell_kernels._checks import FLOATS, check_contiguous, check_dtype, check_shape, check_unit_stride
from gewell_kernels.rms_norm import warps_for_row


@triton.jit
def _residual_norm_kernel(
    residual_ptr,  # read and written
    branch_ptr,
    post_weight_ptr,
    next_weight_ptr,  # not read unless HAS_NEXT_WEIGHT
    normed_ptr,
    branch_stride_t,  # elements; residual and normed are contiguous
    hidden_size,  # runtime: one compile serves every width in the bucket
    eps,
    layer_scalar,
    HAS_NEXT_WEIGHT: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two >= hidden_size
):
    """r' = round((r + b * rsqrt(mean b^2 + eps) * w_post) * scalar); n = round(r' * rsqrt(mean r'^2 + eps) * w_next).

    Float32 throughout; the second norm reads the rounded r', as if the two were separate ops.
    """
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < hidden_size
    residual_ptrs = residual_ptr + row * hidden_size + offs_d
    branch = tl.load(branch_ptr + row * branch_stride_t + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    stream = tl.load(residual_ptrs, mask=mask_d, other=0.0).to(tl.float32)
    post_weight = tl.load(post_weight_ptr + offs_d, mask=mask_d, other=0.0)
    branch *= tl.rsqrt(tl.sum(branch * branch, axis=0) / hidden_size + eps)
    stream = ((stream + branch * post_weight) * layer_scalar).to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptrs, stream, mask=mask_d)
    stream = stream.to(tl.float32)
    normed = stream * tl.rsqrt(tl.sum(stream * stream, axis=0) / hidden_size + eps)
    if HAS_NEXT_WEIGHT:
        normed *= tl.load(next_weight_ptr + offs_d, mask=mask_d, other=0.0)
    tl.store(normed_ptr + row * hidden_size + offs_d, normed.to(normed_ptr.dtype.element_ty), mask=mask_d)


def residual_norm(
    residual: Tensor,
    branch: Tensor,
    post_weight: Tensor,
    next_weight: Tensor | None,
    eps: float,
    layer_scalar: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """See `gewell_kernels.ops.residual_norm`."""
    check_dtype("residual", residual, FLOATS)
    check_dtype("branch", branch, (residual.dtype,))
    check_shape("residual", residual, (None, None))
    check_shape("branch", branch, residual.shape)
    check_contiguous("residual", residual)
    check_unit_stride("branch", branch)
    num_tokens, hidden_size = residual.shape
    for name, weight in (("post_weight", post_weight), ("next_weight", next_weight)):
        if weight is not None:
            check_dtype(name, weight, (torch.float32,))
            check_shape(name, weight, (hidden_size,))
            check_unit_stride(name, weight)
    normed = torch.empty_like(residual)
    if residual.numel():
        block_d = triton.next_power_of_2(hidden_size)
        _residual_norm_kernel[(num_tokens,)](
            residual,
            branch,
            post_weight,
            next_weight,
            normed,
            branch.stride(0),
            hidden_size,
            eps,
            float(layer_scalar),
            HAS_NEXT_WEIGHT=next_weight is not None,
            BLOCK_D=block_d,
            num_warps=warps_for_row(block_d),
        )
    return residual, normed
