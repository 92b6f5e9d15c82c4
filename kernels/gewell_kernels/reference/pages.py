"""Reads and writes single rows of the page pool by the address formula of `layout.py`, in float64."""

import torch
from torch import Tensor

from gewell_kernels.batch import AttentionBatch
from gewell_kernels.layout import LayerKV


def row_offsets(layer: LayerKV, plane: int, head: int, slots: Tensor) -> Tensor:
    """Element offset inside the page of the rows (plane, head, slot); slots [n] int64 counts within the page."""
    row = (plane * layer.num_kv_heads + head) * layer.page_tokens + slots
    return layer.layer_offset + row * layer.row_elems


def read_rows(pages: Tensor, layer: LayerKV, plane: int, head: int, page_ids: Tensor, slots: Tensor) -> Tensor:
    """Rows as stored, [n, row_elems] float64."""
    columns = row_offsets(layer, plane, head, slots)[:, None] + torch.arange(layer.row_elems, device=pages.device)
    return pages[page_ids[:, None], columns].to(torch.float64)


def write_rows(
    pages: Tensor, layer: LayerKV, plane: int, head: int, page_ids: Tensor, slots: Tensor, rows: Tensor
) -> None:
    """Store rows [n, row_elems], rounded to the pages' dtype."""
    columns = row_offsets(layer, plane, head, slots)[:, None] + torch.arange(layer.row_elems, device=pages.device)
    pages[page_ids[:, None], columns] = rows.to(pages.dtype)


def locate(batch: AttentionBatch, layer: LayerKV, seq: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Page ids and slots of a sequence's positions [n] int64."""
    relative = positions - int(batch.table_start[seq])
    return batch.page_table[seq, relative // layer.page_tokens].long(), relative % layer.page_tokens
