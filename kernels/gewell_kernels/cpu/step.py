"""What the CPU ops derive from a batch once, for all layers: row addresses, masks, rotary factors.

The last two batches (one of each layer kind) are remembered by identity, so a batch must not change after it was built.
"""

import math
import threading
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gewell_kernels.batch import AttentionBatch
from gewell_kernels.layout import LayerKV

# Queries of a prefill chunk attend in tiles: a tile reads only the keys that some query of it sees.
PREFILL_TILE = 256


@dataclass(frozen=True, slots=True)
class Addresses:
    """Positions in the pool, before a layer is chosen: page and slot, any shape."""

    page_ids: Tensor  # int64
    slots: Tensor  # int64


@dataclass(frozen=True, slots=True)
class DecodeIndex:
    """Keys of all decode rows, padded to the longest; padding repeats a row's last key, so that it holds numbers."""

    addresses: Addresses  # [num_seqs, length]
    positions: Tensor  # [num_seqs, length] int64
    mask: Tensor | None  # [num_seqs, 1, 1, length] bool; None when nothing is padded
    empty: Tensor | None  # [num_seqs] bool: rows without any key, whose output is 0; None when there are none


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Queries [first_query, last_query) of a chunk and keys [first_key, last_key) of its key list."""

    first_query: int
    last_query: int
    first_key: int
    last_key: int
    mask: Tensor | None  # [queries, keys] bool; None: every query sees every key


@dataclass(frozen=True, slots=True)
class ChunkIndex:
    """One prefill chunk: tokens [first_token, last_token) of the batch; its keys begin at position `first_position`."""

    first_token: int
    last_token: int
    first_position: int
    num_old: int  # keys before this chunk
    old: Addresses  # [num_old]
    all: Addresses  # [num_old + chunk length]
    tiles: tuple[QueryTile, ...]


class Step:
    """Derived values of one batch. Tensors are made when a layer first asks for them."""

    def __init__(self, batch: AttentionBatch) -> None:
        self.batch = batch
        self._by_layer: dict[object, tuple[Tensor, ...]] = {}
        self._decode: DecodeIndex | None = None
        self._chunks: tuple[ChunkIndex, ...] | None = None
        self._single_queries: tuple[ChunkIndex, ...] | None = None

    def rotary(self, layer: LayerKV) -> tuple[Tensor, Tensor]:
        """cos, sin [num_tokens, 1, num_live_pairs] float32 at the new tokens' positions."""
        key = _rope_key(layer)
        if key not in self._by_layer:
            table = rotary_table(layer, self.batch.max_kv_len + 1)
            self._by_layer[key] = table.index_select(0, self.batch.positions).unsqueeze(1).unbind(2)
        cos, sin = self._by_layer[key]
        return cos, sin

    @cached_property
    def written_tokens(self) -> Tensor | None:
        """Tokens of the batch that have a slot; None: all have."""
        has_slot = self.batch.slot_mapping >= 0
        return None if bool(has_slot.all()) else has_slot.nonzero().squeeze(1)

    def written_rows(self, layer: LayerKV, page_elems: int) -> tuple[Tensor, int]:
        """[num_written, num_planes, num_kv_heads, pieces] row numbers for a layer at offset 0, and the piece size."""
        unit = piece_elems(layer, page_elems)
        key = ("written", layer.num_planes, layer.num_kv_heads, layer.row_elems, page_elems, unit)
        if key not in self._by_layer:
            slots = self.batch.slot_mapping
            if self.written_tokens is not None:
                slots = slots[self.written_tokens]
            addresses = Addresses(slots // layer.page_tokens, slots % layer.page_tokens)
            rows = row_numbers(addresses, layer, page_elems, unit)  # [planes, heads, written, pieces]
            self._by_layer[key] = (rows.permute(2, 0, 1, 3).contiguous(),)
        return self._by_layer[key][0], unit

    def decode_rows(self, layer: LayerKV, page_elems: int) -> tuple[Tensor, int]:
        """[num_planes, num_seqs, num_kv_heads, length, pieces] row numbers of the decode rows' keys, at offset 0."""
        unit = piece_elems(layer, page_elems)
        key = ("decode", layer.num_planes, layer.num_kv_heads, layer.row_elems, page_elems, unit)
        if key not in self._by_layer:
            rows = row_numbers(self.decode(layer.page_tokens).addresses, layer, page_elems, unit)
            self._by_layer[key] = (rows.permute(0, 2, 1, 3, 4).contiguous(),)
        return self._by_layer[key][0], unit

    def decode(self, page_tokens: int) -> DecodeIndex:
        if self._decode is None:
            self._decode = self._index_decode_rows(page_tokens)
        return self._decode

    def chunks(self, page_tokens: int) -> tuple[ChunkIndex, ...]:
        if self._chunks is None:
            num_decode, num_seqs = self.batch.num_decode_seqs, self.batch.kv_lens.shape[0]
            chunks = (self._index_chunk(i, page_tokens, PREFILL_TILE) for i in range(num_decode, num_seqs))
            self._chunks = tuple(chunks)
        return self._chunks

    def single_queries(self, page_tokens: int) -> tuple[ChunkIndex, ...]:
        """All sequences, decode rows too, as chunks whose tiles are single queries with exactly the keys they see."""
        if self._single_queries is None:
            kv_lens = self.batch.kv_lens.tolist()
            chunks = (self._index_chunk(i, page_tokens, 1) for i, kv_len in enumerate(kv_lens) if kv_len)
            self._single_queries = tuple(chunks)
        return self._single_queries

    def _index_decode_rows(self, page_tokens: int) -> DecodeIndex:
        batch = self.batch
        kv_lens = batch.kv_lens[: batch.num_decode_seqs].long().unsqueeze(1)
        first = torch.zeros_like(kv_lens)
        if batch.sliding_window is not None:
            first = (kv_lens - batch.sliding_window).clamp_(min=0)
        lengths = kv_lens - first
        longest, shortest = max(1, int(lengths.max())), int(lengths.min())
        counter = torch.arange(longest)
        positions = torch.minimum(first + counter, kv_lens - 1).clamp_(min=0)
        mask = None if longest == shortest else (counter < lengths)[:, None, None, :]
        table = batch.page_table[: batch.num_decode_seqs].long()
        relative = positions - batch.table_start[: batch.num_decode_seqs].unsqueeze(1)
        page_ids = table.gather(1, relative // page_tokens)
        return DecodeIndex(
            addresses=Addresses(page_ids, relative % page_tokens),
            positions=positions,
            mask=mask,
            empty=None if shortest else (kv_lens == 0).squeeze(1),
        )

    def _index_chunk(self, seq: int, page_tokens: int, tile: int) -> ChunkIndex:
        batch = self.batch
        first_token, last_token = int(batch.cu_seqlens_q[seq]), int(batch.cu_seqlens_q[seq + 1])
        kv_len = int(batch.kv_lens[seq])
        start = kv_len - (last_token - first_token)  # position of the chunk's first query
        window = batch.sliding_window
        first_position = 0 if window is None else max(0, start - window + 1)
        relative = torch.arange(first_position, kv_len) - int(batch.table_start[seq])
        # New tokens that left the window again have no page; they are read from k_new and v_new, never from here.
        page_idx = (relative // page_tokens).clamp_(0, batch.page_table.shape[1] - 1)
        page_ids = batch.page_table[seq].long()[page_idx]
        everything = Addresses(page_ids, relative % page_tokens)
        num_old = start - first_position
        ends = torch.arange(start, kv_len) + 1
        if batch.visible_end is not None:
            ends = batch.visible_end[first_token:last_token].long()
        return ChunkIndex(
            first_token=first_token,
            last_token=last_token,
            first_position=first_position,
            num_old=num_old,
            old=Addresses(everything.page_ids[:num_old], everything.slots[:num_old]),
            all=everything,
            tiles=tuple(_tiles(ends, start, kv_len, first_position, window, tile)),
        )


def _tiles(
    ends: Tensor, start: int, kv_len: int, first_position: int, window: int | None, tile: int
) -> list[QueryTile]:
    """ends [queries]: position after the last key that each query sees."""
    tiles = []
    for first in range(0, kv_len - start, tile):
        last = min(first + tile, kv_len - start)
        end = ends[first:last].unsqueeze(1)
        queries = torch.arange(start + first, start + last).unsqueeze(1)
        first_key = first_position if window is None else max(first_position, start + first - window + 1)
        last_key = min(int(end.max()), kv_len)
        keys = torch.arange(first_key, last_key)
        mask = keys < end
        if window is not None:
            mask &= keys > queries - window
        tiles.append(
            QueryTile(
                first_query=first,
                last_query=last,
                first_key=first_key - first_position,
                last_key=last_key - first_position,
                mask=None if bool(mask.all()) else mask,
            )
        )
    return tiles


# --- addresses ---------------------------------------------------------------------------------------------------


def piece_elems(layer: LayerKV, page_elems: int) -> int:
    """The pool is read as rows of this many elements: one stored row, or its largest part that divides all offsets.

    Reading rows by number runs at copy speed, three times faster than indexing pages, heads and slots (measured).
    """
    return math.gcd(layer.row_elems, page_elems, layer.layer_offset)


def row_numbers(addresses: Addresses, layer: LayerKV, page_elems: int, unit: int) -> Tensor:
    """[num_planes, num_kv_heads, *addresses.shape, pieces] row numbers in the pool seen as rows of `unit` elements.

    For layer offset 0: add `layer.layer_offset // unit`.
    """
    pieces = layer.row_elems // unit
    token = addresses.page_ids * (page_elems // unit) + addresses.slots * pieces
    heads = torch.arange(layer.num_planes * layer.num_kv_heads) * (layer.page_tokens * pieces)
    rows = heads.view(-1, *[1] * token.ndim) + token
    rows = rows.unsqueeze(-1) + torch.arange(pieces)
    return rows.view(layer.num_planes, layer.num_kv_heads, *token.shape, pieces)


# --- rotary factors ----------------------------------------------------------------------------------------------


_TABLE_BLOCK = 1024  # positions
_frequencies: dict[tuple[float, ...], Tensor] = {}
_tables: dict[tuple[float, ...], Tensor] = {}


def _rope_key(layer: LayerKV) -> tuple[float, ...]:
    return (layer.rope_theta, layer.rope_factor, layer.head_dim, layer.num_live_pairs)


def inv_freq(layer: LayerKV) -> Tensor:
    """[num_live_pairs] float32."""
    key = _rope_key(layer)
    if key not in _frequencies:
        _frequencies[key] = torch.tensor(layer.inv_freq, dtype=torch.float64).float()
    return _frequencies[key]


def rotary_table(layer: LayerKV, num_positions: int) -> Tensor:
    """[at least num_positions, 2, num_live_pairs] float32: cos and sin of each position. Grows by doubling, is kept.

    Made block by block, so that a position's factors are the same bits whenever it is made: vectorised cos and sin
    differ in the last bit from those of a ragged rest.
    """
    key = _rope_key(layer)
    table = _tables.get(key)
    if table is None or table.shape[0] < num_positions:
        length = max(_TABLE_BLOCK, 1 << (num_positions - 1).bit_length())
        table = torch.empty(length, 2, layer.num_live_pairs)
        for first in range(0, length, _TABLE_BLOCK):
            block = torch.arange(first, first + _TABLE_BLOCK, dtype=torch.float32)
            angles = block.unsqueeze(1) * inv_freq(layer)
            table[first : first + _TABLE_BLOCK, 0] = angles.cos()
            table[first : first + _TABLE_BLOCK, 1] = angles.sin()
        _tables[key] = table
    return table


# --- the last batches --------------------------------------------------------------------------------------------

_recent = threading.local()


def step_of(batch: AttentionBatch) -> Step:
    """The derived values of this batch: remembered while its two kinds alternate through the layers."""
    steps: list[Step] = getattr(_recent, "steps", [])
    for step in steps:
        if step.batch is batch:
            return step
    step = Step(batch)
    _recent.steps = [step, *steps[:1]]
    return step
