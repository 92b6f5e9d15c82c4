"""Norms and the gated activation: a wrong factor here shifts every logit of every request."""

import pytest
import torch
from gewell_kernels import reference  # noqa: F401  (the package must import without Triton)
from gewell_kernels.reference.gelu_mul import gelu_mul as reference_gelu_mul
from gewell_kernels.reference.residual_norm import residual_norm as reference_residual_norm
from gewell_kernels.reference.rms_norm import rms_norm as reference_rms_norm

from tests.kernels.tolerances import assert_close

EPS = 1e-6


@pytest.mark.parametrize("shape", [(1, 64), (5, 123), (3, 2, 256), (2, 5376), (0, 64)])
@pytest.mark.parametrize("has_weight", [True, False])
def test_rms_norm_is_the_float64_norm_rounded_once(shape, has_weight, dtype, device):
    from gewell_kernels.rms_norm import rms_norm

    x = (torch.randn(shape, device=device) * 30).to(dtype)
    before = x.clone()
    weight = torch.randn(shape[-1], device=device) if has_weight else None
    out = rms_norm(x, weight, EPS)
    assert out.dtype == dtype
    assert torch.equal(x, before)
    assert_close(out, reference_rms_norm(x, weight, EPS), dtype)


def test_rms_norm_reads_rows_at_a_stride(dtype, device):
    from gewell_kernels.rms_norm import rms_norm

    wide = torch.randn(4, 100, device=device).to(dtype)
    assert_close(rms_norm(wide[:, :60], None, EPS), reference_rms_norm(wide[:, :60], None, EPS), dtype)


def test_strided_elements_are_refused_not_misread(device):
    from gewell_kernels.rms_norm import rms_norm

    with pytest.raises(ValueError, match="x has stride 2 on its last axis"):
        rms_norm(torch.randn(4, 64, device=device)[:, ::2], None, EPS)


def test_weight_of_another_width_or_dtype_is_refused(device):
    from gewell_kernels.rms_norm import rms_norm

    x = torch.randn(2, 32, device=device)
    with pytest.raises(ValueError, match=r"weight has shape \[16\], want \[32\]"):
        rms_norm(x, torch.ones(16, device=device), EPS)
    with pytest.raises(ValueError, match=r"weight has dtype torch\.float16"):
        rms_norm(x, torch.ones(32, device=device, dtype=torch.float16), EPS)


@pytest.mark.parametrize("shape", [(1, 64), (5, 123), (2, 5376), (0, 64)])
@pytest.mark.parametrize("has_next", [True, False])
def test_residual_norm_updates_the_stream_and_norms_the_rounded_sum(shape, has_next, dtype, device):
    from gewell_kernels.residual_norm import residual_norm

    residual, branch = (torch.randn(shape, device=device).mul(3).to(dtype) for _ in range(2))
    post, following = torch.randn(shape[1], device=device), torch.randn(shape[1], device=device)
    following = following if has_next else None
    want_stream, want_normed = reference_residual_norm(residual, branch, post, following, EPS, 0.37)
    stream, normed = residual_norm(residual, branch, post, following, EPS, 0.37)
    assert stream is residual
    assert_close(stream, want_stream, dtype)
    assert_close(normed, want_normed, dtype)


def test_nan_in_one_row_stays_in_that_row(device):
    from gewell_kernels.residual_norm import residual_norm

    residual, branch = torch.randn(3, 64, device=device), torch.randn(3, 64, device=device)
    branch[1, 7] = float("nan")
    stream, normed = residual_norm(residual, branch, torch.ones(64, device=device), None, EPS)
    for result in (stream, normed):
        assert torch.equal(result.isnan().all(dim=1).cpu(), torch.tensor([False, True, False]))
        assert torch.equal(result.isnan().any(dim=1).cpu(), torch.tensor([False, True, False]))


@pytest.mark.parametrize("shape", [(1, 34), (5, 246), (2, 5000), (0, 8)])
def test_gelu_mul_is_the_tanh_form(shape, dtype, device):
    from gewell_kernels.gelu_mul import gelu_mul

    gate_up = torch.randn(shape, device=device).mul(4).to(dtype)
    assert_close(gelu_mul(gate_up), reference_gelu_mul(gate_up), dtype)


def test_gelu_mul_is_finite_far_out(device):
    from gewell_kernels.gelu_mul import gelu_mul

    gate_up = torch.tensor([[-1e4, -50.0, 50.0, 1e4, 1.0, 1.0, 1.0, 1.0]], device=device)
    assert gelu_mul(gate_up).tolist() == [[0.0, 0.0, 50.0, 1e4]]


def test_odd_width_is_refused(device):
    from gewell_kernels.gelu_mul import gelu_mul

    with pytest.raises(ValueError, match="7 columns"):
        gelu_mul(torch.zeros(1, 7, device=device))
