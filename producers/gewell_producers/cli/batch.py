"""`gewell batch`: a file of requests in, a file of answers out."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from gewell.errors import ConfigError
from gewell.protocol import Lane
from gewell_producers.batch import Batch, BatchCounts, BatchFiles
from gewell_producers.cli.options import Namespace, Redis, connect
from gewell_producers.inbox import MAX_IN_FLIGHT

REPORT_EVERY_S = 10.0  # a line on standard error where no terminal shows progress


def batch(
    requests: Annotated[str, typer.Argument(metavar="IN", help="Requests, one a line; `-` is standard input.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Answers, one a line.")],
    errors: Annotated[
        Path | None, typer.Option(help="Requests that failed; default: OUT with .errors before its ending.")
    ] = None,
    lane: Annotated[Lane, typer.Option(help="Queue by urgency.")] = Lane.LOW,
    in_flight: Annotated[int, typer.Option(min=1, help="Most requests in the queue at a time.")] = MAX_IN_FLIGHT,
    redis: Redis = None,
    ns: Namespace = None,
) -> None:
    """Run a file of requests in OpenAI's batch format.

    Killed or stopped, it goes on where it was when it is started again with the same files; what failed is not sent
    again while it stands among the errors. Exit code 1 when a request failed, now or before.
    """
    with connect(redis, ns) as client, _open(requests) as lines:
        client.require_worker()
        files = BatchFiles.beside(output, errors)
        run = Batch(client, files, lane=lane, max_in_flight=in_flight)
        started_s = time.monotonic()
        for _ in _shown(run.run(lines), _num_lines(requests)):
            pass
    print(_summary(run.counts, time.monotonic() - started_s), file=sys.stderr)
    for warning, num_answers in run.counts.warnings.most_common():
        print(f"warning in {num_answers} answers: {warning}", file=sys.stderr)
    if run.counts.num_failed_before:
        print(f"gewell: to send what failed before again, remove its lines from {files.errors}", file=sys.stderr)
    if run.counts.num_failed or run.counts.num_failed_before:
        raise typer.Exit(1)


def _open(requests: str) -> BinaryIO:
    if requests == "-":
        return sys.stdin.buffer
    try:
        return Path(requests).open("rb")
    except OSError as error:
        raise ConfigError("requests", requests, f"cannot be read ({error.strerror})") from error


def _num_lines(requests: str) -> int | None:
    if requests == "-":
        return None
    with Path(requests).open("rb") as file:
        return sum(1 for line in file if line.strip())


def _shown(counts: Iterator[BatchCounts], total: int | None) -> Iterator[BatchCounts]:
    """Show progress on standard error: a bar with tokens/s and the time left, or a line now and then."""
    started_s = reported_s = time.monotonic()
    if not sys.stderr.isatty():
        for now in counts:
            if time.monotonic() - reported_s > REPORT_EVERY_S:
                reported_s = time.monotonic()
                print(_summary(now, reported_s - started_s), file=sys.stderr, flush=True)
            yield now
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        for now in counts:
            settled = now.num_done + now.num_failed + now.num_skipped + now.num_failed_before
            rate = now.output_tokens / max(time.monotonic() - started_s, 1e-3)
            failed = f", {now.num_failed} failed" if now.num_failed else ""
            progress.update(task, completed=settled, description=f"{rate:.0f} tokens/s{failed}")
            yield now


def _summary(counts: BatchCounts, elapsed_s: float) -> str:
    skipped = f", {counts.num_skipped} skipped (done before)" if counts.num_skipped else ""
    skipped += f", {counts.num_failed_before} failed before" if counts.num_failed_before else ""
    return (
        f"{counts.num_done} done, {counts.num_failed} failed{skipped} in {elapsed_s:.1f} s; "
        f"{counts.prompt_tokens} prompt tokens ({counts.cached_tokens} from cache), {counts.output_tokens} answered, "
        f"{counts.output_tokens / max(elapsed_s, 1e-3):.1f} tokens/s"
    )
