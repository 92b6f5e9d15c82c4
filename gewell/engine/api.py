"""What a worker and an engine say to each other. No torch: a scripted engine implements the same protocol for tests.

The worker calls `add`, `cancel`, `finish` from any thread; one engine thread calls `step` in a loop
and hands the events on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from gewell.config import SamplingDefaults, VisionConfig
from gewell.request import CacheAnswer, CacheHints, EngineRequest, HintAnswer, TokenLogprobs

__all__ = [
    "CacheAnswer",
    "CacheHints",
    "Engine",
    "EngineInfo",
    "EngineRequest",
    "EngineStats",
    "Event",
    "FinishReason",
    "FinishedEvent",
    "HintAnswer",
    "TokenLogprobs",
    "TokensEvent",
]


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    REPETITION = "repetition"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensEvent:
    """New tokens of one request, in order. A stop id that ended the row is recorded here; its text is not shown."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedEvent:
    """The request has left the engine; nothing follows for its id."""

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int  # of this epoch and earlier ones together
    cache: CacheAnswer
    stop_token_id: int | None = None  # the id that ended it, if one did
    error_code: str | None = None
    error_message: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of the prompt's tokens from `score_from` on
    scores: tuple[tuple[TokenLogprobs, ...], ...] | None = None  # of each of the request's continuations
    is_satisfied: bool | None = None  # of a constrained request: whether what stands is complete under its grammar
    started_at_s: float | None = None  # time.monotonic() when first scheduled; None: never was
    first_token_at_s: float | None = None
    engine_time_s: float = 0.0  # seconds of steps that this request took part in


Event = TokensEvent | FinishedEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot for heartbeats, benches and the demo's table. Counters never decrease."""

    num_steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    decode_rows_sum: int = 0  # summed over steps; / num_decode_steps = mean decode rows
    num_decode_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0  # prefill tokens actually computed (recomputation after preemption included)
    generated_tokens: int = 0
    num_preemptions: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    checkpoint_pages: int = 0  # pages that only retained checkpoints hold
    num_checkpoints: int = 0
    last_step_at_s: float = 0.0  # time.monotonic()
    step_time_s: float = 0.0  # summed


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Static facts that ingest needs for validation and the worker for its heartbeat."""

    model: str
    fingerprint: str  # model + weights + KV format; a continuation needs the same
    vocab_size: int
    max_context: int  # tokens, prompt + output
    max_prompt_tokens: int  # what the pool can ever hold for one sequence
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)  # the publisher's advice, for fields left out
    vision: VisionConfig | None = None  # how images are to be cut; None: text alone
    image_token_id: int | None = None  # stands in a prompt, as often as an image has soft tokens


class Engine(Protocol):
    """Thread rules: `step` belongs to one thread; everything else may be called from any thread and returns at once."""

    on_started: Callable[[Sequence[str]], None] | None
    """Set by the worker: called in the engine thread with the ids of requests that join the batch, before their step is
    launched. Who was in the batch when a process dies is a suspect; who waited is not."""

    @property
    def info(self) -> EngineInfo: ...

    def add(self, request: EngineRequest) -> None: ...

    def cancel(self, request_id: str) -> None:
        """End the request at the next step with reason CANCELLED. An unknown id has no effect."""

    def finish(self, request_id: str, num_output_tokens: int) -> None:
        """A stop string was found: the request keeps its first `num_output_tokens` tokens and ends with reason STOP."""

    def has_work(self) -> bool: ...

    def step(self) -> list[Event]:
        """Run one step and return what became known by it. Without work it returns [] at once."""

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...
