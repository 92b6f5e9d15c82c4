"""Log-probabilities of tokens that are given, from the hidden state before each."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gewell.engine.sampler import as_logprob
from gewell.request import TokenLogprobs

_LOGITS_BYTES = 128 << 20  # at once: 128 tokens of a vocabulary of 262144, and as much again while they are summed up


@dataclass(frozen=True, slots=True)
class Scores:
    """On the device: targets [n] int64, their log-probabilities [n], and those of the best ids [n, top]."""

    targets: Tensor
    logprobs: Tensor
    top: Tensor
    top_ids: Tensor

    def on_host(self) -> list[TokenLogprobs] | None:
        """None when they are not all numbers (-inf is one: an id that the model rules out)."""
        logprobs, top = self.logprobs.tolist(), self.top.tolist()
        if any(value != value for value in logprobs):
            return None
        return [
            TokenLogprobs(
                token_id=token_id,
                logprob=as_logprob(logprob),
                top=tuple(zip(ids, map(as_logprob, values), strict=True)),
            )
            for token_id, logprob, values, ids in zip(
                self.targets.tolist(), logprobs, top, self.top_ids.tolist(), strict=True
            )
        ]


def score_tokens(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, num_top: int, *, max_bytes: int = _LOGITS_BYTES
) -> Scores:
    """The model's own log-probability of each target; nothing a job does to logits counts here.

    head       hidden rows [n, hidden] -> logits [n, vocab] float32
    hidden     [n, hidden]: row i is the state before targets[i]
    max_bytes  of logits that exist at once; a row at least
    """
    pieces: list[tuple[Tensor, Tensor, Tensor]] = []
    start, num_rows = 0, 1
    while start < len(targets):
        logits = head(hidden[start : start + num_rows])
        total = logits.logsumexp(dim=1, keepdim=True)
        chosen = logits.gather(1, targets[start : start + num_rows].unsqueeze(1)) - total
        values, ids = torch.topk(logits, num_top, dim=1)
        pieces.append((chosen.squeeze(1), values - total, ids))
        start += num_rows
        num_rows = max(1, max_bytes // (4 * logits.shape[1]))  # the first row has told the width
    chosen, top, top_ids = (torch.cat(part) for part in zip(*pieces, strict=True))
    return Scores(targets, chosen, top, top_ids)
