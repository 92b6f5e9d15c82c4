"""RMS norm over the last axis, one program per row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gewell_kernels._checks import FLOATS, check_dtype, check_shape, check_unit_stride


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    w_ptr,  # not read unless HAS_WEIGHT
    out_ptr,
    x_stride_t,  # elements; the last axis has unit stride
    out_stride_t,
    hidden_size,  # runtime: one compile serves every width in the bucket
    eps,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two >= hidden_size
):
    """out[t, d] = round(x[t, d] * rsqrt(mean(x[t]^2) + eps) * w[d]); all in float32, one rounding."""
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < hidden_size
    x = tl.load(x_ptr + row * x_stride_t + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / hidden_size + eps)
    if HAS_WEIGHT:
        y *= tl.load(w_ptr + offs_d, mask=mask_d, other=0.0)
    tl.store(out_ptr + row * out_stride_t + offs_d, y.to(out_ptr.dtype.element_ty), mask=mask_d)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See `gewell_kernels.ops.rms_norm`. Rows may be strided; their elements may not."""
    check_dtype("x", x, FLOATS)
    check_unit_stride("x", x)
    hidden_size = x.shape[-1]
    if weight is not None:
        check_dtype("weight", weight, (torch.float32,))
        check_shape("weight", weight, (hidden_size,))
        check_unit_stride("weight", weight)
    rows = x.reshape(-1, hidden_size)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if rows.numel():
        block_d = triton.next_power_of_2(hidden_size)
        _rms_norm_kernel[(rows.shape[0],)](
            rows,
            weight,
            out,
            rows.stride(0),
            out.stride(0),
            hidden_size,
            eps,
            HAS_WEIGHT=weight is not None,
            BLOCK_D=block_d,
            num_warps=warps_for_row(block_d),
        )
    return out.view(x.shape)


def warps_for_row(block_d: int) -> int:
    """At most 32 elements a thread: a row of 8192 in float32 then stays in registers through both passes."""
    return max(1, min(8, block_d // 1024))
