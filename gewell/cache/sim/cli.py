"""Replay job traces through the prefix cache's policy and the usual ones."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gewell.cache.sim.report import POLICIES, SimOptions, num_runs, plot, simulate, table
from gewell.cache.sim.trace import iter_paths
from gewell.errors import ConfigError


def sim(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Files (.jsonl, .jsonl.gz) or folders.")],
    gpu_gib: Annotated[float, typer.Option(help="KV pool on the GPU.")] = 64.0,
    host_gib: Annotated[float, typer.Option(help="Host tier; 0: none.")] = 0.0,
    expect: Annotated[
        bool, typer.Option("--expect", help="Jobs say after which job their conversation returns.")
    ] = False,
    lookahead: Annotated[int, typer.Option(help="Waiting jobs that the cache sees.")] = 1024,
    width: Annotated[int, typer.Option(help="Jobs that run side by side at most.")] = 64,
    policies: Annotated[str, typer.Option(help="Comma-separated; default: all.")] = ",".join(POLICIES),
    processes: Annotated[int, typer.Option(help="Runs side by side.")] = 2,
    as_json: Annotated[
        bool, typer.Option("--json", help="Rows as JSON: `--json`, or `--json FILE.json` to keep the table.")
    ] = False,
    plot_to: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the served shares.")] = None,
) -> None:
    """Replay job traces through the prefix cache's policy and the usual ones.

    The policy is the engine's own code, on Gemma 4 31B's page sizes. `lru` and `clock` are what other engines do,
    `clairvoyant` knows the future (greedy: a reference, not a bound), `infinite` never evicts.
    """
    names = [name.strip() for name in policies.split(",") if name.strip()]
    unknown = sorted(set(names) - set(POLICIES))
    if unknown or not names:
        raise ConfigError("policies", policies, f"choose among {', '.join(POLICIES)}")
    json_to = [path for path in traces if path.suffix == ".json"]
    if json_to and (not as_json or len(json_to) > 1):
        raise ConfigError("traces", str(json_to[-1]), "a trace is .jsonl or .jsonl.gz; one .json file goes with --json")
    paths = list(iter_paths([path for path in traces if path.suffix != ".json"]))
    if not paths:
        raise ConfigError("traces", [str(path) for path in traces], "no .jsonl or .jsonl.gz file there")
    options = SimOptions(gpu_gib=gpu_gib, host_gib=host_gib, lookahead=lookahead, width=width, use_expect=expect)
    progress = Progress(
        TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=Console(stderr=True)
    )
    with progress:
        task = progress.add_task("", total=num_runs(paths, names))
        rows = simulate(paths, names, options, num_processes=processes, on_done=lambda: progress.advance(task))
    if as_json:
        text = json.dumps([row.as_json() for row in rows], indent=1)
        if json_to:
            json_to[0].write_text(text + "\n")
        else:
            typer.echo(text)
    if json_to or not as_json:
        console = Console()
        if not console.is_terminal:
            console = Console(width=40 + 16 * len(names))  # a file or a pipe has no width to obey
        console.print(table(rows, names, options))
    if plot_to is not None:
        plot(rows, names, plot_to)
