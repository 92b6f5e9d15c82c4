"""Compare checkpoints with golden outputs in every way the engine can compute them."""

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from gewell.engine.findings import Finding
from gewell.errors import ConfigError

_DTYPES = ("float32", "bfloat16")


def verify(
    folders: list[Path] = typer.Argument(help="Folders with config.json, weights, golden.json, golden.safetensors."),  # noqa: B008  typer's way
    model: str | None = typer.Option(
        None, help="A stored model's name or a folder, when not beside the golden outputs."
    ),
    target: Path | None = typer.Option(None, help="A drafter's target; default: the sibling that golden.json names."),  # noqa: B008  typer's way
    dtype: str = typer.Option("float32", help="float32, or bfloat16 (held against the reference's own loss)."),
    device: str = typer.Option("cpu", help="A torch device."),
    case: list[str] = typer.Option([], help="Only this case (may be repeated)."),  # noqa: B008  typer's way
    way: list[str] = typer.Option([], help='Only this way, e.g. "whole" or "together" (may be repeated).'),  # noqa: B008  typer's way
    layout: list[str] = typer.Option([], help="Only this layout of the full layers (may be repeated)."),  # noqa: B008  typer's way
    as_json: bool = typer.Option(False, "--json", help="Every comparison as one JSON object."),
) -> None:
    """Compare checkpoints with golden outputs; exit 1 when anything is beyond its tolerance."""
    if dtype not in _DTYPES:
        raise ConfigError("--dtype", dtype, f"must be one of {', '.join(_DTYPES)}")
    import torch

    from gewell.engine.verify import verify as run
    from gewell.model_store import model_path

    results = [
        run(
            folder,
            model_dir=model_path(model) if model else None,
            target_dir=target,
            dtype=getattr(torch, dtype),
            device=device,
            only_cases=case,
            only_ways=way,
            only_layouts=layout,
        )
        for folder in folders
    ]
    if as_json:
        typer.echo(json.dumps({"is_ok": all(r.is_ok for r in results), "folders": [r.as_dict() for r in results]}))
    else:
        for result in results:
            Console().print(_table(result.folder, result.worst()))
    if not all(result.is_ok for result in results):
        raise typer.Exit(1)


def _table(title: str, rows: list[Finding]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("case", "compared", "largest difference", "tolerance", "where", "ok"):
        table.add_column(name, justify="right" if name in ("largest difference", "tolerance") else "left")
    for row in rows:
        mark = "yes" if row.is_ok else "[bold red]NO[/]"
        where = f"{row.way}, {row.layout}"
        table.add_row(row.case, row.what, f"{row.difference:.2g}", f"{row.tolerance:.2g}", where, mark)
    return table
