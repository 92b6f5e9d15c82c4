"""Attention over paged keys and values, naive, in float64: every sequence and head alone, every key gathered."""

import torch
from torch import Tensor

from gewell_kernels.batch import AttentionBatch
from gewell_kernels.layout import KVLayout, LayerKV, turning_first_order
from gewell_kernels.reference.pages import locate, read_rows
from gewell_kernels.reference.rotary import rotate


def paged_attention(
    q: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    k_weight: Tensor | None,
    pages: Tensor,
    layer: LayerKV,
    batch: AttentionBatch,
) -> Tensor:
    """As `ops.paged_attention`, float64 [num_tokens, num_q_heads * head_dim].

    Only keys that some query of the sequence sees are read, so that whatever lies in other slots has no say.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    group = num_q_heads // layer.num_kv_heads
    order = turning_first_order(head_dim, layer.num_live_pairs)
    q_wide = q.to(torch.float64)
    if layer.layout is not KVLayout.PLAIN:
        q_wide = _undo(q_wide, order)
    out = torch.zeros(num_tokens, num_q_heads, head_dim, dtype=torch.float64, device=q.device)

    starts = batch.cu_seqlens_q.tolist()
    for seq, kv_len in enumerate(batch.kv_lens.tolist()):
        first, last = starts[seq], starts[seq + 1]
        positions = torch.arange(kv_len - (last - first), kv_len, device=q.device)
        seen_end = positions + 1 if batch.visible_end is None else batch.visible_end[first:last].long()
        window = batch.sliding_window
        seen_start = torch.zeros_like(positions) if window is None else (positions - window + 1).clamp(min=0)
        if last == first or kv_len == 0 or int(seen_end.max()) <= int(seen_start.min()):
            continue
        keys = torch.arange(int(seen_start.min()), int(seen_end.max()), device=q.device)
        visible = (keys >= seen_start[:, None]) & (keys < seen_end[:, None])
        all_paged = k_new is None or seq < batch.num_decode_seqs
        num_old = keys.numel() if all_paged else int((keys < positions[0]).sum())
        new_rows = first + keys[num_old:] - positions[0]
        for head in range(layer.num_kv_heads):
            k, v = _stored(pages, layer, batch, seq, head, keys[:num_old], k_weight, order)
            if k_new is not None and v_new is not None:
                k = torch.cat((k, k_new[new_rows, head].to(torch.float64)))
                v = torch.cat((v, v_new[new_rows, head].to(torch.float64)))
            for q_head in range(head * group, (head + 1) * group):
                scores = (q_wide[first:last, q_head] @ k.T).masked_fill(~visible, float("-inf"))
                blind = ~visible.any(dim=-1, keepdim=True)
                weights = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
                out[first:last, q_head] = weights @ v
    return out.view(num_tokens, num_q_heads * head_dim)


def _undo(x: Tensor, order: list[int]) -> Tensor:
    """From turning-first to the original order of the last axis."""
    out = torch.empty_like(x)
    out[..., order] = x
    return out


def _stored(
    pages: Tensor,
    layer: LayerKV,
    batch: AttentionBatch,
    seq: int,
    head: int,
    keys: Tensor,
    k_weight: Tensor | None,
    order: list[int],
) -> tuple[Tensor, Tensor]:
    """Keys and values of one head as the pages hold them, [n, head_dim] float64 in the original order.

    Where V alone is stored, the key's dims that do not turn are V itself: their norm weight is folded into q.
    """
    page_ids, slots = locate(batch, layer, seq, keys)
    rows = read_rows(pages, layer, 0, head, page_ids, slots)
    if layer.layout is KVLayout.PLAIN:
        return rows, read_rows(pages, layer, 1, head, page_ids, slots)
    num_turning = 2 * layer.num_live_pairs
    v = _undo(rows[:, : layer.head_dim], order)
    k = v.clone()
    turning = order[:num_turning]
    if layer.layout is KVLayout.V_ROTK:
        k[:, turning] = rows[:, layer.head_dim :]
    else:
        assert k_weight is not None, "V_ONLY layers rebuild the key with its norm weight"
        weighted = v.clone()
        weighted[:, turning] *= k_weight.to(torch.float64)[turning]
        k[:, turning] = rotate(weighted[:, None], keys, layer)[:, 0][:, turning]
    return k, v
