"""Gated GELU in its tanh form, over the two halves of a fused projection."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gewell_kernels._checks import FLOATS, check_dtype, check_shape, check_unit_stride

_BLOCK_D = 1024


@triton.jit
def gelu_tanh(x):
    """x * (1 + tanh(y)) / 2 with y = sqrt(2/pi) (x + 0.044715 x^3), written as x * sigmoid(2 y): no cancellation."""
    doubled = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-doubled))


@triton.jit
def _gelu_mul_kernel(
    gate_up_ptr,
    out_ptr,
    gate_up_stride_t,  # elements; out is contiguous
    width,  # of one half
    BLOCK_D: tl.constexpr,
):
    """out[t, d] = round(gelu_tanh(gate_up[t, d]) * gate_up[t, width + d]); float32 inside, one rounding."""
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < width
    gate_ptrs = gate_up_ptr + row * gate_up_stride_t + offs_d
    gate = tl.load(gate_ptrs, mask=mask_d, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + width, mask=mask_d, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + offs_d, (gelu_tanh(gate) * up).to(out_ptr.dtype.element_ty), mask=mask_d)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See `gewell_kernels.ops.gelu_mul`."""
    check_dtype("gate_up", gate_up, FLOATS)
    check_shape("gate_up", gate_up, (None, None))
    check_unit_stride("gate_up", gate_up)
    num_tokens, both = gate_up.shape
    if both % 2:
        raise ValueError(f"gate_up has {both} columns, want an even number: gate and up side by side")
    out = torch.empty(num_tokens, both // 2, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (num_tokens, triton.cdiv(both // 2, _BLOCK_D))
        _gelu_mul_kernel[grid](gate_up, out, gate_up.stride(0), both // 2, BLOCK_D=_BLOCK_D, num_warps=4)
    return out
