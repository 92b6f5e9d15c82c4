"""Small paged worlds for tests and benchmarks: every unused byte of the pool is NaN, pages shuffled, batches ragged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gewell_kernels.batch import AttentionBatch
from gewell_kernels.layout import LayerKV
from gewell_kernels.reference.copy_pages import poison_pages
from gewell_kernels.reference.pages import locate, write_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    pages: Tensor
    layer: LayerKV
    batch: AttentionBatch


def make_batch(
    layer: LayerKV,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    sliding_window: int | None,
    device: torch.device | str,
    seed: int = 0,
    num_pages: int | None = None,
    num_decode_seqs: int | None = None,
) -> tuple[AttentionBatch, int]:
    """A batch over shuffled pages, and the pool's size in pages.

    Sliding sequences hold pages from the window of the step's first query on; a chunk's tokens that fall out of the
    window before its end get slot -1. num_decode_seqs: all leading sequences of one query, unless told.
    """
    generator = torch.Generator().manual_seed(seed)
    starts, tables = [], []
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        oldest = 0 if sliding_window is None else max(0, kv_len - q_len - sliding_window + 1)
        starts.append(oldest // layer.page_tokens * layer.page_tokens)
        tables.append(-(-(kv_len - starts[-1]) // layer.page_tokens))
    num_used = sum(tables)
    num_pages = max(num_pages or 0, num_used + 1)
    shuffled = torch.randperm(num_pages, generator=generator, dtype=torch.int32)[:num_used]
    page_table = torch.zeros(len(q_lens), max([1, *tables]), dtype=torch.int32)
    at = 0
    for seq, num_table in enumerate(tables):
        page_table[seq, :num_table] = shuffled[at : at + num_table]
        at += num_table

    positions: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
    slots: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
    for seq, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        own = torch.arange(kv_len - q_len, kv_len)
        relative = (own - starts[seq]).clamp(min=0)
        slot = page_table[seq, relative // layer.page_tokens].long() * layer.page_tokens + relative % layer.page_tokens
        lost = own < 0 if sliding_window is None else (own < max(0, kv_len - sliding_window))
        positions.append(own.clamp(min=0))
        slots.append(torch.where(lost, -1, slot))
    leading = next((i for i, q_len in enumerate(q_lens) if q_len != 1), len(q_lens))
    batch = AttentionBatch(
        cu_seqlens_q=torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32, device=device),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        positions=torch.cat(positions).to(torch.int32).to(device),
        page_table=page_table.to(device),
        table_start=torch.tensor(starts, dtype=torch.int32, device=device),
        slot_mapping=torch.cat(slots).to(device),
        visible_end=None,
        sliding_window=sliding_window,
        max_q_len=max([0, *q_lens]),
        max_kv_len=max([0, *kv_lens]),
        num_decode_seqs=leading if num_decode_seqs is None else num_decode_seqs,
    )
    return batch, num_pages


def make_world(
    layer: LayerKV,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    sliding_window: int | None,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    page_elems: int | None = None,
    num_decode_seqs: int | None = None,
) -> World:
    """A batch whose readable slots hold random rows; every other element of the pool is NaN."""
    batch, num_pages = make_batch(
        layer, q_lens, kv_lens, sliding_window=sliding_window, device=device, seed=seed, num_decode_seqs=num_decode_seqs
    )
    page_elems = page_elems or layer.layer_offset + layer.layer_elems
    pages = torch.empty(num_pages, page_elems, dtype=dtype, device=device)
    poison_pages(pages, torch.arange(num_pages))
    torch.manual_seed(seed)
    for seq, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        oldest = 0 if sliding_window is None else max(0, kv_len - q_len - sliding_window + 1)
        old = torch.arange(oldest, max(kv_len - q_len, oldest), device=device)
        own = torch.arange(max(kv_len - q_len, 0), kv_len, device=device)
        if sliding_window is not None:
            own = own[own >= kv_len - sliding_window]
        keys = torch.cat((old, own))
        page_ids, slots = locate(batch, layer, seq, keys)
        for plane in range(layer.num_planes):
            for head in range(layer.num_kv_heads):
                rows = torch.randn(keys.numel(), layer.row_elems, device=device)
                write_rows(pages, layer, plane, head, page_ids, slots, rows)
    return World(pages=pages, layer=layer, batch=batch)


def with_image_runs(batch: AttentionBatch, runs: Sequence[tuple[int, int]]) -> AttentionBatch:
    """The batch with bidirectional runs, given as half-open ranges of the step's tokens within one sequence each."""
    visible_end = batch.positions + 1
    for begin, end in runs:
        visible_end[begin:end] = batch.positions[end - 1] + 1
    return replace(batch, visible_end=visible_end)
