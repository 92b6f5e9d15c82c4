"""How to reach Redis, how long to wait for it, and what its errors mean for a producer. Shared by both clients."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, OutOfMemoryError, ReadOnlyError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from gewell.errors import InvalidRequest, NoWorker, QueueError
from gewell.protocol import CANCEL_STREAM_TTL_S, CancelKind, ErrorCode, check_id
from gewell.redis_url import shown_url
from gewell_producers.errors import Unreachable

# The link is gone, or the server cannot serve just now: the same command may succeed later. All of ours are idempotent.
LINK_ERRORS = (RedisConnectionError, RedisTimeoutError, BusyLoadingError, ConnectionError)
LATER_ERRORS = (OutOfMemoryError, ReadOnlyError)

SOCKET_TIMEOUT_S = 20.0  # above every blocking read of ours
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.02, 1.0
SILENCE_S = 1.0  # a follower that hears nothing for so long reads the stream
RANGE_ROWS = 512
ROOM_CHECK_S = 1.0  # how long a look at the queue's length stays good
FULL_POLL_S = 0.2
SWEEP_S = 30.0  # an inbox silent for so long is not trusted: look at the results themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a client waits for what is missing before it says so. None: for ever.

    connect_s     the first connection; short, because a wrong address does not heal
    reconnect_s   a connection that was lost
    no_worker_s   a live worker while a job of ours waits: a restart with a large model takes a while
    queue_full_s  room in the queue
    """

    connect_s: float | None = 3.0
    reconnect_s: float | None = 120.0
    no_worker_s: float | None = 60.0
    queue_full_s: float | None = None


def connection_options(url: str, retry: type[Retry] | type[AsyncRetry]) -> dict[str, Any]:
    """Options for both redis clients. Retries are ours: a retry inside the library would hide a gap from a follower."""
    options = {
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": 5.0,
        "retry": retry(NoBackoff(), 0),
        "decode_responses": False,
    }
    # Connections over a unix socket do not know keepalive, and the blocking ones refuse to be told.
    return options if url.startswith("unix://") else options | {"socket_keepalive": True}


class Backoff:
    """One outage. `failed` returns the seconds to wait, or raises when patience is over; `ok` ends the outage."""

    def __init__(self, url: str, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = shown_url(url)
        self._patience = patience
        self._clock = clock
        self._was_connected = False
        self._down_since: float | None = None
        self._delay_s = FIRST_BACKOFF_S

    def ok(self) -> None:
        self._was_connected = True
        self._down_since = None
        self._delay_s = FIRST_BACKOFF_S

    def failed(self, error: Exception) -> float:
        now = self._clock()
        if self._down_since is None:
            self._down_since = now
        limit_s = self._patience.reconnect_s if self._was_connected else self._patience.connect_s
        if limit_s is not None and now - self._down_since >= limit_s:
            waited = f"after {limit_s:g} s" if self._was_connected else "(is it running? `gewell up` starts one)"
            raise Unreachable(f"no Redis at {self._url} {waited}: {error}") from error
        delay_s, self._delay_s = self._delay_s, min(self._delay_s * 2, LAST_BACKOFF_S)
        return delay_s


def refused(error: RedisError) -> QueueError:
    """The server's answer to a command of ours that no repetition will change."""
    return QueueError(f"Redis refused a command: {error}")


def acknowledged_ids(answers: Sequence[Any]) -> list[bytes]:
    """Entry ids of a pipeline of XADDs up to the first refusal; raises the refusal when it is the first answer."""
    ids: list[bytes] = []
    for answer in answers:
        if isinstance(answer, Exception):
            if not ids:
                raise answer
            break
        ids.append(answer)
    return ids


def as_text(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in fields.items()}


def cancel_entry(job_id: str | None, conversation: str | None, tenant: str | None) -> dict[Any, Any]:
    """Fields of an entry of the cancel stream."""
    given = {CancelKind.ID: job_id, CancelKind.CONVERSATION: conversation, CancelKind.TENANT: tenant}
    named = {str(kind): check_id(value, kind) for kind, value in given.items() if value is not None}
    if len(named) != 1:
        raise InvalidRequest(
            ErrorCode.INVALID_REQUEST,
            f"cancel: {len(named)} of job id, conversation and tenant given; exactly one is needed",
        )
    return named


def oldest_cancel_id() -> int:
    """Entries of the cancel stream before this one are trimmed."""
    return int((time.time() - CANCEL_STREAM_TTL_S) * 1000)


class WorkerWatch:
    """Decides when waiting has become pointless. Ask `is_due`, then report what was seen.

    tell   hears one line when the last worker is gone, and one when a worker is there again
    """

    PERIOD_S = 2.0

    def __init__(
        self,
        url: str,
        ns: str,
        patience: Patience,
        *,
        tell: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._where = f"namespace {ns!r} at {shown_url(url)}"
        self._limit_s = patience.no_worker_s
        self._tell = tell
        self._clock = clock
        self._alone_since: float | None = None
        self._next_look = 0.0

    def is_due(self) -> bool:
        return (self._limit_s is not None or self._tell is not None) and self._clock() >= self._next_look

    def saw(self, num_workers: int) -> None:
        now = self._clock()
        self._next_look = now + self.PERIOD_S
        if num_workers:
            if self._alone_since is not None and self._tell is not None:
                self._tell("a worker is there again")
            self._alone_since = None
            return
        if self._alone_since is None:
            self._alone_since = now
            if self._tell is not None:
                limit = "" if self._limit_s is None else f" for {self._limit_s:g} s"
                self._tell(f"no worker is alive in {self._where}; waiting for one{limit}: `gewell up` starts it")
        if self._limit_s is not None and now - self._alone_since >= self._limit_s:
            raise self.no_worker()

    def no_worker(self) -> NoWorker:
        return NoWorker(f"no worker serves {self._where}; start one with `gewell up`")
