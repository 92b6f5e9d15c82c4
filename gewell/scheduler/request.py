"""One request inside the engine, from the window to its last token: what the scheduler changes step by step."""

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from gewell.request import CacheAnswer, ConstraintRow, EngineRequest, TokenLogprobs

if TYPE_CHECKING:
    from gewell.cache.sequence_pages import SequencePages


class Stage(Enum):
    WAITING = "waiting"  # in the window, behind a leader, or preempted; holds no pages and no row
    PREFILL = "prefill"  # holds pages and a row; its known tokens are still being computed
    DECODE = "decode"  # everything but the newest token is computed: one query each step
    FINISHED = "finished"  # holds nothing; results of a step still in flight are dropped


@dataclass(slots=True, eq=False)
class RequestState:
    """Mutable state of one request. Owned by the scheduler; the engine appends tokens and reads the rest.

    tokens               prompt, tokens of earlier epochs, then generated ones; its length grows by one a sampled token
    num_computed_tokens  KV of [0, num_computed_tokens) is written or part of a step already launched; not kept up to
                         date while the request decodes, where it is one less than the tokens known to the device
    """

    request: EngineRequest
    order: int  # arrival in this process, for entries of one millisecond
    tokens: "array[int]"  # typecode "i"
    num_prompt_tokens: int
    max_output_tokens: int  # of all epochs together, after the clamp to the context
    stop_ids: frozenset[int] = frozenset()
    grammar: ConstraintRow | None = None  # has taken in all tokens but a stop id; the engine's own
    num_output_tokens: int = 0  # of all epochs together
    scored: list[TokenLogprobs] = field(default_factory=list)  # of prompt tokens [score_from, ...), once computed
    stage: Stage = Stage.WAITING

    row_idx: int = -1  # stable while running: where a runner keeps the row's state; -1 while waiting
    start_order: int = -1  # of its first start; kept over preemptions, so that the oldest always gets through
    pages: "SequencePages | None" = None
    num_computed_tokens: int = 0
    num_expected_pages: int = 0  # what it will hold at its expected end
    num_reserved_pages: int = 0  # of these, not allocated yet
    image_runs: tuple[tuple[int, int], ...] = ()  # [start, end): never cut by a chunk

    keep_positions: list[int] = field(default_factory=list)  # ascending: checkpoints still to be taken
    pending_keeps: list[int] = field(default_factory=list)  # in a step under way: their windows must not be trimmed
    followers: list[tuple[int, "RequestState"]] = field(default_factory=list)  # (shared length, sibling that waits)
    leader: "RequestState | None" = None

    cost: float = 0.0  # what its start is charged to lane and tenant
    num_warm_tokens: int = 0  # prompt tokens that the cache would have served at the last look
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # prompt tokens that the first start found computed
    answer: CacheAnswer = field(default_factory=CacheAnswer)
    started_at_s: float | None = None
    first_token_at_s: float | None = None
    engine_time_s: float = 0.0  # of its finished stretches of running
    running_since_s: float = 0.0  # the engine's busy time when the present stretch began

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def sort_key(self) -> tuple[int, int]:
        """Submit order: the server's clock, then arrival here."""
        return (self.request.enqueued_at_ms, self.order)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_shareable_tokens(self) -> int:
        """Leading tokens that may be served from a cache: those to be scored need the hidden state before each."""
        score_from = self.request.score_from
        return self.num_tokens if score_from is None else score_from - 1

    def scored_tokens(self, start: int, end: int) -> tuple[int, int]:
        """Positions [first, last) of the prompt tokens that computing [start, end) scores; empty: none is wanted."""
        score_from = self.request.score_from
        if score_from is None or len(self.scored) == self.num_prompt_tokens - score_from:
            return (0, 0)
        first, last = max(start + 1, score_from), min(end + 1, self.num_prompt_tokens)
        return (first, last) if first < last else (0, 0)

    @property
    def is_complete(self) -> bool:
        """All tokens it may ever produce are there."""
        return self.num_output_tokens >= self.max_output_tokens
