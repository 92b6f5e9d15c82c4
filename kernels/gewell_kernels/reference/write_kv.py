"""Norm, rotation and KV write, naive, in float64."""

import torch
from torch import Tensor

from gewell_kernels.batch import AttentionBatch
from gewell_kernels.layout import KVLayout, LayerKV, turning_first_order
from gewell_kernels.reference.pages import write_rows
from gewell_kernels.reference.rms_norm import rms_norm
from gewell_kernels.reference.rotary import rotate


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
    """As `ops.write_kv`; q, k_new and v_new come back in float64, k_new and v_new rounded to the pages' dtype first."""
    num_tokens, head_dim, num_kv_heads = qkv.shape[0], layer.head_dim, layer.num_kv_heads
    heads = qkv.to(torch.float64).view(num_tokens, -1, head_dim)
    num_kv_parts = (heads.shape[1] - num_q_heads) // num_kv_heads
    order = turning_first_order(head_dim, layer.num_live_pairs)
    num_turning = 2 * layer.num_live_pairs

    q = rotate(rms_norm(heads[:, :num_q_heads], q_weight, eps), batch.positions, layer) * q_scale
    if layer.layout is not KVLayout.PLAIN:
        assert k_weight is not None, "layers that store V alone fold the key's norm weight into the query"
        q = q[..., order]
        q[..., num_turning:] *= k_weight.to(torch.float64)[order][num_turning:]
    if num_kv_parts == 0:
        return q, None, None

    k_raw = heads[:, num_q_heads : num_q_heads + num_kv_heads]
    v_raw = heads[:, num_q_heads + num_kv_heads :] if num_kv_parts == 2 else k_raw
    k = rotate(rms_norm(k_raw, k_weight, eps), batch.positions, layer)
    v = rms_norm(v_raw, None, eps) if has_v_norm else v_raw

    written = batch.slot_mapping >= 0
    page_ids, slots = batch.slot_mapping[written] // layer.page_tokens, batch.slot_mapping[written] % layer.page_tokens
    for head in range(num_kv_heads):
        if layer.layout is KVLayout.PLAIN:
            planes = [k[written, head], v[written, head]]
        elif layer.layout is KVLayout.V_ONLY:
            planes = [v[written, head][:, order]]
        else:
            turning = order[:num_turning]
            planes = [torch.cat((v[written, head][:, order], k[written, head][:, turning]), dim=-1)]
        for plane, rows in enumerate(planes):
            write_rows(pages, layer, plane, head, page_ids, slots, rows)
    if batch.sliding_window is None:
        return q, None, None
    return q, k.to(pages.dtype).to(torch.float64), v.to(pages.dtype).to(torch.float64)
