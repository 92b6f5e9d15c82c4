"""The soft cap bends every logit: sampling and log-probabilities are wrong without it."""

import pytest
import torch
from gewell_kernels.reference.soft_cap import soft_cap as reference_soft_cap

from tests.kernels.tolerances import assert_close


@pytest.mark.parametrize("shape", [(1, 7), (5, 1234), (0, 9)])
def test_logits_are_bent_in_float32_and_left_alone(shape, dtype, device):
    from gewell_kernels.soft_cap import soft_cap

    logits = torch.randn(shape, device=device).mul(40).to(dtype)
    before = logits.clone()
    out = soft_cap(logits, 30.0)
    assert out.dtype == torch.float32
    assert torch.equal(logits, before)
    assert_close(out, reference_soft_cap(logits, 30.0), torch.float32)


def test_far_out_it_is_the_cap_and_zero_stays_zero(device):
    from gewell_kernels.soft_cap import soft_cap

    logits = torch.tensor([[-1e30, -1e4, 0.0, 1e4, float("inf"), float("-inf")]], device=device)
    assert soft_cap(logits, 30.0).tolist() == [[-30.0, -30.0, 0.0, 30.0, 30.0, -30.0]]
