"""Copies whole pages inside the pool, and poisons freed ones in tests. Works on bytes, so any KV dtype will do."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gewell_kernels._checks import check_aligned, check_dtype, check_shape

_BLOCK_WORDS = 4096  # int32 words a program moves


@triton.jit
def _copy_pages_kernel(
    pages_ptr,  # int32 words
    src_ptr,
    dst_ptr,
    page_stride,  # words
    page_words,
    BLOCK_WORDS: tl.constexpr,
):
    """pages[dst[i]] = pages[src[i]]; axis 0 of the grid walks a page, axis 1 the pairs."""
    pair = tl.program_id(1)
    src = tl.load(src_ptr + pair).to(tl.int64) * page_stride
    dst = tl.load(dst_ptr + pair).to(tl.int64) * page_stride
    offs = tl.program_id(0) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    mask = offs < page_words
    tl.store(pages_ptr + dst + offs, tl.load(pages_ptr + src + offs, mask=mask), mask=mask)


@triton.jit
def _poison_pages_kernel(
    pages_ptr,  # int32 words
    page_ids_ptr,
    page_stride,  # words
    page_words,
    BLOCK_WORDS: tl.constexpr,
):
    """Every byte becomes 0xFF: NaN in float32, bf16, float16 and e4m3."""
    page = tl.load(page_ids_ptr + tl.program_id(1)).to(tl.int64) * page_stride
    offs = tl.program_id(0) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    tl.store(pages_ptr + page + offs, tl.full((BLOCK_WORDS,), -1, tl.int32), mask=offs < page_words)


def copy_pages(pages: Tensor, src: Tensor, dst: Tensor) -> None:
    """See `gewell_kernels.ops.copy_pages`."""
    words = _as_words(pages)
    check_dtype("src", src, (torch.int64,))
    check_dtype("dst", dst, (torch.int64,))
    check_shape("src", src, (None,))
    check_shape("dst", dst, src.shape)
    if src.numel():
        grid = (triton.cdiv(words.shape[1], _BLOCK_WORDS), src.numel())
        _copy_pages_kernel[grid](
            words, src.contiguous(), dst.contiguous(), words.stride(0), words.shape[1], BLOCK_WORDS=_BLOCK_WORDS
        )


def poison_pages(pages: Tensor, page_ids: Tensor) -> None:
    """See `gewell_kernels.ops.poison_pages`."""
    words = _as_words(pages)
    check_dtype("page_ids", page_ids, (torch.int64,))
    check_shape("page_ids", page_ids, (None,))
    if page_ids.numel():
        grid = (triton.cdiv(words.shape[1], _BLOCK_WORDS), page_ids.numel())
        _poison_pages_kernel[grid](
            words, page_ids.contiguous(), words.stride(0), words.shape[1], BLOCK_WORDS=_BLOCK_WORDS
        )


def _as_words(pages: Tensor) -> Tensor:
    check_shape("pages", pages, (None, None))
    check_aligned("pages", pages)
    page_bytes = pages.shape[1] * pages.element_size()
    if page_bytes % 16 or pages.stride(1) != 1:
        raise ValueError(
            f"a page has {page_bytes} bytes at stride {pages.stride(1)}, want a multiple of 16 bytes at stride 1"
        )
    return pages.view(torch.int32)
