"""What the queue costs, apart from the engine: latency of one job, publishing many streams, growth over many jobs."""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import redis

from gewell.embedded import EmbeddedServer
from gewell.engine.api import EngineInfo, EngineRequest, EngineStats, Event, TokensEvent
from gewell.protocol import Chunk, FinalRecord, Keys, job_entry, parse_message
from gewell_workers.engine_thread import EngineThread
from gewell_workers.messages import OpenJob
from gewell_workers.output_link import OutputLink


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number. `limit`: what it must stay under (or over, if `is_floor`); None: for information."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    is_floor: bool = False

    @property
    def is_met(self) -> bool:
        if self.limit is None:
            return True
        return self.value >= self.limit if self.is_floor else self.value <= self.limit


@contextmanager
def scripted_worker(url: str, keys: Keys, *, rows: int = 64) -> Iterator[psutil.Process]:
    """A worker process with the scripted engine, ready to serve."""
    command = [sys.executable, "-m", "gewell_workers", "--redis", url, "--ns", keys.ns, "--model", "scripted"]
    process = subprocess.Popen([*command, "--rows", str(rows)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        client = redis.Redis.from_url(url)
        while not client.keys(keys.workers_pattern):
            if process.poll() is not None:
                raise RuntimeError(f"the worker ended at start with code {process.returncode}")
            time.sleep(0.02)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


# --- latency ----------------------------------------------------------------------------------------------------------


def measure_latency(num_jobs: int = 200) -> list[Figure]:
    """Submit to first token in the client's hands, less the engine's own part of it; one job at a time."""
    keys = Keys("bench-latency")
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder)) as server:
        client = redis.Redis.from_url(server.url)
        with scripted_worker(server.url, keys):
            overheads_ms = [_overhead_ms(client, keys, f"job-{idx}") for idx in range(num_jobs + 10)][10:]
    overheads_ms.sort()
    return [
        Figure(name="queue overhead, median", value=statistics.median(overheads_ms), unit="ms", limit=5.0),
        Figure(name="queue overhead, 95th of 100", value=overheads_ms[int(0.95 * len(overheads_ms))], unit="ms"),
    ]


def _overhead_ms(client: Any, keys: Keys, job_id: str) -> float:
    body = {"kind": "completion", "request": {"prompt": "hello", "max_tokens": 4}}
    with client.pubsub(ignore_subscribe_messages=True) as events:
        events.subscribe(keys.ev(job_id))
        events.get_message(timeout=1.0)
        start_s = time.perf_counter()
        client.xadd(keys.jobs("normal"), job_entry(job_id, json.dumps(body)))
        while True:
            message = events.get_message(timeout=5.0)
            if message is not None and isinstance(parse_message(message["data"])[1], Chunk):
                break
        taken_ms = (time.perf_counter() - start_s) * 1e3
    while (raw := client.get(keys.res(job_id))) is None:
        time.sleep(0.001)
    timing = FinalRecord.from_json(raw).timing
    assert timing.ttft is not None
    assert timing.queue is not None
    return taken_ms - (timing.ttft - timing.queue)


# --- publishing -------------------------------------------------------------------------------------------------------


class _MetronomeEngine:
    """One token a row every step, steps at a fixed rate: what a fast device would give the output process."""

    def __init__(self, job_ids: Sequence[str], step_s: float) -> None:
        self.on_started: Callable[[Sequence[str]], None] | None = None
        self._events: list[list[Event]] = [
            [TokensEvent(request_id=job_id, token_ids=(97 + letter,)) for job_id in job_ids] for letter in range(26)
        ]
        self._step_s = step_s
        self._next_s = time.perf_counter()
        self._last_end_s: float | None = None
        self.num_steps = 0
        self.is_running = False
        self.gaps_s: list[float] = []  # between the end of a step and the thread's coming back for the next

    @property
    def info(self) -> EngineInfo:
        raise NotImplementedError

    def has_work(self) -> bool:
        return self.is_running

    def step(self) -> list[Event]:
        now_s = time.perf_counter()
        if self._last_end_s is not None:
            self.gaps_s.append(now_s - self._last_end_s)
        self._next_s = max(self._next_s + self._step_s, now_s)
        time.sleep(max(0.0, self._next_s - now_s))
        self.num_steps += 1
        self._last_end_s = time.perf_counter()
        return self._events[self.num_steps % 26]

    def add(self, request: EngineRequest) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def finish(self, request_id: str, num_output_tokens: int) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats()

    def close(self) -> None: ...


def measure_publishing(num_streams: int = 512, step_s: float = 0.01, seconds: float = 6.0) -> list[Figure]:
    """CPU of the output process while every stream gets a token every step, and the engine thread's worst wait."""
    return asyncio.run(_measure_publishing(num_streams, step_s, seconds))


async def _measure_publishing(num_streams: int, step_s: float, seconds: float) -> list[Figure]:
    keys = Keys("bench-publish")
    job_ids = [f"job-{idx}" for idx in range(num_streams)]
    engine = _MetronomeEngine(job_ids, step_s)
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder)) as server:
        client = redis.Redis.from_url(server.url)
        output = OutputLink()
        await output.start(_setup(server.url, keys.ns))
        for job_id in job_ids:
            client.hset(keys.job(job_id), mapping={"epoch": 1, "state": "running"})
            client.xadd(keys.out(job_id), {"fence": "1"}, id="1-0")
            output.open(open_job(job_id))
        thread = EngineThread(engine, output.step, lambda ids: None, _raise)
        thread.start()
        engine.is_running = True
        await asyncio.sleep(1.0)  # caches warm, all streams past their first token
        process = psutil.Process(output.pid)
        before, start_s, first_step = process.cpu_times(), time.perf_counter(), engine.num_steps
        await asyncio.sleep(seconds)
        after, taken_s = process.cpu_times(), time.perf_counter() - start_s
        num_steps, calm_gap_s = engine.num_steps - first_step, max(engine.gaps_s)
        num_published = await asyncio.to_thread(_num_tokens, client, keys, job_ids)
        engine.gaps_s.clear()
        server.pause()
        try:
            await asyncio.sleep(2.0)
            stalled_gap_s = max(engine.gaps_s)
        finally:
            server.resume()
        engine.is_running = False
        await asyncio.to_thread(thread.stop, 5.0)
        await output.close(20.0)
    cpu_s = after.user + after.system - before.user - before.system
    rate = num_streams * num_steps / taken_s
    name = f"{num_streams} streams, {rate:,.0f} tokens/s"
    return [
        Figure(name=f"output process, {name}", value=100 * cpu_s / taken_s, unit="% of a core", limit=30.0),
        Figure(name="tokens that reached their streams", value=num_published, unit="tokens"),
        Figure(name="engine thread between steps, longest", value=calm_gap_s * 1e3, unit="ms"),
        Figure(name="the same, server stalled 2 s", value=stalled_gap_s * 1e3, unit="ms", limit=100.0),
    ]


def _num_tokens(client: Any, keys: Keys, job_ids: Sequence[str]) -> int:
    total = 0
    for job_id in job_ids:
        for _, fields in client.xrange(keys.out(job_id)):
            total += len(json.loads(fields[b"d"])["ids"]) if b"d" in fields else 0
    return total


def _setup(url: str, ns: str) -> dict[str, object]:
    return {
        "redis_url": url,
        "redis_timeout_s": 5.0,
        "ns": ns,
        "worker_id": f"bench-{os.getpid()}",
        "model_dir": None,
        "flush_s": 0.05,
        "flush_tokens": 16,
    }


def open_job(job_id: str, *, is_chat: bool = True) -> OpenJob:
    """A job as ingest would open it, without anything special."""
    return OpenJob(
        job_id=job_id,
        epoch=1,
        lane="normal",
        entry_id="1-1",
        kept_ids=[],
        kept_ends_with_stop_id=False,
        kept_text={},
        kept_tools=[],
        kept_logprobs=[],
        is_chat=is_chat,
        tools=None,
        stop=[],
        include_stop=False,
        min_tokens=0,
        ends_loops=False,
        first_prompt_id=None,
        wants_logprobs=False,
        stream=True,
        reply_to=None,
        result_ttl_s=60.0,
        seed=0,
        crashes=0,
        num_prompt_tokens=1,
        enqueued_at_ms=0,
        clock_offset_ms=0.0,
        warnings=[],
        metadata=None,
        traceparent=None,
    )


def _raise(error: BaseException) -> None:
    raise error


# --- many jobs --------------------------------------------------------------------------------------------------------


def measure_many(num_jobs: int = 10_000) -> list[Figure]:
    """One client enqueues, one worker finishes; growth of both its processes over the second half."""
    keys = Keys("bench-many")
    body = json.dumps({"kind": "completion", "request": {"prompt": "hello", "max_tokens": 2}})
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder)) as server:
        client = redis.Redis.from_url(server.url)
        with scripted_worker(server.url, keys) as worker:
            processes = [worker, *worker.children(recursive=True)]
            sizes: list[int] = []
            start_s = time.perf_counter()
            enqueue_s = _enqueue(client, keys, body, num_jobs)
            for share in (0.5, 1.0):
                _wait_for_finished(client, keys, int(share * num_jobs))
                sizes.append(sum(process.memory_info().rss for process in processes))
            taken_s = time.perf_counter() - start_s
    return [
        Figure(name=f"{num_jobs:,} jobs enqueued by one client", value=enqueue_s, unit="s", limit=2.0),
        Figure(name="jobs finished by one worker", value=num_jobs / taken_s, unit="jobs/s"),
        Figure(name="growth over the second half", value=(sizes[1] - sizes[0]) / 2**20, unit="MiB", limit=8.0),
    ]


def _enqueue(client: Any, keys: Keys, body: str, num_jobs: int) -> float:
    start_s = time.perf_counter()
    for first in range(0, num_jobs, 1_000):
        pipeline = client.pipeline(transaction=False)
        for idx in range(first, min(first + 1_000, num_jobs)):
            pipeline.xadd(keys.jobs("normal"), job_entry(f"job-{idx}", body))
        pipeline.execute()
    return time.perf_counter() - start_s


def _wait_for_finished(client: Any, keys: Keys, num_jobs: int, timeout_s: float = 300.0) -> None:
    done = threading.Event()
    deadline_s = time.monotonic() + timeout_s
    while not client.exists(keys.res(f"job-{num_jobs - 1}")):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{num_jobs} jobs did not finish in {timeout_s:g} s")
        done.wait(0.02)
