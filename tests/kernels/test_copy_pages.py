"""Page copies: a copy that goes astray corrupts another user's conversation."""

import pytest
import torch


def test_only_the_target_pages_change(dtype, device):
    from gewell_kernels.copy_pages import copy_pages

    pages = torch.randn(6, 40, device=device).to(dtype)
    before = pages.clone()
    copy_pages(pages, torch.tensor([4, 0], device=device), torch.tensor([1, 5], device=device))
    expected = before[[0, 4, 2, 3, 4, 0]]
    assert torch.equal(pages, expected)


def test_poison_is_nan_in_every_kv_dtype_and_nowhere_else(device):
    from gewell_kernels.copy_pages import poison_pages

    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        pages = torch.zeros(4, 48, device=device).to(dtype)
        poison_pages(pages, torch.tensor([2], device=device))
        assert pages[2].float().isnan().all()
        assert not pages[[0, 1, 3]].float().any()


def test_no_pairs_is_no_work(device):
    from gewell_kernels.copy_pages import copy_pages, poison_pages

    pages = torch.ones(2, 16, device=device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    copy_pages(pages, none, none)
    poison_pages(pages, none)
    assert pages.eq(1).all()


def test_pages_that_are_no_whole_vectors_are_refused(device):
    from gewell_kernels.copy_pages import copy_pages

    one = torch.tensor([0], device=device)
    with pytest.raises(ValueError, match="a page has 12 bytes"):
        copy_pages(torch.zeros(2, 3, device=device), one, one + 1)
