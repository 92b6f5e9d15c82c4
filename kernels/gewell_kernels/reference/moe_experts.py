"""Mixture of experts, naive, in float64: token by token, expert by expert."""

import torch
from torch import Tensor

from gewell_kernels.reference.gelu_mul import gelu_mul


def moe_experts(
    x: Tensor, expert_idx: Tensor, expert_weight: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """As `ops.moe_experts`, float64 [num_tokens, hidden]; the inner activation is rounded to x's dtype, as stored."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, experts in enumerate(expert_idx.tolist()):
        for place, expert in enumerate(experts):
            inner = gelu_mul(x[token : token + 1].to(torch.float64) @ gate_up_proj[expert].to(torch.float64).T)
            outer = inner.to(x.dtype).to(torch.float64) @ down_proj[expert].to(torch.float64).T
            out[token] += expert_weight[token, place].to(torch.float64) * outer[0]
    return out
