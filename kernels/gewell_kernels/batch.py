"""One step's ragged batch as the attention ops see it. Built once a step, shared by all layers of a kind."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Sequences of one step, decode rows (one query) and prefill chunks (many) mixed, for one layer kind.

    Query i of sequence s stands at position kv_lens[s] - q_len[s] + i. It sees keys j with
    j < visible_end (causal: its own position + 1; inside an image run: the run's end) and, in sliding layers,
    j > position - sliding_window.
    """

    cu_seqlens_q: "torch.Tensor"  # [num_seqs + 1] int32
    kv_lens: "torch.Tensor"  # [num_seqs] int32: position of the last query of this step + 1
    positions: "torch.Tensor"  # [num_tokens] int32
    page_table: "torch.Tensor"  # [num_seqs, max_pages] int32; unused entries hold a valid page id (0)
    table_start: "torch.Tensor"  # [num_seqs] int32: position of slot 0 of page_table[s, 0], multiple of page_tokens
    slot_mapping: "torch.Tensor"  # [num_tokens] int64: page * page_tokens + slot; -1 writes nothing
    visible_end: "torch.Tensor | None"  # [num_tokens] int32, exclusive; None: causal everywhere
    sliding_window: int | None  # tokens, counting the query itself; None in full layers
    max_q_len: int  # on the host: decode-only steps have 1
    max_kv_len: int  # on the host
    num_decode_seqs: int  # the first num_decode_seqs sequences have exactly one query each
    # [num_decode_seqs + 1] int32, from ops.plan_attention; None: made in every layer anew
    first_tiles: "torch.Tensor | None" = None
