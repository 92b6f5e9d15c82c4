"""How far apart two ways to run a model are: Kullback-Leibler divergence of their next-token distributions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LogProbs = Mapping[int, float]  # the likeliest tokens and their natural logarithms; the rest of the mass is elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Over `num_positions` positions; KL in nats, from the reference to the other."""

    num_positions: int
    mean_kl: float
    p99_kl: float
    max_kl: float
    same_choice: float  # share of positions where both have the same likeliest token


def kl_divergence(reference: LogProbs, other: LogProbs) -> float:
    """Over the reference's listed tokens, and all others taken as one.

    A token that `other` does not list counts as its least likely listed one, which it cannot exceed. Never below 0.
    """
    least = min(other.values())
    pairs = [(math.exp(lp), math.exp(other.get(token, least))) for token, lp in reference.items()]
    pairs.append((max(0.0, 1 - sum(p for p, _ in pairs)), max(0.0, 1 - sum(q for _, q in pairs))))
    tiny = 1e-12
    return max(0.0, sum(p * math.log(max(p, tiny) / max(q, tiny)) for p, q in pairs if p > tiny))


def summarize(pairs: Sequence[tuple[LogProbs, LogProbs]]) -> Divergence:
    """Raises ValueError without positions."""
    if not pairs:
        raise ValueError("no positions to compare")
    values = sorted(kl_divergence(reference, other) for reference, other in pairs)
    same = sum(_likeliest(reference) == _likeliest(other) for reference, other in pairs)
    return Divergence(
        num_positions=len(values),
        mean_kl=sum(values) / len(values),
        p99_kl=values[min(len(values) - 1, int(0.99 * len(values)))],
        max_kl=values[-1],
        same_choice=same / len(values),
    )


def spread_positions(num_tokens: int, most: int) -> list[int]:
    """Up to `most` positions in [0, num_tokens), evenly spread, the first among them."""
    if num_tokens <= most:
        return list(range(num_tokens))
    return [i * num_tokens // most for i in range(most)]


def _likeliest(logprobs: LogProbs) -> int:
    return max(logprobs, key=lambda token: (logprobs[token], -token))
