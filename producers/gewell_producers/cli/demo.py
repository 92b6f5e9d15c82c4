"""`gewell demo`: a writer + critic loop through the queue, on a server and a worker of its own."""

import asyncio
import contextlib
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from gewell.errors import CheckpointError, ConfigError
from gewell.model_store import model_path
from gewell.protocol import WorkerField
from gewell.text.chat import load_chat
from gewell.text.tokenizer import ByteTokenizer, load_tokenizer
from gewell_producers.async_client import AsyncClient
from gewell_producers.demo.loop import Loop
from gewell_producers.demo.processes import NAMESPACE, server_and_worker
from gewell_producers.demo.records import Records
from gewell_producers.demo.scene import Play
from gewell_producers.demo.stories import Stories
from gewell_producers.demo.view import LineView, LiveView, summary_table

DEFAULT_MODEL = "gewell-nano"  # comes with the package
GEMMA = "gemma3-270m"  # fetched on demand, under its own terms
SCRIPTED = "scripted"  # the worker's engine without weights
LEAST_REUSE = 0.95  # of what could be reused; below it the demo counts as failed
HEARTBEAT_WAIT_S = 10.0


def demo(
    model: Annotated[
        str, typer.Option(help="A model folder or the name of a stored model; `scripted` needs no weights.")
    ] = DEFAULT_MODEL,
    conversations: Annotated[int, typer.Option(min=1, max=512, help="How many go on side by side.")] = 8,
    turns: Annotated[int, typer.Option(min=1, max=32, help="Turns of each writer.")] = 3,
    rows: Annotated[int | None, typer.Option(help="Most rows in a step; default: by the device.")] = None,
    kv_gib: Annotated[float | None, typer.Option(help="Memory for keys and values; default: what is free.")] = None,
    host_gib: Annotated[float, typer.Option(help="Host memory for prefixes that find no room there.")] = 0.0,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines, also in a terminal.")] = False,
) -> None:
    """Let writers and critics work through the queue, and show how much of their prompts came from the cache.

    With gewell-nano, which comes with the package, they repair records; with any other, such as gemma3-270m, they write
    stories.

    Starts a server and a worker of its own and removes them at the end. Exit code 1 when a job failed or less than
    95 % of the reusable prompt tokens were reused.
    """
    console = Console(highlight=False)
    memory = _memory_options(kv_gib, host_gib)
    folder = None if model == SCRIPTED else _model_folder(model)
    play = _play(folder)
    with _sigterm_as_exit(), contextlib.ExitStack() as stack:
        with console.status(f"starting a server and a worker with {model}"):
            started_s = time.monotonic()
            served = model if folder is None else str(folder)
            url = stack.enter_context(server_and_worker(served, rows=rows, options=memory))
        console.print(f"server and worker with {model} ready after {time.monotonic() - started_s:.1f} s")
        num_jobs = len(play.warm_ups()) + conversations * play.num_jobs(turns)
        is_live = console.is_terminal and not plain
        view = LiveView(console, num_jobs, conversations) if is_live else LineView(console)
        with view:
            rows_of_table, problems = asyncio.run(_run(url, play, view, conversations, turns))
    console.print(summary_table(rows_of_table))
    for problem in problems:
        print(f"gewell: {problem}", file=sys.stderr)
    if problems:
        raise typer.Exit(1)


def _memory_options(kv_gib: float | None, host_gib: float) -> list[str]:
    """The worker's options, refused here: its own refusal would be the end of a log."""
    options = []
    if kv_gib is not None:
        if not 0 < kv_gib < math.inf:
            raise ConfigError("kv_gib", kv_gib, "a number of GiB above 0")
        options += ["--kv-gib", str(kv_gib)]
    if not 0 <= host_gib < math.inf:
        raise ConfigError("host_gib", host_gib, "a number of GiB, 0 or more")
    return [*options, "--host-gib", str(host_gib)]


async def _run(
    url: str, play: Play, view: LineView | LiveView, conversations: int, turns: int
) -> tuple[list[tuple[str, str]], list[str]]:
    """Run the loop; returns the table's rows and what was not as it should be."""
    async with AsyncClient(url, namespace=NAMESPACE) as client:
        loop = Loop(client, play, view)
        started_s = time.monotonic()
        await loop.run(conversations, turns)
        elapsed_s = time.monotonic() - started_s
        decode_rows = await _mean_decode_rows(client, loop.tally.num_jobs)
    tally, ledger = loop.tally, loop.ledger
    share = tally.num_cached / ledger.num_reusable if ledger.num_reusable else 1.0
    rows = [
        ("conversations", f"{conversations}"),
        *([("came out right", f"{tally.num_right}")] if tally.num_right + tally.num_wrong else []),
        ("jobs", f"{tally.num_jobs}"),
        ("errors", f"{tally.num_errors}"),
        ("seconds", f"{elapsed_s:.1f}"),
        ("answered tokens", f"{tally.num_output_tokens}"),
        ("tokens/s", f"{tally.num_output_tokens / elapsed_s:.1f}"),
        ("mean decode rows", decode_rows),
        ("prompt tokens", f"{ledger.num_prompt_tokens}"),
        ("reusable", f"{ledger.num_reusable} ({ledger.num_reusable / ledger.num_prompt_tokens:.1%})"),
        ("reused", f"{tally.num_cached} ({share:.1%} of reusable)"),
    ]
    problems = []
    if tally.num_errors:
        problems.append(f"{tally.num_errors} of {tally.num_jobs} jobs failed")
    if share < LEAST_REUSE:
        problems.append(f"only {share:.1%} of the reusable prompt tokens were reused, {LEAST_REUSE:.0%} is expected")
    return rows, problems


async def _mean_decode_rows(client: AsyncClient, num_jobs: int) -> str:
    """From the first heartbeat that has seen all jobs."""
    deadline = time.monotonic() + HEARTBEAT_WAIT_S
    while time.monotonic() < deadline:
        for facts in (await client.worker_facts()).values():
            if int(facts.get(WorkerField.NUM_FINISHED, 0)) >= num_jobs:
                return f"{float(facts[WorkerField.MEAN_DECODE_ROWS]):.1f}"
        await asyncio.sleep(0.1)
    return "unknown"


def _play(folder: Path | None) -> Play:
    """What the model can play: gewell-nano knows records, any other model gets few-shot text."""
    if folder is None:
        return Stories(ByteTokenizer())
    tokenizer = load_tokenizer(folder)
    return Records(load_chat(folder, tokenizer)) if folder.name == DEFAULT_MODEL else Stories(tokenizer)


def _model_folder(model: str) -> Path:
    """The model's folder; Gemma is fetched when it is not here, after its terms were shown."""
    try:
        return model_path(model)
    except CheckpointError:
        if model != GEMMA:
            raise
    print(f"{model} is not on this machine yet; getting it (about 250 MB)", flush=True)
    got = subprocess.run([sys.executable, "-m", "gewell", "model", "get", model], check=False)
    if got.returncode:
        raise typer.Exit(got.returncode)
    return model_path(model)


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """SIGTERM unwinds the stack as Ctrl-C does, so that server and worker are stopped."""

    def leave(_signal: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
