"""Compares the inside of a model after a prompt with golden states: residual streams, routers, cached keys."""

from collections.abc import Iterator, Mapping

import torch
from gewell_kernels.cpu.paged_attention import read_kv
from gewell_kernels.cpu.step import Addresses
from gewell_kernels.cpu.write_kv import from_turning_first
from gewell_kernels.layout import KVLayout
from torch import Tensor

from gewell.config import LayerKind
from gewell.engine.golden import Case, largest_difference
from gewell.engine.replay import Replay, Track


def compare_states(replay: Replay, track: Track, case: Case, seen: Mapping[str, Tensor]) -> Iterator[tuple[str, float]]:
    """(name, largest difference) of each golden state; `seen`: what the model showed while it ran the whole prompt."""
    for name, tensor in seen.items():
        if name in case.tensors:
            yield name, largest_difference(tensor.cpu(), case.tensors[name])
    for layer in replay.model.config.layers:
        keys = case.tensors.get(f"key.{layer.layer_idx}")
        values = case.tensors.get(f"value.{layer.layer_idx}")
        if keys is None or values is None:
            continue
        first, k, v = cached_keys_and_values(replay, track, layer.layer_idx)
        yield f"key.{layer.layer_idx}", largest_difference(k, keys[first:])
        yield f"value.{layer.layer_idx}", largest_difference(v, values[first:])


def cached_keys_and_values(replay: Replay, track: Track, layer_idx: int) -> tuple[int, Tensor, Tensor]:
    """First cached position, and k, v [num_tokens, num_kv_heads, head_dim] from there on, dims in original order."""
    model, sequence = replay.model, track.sequence
    layer, layer_kv = model.config.layers[layer_idx], model.layer_kv[layer_idx]
    first, table, table_start = 0, sequence.full_pages, 0
    if layer.kind is LayerKind.SLIDING:
        first = replay.geometry.first_needed(sequence.num_tokens)
        table, table_start = sequence.sliding_pages, sequence.sliding_start
    relative = torch.arange(first, sequence.num_tokens) - table_start
    addresses = Addresses(torch.tensor(table)[relative // layer_kv.page_tokens], relative % layer_kv.page_tokens)
    weight = model.layers[layer_idx].attention.k_norm.cpu()
    k, v = read_kv(replay.store.pages.cpu(), layer_kv, addresses, first, weight)
    if layer_kv.layout is not KVLayout.PLAIN:
        # Stored keys lack the norm weight in the dims that do not turn: queries carry it.
        k, v = from_turning_first(k, layer_kv.num_live_pairs), from_turning_first(v, layer_kv.num_live_pairs)
        n, half = layer_kv.num_live_pairs, layer_kv.head_dim // 2
        k[..., n:half] *= weight[n:half]
        k[..., half + n :] *= weight[half + n :]
    return first, k.transpose(0, 1), v.transpose(0, 1)
