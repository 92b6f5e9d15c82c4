"""Copies and poison of whole pages in torch."""

import torch
from torch import Tensor


def copy_pages(pages: Tensor, src: Tensor, dst: Tensor) -> None:
    """As `ops.copy_pages`."""
    pages.index_copy_(0, dst, pages.index_select(0, src))


def poison_pages(pages: Tensor, page_ids: Tensor) -> None:
    """As `ops.poison_pages`."""
    pages.view(torch.uint8).index_fill_(0, page_ids, 0xFF)
