"""Matrix products with stored weights, in the form that is fastest for few rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Numbers of rows for which the weights go in as the left matrix, measured on two cores of a Xeon with AMX for the
# shapes of Gemma 3 270M. bf16, 262144 x 640, 1 / 8 / 64 rows: F.linear 23.5 / 25.4 / 46.0 ms, this 14.9 / 15.2 / 19.8:
# eight rows cost what one costs. float32, one core, 4096 x 640, 8 rows: 5.7 against 4.0 ms; with two it would lose.
_WEIGHTS_FIRST = {torch.bfloat16: range(2, 65), torch.float32: range(4, 33)}


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """As `ops.linear`."""
    num_rows = x.shape[0]
    if num_rows == 1 and x.dtype is torch.bfloat16:
        return torch.mv(weight, x[0]).unsqueeze(0)
    if num_rows in _WEIGHTS_FIRST.get(x.dtype, ()):
        return torch.mm(weight, x.t()).t().contiguous()
    return F.linear(x, weight)
