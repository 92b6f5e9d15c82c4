"""One step as the scheduler orders it and a runner executes it. Plain lists and arrays of ints; no torch."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gewell.cache.tiers import Transfer
from gewell.request import TokenLogprobs
from gewell.scheduler.request import RequestState


@dataclass(slots=True, kw_only=True)
class PrefillChunk:
    """Tokens [start, start + n) of one request, computed in one piece.

    full_slots, sliding_slots   one slot a token; NO_SLOT where it is not stored; empty for a kind the model lacks
    is_last                     its last token is the newest one known
    samples                     and the next token is to be drawn after it
    keep_positions              checkpoints to be taken when the step was computed
    scored                      positions [first, last) of prompt tokens whose log-probabilities are wanted: those of
                                the tokens before them are computed here
    """

    req: RequestState
    start: int
    token_ids: "array[int]"
    full_slots: Sequence[int]
    sliding_slots: Sequence[int]
    is_last: bool
    samples: bool
    keep_positions: tuple[int, ...] = ()
    scored: tuple[int, int] = (0, 0)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """What one step does, in this order: transfers, poison, copies, then all rows at once.

    decode_rows      one query each; a row's input is the token drawn for its row_idx last, which may still be on the
                     device. The lists beside it are parallel; the runner may keep them, nobody changes them later
    chunks           prefill pieces, after the decode rows
    joined           requests that got their row_idx in this step: load their sampling parameters
    preempted        requests that lost theirs
    changed_tables   requests whose page tables differ from those of the step before; read them before the next plan
    transfers        pages that move between device and host memory, in order
    copies           (source, destination) pages
    freed_pages      filled only when asked for: pages that became free since the last plan
    masked_rows      indexes into `sampling_rows()` whose token is drawn under a mask; see `Runner.draw`
    """

    step_idx: int
    decode_rows: list[RequestState]
    decode_positions: list[int]
    decode_full_slots: list[int]
    decode_sliding_slots: list[int]
    chunks: list[PrefillChunk] = field(default_factory=list)
    joined: list[RequestState] = field(default_factory=list)
    preempted: list[RequestState] = field(default_factory=list)
    changed_tables: list[RequestState] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    freed_pages: list[int] = field(default_factory=list)
    masked_rows: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.decode_rows) + sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    def sampling_rows(self) -> list[RequestState]:
        """Requests that draw a token in this step, in the order of the result: decode rows, then finished prefills."""
        return self.decode_rows + [chunk.req for chunk in self.chunks if chunk.samples]


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What a runner found, parallel to `plan.sampling_rows()`.

    bad_rows   indexes of rows whose logits were not all numbers; their token means nothing
    logprobs   by index, for the rows that asked
    scores     by index of the chunk: its `scored` tokens
    bad_chunks indexes of chunks with scores that are not numbers
    """

    token_ids: Sequence[int]
    bad_rows: Sequence[int] = ()
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    scores: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    bad_chunks: Sequence[int] = ()


class Runner(Protocol):
    """Executes plans in the order they were launched. `depth` steps may be launched before the first is collected."""

    @property
    def depth(self) -> int:
        """0: `launch` computes at once. 1: the device works on a step while the host plans the next."""

    def launch(self, plan: StepPlan) -> None:
        """Begin the step. With `plan.masked_rows` everything but the draw, which then has to follow by `draw`."""

    def draw(self, masks: Any) -> None:
        """Draw the tokens of the step launched last, whose masks depend on tokens of the step before it.

        masks   numpy int32 [len(masked_rows), words]: bit i % 32 of word i // 32 is set where id i may be drawn;
                not changed later by the caller
        """

    def collect(self) -> StepResult:
        """The result of the oldest step that was launched and not collected. Waits for it."""

    def close(self) -> None: ...
