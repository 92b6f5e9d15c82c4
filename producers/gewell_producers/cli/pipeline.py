"""`gewell pipeline`: items of a JSONL file through a pipeline."""

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import orjson
import typer

from gewell.errors import ConfigError
from gewell_producers.cli.options import Namespace, Redis
from gewell_producers.settings import default_namespace, default_url

app = typer.Typer(no_args_is_help=True, help="Send the items of a file through a pipeline of steps.")

PipelineFile = Annotated[Path, typer.Argument(metavar="FILE", help="Python file that sets `pipeline`.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Items at a time on this machine.")]


@app.command()
def run(
    file: PipelineFile,
    items: Annotated[Path, typer.Argument(metavar="ITEMS", help="JSON objects, one a line; `id` names an item.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Results, one a line as items finish.")],
    concurrency: Concurrency = 64,
    works: Annotated[bool, typer.Option(help="Do the work here, or leave it to `gewell pipeline work`.")] = True,
    redis: Redis = None,
    ns: Namespace = None,
) -> None:
    """Run a pipeline over a file of items.

    Stopped or killed, it goes on when it is started again: items in the output are skipped, answers that stand are
    reused. Items that failed go to OUT with .dead before its ending, and make the exit code 1.
    """
    dead = output.with_suffix(f".dead{output.suffix}")
    done = _ids_of(output)
    num_done, num_dead = asyncio.run(_run(file, _items(items, done), output, dead, concurrency, works, redis, ns))
    skipped = f", {len(done)} skipped (done before)" if done else ""
    print(f"{num_done} done, {num_dead} dead{skipped}", file=sys.stderr)
    if num_dead:
        raise typer.Exit(1)
    dead.unlink()


@app.command()
def work(file: PipelineFile, concurrency: Concurrency = 64, redis: Redis = None, ns: Namespace = None) -> None:
    """Work on items that `gewell pipeline run` on another machine sends; until Ctrl-C."""
    asyncio.run(_work(file, concurrency, redis, ns))


async def _run(
    file: Path,
    items: Iterator[tuple[str, dict[str, Any]]],
    output: Path,
    dead: Path,
    concurrency: int,
    works: bool,
    redis: str | None,
    ns: str | None,
) -> tuple[int, int]:
    from gewell_producers.async_client import AsyncClient
    from gewell_producers.pipelines.runner import load_pipeline, run_items

    pipeline = load_pipeline(file)
    started_s, num_done, num_dead = time.monotonic(), 0, 0
    async with AsyncClient(redis or default_url(), namespace=ns or default_namespace()) as client:
        await client.require_worker()
        with output.open("ab") as results, dead.open("wb") as failures:
            async for outcome in run_items(pipeline, items, client, concurrency=concurrency, works=works):
                if outcome.error is None:
                    num_done += 1
                    _write(results, {"id": outcome.item_id, "result": outcome.result})
                else:
                    num_dead += 1
                    _write(failures, {"id": outcome.item_id, "error": outcome.error})
                if sys.stderr.isatty():
                    rate = (num_done + num_dead) / (time.monotonic() - started_s)
                    print(
                        f"\r{num_done} done, {num_dead} dead, {rate:.1f} items/s ", end="", file=sys.stderr, flush=True
                    )
    return num_done, num_dead


async def _work(file: Path, concurrency: int, redis: str | None, ns: str | None) -> None:
    from gewell_producers.async_client import AsyncClient
    from gewell_producers.pipelines.runner import connect, load_pipeline, make_worker, queue_name

    pipeline = load_pipeline(file)
    async with AsyncClient(redis or default_url(), namespace=ns or default_namespace()) as client:
        pool = await connect(client.url, queue_name(pipeline, client.keys.ns))
        await make_worker(pipeline, client, pool, client.keys.ns, concurrency).async_run()


def _items(path: Path, done: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Items that are not done. An item without an `id` is named by its line's number."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError("items", str(path), f"cannot be read ({error.strerror})") from error
    with file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                item = orjson.loads(raw)
            except orjson.JSONDecodeError as error:
                raise ConfigError("items", f"{path}:{number}", f"not JSON ({error})") from error
            if not isinstance(item, dict):
                raise ConfigError("items", f"{path}:{number}", "not a JSON object")
            item_id = str(item.get("id", number))
            if item_id not in done:
                yield item_id, item


def _ids_of(output: Path) -> set[str]:
    """Items whose whole line stands in the output; half a line of a killed run is cut off."""
    if not output.exists():
        return set()
    ids, end = set(), 0
    with output.open("r+b") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            end += len(raw)
            ids.add(str(orjson.loads(raw)["id"]))
        file.truncate(end)
    return ids


def _write(file: BinaryIO, line: dict[str, Any]) -> None:
    file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    file.flush()
