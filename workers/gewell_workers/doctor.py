"""What is wrong with a queue, and what to do about it: looked up, not guessed."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from redis.exceptions import NoPermissionError

from gewell.protocol import GROUP, HANDBACK_CONSUMER, InfoField, Keys, Lane, WorkerField
from gewell_workers.promise import MIN_REDIS, PROMISES

_MAX_SKEW_MS = 1_000.0
_SLOW_RTT_MS = 20.0  # a decode step of a large model
_MIN_MEMORY_LEFT = 0.2  # share of maxmemory


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    verdict: Verdict
    name: str
    text: str
    remedy: str = ""


# What each role's user must be able to do, as commands for ACL DRYRUN; {ns} is filled in.
_WORKER_NEEDS = (
    ("XREADGROUP", "GROUP", GROUP, "w", "STREAMS", "{ns}:jobs:normal", ">"),
    ("XCLAIM", "{ns}:jobs:normal", GROUP, "w", "0", "1-1"),
    ("XADD", "{ns}:out:x", "1-0", "fence", "1"),
    ("WATCH", "{ns}:job:x"),
    ("PUBLISH", "{ns}:ev:x", "x"),
)


def examine(client: Any, keys: Keys) -> Iterator[Finding]:
    """All findings, most basic first. Raises RedisError only when the server is gone."""
    for check in _CHECKS:
        try:
            yield from check(client, keys)
        except NoPermissionError as error:
            yield Finding(verdict=Verdict.WARN, name=_name(check), text=f"not allowed to look: {error}")


def _name(check: Callable[..., Any]) -> str:
    return check.__name__.strip("_").replace("_", " ")


def _server(client: Any, keys: Keys) -> Iterator[Finding]:
    start_s = time.perf_counter()
    client.ping()
    rtt_ms = (time.perf_counter() - start_s) * 1e3
    info = client.info("server")
    version = tuple(int(part) for part in info["redis_version"].split(".")[:2])
    name = info.get("server_name", "redis")
    shown = f"{name} {info.get(f'{name}_version', info['redis_version'])}, round trip {rtt_ms:.2f} ms"
    if version < MIN_REDIS:
        yield Finding(verdict=Verdict.FAIL, name="server", text=shown, remedy="6.2 or later is needed")
    else:
        slow = rtt_ms > _SLOW_RTT_MS
        remedy = "every token waits for round trips: move the server closer" if slow else ""
        yield Finding(verdict=Verdict.WARN if slow else Verdict.OK, name="server", text=shown, remedy=remedy)


def _persistence(client: Any, keys: Keys) -> Iterator[Finding]:
    found = client.config_get("appendonly") | client.config_get("appendfsync")
    promise = "none" if found.get("appendonly") != "yes" else found.get("appendfsync", "everysec")
    promise = promise if promise in PROMISES else "everysec"
    verdict = {"always": Verdict.OK, "everysec": Verdict.OK}.get(promise, Verdict.FAIL)
    remedy = "" if verdict is Verdict.OK else "CONFIG SET appendonly yes"
    yield Finding(verdict=verdict, name="persistence", text=PROMISES[promise], remedy=remedy)
    state = client.info("persistence")
    if state.get("aof_last_write_status", "ok") != "ok":
        yield Finding(
            verdict=Verdict.FAIL, name="persistence", text="the last write failed", remedy="look at the server's disk"
        )


def _memory(client: Any, keys: Keys) -> Iterator[Finding]:
    policy = client.config_get("maxmemory-policy").get("maxmemory-policy")
    limit, used = client.info("memory").get("maxmemory", 0), client.info("memory")["used_memory"]
    if policy != "noeviction":
        yield Finding(
            verdict=Verdict.FAIL,
            name="eviction",
            text=f"maxmemory-policy is {policy}: a full server throws jobs away",
            remedy="CONFIG SET maxmemory-policy noeviction",
        )
    else:
        yield Finding(verdict=Verdict.OK, name="eviction", text="noeviction")
    if limit:
        left = 1 - used / limit
        low = left < _MIN_MEMORY_LEFT
        text = f"{used / 2**20:,.0f} of {limit / 2**20:,.0f} MiB used"
        remedy = "raise maxmemory, or let readers delete their inbox entries" if low else ""
        yield Finding(verdict=Verdict.WARN if low else Verdict.OK, name="memory", text=text, remedy=remedy)
    else:
        yield Finding(verdict=Verdict.OK, name="memory", text=f"{used / 2**20:,.0f} MiB used, no limit set")


def _clock(client: Any, keys: Keys) -> Iterator[Finding]:
    before_s = time.time()
    seconds, micros = client.time()
    skew_ms = (seconds + micros / 1e6 - (before_s + time.time()) / 2) * 1e3
    far = abs(skew_ms) > _MAX_SKEW_MS
    remedy = "deadlines follow the server's clock: run NTP on both" if far else ""
    yield Finding(
        verdict=Verdict.WARN if far else Verdict.OK, name="clock", text=f"differs by {skew_ms:+.0f} ms", remedy=remedy
    )


def _workers(client: Any, keys: Keys) -> Iterator[Finding]:
    names = list(client.scan_iter(keys.workers_pattern, count=1_000))
    if not names:
        yield Finding(verdict=Verdict.FAIL, name="workers", text="none is alive", remedy="gewell up")
    for name in names:
        fields = {field.decode(): value.decode() for field, value in client.hgetall(name).items()}
        status = fields.get(WorkerField.STATUS, "?")
        text = (
            f"{name.decode().rpartition(':')[2]}: {status}, {fields.get(WorkerField.MODEL)}, "
            f"{fields.get(WorkerField.NUM_RUNNING)} rows, {fields.get(WorkerField.NUM_JOBS)} jobs held"
        )
        yield Finding(verdict=Verdict.OK if status == "ready" else Verdict.WARN, name="worker", text=text)


def _lanes(client: Any, keys: Keys) -> Iterator[Finding]:
    max_len = int(client.hget(keys.info, InfoField.MAX_QUEUE_LEN) or 0)
    now_ms = client.time()[0] * 1_000
    for lane in Lane:
        stream = keys.jobs(lane)
        if not client.exists(stream):
            yield Finding(verdict=Verdict.WARN, name=f"lane {lane}", text="not there yet", remedy="gewell up makes it")
            continue
        length, first = client.xlen(stream), client.xrange(stream, count=1)
        age_s = (now_ms - int(first[0][0].partition(b"-")[0])) / 1e3 if first else 0.0
        groups = {group["name"]: group for group in client.xinfo_groups(stream)}
        text = f"{length:,} entries, the oldest {max(0.0, age_s):,.0f} s old"
        if GROUP.encode() not in groups:
            yield Finding(
                verdict=Verdict.FAIL,
                name=f"lane {lane}",
                text=f"{text}; no group {GROUP}",
                remedy="a running worker makes it again",
            )
            continue
        full = bool(max_len) and length >= max_len
        remedy = f"max_queue_len is {max_len:,}: clients hold back" if full else ""
        yield Finding(verdict=Verdict.WARN if full else Verdict.OK, name=f"lane {lane}", text=text, remedy=remedy)
        yield from _consumers(client, keys, lane)


def _consumers(client: Any, keys: Keys, lane: Lane) -> Iterator[Finding]:
    for consumer in client.xinfo_consumers(keys.jobs(lane), GROUP):
        name, pending = consumer["name"].decode(), consumer["pending"]
        if not pending or client.exists(keys.heartbeat_of(name)):
            continue
        what = "handed back" if name == HANDBACK_CONSUMER else f"with dead worker {name}"
        yield Finding(
            verdict=Verdict.WARN,
            name=f"lane {lane}",
            text=f"{pending} jobs {what}",
            remedy="a living worker takes them over within seconds; else start one",
        )


def _dead_letters(client: Any, keys: Keys) -> Iterator[Finding]:
    count = client.xlen(keys.dead)
    remedy = "gewell dead list" if count else ""
    yield Finding(verdict=Verdict.WARN if count else Verdict.OK, name="dead letters", text=f"{count:,}", remedy=remedy)


def _rights(client: Any, keys: Keys) -> Iterator[Finding]:
    """Whether the user we are could be a worker. Needs ACL DRYRUN (server 7 and later, and the right to ask)."""
    user = client.acl_whoami()
    user = user.decode() if isinstance(user, bytes) else user
    for command in _WORKER_NEEDS:
        answer = client.execute_command("ACL", "DRYRUN", user, *[part.format(ns=keys.ns) for part in command])
        if answer not in (b"OK", "OK"):
            text = answer.decode() if isinstance(answer, bytes) else str(answer)
            yield Finding(verdict=Verdict.OK, name="rights", text=f"{user} could not be a worker: {text}")
            return
    yield Finding(verdict=Verdict.OK, name="rights", text=f"{user} may do what a worker does")


_CHECKS = (_server, _persistence, _memory, _clock, _workers, _lanes, _dead_letters, _rights)
