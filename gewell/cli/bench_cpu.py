"""Decode and prefill on this CPU, beside transformers in the same process."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from gewell.errors import ConfigError

if TYPE_CHECKING:
    from gewell.engine.bench_cpu import CpuReport

_DTYPES = ("bfloat16", "float32")


def cpu(
    model: str | None = typer.Option(None, help="A stored model's name, or a folder. [default: the largest stored]"),
    rows: str = typer.Option("1,8", help="Decode rows side by side, separated by commas."),
    tokens: int = typer.Option(48, min=8, help="Tokens decoded per row and turn."),
    prefill: int = typer.Option(512, min=16, help="Tokens of the prompt whose reading is timed."),
    dtype: str = typer.Option("bfloat16", help="bfloat16 or float32, for both."),
    threads: int = typer.Option(0, min=0, help="Threads of the maths; 0: what torch chooses."),
    baseline: bool = typer.Option(True, help="Measure transformers too, when it is installed."),
    out: Path | None = typer.Option(None, help="Folder for cpu.json and cpu.png."),  # noqa: B008  typer's way
) -> None:
    """Decode and prefill on this CPU, beside transformers in the same process."""
    if dtype not in _DTYPES:
        raise ConfigError("--dtype", dtype, f"must be one of {', '.join(_DTYPES)}")
    try:
        row_counts = tuple(int(part) for part in rows.split(","))
    except ValueError:
        raise ConfigError("--rows", rows, "numbers separated by commas") from None
    if not all(1 <= num <= 512 for num in row_counts):
        raise ConfigError("--rows", rows, "each from 1 to 512")
    import torch

    from gewell.engine import bench_cpu
    from gewell.model_store import model_path

    folder = model_path(model) if model is not None else _largest_stored()
    if threads:
        torch.set_num_threads(threads)
    console = Console()
    with console.status("starting") as status:
        report = bench_cpu.measure(
            folder,
            dtype=getattr(torch, dtype),
            rows=row_counts,
            num_tokens=tokens,
            prefill_tokens=prefill,
            has_baseline=baseline and bench_cpu.baseline_is_installed(),
            progress=status.update,
        )
    console.print(_table(report))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "cpu.json").write_text(json.dumps(report.as_dict(), indent=2) + "\n")
        _plot(report, out / "cpu.png")
        console.print(f"written: {out / 'cpu.json'}, {out / 'cpu.png'}")


def _largest_stored() -> Path:
    """A measurement says the more the longer a step is: the stored model with the most weights."""
    from gewell.model_store import list_models, model_path

    sizes = {
        path: sum(file.stat().st_size for file in path.glob("*.safetensors")) for path in map(model_path, list_models())
    }
    folder = max(sizes, key=sizes.__getitem__, default=None)
    if folder is None or not sizes[folder]:
        raise ConfigError("--model", None, "no model with weights is stored; get one with `gewell model get`")
    return folder


def _table(report: "CpuReport") -> Table:
    title = f"{report.model}, {report.dtype}, {report.num_threads} threads"
    table = Table(title=title, title_justify="left")
    for name in ("work", "gewell", "transformers", "ratio"):
        table.add_column(name, justify="left" if name == "work" else "right")

    def add(work: str, ours: float, theirs: float | None, unit: str) -> None:
        other = f"{theirs:,.1f} {unit}" if theirs is not None else "-"
        table.add_row(work, f"{ours:,.1f} {unit}", other, f"{ours / theirs:.2f}x" if theirs else "-")

    for decode in report.decode:
        what = f"decode, {decode.rows} row{'s' if decode.rows > 1 else ''}"
        add(what, decode.tokens_per_s, decode.baseline_tokens_per_s, "tok/s")
    what = f"prefill, {report.prefill_tokens} tokens"
    add(what, report.prefill_tokens_per_s, report.baseline_prefill_tokens_per_s, "tok/s")
    first, last = report.decode[0], report.decode[-1]
    if last.rows != first.rows:
        table.add_row(f"{last.rows} rows over {first.rows}", f"{last.tokens_per_s / first.tokens_per_s:.2f}x", "", "")
    table.add_row("sample 8 x 262144, top_k 64", f"{report.sample_ms:.2f} ms", "", "")
    table.add_row("plan a step of 512 rows", f"{report.plan_us:.0f} us", "", "")
    return table


def _plot(report: "CpuReport", path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    places = range(len(report.decode))
    axes.bar([x - 0.2 for x in places], [d.tokens_per_s for d in report.decode], 0.4, label="gewell")
    theirs = [d.baseline_tokens_per_s or 0.0 for d in report.decode]
    if any(theirs):
        axes.bar([x + 0.2 for x in places], theirs, 0.4, label="transformers")
    axes.set_xticks(list(places), [f"{d.rows} row{'s' if d.rows > 1 else ''}" for d in report.decode])
    axes.set_ylabel("tokens/s")
    axes.set_title(f"decode on {report.num_threads} CPU threads: {report.model}, {report.dtype}")
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
