"""From logits to tokens: bans, bias, penalties, the draw, log-probabilities. One object per runner, state per row.

State of ordinary rows is four numbers and a seed. What costs more (token counts, biases, bans) exists only for rows
that ask for it. What depends on earlier tokens lives on the device, for the host may not know the newest one yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gewell_kernels import ops
from torch import Tensor

from gewell.engine.step_arrays import Int64, to_device
from gewell.request import TokenLogprobs
from gewell.sampling import SamplingParams
from gewell.scheduler.request import RequestState

MIN_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(slots=True)
class _Special:
    """Row state beyond the ordinary. Tensors live on the logits' device."""

    bias_ids: Tensor | None = None  # [n] int64
    bias: Tensor | None = None  # [n] float32
    stop_ids: Tensor | None = None  # banned before min_tokens
    counts: Tensor | None = None  # [vocab] int32: generated tokens
    is_seen: Tensor | None = None  # [vocab] bool: prompt and generated, for the repetition penalty


@dataclass(slots=True)
class Drawn:
    """Device tensors of one step: copy them to the host together.

    token_ids   [rows] int64
    is_sound    [rows] bool: the chosen logit is a finite number
    logprobs    rows that asked: their index, and (chosen [1], top values, top ids) on the device
    """

    token_ids: Tensor
    is_sound: Tensor
    logprobs: list[tuple[int, Tensor, Tensor, Tensor]]

    def logprobs_on_host(self, token_ids: Sequence[int]) -> dict[int, TokenLogprobs]:
        return {
            i: TokenLogprobs(
                token_id=token_ids[i],
                logprob=as_logprob(float(chosen[0])),
                top=tuple(zip(ids.tolist(), map(as_logprob, values.tolist()), strict=True)),
            )
            for i, chosen, values, ids in self.logprobs
        }


def as_logprob(logprob: float) -> float:
    """What JSON can carry."""
    return max(logprob, MIN_LOGPROB) if logprob == logprob else MIN_LOGPROB


class Sampler:
    """Draws one token for each sampling row of a step.

    suppressed_ids   never drawn in any row
    """

    def __init__(
        self, max_num_seqs: int, vocab_size: int, device: torch.device, suppressed_ids: Sequence[int] = ()
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._suppressed = torch.tensor(suppressed_ids, dtype=torch.int64, device=device) if suppressed_ids else None
        self._floats = np.zeros((3, max_num_seqs), dtype=np.float32)  # temperature, top_p, min_p
        self._ints = np.zeros((2, max_num_seqs), dtype=np.int64)  # top_k, seed
        self._specials: dict[int, _Special] = {}
        self._num_logprobs: dict[int, int] = {}

    def join(self, req: RequestState) -> None:
        """The request has its row from now on. Its known tokens are those of `req.tokens`."""
        row, params = req.row_idx, req.request.sampling
        self._floats[:, row] = params.temperature, params.top_p, params.min_p
        self._ints[:, row] = params.top_k, params.seed
        self._specials.pop(row, None)
        self._num_logprobs.pop(row, None)
        if _is_special(params):
            self._specials[row] = self._special(req)
        if params.logprobs is not None:
            self._num_logprobs[row] = params.logprobs

    def _special(self, req: RequestState) -> _Special:
        params, special = req.request.sampling, _Special()
        if params.logit_bias:
            special.bias_ids = self._ids(list(params.logit_bias))
            special.bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=self._device)
        if params.min_tokens and req.stop_ids:
            special.stop_ids = self._ids(sorted(req.stop_ids))
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            generated = self._ids(req.tokens[req.num_prompt_tokens :].tolist())
            special.counts = torch.bincount(generated, minlength=self._vocab_size).to(torch.int32)
            special.is_seen = special.counts > 0
            special.is_seen[self._ids(req.tokens[: req.num_prompt_tokens].tolist())] = True
        return special

    def _ids(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device)

    def draw(
        self,
        logits: Tensor,
        rows: Sequence[RequestState],
        row_idx: Int64,
        positions: Int64,
        mask: tuple[Sequence[int], Tensor] | None = None,
    ) -> Drawn:
        """Draw the token at `positions[i]` of each row. logits [rows, vocab] float32, changed in place.

        row_idx   of the rows when the step was planned: a row may have ended since
        mask      indexes of rows that may draw only ids whose bit is set, and their bits [n, bytes] uint8, least first
        Waits for the device nowhere, so that it may run ahead of the host.
        """
        logprobs = self._logprob_rows(logits, row_idx)
        if self._suppressed is not None:
            logits.index_fill_(1, self._suppressed, -torch.inf)
        if self._specials:
            for i, req in enumerate(rows):
                special = self._specials.get(int(row_idx[i]))
                if special is not None:
                    _reshape(logits[i], special, req.request.sampling, int(positions[i]) - req.num_prompt_tokens)
        if mask is not None:
            _apply_mask(logits, *mask)
        num_rows = len(row_idx)
        padded = -(-num_rows // 16) * 16  # all arguments aligned alike: another alignment compiles another kernel
        floats = np.zeros((3, padded), dtype=np.float32)
        floats[:, :num_rows] = self._floats[:, row_idx]
        longs = np.zeros((3, padded), dtype=np.int64)
        longs[:2, :num_rows] = self._ints[:, row_idx]
        longs[2, :num_rows] = positions
        temperature, top_p, min_p = to_device(floats, self._device)[:, :num_rows]
        top_k, seeds, at = to_device(longs, self._device)[:, :num_rows]
        token_ids = ops.sample(logits, temperature, top_k.to(torch.int32), top_p, min_p, seeds, at)
        chosen = token_ids.unsqueeze(1)
        is_sound = logits.gather(1, chosen).squeeze(1).isfinite()
        if self._specials:
            self._count(row_idx, token_ids)
        return Drawn(token_ids, is_sound, [(i, raw[token_ids[i : i + 1]], *top) for i, raw, top in logprobs])

    def _logprob_rows(self, logits: Tensor, row_idx: Int64) -> list[tuple[int, Tensor, tuple[Tensor, Tensor]]]:
        """Of rows that asked: the model's own log-probabilities, before anything the job does to the logits."""
        if not self._num_logprobs:
            return []
        asked = [(i, self._num_logprobs[row]) for i, row in enumerate(row_idx.tolist()) if row in self._num_logprobs]
        found = []
        for i, num in asked:
            raw = torch.log_softmax(logits[i], dim=0)
            values, ids = torch.topk(raw, num)
            found.append((i, raw, (values, ids)))
        return found

    def _count(self, row_idx: Int64, token_ids: Tensor) -> None:
        for i, row in enumerate(row_idx.tolist()):
            special = self._specials.get(row)
            if special is not None and special.counts is not None and special.is_seen is not None:
                drawn = token_ids[i : i + 1]  # one-element slices: indexing by a scalar tensor would fetch it
                special.counts.index_add_(0, drawn, torch.ones_like(drawn, dtype=torch.int32))
                special.is_seen.index_fill_(0, drawn, True)


def _is_special(params: SamplingParams) -> bool:
    return bool(
        params.logit_bias
        or params.min_tokens
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )


def _apply_mask(logits: Tensor, rows: Sequence[int], bits: Tensor) -> None:
    """Ban what is not allowed. Bits become bytes on the device: the host sends an eighth of them."""
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8).to(bits.device, non_blocking=True)
    banned = (bits.unsqueeze(-1) & powers).flatten(1)[:, : logits.shape[1]] == 0
    if banned.shape[1] < logits.shape[1]:
        raise ValueError(f"masks have {banned.shape[1]} bits for {logits.shape[1]} logits")
    if len(rows) == len(logits):
        logits.masked_fill_(banned, -torch.inf)
    else:
        at = to_device(np.array(rows, dtype=np.int64), logits.device)
        logits[at] = logits[at].masked_fill_(banned, -torch.inf)


def _reshape(logits: Tensor, special: _Special, params: SamplingParams, num_output_tokens: int) -> None:
    """Penalties (OpenAI's two, and that of Keskar et al. 2019), then bias, then bans, on one row in place."""
    if special.counts is not None and special.is_seen is not None:
        if params.repetition_penalty != 1.0:
            scaled = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            torch.where(special.is_seen, scaled, logits, out=logits)
        if params.frequency_penalty:
            logits.sub_(special.counts * params.frequency_penalty)
        if params.presence_penalty:
            logits.sub_((special.counts > 0) * params.presence_penalty)
    if special.bias_ids is not None and special.bias is not None:
        logits.index_add_(0, special.bias_ids, special.bias)
    if special.stop_ids is not None and num_output_tokens < params.min_tokens:
        logits.index_fill_(0, special.stop_ids, -torch.inf)
