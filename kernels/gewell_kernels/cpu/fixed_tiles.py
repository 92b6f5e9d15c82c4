"""Ops whose result for a row does not depend, to the bit, on the other rows of the step or on how a prompt was cut.

Products see tiles of exactly 16 rows, padded with zeros: a matrix library chooses its kernel, and with it the order of
its sums, by the shape. Activations run row by row: the vectorised form differs in the last bit from that of a ragged
rest, and where the rest begins depends on the number of rows. Each query attends alone, to exactly the keys it sees.
Norms and rotation need no form of their own: their sums run along one row, and rotary factors come from one table.
Slower than the ops that they replace; same contracts.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gewell_kernels.batch import AttentionBatch
from gewell_kernels.cpu import gelu_mul as fast_gelu_mul
from gewell_kernels.cpu import soft_cap as fast_soft_cap
from gewell_kernels.cpu.paged_attention import attend_chunks
from gewell_kernels.cpu.step import step_of
from gewell_kernels.layout import LayerKV

TILE_ROWS = 16


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """As `ops.linear`."""
    if not x.shape[0]:
        return F.linear(x, weight)
    padded = F.pad(x, (0, 0, 0, -x.shape[0] % TILE_ROWS))
    return torch.cat([F.linear(tile, weight) for tile in padded.split(TILE_ROWS)])[: x.shape[0]]


def gelu_mul(gate_up: Tensor) -> Tensor:
    """As `ops.gelu_mul`."""
    return _by_rows(fast_gelu_mul.gelu_mul, gate_up)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """As `ops.soft_cap`."""
    return _by_rows(lambda row: fast_soft_cap.soft_cap(row, cap), logits)


def moe_experts(
    x: Tensor, expert_idx: Tensor, expert_weight: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """As `ops.moe_experts`. An expert that some row of a tile chose runs over the whole tile; sums in expert order."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    for first in range(0, x.shape[0], TILE_ROWS):
        rows = slice(first, first + TILE_ROWS)
        chosen, shares = expert_idx[rows], expert_weight[rows]
        for expert in chosen.unique().tolist():
            inner = gelu_mul(linear(x[rows], gate_up_proj[expert]))
            term = linear(inner, down_proj[expert]).float()
            is_here = chosen == expert
            share = torch.where(is_here, shares, 0.0).sum(dim=1, keepdim=True)
            out[rows] += torch.where(is_here.any(dim=1, keepdim=True), term * share, 0.0)
    return out.to(x.dtype)


def paged_attention(
    q: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    k_weight: Tensor | None,
    pages: Tensor,
    layer: LayerKV,
    batch: AttentionBatch,
) -> Tensor:
    """As `ops.paged_attention`."""
    single_queries = step_of(batch).single_queries(layer.page_tokens)
    return attend_chunks(torch.zeros_like(q), q, k_new, v_new, k_weight, pages, layer, single_queries)


def _by_rows(op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """op over x [num_rows, width], a row at a time."""
    return torch.cat([op(row) for row in x.split(1)]) if x.shape[0] else op(x)
