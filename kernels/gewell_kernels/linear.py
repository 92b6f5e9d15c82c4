"""Products of few rows with a large weight: bound by reading the weight once, at any number of outputs.

The weight's tiles are cut along both axes into steps and laid end to end; program p of P takes steps
[p T / P, (p + 1) T / P), so that all programs read equally much whatever the shape ("stream-K", Osama et al. 2023).
A tile that several programs share is summed by the one that arrives last, in the order of programs: the same bits
every time. More rows than `MAX_ROWS` are cuBLAS's.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gewell_kernels._checks import (
    FLOATS,
    check_aligned,
    check_contiguous,
    check_dtype,
    check_same_device,
    check_shape,
    check_unit_stride,
)
from gewell_kernels._device import arrival_counters, num_multiprocessors, shared_memory_bytes

MAX_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTiles:
    block_n: int  # outputs
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


@triton.jit(do_not_specialize=["rows", "total_steps"])
def _linear_kernel(
    x_ptr,
    w_ptr,  # [out_features, in_features] contiguous
    out_ptr,  # [rows, out_features] contiguous
    parts_ptr,  # [2 * programs, BLOCK_N, BLOCK_M] float32: a program's first and last tile, where they are shared
    arrivals_ptr,  # [tiles] int32, all zero; left so
    x_stride_m,
    rows,
    out_features,
    in_features,
    total_steps,  # tiles * steps per tile
    BLOCK_M: tl.constexpr,  # power of two >= rows
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out[m, n] = round(sum_k x[m, k] w[n, k]), summed in float32 and rounded once."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    steps_per_tile = tl.cdiv(in_features, BLOCK_K)
    begin = (program.to(tl.int64) * total_steps // num_programs).to(tl.int32)
    end = ((program.to(tl.int64) + 1) * total_steps // num_programs).to(tl.int32)
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m < rows
    at = begin
    while at < end:
        tile = at // steps_per_tile
        first = at % steps_per_tile
        num_steps = tl.minimum(steps_per_tile - first, end - at)
        offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < out_features
        w_ptrs = w_ptr + offs_n[:, None].to(tl.int64) * in_features + first * BLOCK_K + offs_k[None, :]
        x_ptrs = x_ptr + offs_m[None, :] * x_stride_m + first * BLOCK_K + offs_k[:, None]
        # Weight rows are the tall side of the matrix instruction, the few rows of x its narrow side.
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for step in tl.range(first, first + num_steps, num_stages=STAGES):
            mask_k = step * BLOCK_K + offs_k < in_features
            w = tl.load(w_ptrs, mask=mask_n[:, None] & mask_k[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptrs, mask=mask_m[None, :] & mask_k[:, None], other=0.0)
            acc = tl.dot(w, x, acc, input_precision="ieee")
            w_ptrs += BLOCK_K
            x_ptrs += BLOCK_K

        is_last = True
        if num_steps < steps_per_tile:
            offs_part = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + offs_m[None, :]
            part = (2 * program + (at > begin)).to(tl.int64) * (BLOCK_N * BLOCK_M)
            tl.store(parts_ptr + part + offs_part, acc)
            # Program p starts at p T // P <= s exactly when p <= ((s + 1) P - 1) // T.
            tile_begin = (tile * steps_per_tile).to(tl.int64)
            first_program = ((tile_begin + 1) * num_programs - 1) // total_steps
            last_program = ((tile_begin + steps_per_tile) * num_programs - 1) // total_steps
            tl.debug_barrier()  # every thread's share is written before the arrival is counted
            arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel")
            is_last = arrived == last_program - first_program
            if is_last:
                acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                for other in range(first_program, last_program + 1):
                    other_begin = other * total_steps // num_programs
                    other_part = (2 * other + (other_begin < tile_begin)) * (BLOCK_N * BLOCK_M)
                    acc += tl.load(parts_ptr + other_part + offs_part, cache_modifier=".cg")
                tl.store(arrivals_ptr + tile, 0)
        if is_last:
            out_ptrs = out_ptr + offs_m[None, :].to(tl.int64) * out_features + offs_n[:, None]
            tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_m[None, :] & mask_n[:, None])
        at += num_steps


def linear_tiles(rows: int, out_features: int, in_features: int, dtype_bytes: int, device: torch.device) -> LinearTiles:
    """The first choice whose buffers fit the device's shared memory; n stages keep n - 1 tiles in flight."""
    block_m = max(16, triton.next_power_of_2(rows))
    for tiles in _CHOICES:
        needed = tiles.num_stages * tiles.block_k * (tiles.block_n + block_m) * dtype_bytes
        if needed * tiles.programs_per_sm <= shared_memory_bytes(device):
            return tiles
    return LinearTiles(block_n=64, block_k=32, num_warps=4, num_stages=2, programs_per_sm=1)


_CHOICES = [
    LinearTiles(block_n=128, block_k=128, num_warps=4, num_stages=4, programs_per_sm=1),
    LinearTiles(block_n=64, block_k=64, num_warps=4, num_stages=4, programs_per_sm=1),
]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `gewell_kernels.ops.linear`."""
    check_dtype("x", x, FLOATS)
    check_shape("x", x, (None, None))
    check_unit_stride("x", x)
    rows, in_features = x.shape
    check_dtype("weight", weight, (x.dtype,))
    check_shape("weight", weight, (None, in_features))
    check_same_device("weight", weight, x)
    if rows > MAX_ROWS:
        return torch.nn.functional.linear(x, weight)
    check_contiguous("weight", weight)
    check_aligned("weight", weight)
    out_features = weight.shape[0]
    out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    tiles = linear_tiles(rows, out_features, in_features, x.element_size(), x.device)
    block_m = max(16, triton.next_power_of_2(rows))
    num_tiles = triton.cdiv(out_features, tiles.block_n)
    total_steps = num_tiles * triton.cdiv(in_features, tiles.block_k)
    num_programs = min(num_multiprocessors(x.device) * tiles.programs_per_sm, total_steps)
    parts = torch.empty(2 * num_programs, tiles.block_n, block_m, dtype=torch.float32, device=x.device)
    _linear_kernel[(num_programs,)](
        x,
        weight,
        out,
        parts,
        arrival_counters(x.device, num_tiles),
        x.stride(0),
        rows,
        out_features,
        in_features,
        total_steps,
        BLOCK_M=block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )
    return out
