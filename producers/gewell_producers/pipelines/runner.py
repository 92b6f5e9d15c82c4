"""Items through a pipeline, by arq: it spreads them over machines and brings back those of a machine that died.

arq runs only the items' coroutines, which mostly wait; generation is the workers' work, over our own queue. Payloads
are JSON. An item that fails is a line in the dead file, not an exception in arq.

arq holds an item of a dead process back until its timeout, so an item holds its place for a short slice only: then it
is put back and its coroutine runs again, which costs nothing, since every answer it had stands.
"""

import asyncio
import contextlib
import importlib.util
import secrets
import sys
import time
import traceback
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import orjson
from arq.connections import ArqRedis, RedisSettings, create_pool
from arq.jobs import Job as ArqJob
from arq.worker import Retry, Worker, func

from gewell.errors import ConfigError, GewellError
from gewell_producers.async_client import AsyncClient
from gewell_producers.connection import LINK_ERRORS
from gewell_producers.pipelines.pipeline import Item, ItemRun, Pipeline

POLL_S = 0.1
SLICE_S = 45.0  # a dead machine's items are taken over after this and a little more
RUN_TTL_S = 60  # items of a run that is gone are not worked on
KEEP_RESULT_S = 24 * 3600
UNLIMITED_TRIES = 2**31 - 1  # each slice is one; an item's end is `Pipeline.timeout_s`


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of an item; exactly one of `result` (any JSON) and `error` (a text) counts."""

    item_id: str
    result: Any = None
    error: str | None = None


def load_pipeline(file: Path) -> Pipeline:
    """The `pipeline` that a Python file defines. Raises ConfigError."""
    spec = importlib.util.spec_from_file_location(f"gewell_pipeline_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError("pipeline", str(file), "a Python file")
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses in the file look themselves up
    spec.loader.exec_module(module)
    pipeline = getattr(module, "pipeline", None)
    if not isinstance(pipeline, Pipeline):
        raise ConfigError("pipeline", str(file), "a file that sets `pipeline` to a Pipeline")
    return pipeline


def queue_name(pipeline: Pipeline, ns: str) -> str:
    """arq's queue: of one pipeline and revision, so that machines with other code take nothing of it."""
    return f"arq:{ns}:pipeline:{pipeline.name}:{pipeline.revision}"


async def connect(url: str, queue: str) -> ArqRedis:
    return await create_pool(
        RedisSettings.from_dsn(url),
        job_serializer=orjson.dumps,
        job_deserializer=orjson.loads,
        default_queue_name=queue,
    )


def make_worker(
    pipeline: Pipeline, client: AsyncClient, pool: ArqRedis, ns: str, concurrency: int, slice_s: float = SLICE_S
) -> Worker:
    """An arq worker for this pipeline's items. Run one on as many machines as there are."""

    async def run_item(_context: dict[Any, Any], run_id: str, until_s: float, item_id: str, item: Item) -> Any:
        if not await pool.exists(_alive_key(pipeline, ns, run_id)):
            return {"error": "the run that sent it is gone"}
        try:
            async with asyncio.timeout(slice_s) as scope:
                return {"result": await pipeline.work(ItemRun(client, pipeline, item_id), item)}
        except TimeoutError as error:
            if not scope.expired():
                return {"error": f"TimeoutError: {error}"}
            if time.time() >= until_s:
                return {"error": f"not done within {pipeline.timeout_s:g} s"}
            raise Retry(defer=0) from None
        except GewellError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        except Exception as error:  # a fault in the pipeline's file: this item is dead, the others go on
            place = traceback.extract_tb(error.__traceback__)[-1]
            return {"error": f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"}

    return Worker(
        functions=[func(cast(Any, run_item), name="run_item", timeout=slice_s + 15, max_tries=UNLIMITED_TRIES)],
        queue_name=queue_name(pipeline, ns),
        redis_pool=pool,
        handle_signals=False,
        max_jobs=concurrency,
        poll_delay=POLL_S,
        keep_result=KEEP_RESULT_S,
        job_serializer=orjson.dumps,
        job_deserializer=orjson.loads,
        log_results=False,
    )


async def run_items(
    pipeline: Pipeline, items: Iterable[tuple[str, Item]], client: AsyncClient, *, concurrency: int, works: bool = True
) -> AsyncGenerator[Outcome]:
    """Send items through and yield what became of them, as they finish. At most 2 x `concurrency` are under way.

    works   also do the work here; False: only workers on other machines do
    """
    ns = client.keys.ns
    async with contextlib.AsyncExitStack() as stack:
        pool = await connect(client.url, queue_name(pipeline, ns))
        stack.push_async_callback(pool.aclose)
        if works:
            await stack.enter_async_context(_working(make_worker(pipeline, client, pool, ns, concurrency)))
        run_id = secrets.token_hex(8)
        await stack.enter_async_context(_alive(pool, _alive_key(pipeline, ns, run_id)))
        source: Iterator[tuple[str, Item]] = iter(items)
        waiting: set[asyncio.Task[Outcome]] = set()
        stack.callback(lambda: [task.cancel() for task in waiting])
        is_exhausted = False
        while waiting or not is_exhausted:
            while not is_exhausted and len(waiting) < 2 * concurrency:
                following = next(source, None)
                if following is None:
                    is_exhausted = True
                else:
                    waiting.add(asyncio.create_task(_outcome(pool, pipeline, run_id, *following)))
            if waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()


@contextlib.asynccontextmanager
async def _working(worker: Worker) -> AsyncGenerator[None]:
    running = asyncio.create_task(worker.async_run())
    try:
        yield
    finally:
        running.cancel()
        for task in worker.tasks.values():
            task.cancel()
        await asyncio.gather(running, *worker.tasks.values(), return_exceptions=True)


@contextlib.asynccontextmanager
async def _alive(pool: ArqRedis, key: str) -> AsyncGenerator[None]:
    """Keep the run's mark alive; without it nobody works on its items."""

    async def beat() -> None:
        while True:
            with contextlib.suppress(*LINK_ERRORS):
                await pool.set(key, 1, ex=RUN_TTL_S)
            await asyncio.sleep(RUN_TTL_S / 4)

    await pool.set(key, 1, ex=RUN_TTL_S)
    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        with contextlib.suppress(*LINK_ERRORS):
            await pool.delete(key)


def _alive_key(pipeline: Pipeline, ns: str, run_id: str) -> str:
    return f"{queue_name(pipeline, ns)}:run:{run_id}"


async def _outcome(pool: ArqRedis, pipeline: Pipeline, run_id: str, item_id: str, item: Item) -> Outcome:
    """Enqueue an item and wait for what becomes of it."""
    arq_id = f"{pool.default_queue_name}:{run_id}:{item_id}"
    until_s = time.time() + pipeline.timeout_s
    await pool.enqueue_job("run_item", run_id, until_s, item_id, dict(item), _job_id=arq_id)
    job = ArqJob(arq_id, pool, _queue_name=pool.default_queue_name, _deserializer=orjson.loads)
    answer = await job.result(poll_delay=POLL_S)
    await pool.delete(f"arq:result:{arq_id}")
    return Outcome(item_id=item_id, result=answer.get("result"), error=answer.get("error"))
