"""What a worker needs before its first job: the server reached, weights, tokenizers and output process made."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gewell.engine.api import Engine
from gewell.errors import QueueError
from gewell.text.chat import ChatRenderer
from gewell_workers.config import WorkerConfig
from gewell_workers.output_link import OutputLink
from gewell_workers.prepare import load_renderer
from gewell_workers.resp import Client, LinkLost, ReplyError, describe
from gewell_workers.server_check import check_server

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What takes long to make, made side by side."""

    engine: Engine
    chat: ChatRenderer
    output: OutputLink
    promise: str  # of the server's persistence


async def make_parts(config: WorkerConfig, make_engine: Callable[[], Engine], model_dir: Path | None) -> Parts:
    """Reach the server first, then load weights, tokenizers and output process at the same time.

    Raises QueueError when there is no usable server and `wait_for_redis` is off.
    """
    promise = await _reach_server(config)
    output = OutputLink()
    engine, chat, _ = await asyncio.gather(
        asyncio.to_thread(make_engine),
        asyncio.to_thread(load_renderer, model_dir, config.chat_template),
        output.start(_output_setup(config, model_dir)),
    )
    return Parts(engine=engine, chat=chat, output=output, promise=promise)


# Replies of a server that will serve later; any other, such as a wrong password, is not mended by asking again.
_LATER = ("LOADING", "MASTERDOWN", "ERR max number of clients")


async def _reach_server(config: WorkerConfig) -> str:
    """Until the server is there and has read its data; returns its promise."""
    client = Client(config.redis_url, name=f"{config.worker_id}.start", timeout_s=config.redis_timeout_s)
    delay_s, said = 0.05, False
    while True:
        try:
            await client.connect()
            promise = await check_server(client, config.redis_url)
            client.close()
            return promise
        except (LinkLost, ReplyError) as error:
            is_refusal = isinstance(error, ReplyError) and not str(error).startswith(_LATER)
            if is_refusal or not config.wait_for_redis:
                raise QueueError(f"{describe(config.redis_url)} cannot be used: {error}") from error
            if not said:
                log.warning("%s; trying again", error)
                said = True
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, 2.0)


def _output_setup(config: WorkerConfig, model_dir: Path | None) -> dict[str, Any]:
    return {
        "redis_url": config.redis_url,
        "redis_timeout_s": config.redis_timeout_s,
        "ns": config.ns,
        "worker_id": config.worker_id,
        "model_dir": None if model_dir is None else str(model_dir),
        "flush_s": config.flush_s,
        "flush_tokens": config.flush_tokens,
    }
