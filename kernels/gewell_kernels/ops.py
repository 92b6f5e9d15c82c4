"""The ops that the model calls, one signature for every device.

Each op is a story of its own beside this file: `<op>.py` is the Triton kernel and its wrapper, `cpu/<op>.py` the fast
torch form that a CPU runs, `reference/<op>.py` a naive float64 form for tests. Here only the device is looked at: tests
call the Triton wrappers directly, under Triton's interpreter.
"""

from typing import TYPE_CHECKING

from gewell_kernels.batch import AttentionBatch
from gewell_kernels.layout import LayerKV

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: "Tensor", weight: "Tensor | None", eps: float) -> "Tensor":
    """out = x * rsqrt(mean(x^2) + eps) * weight over the last axis, in float32, one rounding at the end.

    x        [num_tokens, hidden] (or [..., hidden]), float32/bf16/float16, last axis contiguous
    weight   [hidden] float32 as it multiplies (a Gemma 3 loader has already added 1), or None for 1
    returns  new tensor, shape and dtype of x
    """
    if x.is_cuda:
        from gewell_kernels.rms_norm import rms_norm as op
    else:
        from gewell_kernels.cpu.rms_norm import rms_norm as op
    return op(x, weight, eps)


def residual_norm(
    residual: "Tensor",
    branch: "Tensor",
    post_weight: "Tensor",
    next_weight: "Tensor | None",
    eps: float,
    layer_scalar: float = 1.0,
) -> "tuple[Tensor, Tensor]":
    """residual = (residual + norm(branch) * post_weight) * layer_scalar; normed = norm(residual) * next_weight.

    residual   [num_tokens, hidden]; updated in place and returned
    branch     [num_tokens, hidden], output of attention or of the feed-forward part
    returns    (residual, normed); normed is a new tensor (next_weight None: plain norm without weight)
    Norms in float32; the sum is rounded once to residual's dtype, the second norm reads the rounded value.
    """
    if residual.is_cuda:
        from gewell_kernels.residual_norm import residual_norm as op
    else:
        from gewell_kernels.cpu.residual_norm import residual_norm as op
    return op(residual, branch, post_weight, next_weight, eps, layer_scalar)


def gelu_mul(gate_up: "Tensor") -> "Tensor":
    """out[:, i] = gelu_tanh(gate_up[:, i]) * gate_up[:, n + i]; gate_up [num_tokens, 2 n] -> [num_tokens, n], new."""
    if gate_up.is_cuda:
        from gewell_kernels.gelu_mul import gelu_mul as op
    else:
        from gewell_kernels.cpu.gelu_mul import gelu_mul as op
    return op(gate_up)


def linear(x: "Tensor", weight: "Tensor") -> "Tensor":
    """out = x @ weight.T; x [num_rows, in_features], weight [out_features, in_features], both of one dtype."""
    if x.is_cuda:
        from torch.nn.functional import linear as cuda_op

        return cuda_op(x, weight)
    from gewell_kernels.cpu.linear import linear as op

    return op(x, weight)


def soft_cap(logits: "Tensor", cap: float) -> "Tensor":
    """out = cap * tanh(logits / cap) in float32; logits [rows, vocab] of any float dtype -> new."""
    if logits.is_cuda:
        from gewell_kernels.soft_cap import soft_cap as op
    else:
        from gewell_kernels.cpu.soft_cap import soft_cap as op
    return op(logits, cap)


def write_kv(
    qkv: "Tensor",
    num_q_heads: int,
    q_weight: "Tensor",
    k_weight: "Tensor | None",
    eps: float,
    q_scale: float,
    has_v_norm: bool,
    pages: "Tensor",
    layer: LayerKV,
    batch: AttentionBatch,
) -> "tuple[Tensor, Tensor | None, Tensor | None]":
    """Norm and rotate this step's queries and keys, write K and V (or V alone) into the pages, in place.

    qkv       [num_tokens, (num_q_heads + n * num_kv_heads) * head_dim]: q, k, v heads in this order, n = 2;
              with k_eq_v layers (V_ONLY, V_ROTK, and PLAIN when the width says so) q and k only, n = 1: v is k before
              its norm. n = 0 (query-only layers of drafters and of shared-KV models): nothing is written; k_weight
              is that of the layer whose pages are read (V_ONLY and V_ROTK fold it into q)
    q_weight, k_weight   [head_dim] float32
    q_scale   multiplies q after its norm (Gemma 4: 1.0; Gemma 3: query_pre_attn_scalar ** -0.5)
    pages     [num_pages, page_elems]; written at batch.slot_mapping
    returns   q [num_tokens, num_q_heads, head_dim]: normed, rotated, scaled; for V_ONLY and V_ROTK in turning-first
              order, with k_weight folded into the dims that do not turn. k_new, v_new [num_tokens, num_kv_heads,
              head_dim] rounded to the pages' dtype as a reader of the pages would see them, in the original dim order;
              None for full layers (their readers always read the pages)
    Rotation in float32: angle = float32(position) * float32(inv_freq).
    """
    if qkv.is_cuda:
        from gewell_kernels.write_kv import write_kv as op
    else:
        from gewell_kernels.cpu.write_kv import write_kv as op
    return op(qkv, num_q_heads, q_weight, k_weight, eps, q_scale, has_v_norm, pages, layer, batch)


def plan_attention(batch: AttentionBatch, layer: LayerKV, kv_bytes: int) -> AttentionBatch:
    """Share out the decode part's keys among the device's programs, once a step for all layers of a kind.

    layer     any layer of the kind; kv_bytes: bytes of one element of the pages
    returns   batch with what the attention op would else work out in every layer. On the device, so that it can be part
              of a CUDA graph; lengths may change between replays. On a CPU the batch itself
    """
    if not batch.kv_lens.is_cuda:
        return batch
    from gewell_kernels.paged_attention import plan_attention as op

    return op(batch, layer, kv_bytes)


def paged_attention(
    q: "Tensor",
    k_new: "Tensor | None",
    v_new: "Tensor | None",
    k_weight: "Tensor | None",
    pages: "Tensor",
    layer: LayerKV,
    batch: AttentionBatch,
) -> "Tensor":
    """softmax(q k^T + mask) v over paged keys and values; scale 1 (write_kv has scaled q); softmax in float32.

    q         [num_tokens, num_q_heads, head_dim] as write_kv returned it
    k_new, v_new  this step's keys and values where the pages may lack them: in sliding layers a prefill chunk's tokens
              that fall out of the window before its end have slot -1. When given, keys at positions >= kv_len - q_len
              of a sequence are read from these; older ones from the pages. None: everything is read from the pages
    k_weight  [head_dim] float32, for V_ONLY layers (the key's norm weight acts on the turning dims while reading)
    returns   [num_tokens, num_q_heads * head_dim], dtype of q, original dim order. A query that sees no key gives 0
    GQA: query head h reads kv head h // (num_q_heads / num_kv_heads).
    """
    if q.is_cuda:
        from gewell_kernels.paged_attention import paged_attention as op
    else:
        from gewell_kernels.cpu.paged_attention import paged_attention as op
    return op(q, k_new, v_new, k_weight, pages, layer, batch)


def moe_experts(
    x: "Tensor", expert_idx: "Tensor", expert_weight: "Tensor", gate_up_proj: "Tensor", down_proj: "Tensor"
) -> "Tensor":
    """out[t] = sum over i of expert_weight[t, i] * down_proj[e] (gelu_mul(gate_up_proj[e] x[t])), e = expert_idx[t, i].

    x              [num_tokens, hidden]
    expert_idx     [num_tokens, k] int64, distinct in a row; expert_weight [num_tokens, k] float32
    gate_up_proj   [num_experts, 2 * inner, hidden], gate rows first; down_proj [num_experts, hidden, inner]
    returns        [num_tokens, hidden], dtype of x; the sum over experts in float32
    """
    if x.is_cuda:
        from gewell_kernels.moe_experts import moe_experts as op
    else:
        from gewell_kernels.cpu.moe_experts import moe_experts as op
    return op(x, expert_idx, expert_weight, gate_up_proj, down_proj)


def copy_pages(pages: "Tensor", src: "Tensor", dst: "Tensor") -> None:
    """pages[dst[i]] = pages[src[i]] for all i, in place; src and dst [n] int64, no page in both, none twice in dst."""
    if pages.is_cuda:
        from gewell_kernels.copy_pages import copy_pages as op
    else:
        from gewell_kernels.cpu.copy_pages import copy_pages as op
    op(pages, src, dst)


def poison_pages(pages: "Tensor", page_ids: "Tensor") -> None:
    """Fill pages [n] int64 with bytes 0xFF, in place: NaN in every KV dtype, so that a stale read cannot hide."""
    if pages.is_cuda:
        from gewell_kernels.copy_pages import poison_pages as op
    else:
        from gewell_kernels.cpu.copy_pages import poison_pages as op
    op(pages, page_ids)


def sample(
    logits: "Tensor",
    temperature: "Tensor",
    top_k: "Tensor",
    top_p: "Tensor",
    min_p: "Tensor",
    seeds: "Tensor",
    positions: "Tensor",
) -> "Tensor":
    """Draw one token id per row by Gumbel-argmax with counter-based noise.

    Logits are after soft-cap, penalties and bias.

    logits       [rows, vocab] float32
    temperature  [rows] float32; 0 takes the argmax (lowest id among equals)
    top_k        [rows] int32; 0: off.  top_p, min_p [rows] float32; 1.0 and 0.0: off
    seeds        [rows] int64; positions [rows] int64: position of the token to be drawn
    returns      [rows] int64
    Noise u(seed, position, token id) comes from Philox-4x32-10 (key: seed's two halves; counter: token id // 4,
    position, 0, 0; lane token id % 4), u = (x + 0.5) * 2^-32, g = -log(-log u); draw argmax over kept ids of
    logits / temperature + g.
    Kept: of the ids sorted by logit, the first top_k; of those, the smallest set whose probability (softmax of
    logits / temperature over the kept) reaches top_p, at least one; of those, p >= min_p * p_max. Each cut is a logit:
    ids whose logit equals that of the last one kept are kept too, so equal logits are treated equally.
    """
    if logits.is_cuda:
        from gewell_kernels.sample import sample as op
    else:
        from gewell_kernels.cpu.sample import sample as op
    return op(logits, temperature, top_k, top_p, min_p, seeds, positions)
