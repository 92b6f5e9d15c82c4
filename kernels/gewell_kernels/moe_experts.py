"""Mixture of experts: each token's chosen experts, as two grouped products over rows that are gathered by expert.

A *pair* is a token and one of its experts, numbered token * k + place. Pairs are laid out by expert without a sort:
the program of an expert counts the pairs of lower experts and ranks its own. Blocks of BLOCK_M pairs never mix experts,
so a block reads one expert's weights; with few rows an expert has one block and its weights are read once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gewell_kernels._checks import FLOATS, check_aligned, check_contiguous, check_dtype, check_shape
from gewell_kernels._device import shared_memory_bytes
from gewell_kernels.gelu_mul import gelu_tanh

_BLOCK_PAIRS = 2048  # pairs that a placing program looks at together


@triton.jit(do_not_specialize=["num_pairs"])
def _place_pairs_kernel(
    expert_idx_ptr,  # [num_pairs] int64
    pair_at_ptr,  # [num_pairs] int32, written: the pair in each row of the grouped order
    block_expert_ptr,  # [max_blocks] int32, written up to num_blocks
    block_first_ptr,  # [max_blocks] int32, likewise: its first row
    first_row_ptr,  # [num_experts + 1] int32, written
    num_blocks_ptr,  # [1] int32, written by the last expert
    num_pairs,
    num_experts,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two >= num_experts
    BLOCK_M: tl.constexpr,
):
    """Rows and blocks of one expert (the program's number); each expert's rows keep the order of pairs."""
    expert = tl.program_id(0)
    offs_p = tl.arange(0, BLOCK_P)
    offs_e = tl.arange(0, BLOCK_E)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for at in range(0, num_pairs, BLOCK_P):
        mask = at + offs_p < num_pairs
        experts = tl.load(expert_idx_ptr + at + offs_p, mask=mask, other=0).to(tl.int32)
        counts += tl.histogram(experts, BLOCK_E, mask=mask)
    first = tl.sum(tl.where(offs_e < expert, counts, 0), axis=0)
    own = tl.sum(tl.where(offs_e == expert, counts, 0), axis=0)
    block = tl.sum(tl.where(offs_e < expert, tl.cdiv(counts, BLOCK_M), 0), axis=0)
    tl.store(first_row_ptr + expert, first)
    for at in range(0, own, BLOCK_M):
        tl.store(block_expert_ptr + block, expert)
        tl.store(block_first_ptr + block, first + at)
        block += 1
    if expert == num_experts - 1:
        tl.store(num_blocks_ptr, block)
        tl.store(first_row_ptr + num_experts, first + own)
    row = first
    for at in range(0, num_pairs, BLOCK_P):
        mask = at + offs_p < num_pairs
        experts = tl.load(expert_idx_ptr + at + offs_p, mask=mask, other=-1).to(tl.int32)
        mine = (experts == expert) & mask
        ranks = tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(pair_at_ptr + row + ranks, at + offs_p, mask=mine)
        row += tl.sum(mine.to(tl.int32), axis=0)


@triton.jit
def _block_rows(block_expert_ptr, block_first_ptr, first_row_ptr, pair_at_ptr, block, BLOCK_M: tl.constexpr):
    """Expert, grouped rows [BLOCK_M], pairs in them, and which of them exist."""
    expert = tl.load(block_expert_ptr + block)
    rows = tl.load(block_first_ptr + block) + tl.arange(0, BLOCK_M)
    mask_m = rows < tl.load(first_row_ptr + expert + 1)
    return expert, rows, tl.load(pair_at_ptr + rows, mask=mask_m, other=0), mask_m


@triton.jit
def _gate_up_kernel(
    x_ptr,
    w_ptr,  # [num_experts, 2 * inner, hidden] contiguous
    inner_ptr,  # [num_pairs, inner] contiguous, in the grouped order, written
    block_expert_ptr,
    block_first_ptr,
    first_row_ptr,
    pair_at_ptr,
    num_blocks_ptr,
    x_stride_t,
    hidden,
    inner,
    K: tl.constexpr,  # experts per token
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """inner[r] = round(gelu_tanh(gate[e] x[t]) * (up[e] x[t])) for row r of token t and expert e; float32 sums."""
    block = tl.program_id(1)
    if block >= tl.load(num_blocks_ptr):
        return
    expert, rows, pairs, mask_m = _block_rows(
        block_expert_ptr, block_first_ptr, first_row_ptr, pair_at_ptr, block, BLOCK_M
    )
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_n = offs_n < inner
    gate_ptrs = w_ptr + (expert.to(tl.int64) * 2 * inner + offs_n)[:, None] * hidden + offs_k[None, :]
    up_ptrs = gate_ptrs + inner.to(tl.int64) * hidden
    x_ptrs = x_ptr + (pairs // K).to(tl.int64)[None, :] * x_stride_t + offs_k[:, None]
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for at in tl.range(0, hidden, BLOCK_K, num_stages=STAGES):
        mask_k = at + offs_k < hidden
        mask_w = mask_n[:, None] & mask_k[None, :]
        x = tl.load(x_ptrs, mask=mask_m[None, :] & mask_k[:, None], other=0.0)
        gate = tl.dot(tl.load(gate_ptrs, mask=mask_w, other=0.0), x, gate, input_precision="ieee")
        up = tl.dot(tl.load(up_ptrs, mask=mask_w, other=0.0), x, up, input_precision="ieee")
        gate_ptrs += BLOCK_K
        up_ptrs += BLOCK_K
        x_ptrs += BLOCK_K
    out_ptrs = inner_ptr + rows.to(tl.int64)[None, :] * inner + offs_n[:, None]
    activated = (gelu_tanh(gate) * up).to(inner_ptr.dtype.element_ty)
    tl.store(out_ptrs, activated, mask=mask_m[None, :] & mask_n[:, None])


@triton.jit
def _down_kernel(
    inner_ptr,  # [num_pairs, inner] contiguous, in the grouped order
    w_ptr,  # [num_experts, hidden, inner] contiguous
    weight_ptr,  # [num_pairs] float32
    outer_ptr,  # [num_pairs, hidden] float32 contiguous, by pair, written
    block_expert_ptr,
    block_first_ptr,
    first_row_ptr,
    pair_at_ptr,
    num_blocks_ptr,
    hidden,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """outer[pair] = weight[pair] * down[e] inner[row], float32."""
    block = tl.program_id(1)
    if block >= tl.load(num_blocks_ptr):
        return
    expert, rows, pairs, mask_m = _block_rows(
        block_expert_ptr, block_first_ptr, first_row_ptr, pair_at_ptr, block, BLOCK_M
    )
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_n = offs_n < hidden
    w_ptrs = w_ptr + (expert.to(tl.int64) * hidden + offs_n)[:, None] * inner + offs_k[None, :]
    x_ptrs = inner_ptr + rows.to(tl.int64)[None, :] * inner + offs_k[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for at in tl.range(0, inner, BLOCK_K, num_stages=STAGES):
        mask_k = at + offs_k < inner
        x = tl.load(x_ptrs, mask=mask_m[None, :] & mask_k[:, None], other=0.0)
        w = tl.load(w_ptrs, mask=mask_n[:, None] & mask_k[None, :], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        w_ptrs += BLOCK_K
        x_ptrs += BLOCK_K
    acc *= tl.load(weight_ptr + pairs, mask=mask_m, other=0.0)[None, :]
    out_ptrs = outer_ptr + pairs.to(tl.int64)[None, :] * hidden + offs_n[:, None]
    tl.store(out_ptrs, acc, mask=mask_m[None, :] & mask_n[:, None])


@triton.jit
def _sum_pairs_kernel(outer_ptr, out_ptr, hidden, K: tl.constexpr, BLOCK_D: tl.constexpr):
    """out[t] = round(sum over the token's pairs, in order, in float32)."""
    token = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < hidden
    total = tl.zeros((BLOCK_D,), tl.float32)
    for place in tl.static_range(K):
        total += tl.load(outer_ptr + (token * K + place) * hidden + offs_d, mask=mask_d, other=0.0)
    tl.store(out_ptr + token * hidden + offs_d, total.to(out_ptr.dtype.element_ty), mask=mask_d)


def moe_experts(
    x: Tensor, expert_idx: Tensor, expert_weight: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """See `gewell_kernels.ops.moe_experts`."""
    check_dtype("x", x, FLOATS)
    check_shape("x", x, (None, None))
    check_contiguous("x", x)
    num_tokens, hidden = x.shape
    num_experts, both, _ = gate_up_proj.shape
    check_dtype("expert_idx", expert_idx, (torch.int64,))
    check_shape("expert_idx", expert_idx, (num_tokens, None))
    check_contiguous("expert_idx", expert_idx)
    check_dtype("expert_weight", expert_weight, (torch.float32,))
    check_shape("expert_weight", expert_weight, expert_idx.shape)
    check_contiguous("expert_weight", expert_weight)
    for name, weight, shape in (
        ("gate_up_proj", gate_up_proj, (num_experts, both, hidden)),
        ("down_proj", down_proj, (num_experts, hidden, both // 2)),
    ):
        check_dtype(name, weight, (x.dtype,))
        check_shape(name, weight, shape)
        check_contiguous(name, weight)
        check_aligned(name, weight)
    inner, k = both // 2, expert_idx.shape[1]
    out = torch.empty_like(x)
    num_pairs = num_tokens * k
    if not num_pairs:
        return out.zero_()

    block_m = 16
    while block_m < 128 and num_pairs > 2 * block_m * num_experts:
        block_m *= 2
    max_blocks = min(num_pairs, num_pairs // block_m + num_experts)
    num_warps = 8 if block_m >= 64 else 4
    block_n = 128 if shared_memory_bytes(x.device) > 160 * 1024 else 64
    # One allocation for all that the placing kernel writes.
    sizes = [num_pairs, max_blocks, max_blocks, num_experts + 1, 1]
    scratch = torch.empty(sum(sizes), dtype=torch.int32, device=x.device)
    pair_at, block_expert, block_first, first_row, num_blocks = scratch.split(sizes)
    places = (block_expert, block_first, first_row, pair_at, num_blocks)
    _place_pairs_kernel[(num_experts,)](
        expert_idx, pair_at, block_expert, block_first, first_row, num_blocks, num_pairs, num_experts,
        BLOCK_P=_BLOCK_PAIRS, BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_M=block_m, num_warps=4,
    )  # fmt: skip
    activated = torch.empty(num_pairs, inner, dtype=x.dtype, device=x.device)
    outer = torch.empty(num_pairs, hidden, dtype=torch.float32, device=x.device)
    # Two weight tiles a step in the first product: half as wide as the second's.
    _gate_up_kernel[(triton.cdiv(inner, block_n // 2), max_blocks)](
        x, gate_up_proj, activated, *places, x.stride(0), hidden, inner,
        K=k, BLOCK_M=block_m, BLOCK_N=block_n // 2, BLOCK_K=64, STAGES=4, num_warps=num_warps,
    )  # fmt: skip
    _down_kernel[(triton.cdiv(hidden, block_n), max_blocks)](
        activated, down_proj, expert_weight, outer, *places, hidden, inner,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=64, STAGES=4, num_warps=num_warps,
    )  # fmt: skip
    _sum_pairs_kernel[(num_tokens, triton.cdiv(hidden, 1024))](outer, out, hidden, K=k, BLOCK_D=1024, num_warps=4)
    return out
