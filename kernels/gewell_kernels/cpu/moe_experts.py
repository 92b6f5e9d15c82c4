"""Experts of a mixture in torch: one pass over the experts that some token chose."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gewell_kernels.cpu.gelu_mul import gelu_mul


def moe_experts(
    x: Tensor, expert_idx: Tensor, expert_weight: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """As `ops.moe_experts`. Tokens of one expert run together; an expert that nobody chose is not read."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    num_chosen = expert_idx.shape[1]
    order = torch.argsort(expert_idx.flatten(), stable=True)
    tokens = order // num_chosen
    weights = expert_weight.flatten()[order].unsqueeze(-1)
    counts = torch.bincount(expert_idx.flatten(), minlength=gate_up_proj.shape[0]).tolist()
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        rows = tokens[start : start + count]
        inner = gelu_mul(F.linear(x[rows], gate_up_proj[expert]))
        out.index_add_(0, rows, F.linear(inner, down_proj[expert]).float() * weights[start : start + count])
        start += count
    return out.to(x.dtype)
