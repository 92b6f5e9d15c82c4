"""Hugging Face checkpoints: safetensors files of a model folder, read through memory maps, each byte copied once."""

import json
import math
import mmap
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from gewell_kernels.layout import KVLayout
from torch import Tensor

from gewell.config import Family, ModelConfig
from gewell.errors import CheckpointError
from gewell.model.drafter import Drafter
from gewell.model.gemma import GemmaModel, WeightSlot
from gewell.model.kv_plan import plan_kv
from gewell.model.vision import VisionTower

Progress = Callable[[int, int], None]  # bytes done, bytes in all

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library

# Prefixes under which published files keep the text model; the longest that fits is taken off.
_TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
# Parts that a text model leaves where they are.
_OTHER_PARTS = (
    "vision_tower.",
    "embed_vision.",
    "audio_tower.",
    "embed_audio.",
    "multi_modal_projector.",
    "lm_head.",  # the head is the embedding table, also where a file stores it twice
)


# --- files -------------------------------------------------------------------------------------------------------


class TensorInfo(NamedTuple):
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # bytes from the file's start
    end: int


class Checkpoint:
    """The tensors of a model folder by name. Opening reads headers only; a file is mapped when first read."""

    def __init__(self, model_dir: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self.model_dir = model_dir
        self.tensors = tensors
        self._maps: dict[Path, mmap.mmap] = {}

    @classmethod
    def open(cls, model_dir: Path) -> Self:
        """Raises CheckpointError, naming the file, when one is missing, cut off or no safetensors file."""
        tensors: dict[str, TensorInfo] = {}
        for file in _files(model_dir):
            tensors.update(_read_header(file))
        return cls(model_dir, tensors)

    @classmethod
    def open_file(cls, file: Path) -> Self:
        """One safetensors file, whatever its name."""
        if not file.is_file():
            raise CheckpointError(f"{file} is not there")
        return cls(file.parent, _read_header(file))

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped file, valid as long as it lives; do not write to it."""
        info = self.tensors[name]
        if info.file not in self._maps:
            with info.file.open("rb") as f:
                # Copy-on-write: torch wants a writable buffer, the file stays as it is.
                self._maps[info.file] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        count = math.prod(info.shape)
        if count == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        flat = torch.frombuffer(self._maps[info.file], dtype=info.dtype, count=count, offset=info.start)
        return flat.view(info.shape)


def _files(model_dir: Path) -> list[Path]:
    index = model_dir / "model.safetensors.index.json"
    single = model_dir / "model.safetensors"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise CheckpointError(f"{index} is not an index of weights: {e}") from e
        missing = [name for name in names if not (model_dir / name).is_file()]
        if missing:
            raise CheckpointError(f"{index} names files that are not there: {', '.join(missing)}")
        return [model_dir / name for name in names]
    if single.is_file():
        return [single]
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir} is not a folder")
    raise CheckpointError(f"{model_dir} has neither model.safetensors nor model.safetensors.index.json")


def _read_header(file: Path) -> dict[str, TensorInfo]:
    size = file.stat().st_size
    with file.open("rb") as f:
        prefix = f.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{file} is cut off or no safetensors file: {size} bytes, header of {header_bytes}")
        raw = f.read(header_bytes)
    try:
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: _tensor_info(file, name, entry, 8 + header_bytes, size) for name, entry in entries.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as e:
        raise CheckpointError(f"{file} has a damaged header: {e}") from e


def _tensor_info(file: Path, name: str, entry: Mapping[str, Any], data_start: int, size: int) -> TensorInfo:
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(f"{file}: {name} has the unknown type {entry['dtype']}")
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    start, end = (data_start + offset for offset in entry["data_offsets"])
    if end > size:
        raise CheckpointError(f"{file} is cut off: {name} ends at byte {end}, the file has {size}")
    if end - start != math.prod(shape) * dtype.itemsize or start < data_start:
        raise CheckpointError(f"{file}: {name} of shape {shape} cannot lie in {end - start} bytes")
    return TensorInfo(file, dtype, shape, start, end)


# --- filling a model ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    num_tensors: int
    num_bytes: int  # read from files
    seconds: float


def fill(
    checkpoint: Checkpoint,
    slots: Iterable[tuple[str, WeightSlot]],
    *,
    prefixes: tuple[str, ...],
    is_ignored: Callable[[str], bool],
    progress: Progress | None = None,
) -> LoadReport:
    """Copy every slot's tensor into place.

    prefixes     the first of them that makes a stored name a slot's name is taken off
    is_ignored   told the stored name of a tensor that no slot wants; False makes it an error
    Raises CheckpointError that names all missing, unknown and misshapen tensors; nothing is copied then.
    """
    wanted = dict(slots)
    sources: dict[str, str] = {}
    unknown = []
    for stored in checkpoint.tensors:
        name = next((stored[len(p) :] for p in prefixes if stored.startswith(p) and stored[len(p) :] in wanted), None)
        if name is not None:
            sources[name] = stored
        elif not is_ignored(stored):
            unknown.append(stored)
    problems = [
        *_listed("missing", [name for name in wanted if name not in sources]),
        *_listed("unknown", unknown),
        *_listed("of another shape", _misshapen(checkpoint, wanted, sources)),
    ]
    if problems:
        raise CheckpointError(f"{checkpoint.model_dir} does not fit its config.json: {'; '.join(problems)}")
    infos = checkpoint.tensors
    order = sorted(sources, key=lambda name: (infos[sources[name]].file, infos[sources[name]].start))
    total = sum(infos[stored].end - infos[stored].start for stored in sources.values())
    started, done = time.perf_counter(), 0
    for name in order:
        slot, stored = wanted[name], sources[name]
        slot.target.copy_(checkpoint.tensor(stored))
        if slot.add:
            slot.target.add_(slot.add)
        done += infos[stored].end - infos[stored].start
        if progress:
            progress(done, total)
    return LoadReport(num_tensors=len(order), num_bytes=total, seconds=time.perf_counter() - started)


def _misshapen(checkpoint: Checkpoint, wanted: Mapping[str, WeightSlot], sources: Mapping[str, str]) -> list[str]:
    found = []
    for name, stored in sources.items():
        have, want = checkpoint.tensors[stored].shape, tuple(wanted[name].target.shape)
        if have != want:
            found.append(f"{stored} {list(have)} instead of {list(want)}")
    return found


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    rest = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return [f"{what}: {', '.join(names[:8])}{rest}"]


# --- models ------------------------------------------------------------------------------------------------------


def load_model(
    model_dir: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    full_layout: KVLayout = KVLayout.V_ONLY,
    kv_dtype: torch.dtype | None = None,
    is_deterministic: bool = False,
    progress: Progress | None = None,
    report: Callable[[LoadReport], None] | None = None,
) -> GemmaModel:
    """The text model of a folder: config, memory, weights. Towers of other modalities stay in their files.

    dtype        of weights and activations; kv_dtype of the pages, default the same
    full_layout  of full layers whose value is their unnormed key
    is_deterministic  a row's results do not depend on the rest of the step, to the bit (CPU; slower)
    progress     called after each tensor; report once at the end
    Raises CheckpointError or ConfigError.
    """
    config = ModelConfig.from_dir(model_dir)
    if config.family is Family.GEMMA4_DRAFTER:
        raise CheckpointError(f"{model_dir} is a drafter: it has no keys and values of its own and cannot run alone")
    if config.quantization is not None:
        raise CheckpointError(f"{model_dir} holds quantised weights ({config.quantization}): only plain ones are read")
    checkpoint = Checkpoint.open(model_dir)
    plan = plan_kv(config, dtype_bytes=(kv_dtype or dtype).itemsize, full_layout=full_layout)
    model = GemmaModel(config, dtype=dtype, device=device, kv_plan=plan, is_deterministic=is_deterministic)
    loaded = fill(
        checkpoint,
        model.weight_slots(),
        prefixes=_TEXT_PREFIXES,
        is_ignored=lambda stored: _is_elsewhere(stored, config),
        progress=progress,
    )
    model.finish_loading()
    if report:
        report(loaded)
    return model


def load_drafter(model_dir: Path, target: GemmaModel, *, progress: Progress | None = None) -> Drafter:
    """A drafter for this target, in its type and on its device. Raises CheckpointError or ConfigError."""
    config = ModelConfig.from_dir(model_dir)
    if config.family is not Family.GEMMA4_DRAFTER:
        raise CheckpointError(f"{model_dir} is no drafter: its model_type belongs to {config.family}")
    checkpoint = Checkpoint.open(model_dir)
    drafter = Drafter(config, target, dtype=target.dtype, device=target.device)
    fill(
        checkpoint,
        drafter.weight_slots(),
        prefixes=("",),
        is_ignored=lambda stored: stored == "lm_head.weight",
        progress=progress,
    )
    drafter.finish_loading()
    return drafter


def load_vision(
    model_dir: Path, *, dtype: torch.dtype, device: torch.device | str, progress: Progress | None = None
) -> VisionTower | None:
    """The vision tower beside a text model, or None when there is none. Raises CheckpointError or ConfigError."""
    config = ModelConfig.from_dir(model_dir)
    if config.vision is None:
        return None
    tower = VisionTower(config, dtype=dtype, device=device)
    fill(
        Checkpoint.open(model_dir),
        tower.weight_slots(),
        prefixes=("model.", ""),
        is_ignored=lambda stored: not stored.removeprefix("model.").startswith(("vision_tower.", "embed_vision.")),
        progress=progress,
    )
    return tower


def _is_elsewhere(stored: str, config: ModelConfig) -> bool:
    """Whether a text model may leave this tensor alone: another tower's, or keys that a sharing layer does not use."""
    name = next((stored[len(p) :] for p in _TEXT_PREFIXES if p and stored.startswith(p)), stored)
    if name.startswith(_OTHER_PARTS):
        return True
    match name.split("."):
        case ["layers", number, "self_attn", "k_proj" | "v_proj" | "k_norm", "weight"] if number.isdigit():
            return int(number) < config.num_layers and not config.layers[int(number)].writes_kv
    return False
