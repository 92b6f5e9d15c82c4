"""Products of few rows: every logit passes through hundreds of them."""

import pytest
import torch
from gewell_kernels.reference.linear import linear as reference_linear

from tests.kernels.tolerances import assert_close


@pytest.mark.parametrize("rows", [1, 5, 16, 64])
@pytest.mark.parametrize(("out_features", "in_features"), [(128, 128), (300, 520), (48, 2000), (1000, 64)])
def test_any_shape_is_shared_among_programs_and_summed_once(rows, out_features, in_features, dtype, device):
    from gewell_kernels.linear import linear

    x = torch.randn(rows, in_features + 8, device=device).to(dtype)[:, :in_features]  # rows at a stride
    weight = torch.randn(out_features, in_features, device=device).to(dtype)
    expected = reference_linear(x, weight)
    first = linear(x, weight)
    assert_close(first, expected, dtype)
    assert torch.equal(first, linear(x, weight))  # the arrival counters are back at zero


def test_nan_in_one_row_stays_in_that_row(device):
    from gewell_kernels.linear import linear

    x = torch.randn(3, 256, device=device)
    x[1, 7] = float("nan")
    out = linear(x, torch.randn(200, 256, device=device))
    assert torch.equal(out.isnan().any(dim=1).cpu(), torch.tensor([False, True, False]))


def test_many_rows_and_none(device):
    from gewell_kernels.linear import MAX_ROWS, linear

    weight = torch.randn(32, 64, device=device)
    x = torch.randn(MAX_ROWS + 1, 64, device=device)
    assert_close(linear(x, weight), reference_linear(x, weight), torch.float32)
    assert linear(x[:0], weight).shape == (0, 32)


def test_a_weight_at_a_stride_is_refused(device):
    from gewell_kernels.linear import linear

    with pytest.raises(ValueError, match=r"weight has strides \(256, 1\)"):
        linear(torch.randn(2, 128, device=device), torch.randn(16, 256, device=device)[:, :128])
