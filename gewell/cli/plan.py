"""What fits into a GPU's memory: weights, KV pages, sequences side by side."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from gewell.errors import ConfigError

if TYPE_CHECKING:
    from gewell.engine.capacity import Capacity

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|MB|GB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"b": 1, "mb": 10**6, "gb": 10**9, "mib": 2**20, "gib": 2**30}
_LENGTHS = (2_048, 8_192, 32_768, 131_072)


def plan(
    model: str = typer.Argument(help="A stored model's name, a folder, or a config.json."),
    memory: str = typer.Option("141GB", help="Memory of the device, e.g. 24GB or 22.5GiB."),
    reserve: str = typer.Option("6GiB", help="Of it, for activations, graphs and workspaces."),
    kv_bits: int = typer.Option(16, help="Bits of a stored key or value number: 16, or 8."),
    layout: str = typer.Option("v_only", help="How full layers are stored: v_only, v_rotk or plain."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """What fits into a GPU's memory: weights, KV pages, sequences side by side."""
    from gewell_kernels.layout import KVLayout

    from gewell.config import ModelConfig
    from gewell.engine.capacity import capacity
    from gewell.model_store import model_path

    if kv_bits not in (8, 16):
        raise ConfigError("--kv-bits", kv_bits, "8 or 16")
    if layout not in list(KVLayout):
        raise ConfigError("--layout", layout, f"one of {', '.join(KVLayout)}")
    if model.endswith(".json"):
        if not Path(model).is_file():
            raise ConfigError("model", model, "no such file")
        config, weight_bytes = ModelConfig.from_file(Path(model)), None
    else:
        folder = model_path(model)
        config = ModelConfig.from_dir(folder)
        weight_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors")) or None
    found = capacity(
        config,
        memory_bytes=_bytes("--memory", memory),
        weight_bytes=weight_bytes,
        other_bytes=_bytes("--reserve", reserve),
        kv_bytes=kv_bits // 8,
        full_layout=KVLayout(layout),
    )
    longest = min(found.longest_alone, config.max_position_embeddings)
    lengths = [num for num in _LENGTHS if num <= config.max_position_embeddings]
    if as_json:
        typer.echo(json.dumps(_as_dict(found, longest, lengths)))
    else:
        Console().print(_table(f"{model} in {memory}", found, longest, lengths))


def _as_dict(found: "Capacity", longest: int, lengths: Sequence[int]) -> dict[str, Any]:
    return {
        "weight_bytes": found.weight_bytes,
        "page_bytes": found.geometry.page_bytes,
        "num_pages": found.num_pages,
        "window_bytes": found.window_bytes,
        "longest_alone": longest,
        "rows": {str(num): found.rows(num) for num in lengths},
    }


def _table(title: str, found: "Capacity", longest: int, lengths: Sequence[int]) -> Table:
    geometry = found.geometry
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_row("weights", f"{found.weight_bytes / 2**30:.1f} GiB")
    table.add_row("KV pages", f"{found.num_pages:,} of {geometry.page_bytes / 2**20:.2f} MiB")
    for name, kind in (("sliding", geometry.sliding), ("full", geometry.full)):
        if kind is not None:
            table.add_row(f"a page of {name} layers holds", f"{kind.page_tokens} tokens of {kind.bytes_per_token:,} B")
    table.add_row("window of one running row", f"{found.window_bytes / 2**20:,.0f} MiB")
    table.add_row("longest sequence alone", f"{longest:,} tokens")
    for num in lengths:
        table.add_row(f"sequences of {num:,} tokens side by side", f"{found.rows(num):,}")
    return table


def _bytes(option: str, text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(option, text, "a number with B, MB, GB, MiB or GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])
