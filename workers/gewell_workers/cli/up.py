"""`gewell up`: a worker, and a server where none is named."""

import asyncio
import contextlib
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import psutil
import typer

from gewell.config import ModelConfig
from gewell.embedded import EmbeddedServer, Persistence, SharedServer, default_url, queue_dir
from gewell.engine.api import Engine
from gewell.errors import ConfigError, GewellError
from gewell.model_store import list_models, model_path
from gewell.protocol import DEFAULT_NAMESPACE
from gewell.redis_url import shown_url
from gewell_workers.config import WorkerConfig
from gewell_workers.gpu import EXIT_NO_REDIS, run_worker
from gewell_workers.logs import set_up_logging
from gewell_workers.resp import Client, LinkLost, ReplyError, describe

if TYPE_CHECKING:
    from gewell.engine.build import EngineOptions

SCRIPTED = "scripted"  # a model without weights, for tests: deterministic letters
_HASTY_S = 2.0  # an `up` that leaves at once waits no longer for the server that ends with it
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
    host_gib: Annotated[float, typer.Option(help="Host memory for prefixes that find no room there.")] = 0.0,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file for chats, instead of the model's own template.")
    ] = None,
    drain_s: Annotated[float, typer.Option(help="On SIGTERM, running jobs may finish so long.")] = 30.0,
    lease_s: Annotated[float, typer.Option(help="A worker without progress for so long loses its jobs.")] = 10.0,
    stall_s: Annotated[float, typer.Option(help="No step for so long with work waiting: exit with code 71.")] = 30.0,
    wait: Annotated[bool, typer.Option(help="Wait for a server that is down; else exit with code 69.")] = True,
) -> None:
    """Serve jobs: start the worker (and a server, unless one is named) and print how to send a job.

    Ctrl-C or SIGTERM takes no new jobs, lets running ones finish and hands the rest back; a second one leaves at once.
    """
    set_up_logging()
    started_s = time.monotonic()
    settings = WorkerConfig(
        redis_url=redis or default_url(),
        ns=ns,
        drain_s=drain_s,
        lease_s=lease_s,
        stall_s=stall_s,
        wait_for_redis=wait,
        chat_template=chat_template,
    )
    flags = EngineFlags(
        rows=rows, max_context=max_context, kv_gib=kv_gib, host_gib=host_gib, dtype=dtype, device=device
    )
    folder = _model_folder(model)
    if folder is not None:
        ModelConfig.from_dir(folder)  # a folder that is none of ours is said before anything starts
    with _server(redis, data, fsync, port) as (url, leave_server):
        if redis is None:
            _say(f"server ready at {describe(url)} after {time.monotonic() - started_s:.1f} s")
        config = replace(settings, redis_url=url)
        if not wait:
            _require_server(url)

        def make() -> Engine:
            engine = _make_engine(folder, flags)
            info = engine.info
            _say(
                f"model {info.model} loaded after {time.monotonic() - started_s:.1f} s: {info.max_num_seqs} rows, "
                f"context {info.max_context}, {engine.stats().num_pages} pages{_host_memory(flags)}"
            )
            return engine

        def ready() -> None:
            _say(f"ready after {time.monotonic() - started_s:.1f} s")
            _say(_how_to(url, ns, is_embedded=redis is None))

        code = run_worker(config, make, folder, on_ready=ready, on_exit=leave_server)
    if code:
        raise typer.Exit(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """The engine's options, as far as they can be told before a model is read: a wrong number is said at once."""

    rows: int | None = None
    max_context: int | None = None
    kv_gib: float | None = None
    host_gib: float = 0.0
    dtype: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise ConfigError("rows", self.rows, "at least 1")
        if self.max_context is not None and self.max_context < 2:
            raise ConfigError("max_context", self.max_context, "at least 2 tokens, one of prompt and one of answer")
        if self.kv_gib is not None and not 0 < self.kv_gib < math.inf:
            raise ConfigError("kv_gib", self.kv_gib, "a number of GiB above 0")
        if not 0 <= self.host_gib < math.inf:
            raise ConfigError("host_gib", self.host_gib, "a number of GiB, 0 or more")
        machine_gib = psutil.virtual_memory().total / 2**30
        if self.host_gib >= machine_gib:
            raise ConfigError("host_gib", self.host_gib, f"less than this machine's {machine_gib:.1f} GiB")
        if self.dtype not in (None, "bfloat16", "float32"):
            raise ConfigError("dtype", self.dtype, "bfloat16 or float32")
        if self.device is not None and re.fullmatch(r"cpu|cuda(:\d{1,2})?", self.device) is None:
            raise ConfigError("device", self.device, "cpu or cuda")

    def options(self) -> "EngineOptions":
        """Imports torch. Raises ConfigError for a GPU that is not there."""
        import torch

        from gewell.engine.build import EngineOptions

        if self.device is not None and self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError("device", self.device, "torch sees no GPU here")
        return EngineOptions(
            device=self.device,
            dtype=None if self.dtype is None else getattr(torch, self.dtype),
            kv_memory_bytes=None if self.kv_gib is None else int(self.kv_gib * 2**30),
            host_memory_bytes=int(self.host_gib * 2**30),
            max_num_seqs=self.rows,
            max_context=self.max_context,
        )


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
def _server(
    url: str | None, data: Path | None, fsync: Persistence, port: int | None
) -> Iterator[tuple[str, Callable[[], None]]]:
    """The named server, or that of the data directory, which ends with the last `up` that uses it.

    With it what to call before an exit that passes this context manager by.
    """
    if url is not None:
        yield url, lambda: None
        return
    with SharedServer(EmbeddedServer(data or queue_dir(), persistence=fsync, port=port)) as server:
        if server.is_found:
            _say(f"using the server that runs already (pid {server.pid})")
        yield server.url, lambda: server.leave(_HASTY_S)


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


def _make_engine(folder: Path | None, flags: EngineFlags) -> Engine:
    if folder is None:
        for name, value in (("kv_gib", flags.kv_gib), ("host_gib", flags.host_gib)):
            if value:
                raise ConfigError(name, value, "not with the scripted engine, which has no such memory")
        return _make_scripted(flags.rows, flags.max_context)
    from gewell.engine.build import build_engine  # imports torch, which `--help` and the scripted engine do not need

    return build_engine(folder, flags.options())


def _host_memory(flags: EngineFlags) -> str:
    return f" and {flags.host_gib:g} GiB of host memory for prefixes" if flags.host_gib else ""


def _make_scripted(rows: int | None, max_context: int | None) -> Engine:
    """Speed and length of its answers come from the environment: tests of the queue set them."""
    from gewell.engine.scripted import build_scripted_engine

    has_traps = os.environ.get("GEWELL_SCRIPTED_TRAPS") == "1"
    return build_scripted_engine(
        num_pages=int(os.environ.get("GEWELL_SCRIPTED_PAGES", "4096")),
        max_num_seqs=rows or 64,
        max_context=max_context or 8_192,
        step_delay_s=float(os.environ.get("GEWELL_SCRIPTED_STEP_S", "0")),
        is_bad=lambda req, position: has_traps and _spring_trap(bytes(req.request.prompt_ids[:6])),
        eos_odds=int(os.environ.get("GEWELL_SCRIPTED_EOS_ODDS", "0")),
    )


def _spring_trap(head: bytes) -> bool:
    """Faults that a prompt asks for when its first token is drawn: death, a hang, logits that are no numbers."""
    if head.startswith(b"!!die"):
        os.kill(os.getpid(), signal.SIGKILL)
    if head.startswith(b"!!hang"):
        time.sleep(3_600)
    return head.startswith(b"!!nan")


def _how_to(url: str, ns: str, *, is_embedded: bool) -> str:
    body = '{"kind":"chat","request":{"messages":[{"role":"user","content":"Hello"}],"max_tokens":64}}'
    url = shown_url(url)  # what is printed ends up in logs
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
