"""The thread that owns the engine. It never waits for Redis, never tokenises, never formats JSON."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from gewell.engine.api import Engine, EngineRequest, Event
from gewell.engine.scoring import ScoringEngine

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.2  # the longest sleep without work; every command wakes the thread at once


class EngineThread:
    """Steps the engine while it has work and hands events to the asyncio loop.

    on_events(events)     called in the loop with the events of one or more steps, in order
    on_started(ids)       called in the loop with requests whose first step is about to be launched
    on_failure(error)     called in the loop when a step raised: the engine cannot go on
    """

    def __init__(
        self,
        engine: Engine,
        on_events: Callable[[list[Event]], None],
        on_started: Callable[[list[str]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.engine: Engine = ScoringEngine(engine)
        self._on_events = on_events
        self._on_started = on_started
        self._on_failure = on_failure
        self.engine.on_started = self._note_started
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._drain_is_due = False
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._last_progress_s = time.monotonic()

    def start(self) -> None:
        self._thread.start()

    def add(self, request: EngineRequest) -> None:
        self.engine.add(request)
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        self.engine.cancel(request_id)
        self._wake.set()

    def finish(self, request_id: str, num_output_tokens: int) -> None:
        self.engine.finish(request_id, num_output_tokens)
        self._wake.set()

    def seconds_without_progress(self) -> float:
        """How long ago a step ended, or the thread found no work. Grows while a step hangs."""
        return time.monotonic() - self._last_progress_s

    def stop(self, timeout_s: float) -> bool:
        """Stop after the current step. False if that did not end in time."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping:
                if self.engine.has_work():
                    events = self.engine.step()
                    self._last_progress_s = time.monotonic()
                    if events:
                        self._hand_over(events)
                else:
                    self._last_progress_s = time.monotonic()
                    self._wake.wait(_IDLE_WAIT_S)
                    self._wake.clear()
        except BaseException as error:  # whatever it was, the loop must know: it ends the process
            self._call_in_loop(self._on_failure, error)

    def _note_started(self, request_ids: Sequence[str]) -> None:
        """Before the step that may kill us: who dies in the batch is counted, who waits is not."""
        self._call_in_loop(self._on_started, list(request_ids))

    def _hand_over(self, events: Sequence[Event]) -> None:
        self._events.extend(events)
        if not self._drain_is_due:  # cleared before draining, so nothing is added unseen
            self._drain_is_due = True
            self._call_in_loop(self._drain)

    def _drain(self) -> None:
        self._drain_is_due = False
        events = []
        while self._events:
            events.append(self._events.popleft())
        if events:
            self._on_events(events)

    def _call_in_loop(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            log.warning("engine: the loop is closed, events are dropped")
