"""Sampling by Gumbel-argmax, naive: sort, cut, draw, one row after the other, in float64."""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def philox(key: int, counter: tuple[int, int, int, int], rounds: int = 10) -> tuple[int, int, int, int]:
    """Philox-4x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with a 64-bit key."""
    key_low, key_high = key & _MASK, (key >> 32) & _MASK
    c0, c1, c2, c3 = counter
    for _ in range(rounds):
        product_0, product_2 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product_2 >> 32) ^ c1 ^ key_low,
            product_2 & _MASK,
            (product_0 >> 32) ^ c3 ^ key_high,
            product_0 & _MASK,
        )
        key_low, key_high = (key_low + 0x9E3779B9) & _MASK, (key_high + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def gumbel(seed: int, position: int, token_id: int) -> float:
    """-log(-log u), u = (x + 0.5) * 2^-32, x the token's lane of its Philox block."""
    x = philox(seed & 0xFFFFFFFFFFFFFFFF, (token_id // 4, position & _MASK, 0, 0))[token_id % 4]
    u = torch.tensor((x + 0.5) * 2.0**-32, dtype=torch.float64)
    return float(-torch.log(-torch.log(u)))


def kept_ids(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Ids of one row that may be drawn, ascending. An id whose logit equals the last kept one's is kept as well."""
    scaled = logits.to(torch.float64) / temperature
    ordered = scaled.sort(descending=True).values
    floor = ordered[top_k - 1] if 0 < top_k < ordered.numel() else ordered[-1]
    ordered = ordered[ordered >= floor]
    weights = torch.softmax(ordered, dim=0)
    if top_p < 1.0:
        num_needed = int((weights.cumsum(0) < top_p).sum()) + 1
        floor = ordered[min(num_needed, ordered.numel()) - 1]
    if min_p > 0.0:
        floor = torch.maximum(floor, ordered[0] + torch.log(torch.tensor(min_p, dtype=torch.float64)))
    return (scaled >= floor).nonzero()[:, 0]


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
    drawn = []
    for row in range(logits.shape[0]):
        if float(temperature[row]) == 0.0:
            drawn.append(int((logits[row] == logits[row].max()).nonzero()[0, 0]))
            continue
        heat = float(temperature[row])
        ids = kept_ids(logits[row], heat, int(top_k[row]), float(top_p[row]), float(min_p[row]))
        noisy = [float(logits[row, i]) / heat + gumbel(int(seeds[row]), int(positions[row]), i) for i in ids.tolist()]
        drawn.append(int(ids[max(range(len(noisy)), key=noisy.__getitem__)]))
    return torch.tensor(drawn, dtype=torch.int64)
