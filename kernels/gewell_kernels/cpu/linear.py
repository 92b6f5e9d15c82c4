"""Matrix products with stored weights, in the form that is fastest for few rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_ROWS = 64


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """As `ops.linear`.

    bf16 with few rows reads the weights as the left matrix: oneDNN's kernels then stream them at the memory's speed.
    Two cores with AMX, 262144 x 640, 1 / 8 / 64 rows: F.linear 23.5 / 25.4 / 46.0 ms, this 14.9 / 15.2 / 19.8 ms.
    """
    if x.dtype is not torch.bfloat16 or x.shape[0] > _FEW_ROWS:
        return F.linear(x, weight)
    if x.shape[0] == 1:
        return torch.mv(weight, x[0]).unsqueeze(0)
    return torch.mm(weight, x.t()).t().contiguous()
