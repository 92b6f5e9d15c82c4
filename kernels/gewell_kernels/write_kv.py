"""Per-head norm and rotation of this step's queries and keys, and the write of keys and values into the pages."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gewell_kernels._checks import FLOATS, check_aligned, check_dtype, check_shape, check_unit_stride
from gewell_kernels.batch import AttentionBatch
from gewell_kernels.layout import KVLayout, LayerKV
from gewell_kernels.rotary import inv_freq_tensor

_BLOCK_ELEMS = 4096  # of the heads one program holds


@triton.jit
def _load_halves(ptr, offs_h, mask_h, HEAD_DIM: tl.constexpr):
    """First and second half of heads, [BLOCK_H, HEAD_DIM / 2] float32 each: dim i turns with i + HEAD_DIM / 2."""
    offs_i = tl.arange(0, HEAD_DIM // 2)
    ptrs = ptr + offs_h[:, None] * HEAD_DIM + offs_i[None, :]
    a = tl.load(ptrs, mask=mask_h[:, None], other=0.0).to(tl.float32)
    b = tl.load(ptrs + HEAD_DIM // 2, mask=mask_h[:, None], other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _inverse_rms(a, b, eps, HEAD_DIM: tl.constexpr):
    return tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD_DIM + eps)[:, None]


@triton.jit
def _write_kv_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    inv_freq_ptr,
    positions_ptr,
    slot_mapping_ptr,
    pages_ptr,
    q_ptr,  # [num_tokens, num_q_heads, HEAD_DIM] contiguous
    k_new_ptr,  # [num_tokens, num_kv_heads, HEAD_DIM] contiguous, likewise v_new
    v_new_ptr,
    qkv_stride_t,  # elements
    page_stride,  # elements
    layer_offset,
    page_tokens,
    num_q_heads,
    num_kv_heads,
    eps,
    q_scale,
    HEAD_DIM: tl.constexpr,
    NUM_LIVE: tl.constexpr,  # rotary pairs that turn
    BLOCK_H: tl.constexpr,
    LAYOUT: tl.constexpr,  # "plain", "v_only" or "v_rotk"
    ROW_ELEMS: tl.constexpr,
    K_IS_V: tl.constexpr,  # one projection: v is k before its norm
    HAS_V_NORM: tl.constexpr,
    KEEP_NEW: tl.constexpr,
):
    """q = round(rot(norm(q) w_q) scale); k = round(rot(norm(k) w_k)); v = round(norm(v)); float32 inside, one rounding.

    rot turns (a, b) = (x[i], x[i + HEAD_DIM / 2]) to (a cos - b sin, b cos + a sin), angle = float32(pos) inv_freq[i],
    for i < NUM_LIVE; other pairs pass. Where V alone is stored, rows are turning-first: i and i + HEAD_DIM / 2 go to i
    and NUM_LIVE + i for i < NUM_LIVE, else to NUM_LIVE + i and HEAD_DIM / 2 + i; w_k folds into q's dims that pass.
    Axis 0 of the grid is the token; axis 1 first walks blocks of query heads, then blocks of kv heads.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    SHARED: tl.constexpr = LAYOUT != "plain"
    token = tl.program_id(0).to(tl.int64)
    num_q_blocks = tl.cdiv(num_q_heads, BLOCK_H)
    offs_i = tl.arange(0, HALF)
    is_live = offs_i < NUM_LIVE
    angle = tl.load(positions_ptr + token).to(tl.float32) * tl.load(inv_freq_ptr + offs_i, mask=is_live, other=0.0)
    cos = tl.cos(angle)[None, :]
    sin = tl.sin(angle)[None, :]
    # Stored place of dim i and of dim i + HALF.
    if SHARED:
        place_a = tl.where(is_live, offs_i, NUM_LIVE + offs_i)[None, :]
        place_b = tl.where(is_live, NUM_LIVE + offs_i, HALF + offs_i)[None, :]
    else:
        place_a = offs_i[None, :]
        place_b = HALF + offs_i[None, :]
    qkv_ptr += token * qkv_stride_t

    if tl.program_id(1) < num_q_blocks:
        offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask_h = offs_h < num_q_heads
        a, b = _load_halves(qkv_ptr, offs_h, mask_h, HEAD_DIM)
        rms = _inverse_rms(a, b, eps, HEAD_DIM)
        a *= rms * tl.load(q_weight_ptr + offs_i)[None, :]
        b *= rms * tl.load(q_weight_ptr + HALF + offs_i)[None, :]
        turned_a = (a * cos - b * sin) * q_scale
        turned_b = (b * cos + a * sin) * q_scale
        if SHARED:
            turned_a *= tl.where(is_live, 1.0, tl.load(k_weight_ptr + offs_i))[None, :]
            turned_b *= tl.where(is_live, 1.0, tl.load(k_weight_ptr + HALF + offs_i))[None, :]
        q_rows = q_ptr + (token * num_q_heads + offs_h[:, None]) * HEAD_DIM
        tl.store(q_rows + place_a, turned_a.to(q_ptr.dtype.element_ty), mask=mask_h[:, None])
        tl.store(q_rows + place_b, turned_b.to(q_ptr.dtype.element_ty), mask=mask_h[:, None])
    else:
        offs_h = (tl.program_id(1) - num_q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask_h = offs_h < num_kv_heads
        slot = tl.load(slot_mapping_ptr + token)
        has_slot = slot >= 0
        page = tl.where(has_slot, slot // page_tokens, 0).to(tl.int64)
        row = offs_h * page_tokens + slot % page_tokens
        stored = pages_ptr + page * page_stride + layer_offset + row[:, None].to(tl.int64) * ROW_ELEMS
        mask_stored = mask_h[:, None] & has_slot
        new_rows = (token * num_kv_heads + offs_h[:, None]) * HEAD_DIM

        a, b = _load_halves(qkv_ptr + num_q_heads * HEAD_DIM, offs_h, mask_h, HEAD_DIM)
        rms = _inverse_rms(a, b, eps, HEAD_DIM)
        if LAYOUT != "v_only":
            weighted_a = a * rms * tl.load(k_weight_ptr + offs_i)[None, :]
            weighted_b = b * rms * tl.load(k_weight_ptr + HALF + offs_i)[None, :]
            k_a = (weighted_a * cos - weighted_b * sin).to(pages_ptr.dtype.element_ty)
            k_b = (weighted_b * cos + weighted_a * sin).to(pages_ptr.dtype.element_ty)
            if LAYOUT == "plain":
                tl.store(stored + place_a, k_a, mask=mask_stored)
                tl.store(stored + place_b, k_b, mask=mask_stored)
            else:
                mask_live = mask_stored & is_live[None, :]
                tl.store(stored + HEAD_DIM + offs_i[None, :], k_a, mask=mask_live)
                tl.store(stored + HEAD_DIM + NUM_LIVE + offs_i[None, :], k_b, mask=mask_live)
            if KEEP_NEW:
                tl.store(k_new_ptr + new_rows + offs_i[None, :], k_a, mask=mask_h[:, None])
                tl.store(k_new_ptr + new_rows + HALF + offs_i[None, :], k_b, mask=mask_h[:, None])
        if not K_IS_V:
            a, b = _load_halves(qkv_ptr + (num_q_heads + num_kv_heads) * HEAD_DIM, offs_h, mask_h, HEAD_DIM)
            rms = _inverse_rms(a, b, eps, HEAD_DIM)
        if HAS_V_NORM:
            a *= rms
            b *= rms
        v_a = a.to(pages_ptr.dtype.element_ty)
        v_b = b.to(pages_ptr.dtype.element_ty)
        if LAYOUT == "plain":
            stored += num_kv_heads * page_tokens * ROW_ELEMS
        tl.store(stored + place_a, v_a, mask=mask_stored)
        tl.store(stored + place_b, v_b, mask=mask_stored)
        if KEEP_NEW:
            tl.store(v_new_ptr + new_rows + offs_i[None, :], v_a, mask=mask_h[:, None])
            tl.store(v_new_ptr + new_rows + HALF + offs_i[None, :], v_b, mask=mask_h[:, None])


def write_kv(
    qkv: Tensor,
    num_q_heads: int,
    q_weight: Tensor,
    k_weight: Tensor | None,
    eps: float,
    q_scale: float,
    has_v_norm: bool,
    pages: Tensor,
    layer: LayerKV,
    batch: AttentionBatch,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See `gewell_kernels.ops.write_kv`."""
    head_dim, num_kv_heads = layer.head_dim, layer.num_kv_heads
    num_tokens = qkv.shape[0]
    check_dtype("qkv", qkv, FLOATS)
    check_shape("qkv", qkv, (None, None))
    check_unit_stride("qkv", qkv)
    check_dtype("pages", pages, FLOATS)
    check_shape("pages", pages, (None, None))
    check_unit_stride("pages", pages)
    check_aligned("pages", pages)
    check_dtype("batch.positions", batch.positions, (torch.int32,))
    check_shape("batch.positions", batch.positions, (num_tokens,))
    check_dtype("batch.slot_mapping", batch.slot_mapping, (torch.int64,))
    check_shape("batch.slot_mapping", batch.slot_mapping, (num_tokens,))
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check_dtype(name, weight, (torch.float32,))
            check_shape(name, weight, (head_dim,))
            check_unit_stride(name, weight)
    if head_dim & (head_dim - 1):
        raise ValueError(f"head_dim is {head_dim}, want a power of two")
    num_kv_parts, rest = divmod(qkv.shape[1] - num_q_heads * head_dim, num_kv_heads * head_dim)
    if rest or num_kv_parts not in (0, 1, 2):
        raise ValueError(
            f"qkv has {qkv.shape[1]} columns, want {num_q_heads} + n * {num_kv_heads} heads of {head_dim}, n in 0, 1, 2"
        )
    if layer.layout is not KVLayout.PLAIN and num_kv_parts == 2:
        raise ValueError(f"layout {layer.layout} stores V alone, but qkv carries keys and values")
    if k_weight is None and (num_kv_parts or layer.layout is not KVLayout.PLAIN):
        raise ValueError(f"k_weight is None, but layout {layer.layout} with {num_kv_parts} kv parts needs it")

    q = torch.empty(num_tokens, num_q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    keeps_new = num_kv_parts > 0 and batch.sliding_window is not None
    k_new = v_new = None
    if keeps_new:
        k_new = torch.empty(num_tokens, num_kv_heads, head_dim, dtype=pages.dtype, device=qkv.device)
        v_new = torch.empty_like(k_new)
    if num_tokens:
        block_h = max(1, min(_BLOCK_ELEMS // head_dim, triton.next_power_of_2(num_q_heads)))
        num_blocks = triton.cdiv(num_q_heads, block_h)
        if num_kv_parts:
            num_blocks += triton.cdiv(num_kv_heads, block_h)
        _write_kv_kernel[(num_tokens, num_blocks)](
            qkv,
            q_weight,
            k_weight,
            inv_freq_tensor(layer, qkv.device),
            batch.positions,
            batch.slot_mapping,
            pages,
            q,
            k_new,
            v_new,
            qkv.stride(0),
            pages.stride(0),
            layer.layer_offset,
            layer.page_tokens,
            num_q_heads,
            num_kv_heads,
            eps,
            float(q_scale),
            HEAD_DIM=head_dim,
            NUM_LIVE=layer.num_live_pairs,
            BLOCK_H=block_h,
            LAYOUT=layer.layout.value,
            ROW_ELEMS=layer.row_elems,
            K_IS_V=num_kv_parts == 1,
            HAS_V_NORM=has_v_norm,
            KEEP_NEW=keeps_new,
            num_warps=4,
        )
    return q, k_new, v_new
