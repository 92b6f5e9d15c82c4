"""Gated activation in torch."""

import torch.nn.functional as F
from torch import Tensor


def gelu_mul(gate_up: Tensor) -> Tensor:
    """As `ops.gelu_mul`; the product is taken in the input's dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
