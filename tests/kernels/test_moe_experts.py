"""Mixture of experts: a row sent to the wrong expert reads as fluent nonsense."""

import pytest
import torch
from gewell_kernels.reference.moe_experts import moe_experts as reference_moe_experts

from tests.kernels.tolerances import assert_close


def make_case(num_tokens: int, num_experts: int, k: int, hidden: int, inner: int, dtype, device):
    x = torch.randn(num_tokens, hidden, device=device).to(dtype)
    idx = torch.stack([torch.randperm(num_experts)[:k] for _ in range(num_tokens)]) if num_tokens else torch.empty(0, k)
    weight = torch.rand(num_tokens, k, device=device)
    gate_up = (torch.randn(num_experts, 2 * inner, hidden, device=device) / hidden**0.5).to(dtype)
    down = (torch.randn(num_experts, hidden, inner, device=device) / inner**0.5).to(dtype)
    return x, idx.to(torch.int64).to(device), weight, gate_up, down


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k"), [(1, 8, 2), (7, 8, 2), (40, 4, 1), (33, 5, 3), (200, 2, 2), (0, 4, 2)]
)
def test_every_pair_reaches_its_expert(num_tokens, num_experts, k, dtype, device):
    from gewell_kernels.moe_experts import moe_experts

    case = make_case(num_tokens, num_experts, k, 80, 48, dtype, device)
    before = [tensor.clone() for tensor in case]
    out = moe_experts(*case)
    assert all(torch.equal(tensor, old) for tensor, old in zip(case, before, strict=True))
    assert_close(out, reference_moe_experts(*case), dtype)


def test_all_tokens_may_want_one_expert(device):
    from gewell_kernels.moe_experts import moe_experts

    x, idx, weight, gate_up, down = make_case(50, 6, 1, 64, 32, torch.float32, device)
    idx.fill_(4)
    arguments = (x, idx, weight, gate_up, down)
    assert_close(moe_experts(*arguments), reference_moe_experts(*arguments), torch.float32)


def test_nan_in_one_row_stays_in_that_row(device):
    from gewell_kernels.moe_experts import moe_experts

    x, *rest = make_case(9, 3, 2, 64, 32, torch.float32, device)
    x[4, 5] = float("nan")
    bad = moe_experts(x, *rest).isnan().any(dim=1)
    assert bad.nonzero()[:, 0].tolist() == [4]


def test_weights_of_another_shape_are_refused(device):
    from gewell_kernels.moe_experts import moe_experts

    x, idx, weight, gate_up, down = make_case(2, 3, 1, 64, 32, torch.float32, device)
    with pytest.raises(ValueError, match=r"down_proj has shape \[3, 64, 16\], want \[3, 64, 32\]"):
        moe_experts(x, idx, weight, gate_up, down[:, :, :16])
