"""What `gewell bench masks` measures: decode steps whose rows all keep to a JSON schema, against the same without.

The rows draw at random, so each stands somewhere else in the schema. The two take turns; medians of single steps.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gewell.engine.api import TokensEvent
from gewell.engine.build import EngineOptions, build_engine
from gewell.engine.engine import PagedEngine
from gewell.request import Constraint, EngineRequest
from gewell.sampling import SamplingParams
from gewell.structured import ConstraintKind, ConstraintSpec
from gewell.text.constraint import GrammarCompiler
from gewell.text.tokenizer import load_tokenizer

_WARMUP_STEPS = 3
_NUM_TURNS = 3
_RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_ENDLESS = {"type": "array", "items": _RECORD, "minItems": 10_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskReport:
    """step_ms: medians of decode steps of `rows` rows."""

    model: str
    device: str
    num_threads: int
    rows: int
    vocab_size: int
    vocabulary_s: float  # once a worker
    compile_ms: float  # once a schema
    free_step_ms: float
    constrained_step_ms: float

    @property
    def share(self) -> float:
        """What the masks add, as a share of a step without them."""
        return self.constrained_step_ms / self.free_step_ms - 1


def measure(model_dir: Path, *, device: str, rows: int, num_tokens: int) -> MaskReport:
    """Raises CheckpointError or ConfigError for a model that cannot be loaded."""
    options = EngineOptions(device=device, max_num_seqs=rows, max_num_batched_tokens=max(4096, 2 * rows))
    engine = build_engine(model_dir, options)
    start = time.perf_counter()
    tokenizer = load_tokenizer(model_dir)
    compiler = GrammarCompiler(tokenizer, end_ids=engine.info.eos_token_ids, vocab_size=engine.info.vocab_size)
    vocabulary_s = time.perf_counter() - start
    start = time.perf_counter()
    grammar = compiler.compile(ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, value=_ENDLESS))
    compile_ms = (time.perf_counter() - start) * 1e3
    free: list[float] = []
    constrained: list[float] = []
    for _ in range(_NUM_TURNS):
        free += list(_steps(engine, rows, num_tokens, None))[_WARMUP_STEPS:]
        constrained += list(_steps(engine, rows, num_tokens, grammar))[_WARMUP_STEPS:]
    engine.close()
    return MaskReport(
        model=engine.info.model,
        device=device,
        num_threads=torch.get_num_threads(),
        rows=rows,
        vocab_size=engine.info.vocab_size,
        vocabulary_s=vocabulary_s,
        compile_ms=compile_ms,
        free_step_ms=statistics.median(free) * 1e3,
        constrained_step_ms=statistics.median(constrained) * 1e3,
    )


def _steps(engine: PagedEngine, rows: int, num_tokens: int, constraint: Constraint | None) -> Iterator[float]:
    """Seconds of each step in which all rows drew."""
    for row in range(rows):
        engine.add(
            EngineRequest(
                request_id=f"row-{row}",
                prompt_ids=[200 + (7919 * (row + i)) % (engine.info.vocab_size - 400) for i in range(16)],
                sampling=SamplingParams(top_k=64, top_p=0.95, max_tokens=num_tokens, seed=row, ignore_eos=True),
                constraint=constraint,
            )
        )
    while engine.has_work():
        start = time.perf_counter()
        events = engine.step()
        elapsed = time.perf_counter() - start
        if sum(isinstance(event, TokensEvent) for event in events) == rows:
            yield elapsed
