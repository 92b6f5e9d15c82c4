"""Soft cap of logits: one pass from the head's dtype to float32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gewell_kernels._checks import FLOATS, check_contiguous, check_dtype

_BLOCK = 4096


@triton.jit
def _soft_cap_kernel(logits_ptr, out_ptr, num_elems, cap, BLOCK: tl.constexpr):
    """out = cap * tanh(x / cap), float32; tanh |y| as (1 - e) / (1 + e), e = exp(-2 |y|): no overflow."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_elems
    x = tl.load(logits_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    e = tl.exp(-2.0 * tl.abs(x) / cap)
    bounded = cap * (1.0 - e) / (1.0 + e)
    tl.store(out_ptr + offs, tl.where(x < 0, -bounded, bounded), mask=mask)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """See `gewell_kernels.ops.soft_cap`."""
    check_dtype("logits", logits, FLOATS)
    check_contiguous("logits", logits)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if out.numel():
        grid = (triton.cdiv(out.numel(), _BLOCK),)
        _soft_cap_kernel[grid](logits, out, out.numel(), float(cap), BLOCK=_BLOCK, num_warps=8)
    return out
