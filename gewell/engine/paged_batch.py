"""Builds one step's `ForwardBatch` from page tables: the plain way, for steps that no captured graph waits for."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from gewell_kernels.batch import AttentionBatch
from torch import Tensor

from gewell.cache.geometry import KVGeometry
from gewell.cache.sequence_pages import HOLE, NO_SLOT, Appended, SequencePages
from gewell.model.gemma import ForwardBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """New tokens of one sequence. They end at `sequence.num_tokens`: `appended` is what its `append` just gave.

    visible_end   for tokens of an image run the position after the run, for all others their own plus one; None: causal
    is_decode     one token that reads everything from the pages; decode rows come first in a step
    """

    sequence: SequencePages
    appended: Appended
    token_ids: Sequence[int]
    visible_end: Sequence[int] | None = None
    is_decode: bool = False


def forward_batch(
    rows: Sequence[StepRow],
    geometry: KVGeometry,
    device: torch.device | str,
    *,
    image_rows: Tensor | None = None,
    image_embeds: Tensor | None = None,
) -> ForwardBatch:
    """rows: decode rows first. image_rows [n] int64 index the step's tokens; image_embeds [n, hidden]."""
    ids = [token for row in rows for token in row.token_ids]
    builder = _Builder(rows, device)
    return ForwardBatch(
        input_ids=torch.tensor(ids, dtype=torch.int64, device=device),
        sliding=builder.sliding(geometry.sliding_window) if geometry.sliding else None,
        full=builder.full() if geometry.full else None,
        image_rows=image_rows,
        image_embeds=image_embeds,
    )


def draft_batch(
    sequences: Sequence[SequencePages], token_ids: Sequence[int], geometry: KVGeometry, device: torch.device | str
) -> ForwardBatch:
    """One row per sequence for a drafter: the newest token, at the position after all cached ones, which it only reads.

    As in the published code, sliding layers read the last `sliding_window + 1` cached tokens: trim with a slack of 2.
    """
    positions = torch.tensor([sequence.num_tokens for sequence in sequences], dtype=torch.int32, device=device)

    def batch(tables: list[list[int]], starts: list[int], window: int | None) -> AttentionBatch:
        return AttentionBatch(
            cu_seqlens_q=torch.arange(len(sequences) + 1, dtype=torch.int32, device=device),
            kv_lens=positions + 1,
            positions=positions,
            page_table=torch.tensor(_padded(tables), dtype=torch.int32, device=device),
            table_start=torch.tensor(starts, dtype=torch.int32, device=device),
            slot_mapping=torch.full((len(sequences),), NO_SLOT, dtype=torch.int64, device=device),
            visible_end=positions,
            sliding_window=window,
            max_q_len=1,
            max_kv_len=max(sequence.num_tokens for sequence in sequences) + 1,
            num_decode_seqs=0,  # decode rows would read their own token, which has no slot
        )

    starts = [sequence.sliding_start for sequence in sequences]
    sliding = batch([sequence.sliding_pages for sequence in sequences], starts, geometry.sliding_window + 2)
    full = batch([sequence.full_pages for sequence in sequences], [0] * len(sequences), None)
    return ForwardBatch(
        input_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        sliding=sliding if geometry.sliding else None,
        full=full if geometry.full else None,
    )


def _padded(tables: Sequence[Sequence[int]]) -> list[list[int]]:
    width = max((len(table) for table in tables), default=0) or 1
    return [[0 if page == HOLE else page for page in table] + [0] * (width - len(table)) for table in tables]


class _Builder:
    """What both layer kinds share: boundaries, lengths, positions."""

    def __init__(self, rows: Sequence[StepRow], device: torch.device | str) -> None:
        self._rows = rows
        self._device = device
        lengths = [len(row.token_ids) for row in rows]
        ends = [row.sequence.num_tokens for row in rows]
        boundaries = [0]
        for length in lengths:
            boundaries.append(boundaries[-1] + length)
        self._cu_seqlens_q = self._int32(boundaries)
        self._kv_lens = self._int32(ends)
        self._positions = self._int32(
            position for end, length in zip(ends, lengths, strict=True) for position in range(end - length, end)
        )
        self._max_q_len, self._max_kv_len = max(lengths), max(ends)
        self._num_decode_seqs = sum(row.is_decode for row in rows)
        assert all(row.is_decode for row in rows[: self._num_decode_seqs]), "decode rows come first"

    def sliding(self, window: int) -> AttentionBatch:
        visible_end = None
        if any(row.visible_end is not None for row in self._rows):
            visible_end = self._int32(end for row in self._rows for end in _visible_ends(row))
        return self._batch(
            tables=[row.sequence.sliding_pages for row in self._rows],
            starts=[row.sequence.sliding_start for row in self._rows],
            slots=[row.appended.sliding_slots for row in self._rows],
            visible_end=visible_end,
            window=window,
        )

    def full(self) -> AttentionBatch:
        return self._batch(
            tables=[row.sequence.full_pages for row in self._rows],
            starts=[0] * len(self._rows),
            slots=[row.appended.full_slots for row in self._rows],
            visible_end=None,
            window=None,
        )

    def _batch(
        self,
        *,
        tables: list[list[int]],
        starts: list[int],
        slots: "list[array[int]]",
        visible_end: Tensor | None,
        window: int | None,
    ) -> AttentionBatch:
        return AttentionBatch(
            cu_seqlens_q=self._cu_seqlens_q,
            kv_lens=self._kv_lens,
            positions=self._positions,
            page_table=torch.tensor(_padded(tables), dtype=torch.int32, device=self._device),
            table_start=self._int32(starts),
            slot_mapping=torch.tensor([s for part in slots for s in part], dtype=torch.int64, device=self._device),
            visible_end=visible_end,
            sliding_window=window,
            max_q_len=self._max_q_len,
            max_kv_len=self._max_kv_len,
            num_decode_seqs=self._num_decode_seqs,
        )

    def _int32(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self._device)


def _visible_ends(row: StepRow) -> Sequence[int]:
    if row.visible_end is not None:
        return row.visible_end
    end = row.sequence.num_tokens
    return range(end - len(row.token_ids) + 1, end + 1)
