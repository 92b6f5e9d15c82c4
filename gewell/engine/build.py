"""From a model folder to a running engine: weights, pages for the memory there is, scheduler, cache, runner."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from gewell_kernels.layout import KVLayout

from gewell.cache.geometry import KVGeometry
from gewell.cache.page_pool import PagePool
from gewell.cache.prefix_cache import PrefixCache
from gewell.config import ModelConfig
from gewell.engine.api import EngineInfo
from gewell.engine.engine import PagedEngine
from gewell.engine.images import ImageFeatures
from gewell.engine.kv_store import KVStore
from gewell.engine.runner import ModelRunner
from gewell.errors import ConfigError
from gewell.model.gemma import GemmaModel
from gewell.model.vision import VisionTower
from gewell.scheduler.batch import Scheduler, SchedulerConfig, max_tokens_alone
from gewell.scheduler.prefixes import CachedPrefixes, NoPrefixes, Prefixes
from gewell.weights.checkpoint import Progress, load_model, load_vision

_CPU_SHARE = 0.3  # of the memory that is available: other processes live there too
_CUDA_SLACK = 2 << 30  # bytes beside weights, pages and activations: compiled kernels, workspaces, fragments
_CPU_LARGEST_POOL = 8 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Everything about an engine but its model. None: chosen from the device.

    dtype            bf16 | float32; default bf16, but float32 on a CPU without bf16 instructions
    kv_memory_bytes  of the page pool
    host_memory_bytes  for prefixes that the pool has no room for; 0: none
    max_context      tokens; default what the model and the pool allow
    """

    device: str | None = None
    dtype: torch.dtype | None = None
    full_layout: KVLayout = KVLayout.V_ONLY
    kv_memory_bytes: int | None = None
    host_memory_bytes: int = 0
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_context: int | None = None
    has_prefix_cache: bool = True
    poison_freed_pages: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in (None, torch.bfloat16, torch.float32):
            raise ConfigError("dtype", self.dtype, "bfloat16 or float32")
        if self.host_memory_bytes < 0:
            raise ConfigError("host_memory_bytes", self.host_memory_bytes, "at least 0")
        if self.max_context is not None and self.max_context < 2:
            raise ConfigError("max_context", self.max_context, "at least 2 tokens")


def build_engine(
    model_dir: Path, options: EngineOptions | None = None, *, progress: Progress | None = None
) -> PagedEngine:
    """Load the model and make an engine of it. Raises CheckpointError or ConfigError."""
    options = options or EngineOptions()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = options.dtype or default_dtype(device)
    model = load_model(model_dir, dtype=dtype, device=device, full_layout=options.full_layout, progress=progress)
    tower = load_vision(model_dir, dtype=dtype, device=device)
    fingerprint = model_fingerprint(model_dir, dtype, options.full_layout)
    return assemble(model, options, name=model_dir.name, fingerprint=fingerprint, tower=tower)


def default_dtype(device: torch.device) -> torch.dtype:
    """bf16 wherever the hardware multiplies it; without such instructions torch converts at every product.

    What cannot be asked (no /proc/cpuinfo) counts as having none.
    """
    if device.type == "cuda":
        return torch.bfloat16
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return torch.float32
    return torch.bfloat16 if {"amx_bf16", "avx512_bf16", "bf16"} & set(words) else torch.float32


def assemble(
    model: GemmaModel, options: EngineOptions, *, name: str, fingerprint: str, tower: VisionTower | None = None
) -> PagedEngine:
    """An engine around a model that is in memory already. tower: None for text alone."""
    device = next(model.weight_slots())[1].target.device
    geometry, dtype = model.kv_plan.geometry, _KV_TYPES[model.kv_plan.dtype_bytes]
    config = _scheduler_config(options, device)
    _check_memory(options, device)
    num_pages = _num_pages(options, geometry, model.config, config, device)
    longest = min(max_tokens_alone(num_pages, geometry), model.config.max_position_embeddings)
    if options.max_context is not None:
        longest = min(longest, options.max_context)
    if longest < 2:
        raise ConfigError("kv_memory_bytes", num_pages * geometry.page_bytes, _too_small(geometry))
    pool = PagePool(num_pages, record_freed=options.poison_freed_pages)
    num_host_pages = options.host_memory_bytes // geometry.page_bytes if options.has_prefix_cache else 0
    store = KVStore(
        geometry,
        num_pages,
        dtype=dtype,
        device=device,
        num_host_pages=num_host_pages,
        poison=options.poison_freed_pages,
    )
    prefixes: Prefixes = NoPrefixes()
    if options.has_prefix_cache:
        prefixes = CachedPrefixes(PrefixCache(pool, geometry, num_host_pages=num_host_pages))
    images = None
    if tower is not None:
        images = ImageFeatures(tower, is_bidirectional=model.config.has_bidirectional_images)
    runner = ModelRunner(
        model,
        store,
        config.max_num_seqs,
        depth=1 if device.type == "cuda" else 0,
        max_context=longest,
        images=images,
    )
    if runner.graphs is not None:
        runner.graphs.record_small()
    return PagedEngine(
        info=EngineInfo(
            model=name,
            fingerprint=fingerprint,
            vocab_size=model.config.vocab_size,
            max_context=longest,
            max_prompt_tokens=longest - 1,
            max_num_seqs=config.max_num_seqs,
            eos_token_ids=model.config.tokens.eos,
            sampling=model.config.sampling,
            vision=None if tower is None else tower.config,
            image_token_id=None if tower is None else model.config.tokens.image,
        ),
        scheduler=Scheduler(config, pool, geometry, prefixes),
        runner=runner,
        is_recording_freed=options.poison_freed_pages,
    )


def model_fingerprint(model_dir: Path, dtype: torch.dtype, full_layout: KVLayout) -> str:
    """What a continuation in another process must find again: model, weights, number formats.

    Of each weight file its size, its header and 64 KiB from either end are hashed: enough to tell checkpoints apart
    without reading them.
    """
    digest = hashlib.sha256(f"{dtype} {full_layout} ".encode())
    for path in sorted([model_dir / "config.json", *model_dir.glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 16))
            file.seek(max(0, size - (1 << 16)))
            digest.update(file.read())
    return digest.hexdigest()[:16]


_KV_TYPES = {2: torch.bfloat16, 4: torch.float32}


def _scheduler_config(options: EngineOptions, device: torch.device) -> SchedulerConfig:
    if device.type == "cuda":
        max_num_seqs, max_num_batched_tokens, shadow_tokens = 64, 8192, 512
    else:
        max_num_seqs, max_num_batched_tokens, shadow_tokens = 16, 512, 64
    max_num_seqs = options.max_num_seqs or max_num_seqs
    max_num_batched_tokens = options.max_num_batched_tokens or max(max_num_batched_tokens, 2 * max_num_seqs)
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        shadow_tokens=min(shadow_tokens, max_num_batched_tokens),
    )


def _check_memory(options: EngineOptions, device: torch.device) -> None:
    """Refuse pools that the memory cannot hold: else the allocator or the kernel's OOM killer ends the process."""
    kv_bytes, host_bytes = options.kv_memory_bytes or 0, options.host_memory_bytes if options.has_prefix_cache else 0
    host_free = psutil.virtual_memory().available
    if device.type == "cuda":
        # What torch holds and does not use may lie in pieces, but a loader's buffers are mostly whole.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        _check_free("kv_memory_bytes", kv_bytes, torch.cuda.mem_get_info(device)[0] + unused, "the GPU")
    else:
        _check_free("kv_memory_bytes", kv_bytes, host_free, "this machine")
        host_free -= kv_bytes
    _check_free("host_memory_bytes", host_bytes, host_free, "this machine")


def _check_free(field: str, wanted: int, free: int, place: str) -> None:
    if wanted > free:
        raise ConfigError(field, f"{wanted / 2**30:.4g} GiB", f"{place} has {free / 2**30:.4g} GiB free")


def _num_pages(
    options: EngineOptions, geometry: KVGeometry, model: ModelConfig, config: SchedulerConfig, device: torch.device
) -> int:
    """Pages for the memory given, or for what there is; never more than all rows at full context could fill."""
    if options.kv_memory_bytes is not None:
        num_pages = options.kv_memory_bytes // geometry.page_bytes
        if num_pages < 1:
            raise ConfigError("kv_memory_bytes", options.kv_memory_bytes, _too_small(geometry))
        return num_pages
    if device.type == "cuda":
        num_bytes = torch.cuda.mem_get_info(device)[0] - _CUDA_SLACK - _activation_bytes(model, config)
    else:
        num_bytes = min(int(psutil.virtual_memory().available * _CPU_SHARE), _CPU_LARGEST_POOL)
    longest = min(model.max_position_embeddings, options.max_context or model.max_position_embeddings)
    enough = 4 * config.max_num_seqs * geometry.num_pages(longest)  # beyond it, even cached prefixes find no use
    return max(1, min(num_bytes // geometry.page_bytes, enough))


def _activation_bytes(model: ModelConfig, config: SchedulerConfig) -> int:
    """Most that a step's activations take: the widest layer of the largest chunk, and what the head of all rows makes.

    Graphs keep the logits of every recorded size: together less than six times those of the largest.
    """
    widths = [
        4 * layer.num_q_heads * layer.head_dim + 4 * layer.num_kv_heads * layer.head_dim + 4 * layer.intermediate_size
        for layer in model.layers
    ]
    per_token = 2 * (max(widths) + 8 * model.hidden_size)  # bf16
    logits = 4 * model.vocab_size * config.max_num_seqs
    return config.max_num_batched_tokens * per_token + (6 + 3) * logits


def _too_small(geometry: KVGeometry) -> str:
    return f"a page has {geometry.page_bytes} bytes, and one sequence needs a window of pages and a few more"
