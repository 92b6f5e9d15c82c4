"""`gewell bench queue`."""

from typing import Annotated

import typer

from gewell_workers.bench_queue import Figure, measure_latency, measure_many, measure_publishing


def queue(
    jobs: Annotated[int, typer.Option(help="Jobs of the growth run.")] = 10_000,
    streams: Annotated[int, typer.Option(help="Streams published side by side.")] = 512,
) -> None:
    """What the queue costs apart from the engine, on an embedded server over loopback; exit 1 if a limit is missed."""
    are_met = [_report(figure) for figure in measure_latency()]
    are_met += [_report(figure) for figure in measure_publishing(streams)]
    are_met += [_report(figure) for figure in measure_many(jobs)]
    if not all(are_met):
        raise typer.Exit(1)


def _report(figure: Figure) -> bool:
    limit = "" if figure.limit is None else f"(limit {figure.limit:g})"
    missed = "" if figure.is_met else "  MISSED"
    typer.echo(f"{figure.name:<48} {figure.value:>12,.2f} {figure.unit:<12} {limit}{missed}")
    return figure.is_met
