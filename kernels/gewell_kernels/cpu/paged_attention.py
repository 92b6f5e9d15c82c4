"""Attention over paged keys and values in torch: decode rows together, prefill chunks one by one."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gewell_kernels.batch import AttentionBatch
from gewell_kernels.cpu.step import Addresses, ChunkIndex, piece_elems, rotary_table, row_numbers, step_of
from gewell_kernels.cpu.write_kv import from_turning_first, rotate
from gewell_kernels.layout import KVLayout, LayerKV


def paged_attention(
    q: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    k_weight: Tensor | None,
    pages: Tensor,
    layer: LayerKV,
    batch: AttentionBatch,
) -> Tensor:
    """As `ops.paged_attention`. Decode rows read everything from the pages: their own token has been written there."""
    out = torch.empty_like(q)
    if batch.num_decode_seqs:
        out[: batch.num_decode_seqs] = _decode_rows(q[: batch.num_decode_seqs], k_weight, pages, layer, batch)
    return attend_chunks(out, q, k_new, v_new, k_weight, pages, layer, step_of(batch).chunks(layer.page_tokens))


def attend_chunks(
    out: Tensor,
    q: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    k_weight: Tensor | None,
    pages: Tensor,
    layer: LayerKV,
    chunks: Sequence[ChunkIndex],
) -> Tensor:
    """Fill the rows of `out` that belong to these chunks, dims in stored order; returns all in the original order."""
    for chunk in chunks:
        span = slice(chunk.first_token, chunk.last_token)
        if k_new is not None and v_new is not None:
            k, v = read_kv(pages, layer, chunk.old, chunk.first_position, k_weight)
            keys = torch.cat((k.to(q.dtype), k_new[span].transpose(0, 1).to(q.dtype)), dim=1)
            values = torch.cat((v.to(q.dtype), v_new[span].transpose(0, 1).to(q.dtype)), dim=1)
        else:
            k, v = read_kv(pages, layer, chunk.all, chunk.first_position, k_weight)
            keys, values = k.to(q.dtype), v.to(q.dtype)
        _chunk(q[span], keys, values, chunk, out[span])
    if layer.layout is not KVLayout.PLAIN:
        out = from_turning_first(out, layer.num_live_pairs)
    return out.flatten(1)


def _decode_rows(q: Tensor, k_weight: Tensor | None, pages: Tensor, layer: LayerKV, batch: AttentionBatch) -> Tensor:
    """q [num_seqs, num_q_heads, head_dim] -> the same shape, one padded gather and one product for all rows."""
    step = step_of(batch)
    rows, unit = step.decode_rows(layer, pages.shape[1])
    rows = rows + layer.layer_offset // unit
    stored = pages.view(-1, unit).index_select(0, rows.view(-1)).view(*rows.shape[:-1], layer.row_elems)
    index = step.decode(layer.page_tokens)
    k, v = _keys_and_values(stored.to(q.dtype), layer, index.positions, k_weight)
    grouped = q.view(q.shape[0], layer.num_kv_heads, -1, layer.head_dim)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=index.mask, scale=1.0).view(q.shape)
    return out if index.empty is None else out.masked_fill(index.empty[:, None, None], 0.0)


def _chunk(q: Tensor, k: Tensor, v: Tensor, chunk: ChunkIndex, out: Tensor) -> None:
    """q, out [num_queries, num_q_heads, head_dim]; k, v [num_kv_heads, num_keys, head_dim]; writes out."""
    num_kv_heads = k.shape[0]
    group = q.shape[1] // num_kv_heads
    for tile in chunk.tiles:
        queries = q[tile.first_query : tile.last_query].unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3)
        keys = k[:, None, tile.first_key : tile.last_key].expand(-1, group, -1, -1)
        values = v[:, None, tile.first_key : tile.last_key].expand(-1, group, -1, -1)
        result = F.scaled_dot_product_attention(queries, keys, values, attn_mask=tile.mask, scale=1.0)
        out[tile.first_query : tile.last_query] = result.permute(2, 0, 1, 3).flatten(1, 2)


def read_kv(
    pages: Tensor, layer: LayerKV, addresses: Addresses, first_position: int, k_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Keys and values at consecutive positions, [num_kv_heads, length, head_dim] in the stored order of dims."""
    unit = piece_elems(layer, pages.shape[1])
    rows = row_numbers(addresses, layer, pages.shape[1], unit) + layer.layer_offset // unit
    stored = pages.view(-1, unit).index_select(0, rows.view(-1)).view(*rows.shape[:-1], layer.row_elems)
    positions = torch.arange(first_position, first_position + addresses.slots.shape[0])
    return _keys_and_values(stored, layer, positions, k_weight)


def _keys_and_values(
    stored: Tensor, layer: LayerKV, positions: Tensor, k_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """stored [planes, ..., num_kv_heads, length, row_elems], positions [..., length] -> k, v, dims in stored order.

    Without a plane of their own the keys are those that match the folded queries: in the dims that do not turn, V.
    """
    if layer.layout is KVLayout.PLAIN:
        return stored[0], stored[1]
    row, turning = stored[0], 2 * layer.num_live_pairs
    v = row[..., : layer.head_dim]
    if layer.layout is KVLayout.V_ROTK:
        return torch.cat((row[..., layer.head_dim :], v[..., turning:]), dim=-1), v
    assert k_weight is not None
    n, half = layer.num_live_pairs, layer.head_dim // 2
    weight = torch.cat((k_weight[:n], k_weight[half : half + n]))
    table = rotary_table(layer, int(positions.max()) + 1 if positions.numel() else 1)
    cos, sin = table[positions].unsqueeze(-4 if positions.ndim > 1 else 0).unbind(-2)
    turned = rotate(v[..., :turning].float() * weight, cos, sin)
    return torch.cat((turned.to(v.dtype), v[..., turning:]), dim=-1), v
