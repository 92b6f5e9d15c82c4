"""Page copies and poison, one page after the other."""

import torch
from torch import Tensor


def copy_pages(pages: Tensor, src: Tensor, dst: Tensor) -> None:
    """pages[dst[i]] = pages[src[i]], one by one, in place."""
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        pages[target] = pages[source].clone()


def poison_pages(pages: Tensor, page_ids: Tensor) -> None:
    """Every byte of these pages becomes 0xFF, in place: NaN in float32, bf16, float16 and e4m3."""
    for page_id in page_ids.tolist():
        pages[page_id].view(torch.uint8).fill_(0xFF)
