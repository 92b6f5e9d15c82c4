"""`gewell up`: a worker, and a server where none is named."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from gewell.config import ModelConfig
from gewell.embedded import EmbeddedServer, Persistence, ServerAlreadyRunning, default_url, queue_dir
from gewell.engine.api import Engine
from gewell.errors import ConfigError, GewellError
from gewell.model_store import list_models, model_path
from gewell.protocol import DEFAULT_NAMESPACE
from gewell_workers.config import WorkerConfig
from gewell_workers.gpu import EXIT_NO_REDIS, run_worker
from gewell_workers.logs import set_up_logging
from gewell_workers.resp import Client, LinkLost, ReplyError, describe

SCRIPTED = "scripted"  # a model without weights, for tests: deterministic letters
_DEFAULT_MODELS = ("gewell-nano", "gemma3-270m")  # the first that is stored here


def up(
    redis: Annotated[
        str | None, typer.Option(envvar="GEWELL_REDIS", help="Server to use; none given: one is started here.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder, or name of a stored model (`gewell model list`).")
    ] = None,
    ns: Annotated[str, typer.Option(envvar="GEWELL_NAMESPACE", help="Prefix of all keys.")] = DEFAULT_NAMESPACE,
    data: Annotated[Path | None, typer.Option(help="Data directory of the server started here.")] = None,
    fsync: Annotated[
        Persistence, typer.Option(help="What the server started here keeps through a crash.")
    ] = Persistence.EVERYSEC,
    port: Annotated[int | None, typer.Option(help="Loopback port of that server; default: a free one.")] = None,
    rows: Annotated[int | None, typer.Option(help="Most rows in a step; default: by the device.")] = None,
    max_context: Annotated[int | None, typer.Option(help="Tokens of prompt and answer together.")] = None,
    kv_gib: Annotated[float | None, typer.Option(help="Memory for keys and values; default: what is free.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    drain_s: Annotated[float, typer.Option(help="On SIGTERM, running jobs may finish so long.")] = 30.0,
    lease_s: Annotated[float, typer.Option(help="A worker without progress for so long loses its jobs.")] = 10.0,
    wait: Annotated[bool, typer.Option(help="Wait for a server that is down; else exit with code 69.")] = True,
) -> None:
    """Serve jobs: start the worker (and a server, unless one is named) and print how to send a job.

    Ctrl-C or SIGTERM takes no new jobs, lets running ones finish and hands the rest back; a second one leaves at once.
    """
    set_up_logging()
    started_s = time.monotonic()
    settings = WorkerConfig(
        redis_url=redis or default_url(), ns=ns, drain_s=drain_s, lease_s=lease_s, wait_for_redis=wait
    )
    folder = _model_folder(model)
    if folder is not None:
        ModelConfig.from_dir(folder)  # a folder that is none of ours is said before anything starts
    with _server(redis, data, fsync, port) as url:
        if redis is None:
            _say(f"server ready at {describe(url)} after {time.monotonic() - started_s:.1f} s")
        config = replace(settings, redis_url=url)
        if not wait:
            _require_server(url)

        def make() -> Engine:
            engine = _make_engine(folder, rows, max_context, kv_gib, dtype, device)
            info = engine.info
            _say(
                f"model {info.model} loaded after {time.monotonic() - started_s:.1f} s: {info.max_num_seqs} rows, "
                f"context {info.max_context}"
            )
            return engine

        def ready() -> None:
            _say(f"ready after {time.monotonic() - started_s:.1f} s")
            _say(_how_to(url, ns, is_embedded=redis is None))

        code = run_worker(config, make, folder, on_ready=ready)
    if code:
        raise typer.Exit(code)


def _model_folder(name: str | None) -> Path | None:
    """None: the scripted engine."""
    if name == SCRIPTED:
        return None
    if name is not None:
        return model_path(name)
    stored = list_models()
    for candidate in _DEFAULT_MODELS:
        if candidate in stored:
            return model_path(candidate)
    raise ConfigError("model", None, f"name one of {', '.join(stored) or '(none stored)'}, or see `gewell model get`")


@contextlib.contextmanager
def _server(url: str | None, data: Path | None, fsync: Persistence, port: int | None) -> Iterator[str]:
    """The named server, the one that an earlier `up` left running here, or a new one that ends with us."""
    if url is not None:
        yield url
        return
    server = EmbeddedServer(data or queue_dir(), persistence=fsync, port=port)
    try:
        server.start()
    except ServerAlreadyRunning as error:
        if error.running is None:
            raise
        _say(f"using the server that runs already (pid {error.running.pid})")
        yield error.running.url
        return
    try:
        yield server.url
    finally:
        server.stop()


def _require_server(url: str) -> None:
    async def probe() -> None:
        client = Client(url, name="gewell.probe")
        await client.connect()
        client.close()

    try:
        asyncio.run(probe())
    except (LinkLost, ReplyError) as error:
        print(f"gewell: no usable server: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_NO_REDIS) from error


def _make_engine(
    folder: Path | None,
    rows: int | None,
    max_context: int | None,
    kv_gib: float | None,
    dtype: str | None,
    device: str | None,
) -> Engine:
    if folder is None:
        return _make_scripted(rows, max_context)
    import torch  # here, so that `gewell up --help` and the scripted engine start without it

    from gewell.engine.build import EngineOptions, build_engine

    dtypes = {None: None, "bfloat16": torch.bfloat16, "float32": torch.float32}
    if dtype not in dtypes:
        raise ConfigError("dtype", dtype, "bfloat16 or float32")
    options = EngineOptions(
        device=device,
        dtype=dtypes[dtype],
        kv_memory_bytes=None if kv_gib is None else int(kv_gib * 2**30),
        max_num_seqs=rows,
        max_context=max_context,
    )
    return build_engine(folder, options)


def _make_scripted(rows: int | None, max_context: int | None) -> Engine:
    """Speed and length of its answers come from the environment: tests of the queue set them.

    GEWELL_SCRIPTED_POISON: a prompt that begins with this text kills the process in the step that reads it.
    """
    from gewell.engine.scripted import build_scripted_engine

    poison = tuple(os.environ.get("GEWELL_SCRIPTED_POISON", "").encode())

    def dies_of(prompt_ids: Sequence[int]) -> bool:
        if poison and tuple(prompt_ids[: len(poison)]) == poison:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    return build_scripted_engine(
        num_pages=int(os.environ.get("GEWELL_SCRIPTED_PAGES", "4096")),
        max_num_seqs=rows or 64,
        max_context=max_context or 8_192,
        step_delay_s=float(os.environ.get("GEWELL_SCRIPTED_STEP_S", "0")),
        is_bad=lambda req, position: dies_of(req.request.prompt_ids),
        eos_odds=int(os.environ.get("GEWELL_SCRIPTED_EOS_ODDS", "0")),
    )


def _how_to(url: str, ns: str, *, is_embedded: bool) -> str:
    body = '{"kind":"chat","request":{"messages":[{"role":"user","content":"Hello"}],"max_tokens":64}}'
    lines = [
        "send a job:",
        f"  gewell run 'Hello'{'' if is_embedded else f' --redis {url}'}",
        f"  redis-cli -u {url} XADD {ns}:jobs:normal '*' v 1 id my-job body '{body}'",
        f"  redis-cli -u {url} GET {ns}:res:my-job",
        "  python: from gewell_producers import Client",
        "stop with Ctrl-C",
    ]
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    """`python -m gewell_workers`: the same command without the rest of the CLI."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(up)
    try:
        app()
    except GewellError as error:
        sys.exit(f"gewell: {error}")
