"""Sampling by Gumbel-argmax in torch: rows that are greedy cost one argmax, the others only their kept ids."""

import math

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_FIRST_LOOK = 2048  # top_p is nearly always reached among the best few: a full sort is the exception


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
    drawn = logits.argmax(dim=-1)
    heats, tops, shares = temperature.tolist(), top_k.tolist(), top_p.tolist()
    floors, seed_list, position_list = min_p.tolist(), seeds.tolist(), positions.tolist()
    for row, heat in enumerate(heats):
        if heat == 0.0:
            continue
        scaled = logits[row].double() / heat
        ids = _kept_ids(scaled, tops[row], shares[row], floors[row])
        noisy = scaled[ids] + _gumbel(seed_list[row], position_list[row], ids)
        drawn[row] = ids[noisy.argmax()]
    return drawn


def _kept_ids(scaled: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Ids that may be drawn, ascending. All cuts are one floor under the logits."""
    vocab_size = scaled.shape[0]
    floor = -math.inf
    if 0 < top_k < vocab_size:
        floor = float(scaled.topk(top_k).values[-1])
    if top_p < 1.0:
        floor = max(floor, _share_floor(scaled, floor, top_p))
    if min_p > 0.0:
        floor = max(floor, float(scaled.max()) + math.log(min_p))
    if floor == -math.inf:
        return torch.arange(vocab_size)
    return (scaled >= floor).nonzero().squeeze(1)


def _share_floor(scaled: Tensor, floor: float, top_p: float) -> float:
    """The least logit of the smallest set of ids, best first, whose share of the ids at or above `floor` is top_p."""
    kept = scaled[scaled >= floor]
    log_total = torch.logsumexp(kept, dim=0)
    for length in (min(_FIRST_LOOK, kept.shape[0]), kept.shape[0]):
        best = kept.topk(length).values
        num_below = int(((best - log_total).exp().cumsum(0) < top_p).sum())
        if num_below < length:
            return float(best[num_below])
    return float(best[-1])


def _gumbel(seed: int, position: int, ids: Tensor) -> Tensor:
    """[num_ids] float64: -log(-log u), u from the ids' lanes of the Philox blocks keyed by seed and position."""
    lanes = torch.stack(_philox(seed & 0xFFFFFFFFFFFFFFFF, ids // 4, position & _MASK))
    x = lanes.gather(0, (ids % 4).unsqueeze(0)).squeeze(0)
    u = (x.double() + 0.5) * 2.0**-32
    return -(-u.log()).log()


def _philox(key: int, block: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32-10 with counter (block, position, 0, 0); int64 tensors that hold 32-bit words."""
    key_low, key_high = key & _MASK, key >> 32
    c0, c1 = block, torch.full_like(block, position)
    c2, c3 = torch.zeros_like(block), torch.zeros_like(block)
    for _ in range(10):
        # The 64-bit products wrap into the sign; masking after the arithmetic shift gives the right high word.
        product_0, product_2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((product_2 >> 32) & _MASK) ^ c1 ^ key_low,
            product_2 & _MASK,
            ((product_0 >> 32) & _MASK) ^ c3 ^ key_high,
            product_0 & _MASK,
        )
        key_low, key_high = (key_low + 0x9E3779B9) & _MASK, (key_high + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3
