"""Attention over paged keys and values: checks, choice of tiles, launches of the decode and prefill kernels."""

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from gewell_kernels._checks import (
    FLOATS,
    check_aligned,
    check_contiguous,
    check_dtype,
    check_shape,
    check_unit_stride,
)
from gewell_kernels._device import (
    NUM_ARRIVAL_COUNTERS,
    arrival_counters,
    num_multiprocessors,
    shared_memory_bytes,
)
from gewell_kernels._tuning import tuned
from gewell_kernels.attention_decode import (
    decode_plain_kernel,
    decode_shared_kernel,
    join_parts_kernel,
    plan_decode_kernel,
)
from gewell_kernels.attention_prefill import prefill_plain_kernel, prefill_shared_kernel, rotate_keys_kernel
from gewell_kernels.batch import AttentionBatch
from gewell_kernels.layout import KVLayout, LayerKV
from gewell_kernels.rotary import rotary_table


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTiles:
    keys: int  # of each head, per tile
    heads: int  # kv heads per tile
    num_warps: int
    num_stages: int
    programs_per_sm: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTiles:
    block_m: int  # tokens times query heads of a kv head
    block_n: int  # keys per tile
    num_warps: int
    num_stages: int


def decode_tiles(layer: LayerKV, kv_bytes: int, device: torch.device) -> DecodeTiles:
    """What was tuned for the device, else the first choice whose buffers fit its shared memory.

    n stages keep n - 1 tiles in flight.
    """
    known = tuned(
        "paged_attention", device, part="decode", layout=layer.layout.value, head_dim=layer.head_dim, kv_bytes=kv_bytes
    )
    if known is not None and layer.num_kv_heads % known["heads"] == 0:
        return DecodeTiles(**known)
    row_bytes = layer.num_planes * layer.row_elems * kv_bytes
    if layer.layout is KVLayout.V_ONLY:
        row_bytes += 2 * layer.num_live_pairs * kv_bytes  # cosines and sines
    for tiles in _DECODE_CHOICES[layer.layout is not KVLayout.PLAIN]:
        needed = (tiles.num_stages - 1) * tiles.keys * tiles.heads * row_bytes + _SHARED_RESERVE
        if layer.num_kv_heads % tiles.heads == 0 and needed * tiles.programs_per_sm <= shared_memory_bytes(device):
            return tiles
    return DecodeTiles(keys=16, heads=1, num_warps=4, num_stages=1, programs_per_sm=1)


def prefill_tiles(layer: LayerKV, kv_bytes: int, device: torch.device) -> PrefillTiles:
    """What was tuned for the device, else the first choice whose query block and buffers fit its shared memory."""
    known = tuned(
        "paged_attention", device, part="prefill", layout=layer.layout.value, head_dim=layer.head_dim, kv_bytes=kv_bytes
    )
    if known is not None:
        return PrefillTiles(**known)
    row_bytes = layer.num_planes * layer.row_elems * kv_bytes
    for tiles in _PREFILL_CHOICES[layer.layout is not KVLayout.PLAIN, layer.head_dim > 256]:
        needed = tiles.num_stages * tiles.block_n * row_bytes + tiles.block_m * layer.head_dim * kv_bytes
        if needed <= shared_memory_bytes(device):
            return tiles
    return PrefillTiles(block_m=16, block_n=16, num_warps=4, num_stages=1)


_FUSED_UNITS = 64
# Room for a chunk's rotated keys: half a million positions of the 31B. Beyond, keys are rotated where they are read.
_ROTATED_BYTES = 512 << 20
# Query block, reductions and layout changes need some shared memory beside the tiles.
_SHARED_RESERVE = 12 * 1024
_DECODE_CHOICES = {
    False: [
        DecodeTiles(keys=32, heads=1, num_warps=4, num_stages=3, programs_per_sm=3),
        DecodeTiles(keys=32, heads=1, num_warps=4, num_stages=3, programs_per_sm=1),
        DecodeTiles(keys=16, heads=1, num_warps=4, num_stages=3, programs_per_sm=1),
    ],
    True: [
        DecodeTiles(keys=32, heads=1, num_warps=4, num_stages=3, programs_per_sm=2),
        DecodeTiles(keys=32, heads=1, num_warps=4, num_stages=3, programs_per_sm=1),
        DecodeTiles(keys=16, heads=1, num_warps=4, num_stages=3, programs_per_sm=1),
    ],
}
# Keyed by (V alone is stored, head_dim > 256).
_PREFILL_CHOICES = {
    (False, False): [
        PrefillTiles(block_m=128, block_n=64, num_warps=8, num_stages=2),
        PrefillTiles(block_m=64, block_n=32, num_warps=4, num_stages=2),
        PrefillTiles(block_m=32, block_n=16, num_warps=4, num_stages=1),
    ],
    (False, True): [
        PrefillTiles(block_m=64, block_n=32, num_warps=8, num_stages=2),
        PrefillTiles(block_m=32, block_n=16, num_warps=4, num_stages=1),
    ],
    (True, False): [
        PrefillTiles(block_m=64, block_n=64, num_warps=4, num_stages=2),
        PrefillTiles(block_m=32, block_n=16, num_warps=4, num_stages=1),
    ],
    (True, True): [
        PrefillTiles(block_m=64, block_n=64, num_warps=8, num_stages=2),
        PrefillTiles(block_m=32, block_n=32, num_warps=4, num_stages=2),
        PrefillTiles(block_m=16, block_n=16, num_warps=4, num_stages=1),
    ],
}


def plan_attention(batch: AttentionBatch, layer: LayerKV, kv_bytes: int) -> AttentionBatch:
    """See `gewell_kernels.ops.plan_attention`."""
    if not batch.num_decode_seqs:
        return batch
    check_dtype("batch.kv_lens", batch.kv_lens, (torch.int32,))
    check_contiguous("batch.kv_lens", batch.kv_lens)
    tiles = decode_tiles(layer, kv_bytes, batch.kv_lens.device)
    first_tiles = torch.empty(batch.num_decode_seqs + 1, dtype=torch.int32, device=batch.kv_lens.device)
    plan_decode_kernel[(1,)](
        batch.kv_lens,
        first_tiles,
        batch.num_decode_seqs,
        WINDOW=batch.sliding_window or 0,
        ALIGN=_alignment(layer, tiles),
        BLOCK_T=tiles.keys,
        BLOCK_S=_sequence_block(batch.num_decode_seqs),
        num_warps=1,
    )
    return replace(batch, first_tiles=first_tiles)


def paged_attention(
    q: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    k_weight: Tensor | None,
    pages: Tensor,
    layer: LayerKV,
    batch: AttentionBatch,
) -> Tensor:
    """See `gewell_kernels.ops.paged_attention`."""
    _check(q, k_new, v_new, k_weight, pages, layer, batch)
    num_tokens, num_q_heads, head_dim = q.shape
    out = torch.empty(num_tokens, num_q_heads * head_dim, dtype=q.dtype, device=q.device)
    if batch.num_decode_seqs:
        _decode(q, k_weight, pages, layer, batch, out)
    if batch.kv_lens.shape[0] > batch.num_decode_seqs and num_tokens > batch.num_decode_seqs:
        _prefill(q, k_new, v_new, k_weight, pages, layer, batch, out)
    return out


def _decode(
    q: Tensor, k_weight: Tensor | None, pages: Tensor, layer: LayerKV, batch: AttentionBatch, out: Tensor
) -> None:
    tiles = decode_tiles(layer, pages.element_size(), q.device)
    if batch.first_tiles is None:
        batch = plan_attention(batch, layer, pages.element_size())
    num_seqs, group = batch.num_decode_seqs, q.shape[1] // layer.num_kv_heads
    num_programs = num_multiprocessors(q.device) * tiles.programs_per_sm
    rows = tiles.heads * group
    part_acc = torch.empty(2 * num_programs, rows, layer.head_dim, dtype=torch.float32, device=q.device)
    part_stat = torch.empty(2 * num_programs, 2, rows, dtype=torch.float32, device=q.device)
    window = batch.sliding_window or 0
    units = num_seqs * layer.num_kv_heads // tiles.heads
    # A window is never cut into many shares; a very long row among few is, and joins faster over many programs.
    fused = (window > 0 or units >= _FUSED_UNITS) and units <= NUM_ARRIVAL_COUNTERS
    arrivals = arrival_counters(q.device) if fused else None
    common = {
        "NUM_KV_HEADS": layer.num_kv_heads,
        "GROUP": group,
        "BLOCK_G": max(16, triton.next_power_of_2(rows)),
        "HEAD_DIM": layer.head_dim,
        "PAGE_TOKENS": layer.page_tokens,
        "WINDOW": window,
        "HEADS_PER_TILE": tiles.heads,
        "BLOCK_T": tiles.keys,
        "BLOCK_S": _sequence_block(num_seqs),
        "ALIGN": _alignment(layer, tiles),
        "ONE_PAGE": layer.page_tokens % tiles.keys == 0,
        "STAGES": tiles.num_stages,
        "FUSED": fused,
        "UNROLL": 4 if layer.head_dim <= 64 * tiles.num_warps else 2,
        "num_warps": tiles.num_warps,
    }
    places = (batch.page_table, batch.table_start, batch.kv_lens, batch.first_tiles)
    sizes = (pages.stride(0), batch.page_table.stride(0), layer.layer_offset, num_seqs)
    if layer.layout is KVLayout.PLAIN:
        decode_plain_kernel[(num_programs,)](q, pages, *places, out, arrivals, part_acc, part_stat, *sizes, **common)
    else:
        v_only = layer.layout is KVLayout.V_ONLY
        rotary = rotary_table(layer, q.device, batch.max_kv_len, pages.dtype) if v_only else None
        decode_shared_kernel[(num_programs,)](
            q, pages, *places, k_weight, rotary, out, arrivals, part_acc, part_stat, *sizes,
            NUM_LIVE=layer.num_live_pairs, V_ONLY=v_only, **common,
        )  # fmt: skip
    if fused:
        return
    join_parts_kernel[(num_seqs, q.shape[1])](
        batch.first_tiles,
        part_acc,
        part_stat,
        out,
        num_seqs,
        num_programs,
        UNITS=layer.num_kv_heads // tiles.heads,
        ROWS=rows,
        HEAD_DIM=layer.head_dim,
        BLOCK_P=16,
        num_warps=4,
    )


def _prefill(
    q: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    k_weight: Tensor | None,
    pages: Tensor,
    layer: LayerKV,
    batch: AttentionBatch,
    out: Tensor,
) -> None:
    tiles = prefill_tiles(layer, pages.element_size(), q.device)
    first_seq, num_seqs = batch.num_decode_seqs, batch.kv_lens.shape[0]
    group = q.shape[1] // layer.num_kv_heads
    block_g = triton.next_power_of_2(group)
    block_m = max(tiles.block_m, block_g)
    num_blocks = (q.shape[0] - first_seq) // (block_m // block_g) + num_seqs - first_seq
    window = batch.sliding_window or 0
    common = {
        "NUM_KV_HEADS": layer.num_kv_heads,
        "GROUP": group,
        "BLOCK_G": block_g,
        "HEAD_DIM": layer.head_dim,
        "PAGE_TOKENS": layer.page_tokens,
        "WINDOW": window,
        "HAS_VISIBLE_END": batch.visible_end is not None,
        "BLOCK_M": block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_S": _sequence_block(num_seqs - first_seq),
        "ONE_PAGE": layer.page_tokens % tiles.block_n == 0,
        "STAGES": tiles.num_stages,
        "num_warps": tiles.num_warps,
    }
    places = (batch.page_table, batch.table_start, batch.kv_lens, batch.cu_seqlens_q, batch.visible_end)
    sizes = (pages.stride(0), batch.page_table.stride(0), layer.layer_offset, first_seq, num_seqs)
    grid = (num_blocks, layer.num_kv_heads)
    if layer.layout is KVLayout.PLAIN:
        prefill_plain_kernel[grid](q, k_new, v_new, pages, *places, out, *sizes, HAS_NEW=k_new is not None, **common)
    else:
        keys, max_keys = "stored", 0
        rotary = rotated = None
        if layer.layout is KVLayout.V_ONLY:
            rotary = rotary_table(layer, q.device, batch.max_kv_len, pages.dtype)
            keys, max_keys = "rebuilt", batch.max_kv_len
            num_rotated = (num_seqs - first_seq) * layer.num_kv_heads * max_keys * 2 * layer.num_live_pairs
            if num_rotated * q.element_size() <= _ROTATED_BYTES:
                keys, rotated = "rotated", torch.empty(num_rotated, dtype=q.dtype, device=q.device)
                rotate_keys_kernel[(triton.cdiv(max_keys, 64), layer.num_kv_heads, num_seqs - first_seq)](
                    pages, *places[:3], k_weight, rotary, rotated, *sizes[:4], max_keys,
                    NUM_KV_HEADS=layer.num_kv_heads, HEAD_DIM=layer.head_dim, NUM_LIVE=layer.num_live_pairs,
                    PAGE_TOKENS=layer.page_tokens, BLOCK_N=64, ONE_PAGE=layer.page_tokens % 64 == 0, num_warps=4,
                )  # fmt: skip
        prefill_shared_kernel[grid](
            q, pages, *places, k_weight, rotary, rotated, out, *sizes, max_keys,
            NUM_LIVE=layer.num_live_pairs, KEYS=keys, **common,
        )  # fmt: skip


def _alignment(layer: LayerKV, tiles: DecodeTiles) -> int:
    """Tiles start on multiples of this, so that none straddles more pages than it must."""
    return min(layer.page_tokens, tiles.keys)


def _sequence_block(num_seqs: int) -> int:
    """Few sizes, so that few kernels are compiled: a search among 128 costs no more than one among 8."""
    return max(128, triton.next_power_of_2(num_seqs))


def _check(
    q: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    k_weight: Tensor | None,
    pages: Tensor,
    layer: LayerKV,
    batch: AttentionBatch,
) -> None:
    head_dim, num_kv_heads = layer.head_dim, layer.num_kv_heads
    check_dtype("q", q, FLOATS)
    check_shape("q", q, (None, None, head_dim))
    check_contiguous("q", q)
    check_aligned("q", q)
    num_tokens, num_q_heads, _ = q.shape
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise ValueError(f"head_dim is {head_dim}, want a power of two >= 16")
    if num_q_heads % num_kv_heads or num_q_heads // num_kv_heads > 32:
        raise ValueError(f"{num_q_heads} query heads over {num_kv_heads} kv heads, want a whole ratio of at most 32")
    check_dtype("pages", pages, FLOATS)
    check_shape("pages", pages, (None, None))
    check_unit_stride("pages", pages)
    check_aligned("pages", pages)
    for name, offset in (("layer_offset", layer.layer_offset), ("page stride", pages.stride(0))):
        if offset * pages.element_size() % 16:
            raise ValueError(
                f"{name} is {offset} elements of {pages.element_size()} bytes, want a multiple of 16 bytes"
            )
    if layer.layer_offset + layer.layer_elems > pages.shape[1]:
        raise ValueError(
            f"the layer ends at element {layer.layer_offset + layer.layer_elems} of a page of {pages.shape[1]}"
        )
    for name, new in (("k_new", k_new), ("v_new", v_new)):
        if new is not None:
            check_dtype(name, new, FLOATS)
            check_shape(name, new, (num_tokens, num_kv_heads, head_dim))
            check_contiguous(name, new)
            check_aligned(name, new)
    if (k_new is None) != (v_new is None):
        raise ValueError("k_new and v_new come together or not at all")
    if layer.layout is not KVLayout.PLAIN:
        if layer.num_live_pairs * 8 != head_dim or layer.num_live_pairs < 16:
            raise ValueError(
                f"layout {layer.layout} has num_live_pairs {layer.num_live_pairs} of head_dim {head_dim}, "
                "want an eighth of it and at least 16"
            )
        if k_new is not None:
            raise ValueError(f"layout {layer.layout} reads every key from the pages, but k_new is given")
    if layer.layout is KVLayout.V_ONLY:
        if k_weight is None:
            raise ValueError("layout v_only rebuilds keys with k_weight, which is None")
        check_dtype("k_weight", k_weight, (torch.float32,))
        check_shape("k_weight", k_weight, (head_dim,))
        check_unit_stride("k_weight", k_weight)
    num_seqs = batch.kv_lens.shape[0]
    for name, tensor, shape in (
        ("kv_lens", batch.kv_lens, (num_seqs,)),
        ("cu_seqlens_q", batch.cu_seqlens_q, (num_seqs + 1,)),
        ("page_table", batch.page_table, (num_seqs, None)),
        ("table_start", batch.table_start, (num_seqs,)),
        ("visible_end", batch.visible_end, (num_tokens,)),
        ("first_tiles", batch.first_tiles, (batch.num_decode_seqs + 1,)),
    ):
        if tensor is not None:
            check_dtype(f"batch.{name}", tensor, (torch.int32,))
            check_shape(f"batch.{name}", tensor, shape)
            check_unit_stride(f"batch.{name}", tensor)
