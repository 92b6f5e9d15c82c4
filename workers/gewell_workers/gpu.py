"""The worker process: reads jobs, runs one engine, and keeps its lease. `run_worker` is all that callers need.

Main thread: asyncio (intake, lease, cancels, control). Engine thread: steps. Output process: text and publishing.
"""

import asyncio
import contextlib
import faulthandler
import heapq
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gewell.engine.api import Engine, Event, FinishedEvent
from gewell.protocol import CANCEL_STREAM_TTL_S, CTL_STREAM_TTL_S, ControlVerb, Lane, WorkerField
from gewell_workers.cancel import Cancel, CancelLog, hits_held, hits_waiting, parse_cancel, set_markers
from gewell_workers.claim import Taken
from gewell_workers.clock import ServerClock
from gewell_workers.config import WorkerConfig
from gewell_workers.engine_thread import EngineThread
from gewell_workers.finish import Outcome
from gewell_workers.ingest import Ingest
from gewell_workers.jobs import JobTable, ParkedJob
from gewell_workers.lanes import LaneReader, entries_of
from gewell_workers.lease import Lease, engine_fields
from gewell_workers.prepare import Preparer
from gewell_workers.probation import Probation, Suspect
from gewell_workers.resp import Argument, Client, LinkLost, Reply, ReplyError, pack, raise_error
from gewell_workers.server_check import publish_info
from gewell_workers.startup import Parts, make_parts

log = logging.getLogger(__name__)

EXIT_DRAINED = 0
EXIT_ENGINE = 70  # the engine failed: jobs are taken over by others
EXIT_STALLED = 71  # no step for `stall_s` with work waiting
EXIT_OUTPUT = 72  # the output process died
EXIT_NO_REDIS = 69  # the server could not be reached at start
EXIT_NOW = 130  # a second signal

_READ_BATCH = 64  # entries a read: bodies may be large, and their prompt tokens are known only afterwards
_SWITCH_INTERVAL_S = 0.0005
_SAY_AGAIN_S = 60.0  # a trouble that lasts is told so often
_TICK_S = 0.05  # deadlines and parked jobs are looked at so often


class Worker:
    def __init__(
        self,
        config: WorkerConfig,
        parts: Parts,
        *,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        engine = parts.engine
        self._config = config
        self._info = engine.info
        self._keys = config.keys
        self._on_ready = on_ready
        self._stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._room_changed = asyncio.Event()
        self._clock_is_set = asyncio.Event()  # deadlines can be judged
        self._caught_up = asyncio.Event()  # all cancels and commands of before are known; jobs may be read
        self._is_draining = False
        self._paused: set[Lane] = set()
        self._trouble: str | None = None
        self._said_at_s: dict[str, float] = {}  # when each trouble was last told
        self._promise = parts.promise
        self._leaving: set[str] = set()  # cancelled in the engine because their stream here is over
        self._deadlines: list[tuple[int, str, int]] = []
        self._started_at_ms = int(time.time() * 1e3)
        self._tasks: list[asyncio.Task[None]] = []
        self._table = JobTable()
        self._cancels = CancelLog()
        self._probation = Probation()
        self._clock = ServerClock()
        self._engine = EngineThread(engine, self._on_events, self._on_started, self._on_engine_failure)
        self._output = parts.output
        self._output.on_frame, self._output.on_end = self._on_output, self._on_output_end
        self._output.identify(self._info.model, self._info.fingerprint)
        self._read_client = self._client("read")
        self._intake_client = self._client("intake")
        self._lease_client = self._client("lease")
        self._watch_client = self._client("watch")
        self._reader = LaneReader(self._read_client, self._keys, config.worker_id)
        self._lease = Lease(
            self._lease_client,
            self._keys,
            config.worker_id,
            lease_s=config.lease_s,
            min_idle_ms=config.min_idle_ms,
        )
        self._ingest = Ingest(
            self._intake_client,
            self._keys,
            worker_id=config.worker_id,
            info=self._info,
            preparer=Preparer(self._info, parts.chat),
            table=self._table,
            engine=self._engine,
            output=self._output,
            clock=self._clock,
            cancels=self._cancels,
            probation=self._probation,
            max_parked=config.max_parked,
        )

    async def run(self) -> int:
        """Serve until drained, failed or told to end; returns the exit code."""
        self._engine.start()
        loops = (self._beat_loop, self._read_loop, self._take_over_loop, self._watch_loop, self._tick_loop)
        for loop in loops:
            task = asyncio.create_task(loop(), name=loop.__name__)
            task.add_done_callback(self._on_task_done)
            self._tasks.append(task)
        try:
            return await self._leave(await self._stop)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for client in (self._read_client, self._intake_client, self._lease_client, self._watch_client):
                client.close()

    def drain(self) -> None:
        """Take no new jobs; end when the held ones are done, or after `drain_s` hand the rest back."""
        if not self._is_draining:
            self._is_draining = True
            log.info("draining: %d jobs held, at most %g s", len(self._table.held), self._config.drain_s)
            asyncio.get_running_loop().call_later(self._config.drain_s, self._end, EXIT_DRAINED)
            self._end_if_drained()

    # ---------------------------------------------------------------------------------------------- start and end

    def _client(self, role: str) -> Client:
        name = f"{self._config.worker_id}.{role}"
        return Client(self._config.redis_url, name=name, timeout_s=self._config.redis_timeout_s)

    def _end(self, code: int) -> None:
        if not self._stop.done():
            self._stop.set_result(code)

    def _end_if_drained(self) -> None:
        if self._is_draining and not self._table.held:
            self._end(EXIT_DRAINED)

    async def _leave(self, code: int) -> int:
        """Stop the engine, let the output process write what it has, hand the rest back."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._ingest.close()
        stopped = self._engine.stop(timeout_s=10.0 if code == EXIT_DRAINED else 1.0)
        await self._output.close(timeout_s=15.0)
        try:
            if code == EXIT_DRAINED:
                num = await self._lease.hand_back()
                if num:
                    log.info("handed %d jobs back", num)
                await self._lease.end()
            else:
                await self._lease_client.call("DEL", self._keys.worker(self._config.worker_id))
        except (LinkLost, ReplyError) as error:
            log.warning("left without saying so to the server (%s); our lease runs out by itself", error)
        if stopped:
            self._engine.engine.close()
        return code

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("%s failed", task.get_name(), exc_info=task.exception())
            self._end(EXIT_ENGINE)

    # ---------------------------------------------------------------------------------------------- what we hear

    def _on_events(self, events: list[Event]) -> None:
        if self._leaving:
            events = [event for event in events if event.request_id not in self._leaving or self._has_left(event)]
        for event in events:
            if isinstance(event, FinishedEvent) and event.request_id in self._table.held:
                self._table.held[event.request_id].is_ending = True  # the engine has no more of it to cancel
        if self._probation.has_trial:
            for event in events:
                if not isinstance(event, FinishedEvent):
                    self._probation.saw_tokens(event.request_id, len(event.token_ids))
        self._output.step(events)

    def _on_started(self, job_ids: list[str]) -> None:
        self._output.started(job_ids)
        self._probation.started(job_ids)

    def _has_left(self, event: Event) -> bool:
        """Swallow the last events of a request whose stream is over; always False."""
        if isinstance(event, FinishedEvent):
            self._leaving.discard(event.request_id)
        return False

    def _on_engine_failure(self, error: BaseException) -> None:
        log.error("the engine cannot go on; its jobs go to other workers", exc_info=error)
        self._end(EXIT_ENGINE)

    def _on_output(self, kind: str, body: Any) -> None:
        if kind == "stop":
            job_id, num_tokens = body
            self._engine.finish(job_id, num_tokens)
        elif kind == "drop":
            self._engine.cancel(body)
        elif kind == "done":
            self._on_done(*body)
        elif kind == "trouble":
            self._trouble = body
            self._room_changed.set()

    def _on_done(self, job_id: str, epoch: int, outcome: str) -> None:
        job = self._table.drop(job_id, epoch)
        self._probation.left([job_id])
        if job is not None and outcome != Outcome.WRITTEN and not job.is_ending:
            self._leaving.add(job_id)
            self._engine.cancel(job_id)
        self._room_changed.set()
        self._end_if_drained()

    def _on_output_end(self) -> None:
        log.error("the output process is gone")
        self._end(EXIT_OUTPUT)

    # ---------------------------------------------------------------------------------------------- loops

    async def _read_loop(self) -> None:
        num_connects = 0
        while not self._is_draining:
            await self._read_client.wait_until_up()
            await self._clock_is_set.wait()
            await self._caught_up.wait()
            try:
                if self._read_client.num_connects != num_connects:
                    await self._reader.ensure_groups()
                    num_connects = self._read_client.num_connects
                room = self._room()
                lanes = [lane for lane in Lane if lane not in self._paused]
                if not room or not lanes or self._probation.needs_empty_engine:
                    await self._wait_for_room()
                    continue
                entries = await self._reader.read(room, lanes)
            except (LinkLost, ReplyError) as error:
                await self._say_and_wait("reading jobs", error)
                continue
            if entries:
                await self._take(entries)

    async def _take(self, entries: list[Taken]) -> None:
        """What fails here stays pending with us, and the sweep of the take-over loop brings it again."""
        entries = [taken for taken in entries if taken.job_id not in self._leaving]
        await self._intake_client.wait_until_up()
        try:
            await self._ingest.take(entries)
        except (LinkLost, ReplyError) as error:
            await self._say_and_wait("taking jobs in", error)
        for taken in entries:
            job = self._table.held.get(taken.job_id)
            if job is not None and job.deadline_ms is not None:
                heapq.heappush(self._deadlines, (job.deadline_ms, taken.job_id, job.epoch))

    async def _take_over_loop(self) -> None:
        """What dead workers held, what was handed back, and what a lost connection hid from us."""
        pause_s = min(1.0, self._config.lease_s / 3)
        while True:
            await asyncio.sleep(pause_s)
            await self._caught_up.wait()
            if self._is_draining or self._trouble is not None or not self._lease_client.is_up:
                continue
            try:
                lost = await self._lease.own_pending(self._table.entries)
                room = 0 if self._probation.needs_empty_engine else self._room()
                entries = lost + (await self._lease.take_over(room) if room else [])
            except (LinkLost, ReplyError) as error:
                await self._say_and_wait("looking for jobs of dead workers", error)
                continue
            if entries:
                await self._take(entries)

    async def _beat_loop(self) -> None:
        pause_s = self._config.lease_s / 3
        is_ready = False
        while True:
            await self._lease_client.wait_until_up()
            self._check_progress()
            try:
                await self._clock.measure(self._lease_client)
                await self._lease.beat(self._heartbeat())
                max_queue_len = self._config.max_queue_len
                await publish_info(self._lease_client, self._keys, self._info, max_queue_len, self._promise)
                await self._trim()
            except (LinkLost, ReplyError) as error:
                await self._say_and_wait("the heartbeat", error)
                continue
            if not is_ready:
                is_ready = True
                self._clock_is_set.set()
                if self._on_ready is not None:
                    self._on_ready()
            await asyncio.sleep(pause_s)

    async def _watch_loop(self) -> None:
        """Cancels and operators' commands. Both streams are read from their beginning: a pause of before holds."""
        last = {self._keys.cancel: "0-0", self._keys.ctl: "0-0"}
        while True:
            await self._watch_client.wait_until_up()
            try:
                wait = ("BLOCK", 500) if self._caught_up.is_set() else ()
                head = ("XREAD", "COUNT", 1_000, *wait)
                reply = await self._watch_client.call(*head, "STREAMS", *last, *last.values())
                for name, entries in reply or ():
                    await self._on_watched(name.decode(), entries)
                    last[name.decode()] = entries[-1][0].decode()
                if not reply:
                    self._caught_up.set()
            except (LinkLost, ReplyError) as error:
                self._caught_up.clear()
                await self._say_and_wait("watching for cancels", error)

    async def _on_watched(self, stream: str, entries: Reply) -> None:
        parsed = [(entry_id.decode(), _text_fields(flat)) for entry_id, flat in entries]
        if stream == self._keys.cancel:
            await self._on_cancels([cancel for entry in parsed for cancel in parse_cancel(*entry)])
            return
        for entry_id, fields in parsed:
            self._on_control(entry_id, fields)

    async def _tick_loop(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now_ms = self._clock.now_ms()
            while self._deadlines and self._deadlines[0][0] <= now_ms:
                _, job_id, epoch = heapq.heappop(self._deadlines)
                job = self._table.held.get(job_id)
                if job is not None and job.epoch == epoch and not job.is_ending:
                    self._output.expire(job_id)
                    self._engine.cancel(job_id)
            if self._is_draining or self._trouble is not None:
                continue
            due: list[ParkedJob] = []
            if not self._probation.needs_empty_engine:
                due = [job for job in self._table.parked.values() if job.due_ms <= now_ms]
            self._probation.clear_survivors()
            group = self._probation.next_group(is_engine_empty=not self._table.held)
            if due or group:
                await self._fetch(due, group)

    async def _say_and_wait(self, what: str, error: Exception) -> None:
        """A lost connection is reported by its client; an error reply here, once a minute. Never a busy loop."""
        if isinstance(error, ReplyError):
            text, now_s = f"{what}: {error}", time.monotonic()
            if now_s - self._said_at_s.get(text, -math.inf) >= _SAY_AGAIN_S:
                self._said_at_s = {old: at_s for old, at_s in self._said_at_s.items() if now_s - at_s < _SAY_AGAIN_S}
                self._said_at_s[text] = now_s
                log.warning("%s", text)
            await asyncio.sleep(0.5)

    # ---------------------------------------------------------------------------------------------- pieces

    def _room(self) -> int:
        """How many entries may be taken now."""
        config, table = self._config, self._table
        window = config.window_rows or max(256, 8 * self._info.max_num_seqs)
        if self._trouble is not None or table.num_tokens >= config.window_prompt_tokens:
            return 0
        batch = _READ_BATCH if table.num_tokens * 2 < config.window_prompt_tokens else 8
        return max(0, min(batch, window + self._info.max_num_seqs - len(table.held)))

    async def _wait_for_room(self) -> None:
        self._room_changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await self._room_changed.wait()

    async def _fetch(self, due: list[ParkedJob], group: list[Suspect]) -> None:
        """Read the bodies of parked jobs whose time has come, and of suspects whose trial begins, and take them in."""
        waiting: list[ParkedJob | Suspect] = [*due, *group]
        commands = [pack("XRANGE", self._keys.jobs(job.lane), job.entry_id, job.entry_id) for job in waiting]
        try:
            await self._lease_client.wait_until_up()
            replies = [raise_error(reply) for reply in await self._lease_client.batch(commands)]
        except (LinkLost, ReplyError) as error:
            for suspect in group:
                self._probation.left([suspect.job_id])
                self._probation.add(suspect)
            await self._say_and_wait("reading jobs again", error)
            return
        entries: list[Taken] = []
        for job, reply in zip(waiting, replies, strict=True):
            self._table.parked.pop(job.entry, None)
            self._table.entries.discard(job.entry)
            entries += entries_of(Lane(job.lane), reply)
        on_trial = {suspect.entry for suspect in group}
        await self._take(
            [replace(one, is_crash=True, is_trial=True) if one.entry in on_trial else one for one in entries]
        )
        self._probation.left(suspect.job_id for suspect in group if suspect.job_id not in self._table.held)

    async def _on_cancels(self, cancels: list[Cancel]) -> None:
        self._cancels.add(cancels)  # before the markers: what is being made ready now is covered by this
        await set_markers(self._watch_client, self._keys, cancels)
        for cancel in cancels:
            for job in list(self._table.held.values()):
                if hits_held(cancel, job) and not job.is_ending:
                    self._engine.cancel(job.taken.job_id)
            parked = [job for job in self._table.parked.values() if hits_waiting(cancel, job)]
            suspects = [job for job in self._probation.waiting.values() if hits_waiting(cancel, job)]
            for suspect in suspects:
                del self._probation.waiting[suspect.entry]
            if parked or suspects:
                await self._fetch(parked, suspects)

    def _on_control(self, entry_id: str, fields: dict[str, str]) -> None:
        verb, worker, lane = fields.get("cmd"), fields.get("worker"), fields.get("lane")
        if worker not in (None, "", self._config.worker_id):
            return
        lanes = [one for one in Lane if lane in (None, "", one)]
        if verb == ControlVerb.PAUSE:
            self._paused.update(lanes)
        elif verb == ControlVerb.RESUME:
            self._paused.difference_update(lanes)
            self._room_changed.set()
        elif verb == ControlVerb.DRAIN and int(entry_id.partition("-")[0]) > self._started_at_ms:
            self.drain()  # an old drain was meant for an old process

    def _heartbeat(self) -> dict[WorkerField, Argument]:
        status = "draining" if self._is_draining else "paused" if len(self._paused) == len(Lane) else "ready"
        table = self._table
        return {
            WorkerField.MODEL: self._info.model,
            WorkerField.FINGERPRINT: self._info.fingerprint,
            WorkerField.STATUS: status,
            WorkerField.PID: os.getpid(),
            WorkerField.HOST: socket.gethostname(),
            WorkerField.STARTED_AT_MS: self._started_at_ms,
            WorkerField.BEAT_AT_MS: self._clock.now_ms(),
            WorkerField.NUM_JOBS: len(table.held),
            WorkerField.NUM_PARKED: len(table.parked),
            WorkerField.NUM_FINISHED: table.num_finished,
            **engine_fields(self._engine.engine.stats()),
        }

    def _check_progress(self) -> None:
        """A step that hangs ends the process: its jobs are worth more elsewhere than a heartbeat that lies."""
        stalled_s = self._engine.seconds_without_progress()
        if stalled_s > self._config.stall_s:
            log.error("no step ended for %.1f s with work waiting: %s", stalled_s, self._engine.engine.stats())
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            self._end(EXIT_STALLED)

    async def _trim(self) -> None:
        """Lifetimes of the two shared streams."""
        now_ms = self._clock.now_ms()
        for stream, ttl_s in ((self._keys.cancel, CANCEL_STREAM_TTL_S), (self._keys.ctl, CTL_STREAM_TTL_S)):
            await self._lease_client.call("XTRIM", stream, "MINID", "~", f"{int(now_ms - ttl_s * 1e3)}-0")


def _text_fields(flat: list[bytes]) -> dict[str, str]:
    return {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in zip(flat[::2], flat[1::2], strict=False)
    }


def run_worker(
    config: WorkerConfig,
    make_engine: Callable[[], Engine],
    model_dir: Path | None,
    *,
    on_ready: Callable[[], None] | None = None,
    on_exit: Callable[[], None] = lambda: None,
) -> int:
    """Make the engine, serve, return the exit code. model_dir None: the scripted engine, whose ids are bytes.

    The first SIGTERM or SIGINT drains, the second ends the process at once. Raises QueueError if there is no server
    and we may not wait, and whatever the engine's making raises. on_exit is called where the process ends in here.
    """
    # The loop gives the GIL up at every system call and must win it back from the engine thread: 5 ms each at the
    # default interval, when steps are pure Python. Torch releases it by itself.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    code = asyncio.run(_run(config, make_engine, model_dir, on_ready, on_exit))
    if code in (EXIT_STALLED, EXIT_ENGINE):
        on_exit()
        sys.stderr.flush()
        os._exit(code)  # a thread may hang inside the engine; an ordinary exit would wait for it
    return code


async def _run(
    config: WorkerConfig,
    make_engine: Callable[[], Engine],
    model_dir: Path | None,
    on_ready: Callable[[], None] | None,
    on_exit: Callable[[], None],
) -> int:
    loop = asyncio.get_running_loop()
    worker: Worker | None = None
    num_signals = 0

    def on_signal() -> None:
        nonlocal num_signals
        num_signals += 1
        if worker is None or num_signals > 1:
            log.warning("leaving now; held jobs, if any, are taken over when our lease ends")
            on_exit()
            os._exit(EXIT_NOW)
        worker.drain()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    worker = Worker(config, await make_parts(config, make_engine, model_dir), on_ready=on_ready)
    return await worker.run()
