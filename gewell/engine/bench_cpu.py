"""What `gewell bench cpu` measures: our engine and transformers, side by side in one process, dtype and thread count.

Times are of single steps and medians are reported, so that a neighbour on the machine disturbs little; the two take
turns, so that it disturbs both alike.
"""

import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from gewell.cache.geometry import KindGeometry, KVGeometry
from gewell.cache.page_pool import PagePool
from gewell.cache.prefix_cache import PrefixCache
from gewell.engine.api import TokensEvent
from gewell.engine.build import EngineOptions, build_engine
from gewell.engine.engine import PagedEngine
from gewell.request import EngineRequest
from gewell.sampling import SamplingParams
from gewell.scheduler.batch import Scheduler, SchedulerConfig
from gewell.scheduler.prefixes import CachedPrefixes
from gewell.scheduler.request import RequestState

_PROMPT_TOKENS = 32  # of the decode runs
_WARMUP_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Decoding `rows` sequences side by side. step_ms: median of one step; tokens/s follow from it."""

    rows: int
    step_ms: float
    baseline_step_ms: float | None  # transformers, when it is installed

    @property
    def tokens_per_s(self) -> float:
        return self.rows / self.step_ms * 1e3

    @property
    def baseline_tokens_per_s(self) -> float | None:
        return None if self.baseline_step_ms is None else self.rows / self.baseline_step_ms * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuReport:
    model: str
    dtype: str
    num_threads: int
    decode: tuple[Decode, ...]
    prefill_tokens: int
    prefill_tokens_per_s: float
    baseline_prefill_tokens_per_s: float | None
    sample_ms: float  # 8 rows of 262144 logits, top_k 64 and top_p 0.95
    plan_us: float  # host's plan of a step with 512 decode rows, geometry of the 31B

    def as_dict(self) -> dict[str, Any]:
        report = asdict(self)
        for entry, decode in zip(report["decode"], self.decode, strict=True):
            entry["tokens_per_s"] = decode.tokens_per_s
            entry["baseline_tokens_per_s"] = decode.baseline_tokens_per_s
        return report


def measure(
    model_dir: Path,
    *,
    dtype: torch.dtype,
    rows: tuple[int, ...],
    num_tokens: int,
    prefill_tokens: int,
    has_baseline: bool,
    progress: Callable[[str], None] = lambda stage: None,
) -> CpuReport:
    """Measure everything. Raises CheckpointError or ConfigError for a model that cannot be loaded."""
    progress("loading the model")
    options = EngineOptions(device="cpu", dtype=dtype, max_num_seqs=max(16, *rows), max_num_batched_tokens=1024)
    engine = build_engine(model_dir, options)
    baseline = None
    if has_baseline:
        progress("loading it in transformers")
        baseline = _load_baseline(model_dir, dtype)
    decodes = []
    for num_rows in rows:
        progress(f"decoding {num_rows} row{'s' if num_rows > 1 else ''}")
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(2):  # taking turns
            ours += list(_engine_steps(engine, num_rows, num_tokens))[_WARMUP_STEPS:]
            if baseline is not None:
                theirs += list(_baseline_steps(baseline, num_rows, num_tokens))[_WARMUP_STEPS:]
        decodes.append(
            Decode(
                rows=num_rows,
                step_ms=statistics.median(ours) * 1e3,
                baseline_step_ms=statistics.median(theirs) * 1e3 if theirs else None,
            )
        )
    progress(f"reading a prompt of {prefill_tokens} tokens")
    prefill = [_engine_prefill(engine, prefill_tokens, salt) for salt in range(4)][1:]
    baseline_prefill = None
    if baseline is not None:
        baseline_prefill = [_baseline_prefill(baseline, prefill_tokens) for _ in range(4)][1:]
    engine.close()
    progress("sampling and planning")
    return CpuReport(
        model=engine.info.model,
        dtype=str(dtype).removeprefix("torch."),
        num_threads=torch.get_num_threads(),
        decode=tuple(decodes),
        prefill_tokens=prefill_tokens,
        prefill_tokens_per_s=prefill_tokens / statistics.median(prefill),
        baseline_prefill_tokens_per_s=prefill_tokens / statistics.median(baseline_prefill)
        if baseline_prefill
        else None,
        sample_ms=sample_ms(),
        plan_us=plan_us(),
    )


def _ids(num: int, vocab_size: int, salt: int) -> list[int]:
    """Ordinary-looking token ids: spread over the vocabulary, above the control tokens."""
    return [1000 + (7919 * i + 104729 * (salt + 1)) % (min(vocab_size, 200_000) - 1000) for i in range(num)]


# ------------------------------------------------------------------------------------------------------------- ours


def _engine_steps(engine: PagedEngine, rows: int, num_tokens: int) -> Iterator[float]:
    """Seconds of each pure decode step of a batch."""
    for row in range(rows):
        engine.add(
            EngineRequest(
                request_id=f"row-{row}",
                prompt_ids=_ids(_PROMPT_TOKENS, engine.info.vocab_size, row),
                sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
            )
        )
    while engine.has_work():
        start = time.perf_counter()
        events = engine.step()
        elapsed = time.perf_counter() - start
        if sum(isinstance(event, TokensEvent) for event in events) == rows:
            yield elapsed


def _engine_prefill(engine: PagedEngine, num_tokens: int, salt: int) -> float:
    ids = _ids(num_tokens, engine.info.vocab_size, 1000 + salt)
    engine.add(EngineRequest(request_id="prefill", prompt_ids=ids, sampling=SamplingParams(max_tokens=1)))
    start = time.perf_counter()
    while engine.has_work():
        engine.step()
    return time.perf_counter() - start


def sample_ms() -> float:
    from gewell_kernels import ops

    logits = torch.randn(8, 262_144, generator=torch.Generator().manual_seed(0)) * 3
    full = [torch.full((8,), value) for value in (1.0, 0.95, 0.0)]
    arguments = (full[0], torch.full((8,), 64, dtype=torch.int32), full[1], full[2])
    times = []
    for position in range(20):
        start = time.perf_counter()
        ops.sample(logits, *arguments, torch.arange(8), torch.full((8,), position))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def plan_us(num_rows: int = 512) -> float:
    """Median microseconds of `Scheduler.plan` over decode steps of that many rows. Torch takes no part."""
    geometry = KVGeometry(  # Gemma 4 31B in bf16
        page_bytes=13_107_200,
        sliding=KindGeometry(page_tokens=16, bytes_per_token=819_200),
        full=KindGeometry(page_tokens=320, bytes_per_token=40_960),
        sliding_window=1024,
    )
    pool = PagePool(num_rows * 80)
    config = SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=1 << 16, shadow_tokens=512)
    scheduler = Scheduler(config, pool, geometry, CachedPrefixes(PrefixCache(pool, geometry)))
    for i in range(num_rows):
        ids = [(i * 31 + k) % 1000 for k in range(16 + i % 150)]
        request = EngineRequest(request_id=str(i), prompt_ids=ids, sampling=SamplingParams(max_tokens=1000))
        scheduler.add(
            RequestState(
                request=request,
                order=i,
                tokens=array("i", ids),
                num_prompt_tokens=len(ids),
                max_output_tokens=1000,
            )
        )
    times = []
    for _ in range(200):
        start = time.perf_counter()
        plan = scheduler.plan()
        elapsed = time.perf_counter() - start
        assert plan is not None
        if len(plan.decode_rows) == num_rows and not plan.chunks:
            times.append(elapsed)
        scheduler.complete(plan)
        for req in plan.sampling_rows():
            req.tokens.append(5)
            req.num_output_tokens += 1
    return statistics.median(times) * 1e6


# ------------------------------------------------------------------------------------------------------ transformers


def baseline_is_installed() -> bool:
    import importlib.util

    return importlib.util.find_spec("transformers") is not None


def _load_baseline(model_dir: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    return model.eval()


@torch.inference_mode()
def _baseline_steps(model: Any, rows: int, num_tokens: int) -> Iterator[float]:
    """Seconds between the tokens of `generate`, the prompt's own step left out."""
    stamps: list[float] = []

    def stamp(input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        stamps.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    ids = torch.tensor([_ids(_PROMPT_TOKENS, model.config.get_text_config().vocab_size, row) for row in range(rows)])
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        stopping_criteria=[stamp],
        pad_token_id=0,
    )
    return iter([after - before for before, after in pairwise(stamps)])


@torch.inference_mode()
def _baseline_prefill(model: Any, num_tokens: int) -> float:
    ids = torch.tensor([_ids(num_tokens, model.config.get_text_config().vocab_size, 1000)])
    start = time.perf_counter()
    model(ids, logits_to_keep=1)
    return time.perf_counter() - start
