"""The whole engine on a GPU, with random weights of a real model's shape."""

import json
import re
from pathlib import Path

import typer

from gewell.errors import ConfigError

_PART = re.compile(r"decode:[1-9]\d*x[1-9]\d*|prefill:[1-9]\d*|host:[1-9]\d*|turns")
_DEFAULT = [
    "decode:1x128",
    "decode:64x128",
    "decode:256x128",
    "decode:64x2048",
    "prefill:8192",
    "prefill:32768",
    "turns",
]


def gpu(
    config: Path = typer.Argument(help="A config.json: the shape."),  # noqa: B008  typer's way
    part: list[str] = typer.Option(_DEFAULT, help="decode:ROWSxCTX, prefill:TOKENS, host:ROWS or turns; repeatable."),  # noqa: B008  typer's way
    out: Path | None = typer.Option(None, help="Folder for gpu.json."),  # noqa: B008  typer's way
) -> None:
    """The whole engine on a GPU, with random weights of a real model's shape."""
    for name in part:
        if not _PART.fullmatch(name):
            raise ConfigError("--part", name, "decode:ROWSxCTX, prefill:TOKENS, host:ROWS or turns")
    if not config.is_file():
        raise ConfigError("config", str(config), "no such file")
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("device", "cuda", "no CUDA device is visible")
    from gewell.engine.bench_gpu import run

    rows = run(config, part, progress=typer.echo)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "gpu.json").write_text(json.dumps(rows, indent=2) + "\n")
