"""One tolerance per dtype for all ops, a relative error of the whole result (Frobenius). No test widens its own."""

import torch
from torch import Tensor

# A few roundings to the dtype (2^-24, 2^-11, 2^-8 relative) and, for attention, one of the softmax weights.
RELATIVE_ERROR = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.shape == expected.shape
    difference = (actual.to(torch.float64) - expected.to(torch.float64)).norm()
    scale = expected.to(torch.float64).norm().clamp(min=1e-12)
    error = float(difference / scale)
    assert error <= RELATIVE_ERROR[dtype], f"relative error {error:.3g}"  # NaN fails as well
