"""Sampling by Gumbel-argmax on a CPU: as `ops.sample`, without sorting the vocabulary and without noise nobody needs.

One pass over the logits takes the maximum of every block of 64 ids. The k-th largest of these bounds the k-th largest
logit from below, so only blocks that reach it are looked at again: with top_k = 64 that is 64 blocks of 4096. Without
filters the noise itself prunes: it lies in (-3.14, 22.88), so an id further than that below what has been drawn so far
cannot win. Cuts are made on the float32 logits, probabilities and noise are float64.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_BLOCK = 64  # ids; Gemma's vocabularies (262144, 262208) are multiples of it
_MAX_GUMBEL = -math.log(-math.log1p(-(2.0**-33)))  # of the largest u, 1 - 2^-33
_HEAD = 256  # ids looked at first where very many may be drawn
_NARROW = 16384  # ids
_LOWEST = float(torch.finfo(torch.float32).min)
_NUM_BINS = 4096
_CHUNK = 8192  # Philox blocks a call: its arrays stay in the second-level cache
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ALL = 2**64 - 1
_MASK, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_UInts = npt.NDArray[np.uint64] | np.uint64


class _Row(NamedTuple):
    """One row's logits in blocks, and each block's maximum."""

    blocks: Tensor  # [num_blocks, 64] float32
    maxima: Tensor  # [num_blocks]

    def at_least(self, floor: float) -> tuple[Tensor, Tensor]:
        """Logits >= floor and their ids, ids ascending. Ruled out ids (-inf) only where there are no others."""
        if floor == -math.inf and float(self.maxima.max()) > -math.inf:
            floor = _LOWEST  # a row under a grammar may have fewer ids than top_k: the rest is no work for the noise
        touched = (self.maxima >= floor).nonzero()[:, 0]
        values = self.blocks[touched]
        where = (values >= floor).nonzero()
        ids = touched[where[:, 0]] * _BLOCK + where[:, 1]
        return values[where[:, 0], where[:, 1]], ids

    def is_wide(self, floor: float) -> bool:
        """So many ids may lie at or above the floor that noise for each would cost more than a pass over all."""
        return int((self.maxima >= floor).sum()) * _BLOCK > max(_NARROW, self.blocks.numel() // 16)

    def head_floor(self) -> float:
        return self.kth_largest(_HEAD)

    def kth_largest(self, k: int) -> float:
        """The k-th largest logit; the smallest when there are fewer."""
        if k >= self.blocks.numel():
            return float(self.blocks.min())
        if k <= self.maxima.numel():
            touched = self.blocks[self.maxima >= torch.topk(self.maxima, k).values[-1]]
        else:
            touched = self.blocks
        return float(torch.topk(touched.flatten(), k).values[-1])


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """As `ops.sample`."""
    num_rows = logits.shape[0]
    if not num_rows:
        return torch.empty(0, dtype=torch.int64)
    blocks = _in_blocks(logits)
    maxima = blocks.amax(dim=2)
    drawn = _first_argmax(blocks, maxima)
    heats = temperature.tolist()
    if not any(heats):
        return drawn
    filters = list(zip(top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True))
    all_keys = [(seed & _ALL, at & _ALL) for seed, at in zip(seeds.tolist(), positions.tolist(), strict=True)]
    has_nan = maxima.amax(dim=1).isnan().tolist()  # such a row's token means nothing; its caller looks at the logit
    hot = [i for i, heat in enumerate(heats) if heat > 0.0 and not has_nan[i]]
    if not hot:
        return drawn
    rows = [_Row(blocks[i], maxima[i]) for i in hot]
    floors = [_floor(row, heats[i], *filters[i]) for row, i in zip(rows, hot, strict=True)]
    heads = [
        max(floor, row.head_floor()) if row.is_wide(floor) else floor for row, floor in zip(rows, floors, strict=True)
    ]
    kept = [row.at_least(head) for row, head in zip(rows, heads, strict=True)]
    winners = _argmax_with_noise(kept, [heats[i] for i in hot], [all_keys[i] for i in hot])
    for row, i, floor, head, (value, token) in zip(rows, hot, floors, heads, winners, strict=True):
        drawn[i] = token if head == floor else _draw_below_head(row, heats[i], all_keys[i], floor, value, token)
    return drawn


def _in_blocks(logits: Tensor) -> Tensor:
    """[rows, vocab] -> [rows, num_blocks, 64]; a view when the vocabulary is a multiple of 64."""
    num_rows, vocab = logits.shape
    if vocab % _BLOCK:
        logits = torch.nn.functional.pad(logits, (0, -vocab % _BLOCK), value=-math.inf)
    return logits.contiguous().view(num_rows, -1, _BLOCK)


def _first_argmax(blocks: Tensor, maxima: Tensor) -> Tensor:
    """The lowest id among the largest logits of each row (torch.argmax gives the first of equals)."""
    block = maxima.argmax(dim=1)
    inside = blocks[torch.arange(len(block)), block].argmax(dim=1)
    return block * _BLOCK + inside


def _floor(row: _Row, heat: float, top_k: int, top_p: float, min_p: float) -> float:
    """The smallest logit that may be drawn; -inf without filters."""
    largest = float(row.maxima.max())
    floor = -math.inf
    if 0 < top_k < row.blocks.numel():
        floor = row.kth_largest(top_k)
        if top_p < 1.0:
            ordered = row.at_least(floor)[0].to(torch.float64).sort(descending=True).values
            reached = torch.softmax(ordered / heat, dim=0).cumsum(0)
            floor = float(ordered[min(int((reached < top_p).sum()), len(ordered) - 1)])
    elif top_p < 1.0:
        floor = _nucleus_floor(row, heat, top_p, largest)
    if min_p > 0.0:
        floor = max(floor, largest + heat * math.log(min_p))
    return floor


def _nucleus_floor(row: _Row, heat: float, top_p: float, largest: float) -> float:
    """Logit of the last id of the smallest set whose probability reaches top_p, over the whole vocabulary."""
    total = float(((row.blocks - largest) / heat).exp().sum(dtype=torch.float64))
    values, _ = row.at_least(row.kth_largest(_HEAD))
    floor = _floor_of(values, heat, top_p, largest, total, before=0.0)
    if floor is not None:
        return floor
    # A flat row: bins of 1/16 in logit / heat find the stretch where the sum passes top_p; only that one is sorted.
    depth = ((largest - row.blocks) / heat).flatten()
    bins = (depth * 16.0).clamp_(max=_NUM_BINS - 1).to(torch.int64).numpy()
    mass = np.bincount(bins, weights=(-depth).exp().numpy(), minlength=_NUM_BINS).cumsum() / total
    at = min(int((mass < top_p).sum()), _NUM_BINS - 1)
    inside = row.blocks.flatten()[torch.from_numpy(bins == at)]
    floor = _floor_of(inside, heat, top_p, largest, total, before=float(mass[at - 1]) if at else 0.0)
    return float(inside.min()) if floor is None else floor


def _floor_of(
    values: Tensor, heat: float, top_p: float, largest: float, total: float, *, before: float
) -> float | None:
    """The value at which `before` and the probabilities of `values`, largest first, reach top_p; None: they do not."""
    ordered = values.to(torch.float64).sort(descending=True).values
    reached = before + ((ordered - largest) / heat).exp().cumsum(0) / total
    at = int((reached < top_p).sum())
    return float(ordered[at]) if at < len(ordered) else None


def _argmax_with_noise(
    kept: list[tuple[Tensor, Tensor]], heats: list[float], keys: list[tuple[int, int]]
) -> list[tuple[float, int]]:
    """For each row the largest logit / heat + noise among the kept, and its id. One Philox call serves all rows."""
    counts = np.array([len(ids) for _, ids in kept])
    ids = torch.cat([ids for _, ids in kept]).numpy()
    logits = torch.cat([values for values, _ in kept]).numpy().astype(np.float64)
    seeds = np.repeat(np.array([seed for seed, _ in keys], dtype=np.uint64), counts)
    positions = np.repeat(np.array([position for _, position in keys], dtype=np.uint64), counts)
    noisy = logits / np.repeat(np.array(heats), counts) + gumbel(seeds, positions, ids)
    winners, start = [], 0
    for count in counts:
        best = start + int(noisy[start : start + count].argmax())
        winners.append((float(noisy[best]), int(ids[best])))
        start += count
    return winners


def _draw_below_head(row: _Row, heat: float, key: tuple[int, int], floor: float, best: float, token: int) -> int:
    """Go on from the head's winner to all ids from `floor` up whose noise could still beat it."""
    floor = max(floor, (best - _MAX_GUMBEL) * heat)
    values, ids = _lucky(row, heat, key, floor, best) if row.is_wide(floor) else row.at_least(floor)
    if not len(ids):
        return token
    ((value, other),) = _argmax_with_noise([(values, ids)], [heat], [key])
    return other if value > best else token


def _lucky(row: _Row, heat: float, key: tuple[int, int], floor: float, best: float) -> tuple[Tensor, Tensor]:
    """Logits >= floor and their ids whose noise comes near to lifting them over `best`: few, found without logarithms.

    To win needs u > exp(-exp(-d)), d = best - logit / heat, hence 1 - u < exp(-d).
    """
    flat = row.blocks.flatten()
    chance = torch.where(flat >= floor, (flat / heat - best).exp_().mul_(1.0 + 1e-5), 0.0).numpy()
    found = []
    for start in range(0, len(chance), 4 * _CHUNK):
        counters = np.arange(start // 4, min(start // 4 + _CHUNK, len(chance) // 4), dtype=np.uint64)
        lanes = philox(np.uint64(key[0]), counters, np.uint64(key[1]))
        miss = (4294967295.5 - lanes.T.astype(np.float64)) * 2.0**-32  # 1 - u
        found.append((miss.ravel() < chance[start : start + miss.size]).nonzero()[0] + start)
    ids = torch.from_numpy(np.concatenate(found))
    return flat[ids], ids


def gumbel(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64], ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """-log(-log u) of each (seed, position, id), u = (x + 0.5) * 2^-32. Three arrays of one length; float64."""
    lanes = philox(seeds, ids.astype(np.uint64) >> np.uint64(2), positions)
    x = np.take_along_axis(lanes, (ids & 3)[None, :], axis=0)[0]
    noise: npt.NDArray[np.float64] = -np.log(-np.log((x + 0.5) * 2.0**-32))
    return noise


def philox(keys: _UInts, counter_0: npt.NDArray[np.uint64], counter_1: _UInts) -> npt.NDArray[np.uint64]:
    """Philox-4x32-10 (Salmon et al. 2011) of the counters (counter_0, counter_1, 0, 0) under 64-bit keys.

    keys, counter_1   one each, or one for all
    returns           [4, n], 32 bits in each
    """
    low = np.asarray(keys & _MASK)
    high = np.asarray(keys >> _HALF)
    c0, c2 = counter_0 & _MASK, np.zeros_like(counter_0)
    c1, c3 = np.full_like(counter_0, counter_1 & _MASK), np.zeros_like(counter_0)
    product_0, product_2 = np.empty_like(c0), np.empty_like(c0)
    for _ in range(10):
        np.multiply(c0, _MULTIPLIERS[0], out=product_0)  # 32 x 32 bits: exact in 64
        np.multiply(c2, _MULTIPLIERS[1], out=product_2)
        np.right_shift(product_2, _HALF, out=c0)
        c0 ^= c1
        c0 ^= low
        np.bitwise_and(product_2, _MASK, out=c1)
        np.right_shift(product_0, _HALF, out=c2)
        c2 ^= c3
        c2 ^= high
        np.bitwise_and(product_0, _MASK, out=c3)
        low = (low + _WEYL[0]) & _MASK
        high = (high + _WEYL[1]) & _MASK
    return np.stack([c0, c1, c2, c3])
