"""Chaos: producers, followers, workers and a server, each a process of its own, under random faults.

    python tests/workers/chaos.py --jobs 20000 --faults 1000 --seed 1

Afterwards every accepted job must have ended once and rightly: done jobs hold exactly the scripted engine's tokens,
streams join to their records, and no key is left that the protocol does not allow. What the faults will be, and which
job is sent as what, follows from the seed, so a failing run is repeated by naming it.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from harness import LEASE_S, Harness, WorkerProcess, check_entries, expected_ids

from gewell.embedded import EmbeddedServer, Persistence
from gewell.protocol import (
    GROUP,
    TERMINAL_STATES,
    End,
    EntryId,
    FinalRecord,
    Keys,
    Lane,
    State,
    job_entry,
    parse_entry,
    parse_message,
)

LINK_ERRORS = (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError, ConnectionError)
STEP_S = 0.002
MAX_TOKENS = 40
_FOLLOW_S = 150.0  # a job may change its worker many times here
_EVERYSEC_MS = 3_000  # the server syncs every second, and postpones a write while a sync is under way, up to 2 s


# --- jobs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Job number idx of a run. `kind` says how it may end."""

    job_id: str
    lane: str
    body: str
    kind: str
    prompt: bytes
    seed: int
    num_tokens: int
    is_sent_twice: bool

    def expected(self) -> list[int]:
        return expected_ids(self.prompt, self.seed, self.num_tokens)


def spec_of(run_seed: int, idx: int) -> Spec:
    rng = random.Random(f"{run_seed}/{idx}")
    kind = rng.choices(["plain", "stop", "quiet", "bad", "late", "soon"], [80, 6, 5, 4, 2, 3])[0]
    prompt = bytes(rng.choices(range(97, 123), k=rng.randint(1, 60)))
    seed, num_tokens = rng.randrange(2**63), rng.randint(1, MAX_TOKENS)
    request: dict[str, Any] = {"prompt": prompt.decode(), "max_tokens": num_tokens, "seed": seed}
    body: dict[str, Any] = {"kind": "completion", "request": request, "metadata": {"idx": idx}, "max_crashes": 100}
    if rng.random() < 0.2:
        body["reply_to"] = f"audit-{idx % 8}"
    if rng.random() < 0.1:
        request["logprobs"] = 1
    if kind == "stop":
        ids = bytes(expected_ids(prompt, seed, num_tokens))
        at = rng.randrange(len(ids))
        request["stop"] = [ids[at : at + 2].decode()]
    elif kind == "quiet":
        body["stream"] = False
    elif kind == "bad":
        request["temperature"] = rng.choice(["hot", -1, None, [1]]) or "cold"
    elif kind == "late":
        body["deadline_ms"] = 1
    elif kind == "soon":
        body["not_before_ms"] = int(time.time() * 1e3) + rng.randint(0, 500)
    return Spec(
        job_id=f"job-{idx}",
        lane=rng.choice(["high", "normal", "low"]),
        body=json.dumps(body),
        kind=kind,
        prompt=prompt,
        seed=seed,
        num_tokens=num_tokens,
        is_sent_twice=rng.random() < 0.03,
    )


# --- producer: a process ----------------------------------------------------------------------------------------------


def produce(url: str, ns: str, run_seed: int, first: int, count: int, per_second: float) -> None:
    """Send jobs; whatever has no acknowledgement is sent again under its id. Prints each accepted id."""
    client, keys = redis.Redis.from_url(url, socket_timeout=3), Keys(ns)
    batch = 20
    for start in range(first, first + count, batch):
        specs = [spec_of(run_seed, idx) for idx in range(start, min(start + batch, first + count))]
        while True:
            pipeline = client.pipeline(transaction=False)
            for spec in specs:
                for _ in range(2 if spec.is_sent_twice else 1):
                    pipeline.xadd(keys.jobs(spec.lane), job_entry(spec.job_id, spec.body))
            try:
                pipeline.execute()
                break
            except (*LINK_ERRORS, redis.ResponseError):  # the server is full, loading or gone
                time.sleep(0.1)
        print(int(time.time() * 1e3), *(spec.job_id for spec in specs), flush=True)
        time.sleep(batch / per_second)


# --- follower: a process ----------------------------------------------------------------------------------------------


class CutFollower:
    """Follows one job as the protocol says, its connection cut every so many chunks; checks what it is shown."""

    def __init__(self, url: str, keys: Keys, job_id: str, rng: random.Random) -> None:
        self._url, self._keys, self._job_id, self._rng = url, keys, job_id, rng
        self.entries: list[tuple[EntryId, Any]] = []

    def run(self, timeout_s: float) -> bool:
        """True when the end was seen; raises AssertionError when something was wrong."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(*LINK_ERRORS):
                client = redis.Redis.from_url(self._url, socket_timeout=3)
                with contextlib.closing(client), client.pubsub(ignore_subscribe_messages=True) as events:
                    events.subscribe(self._keys.ev(self._job_id))
                    if self._follow(client, events, deadline):
                        check_entries(self.entries)
                        return True
            time.sleep(0.02)
        return False

    def _follow(self, client: Any, events: Any, deadline: float) -> bool:
        left = self._rng.randint(1, 300)
        self._read_range(client)
        while time.monotonic() < deadline and left > 0:
            if self.entries and isinstance(self.entries[-1][1], End):
                return True
            message = events.get_message(timeout=1.0)
            if message is None:
                self._read_range(client)
                continue
            left -= 1
            entry = parse_message(message["data"])
            last = self.entries[-1][0] if self.entries else None
            if last is not None and entry[0].is_next_after(last):
                self.entries.append(entry)
            elif last is None or entry[0] > last:
                self._read_range(client)
        return False

    def _read_range(self, client: Any) -> None:
        start = f"({self.entries[-1][0]}" if self.entries else "-"
        for entry_id, fields in client.xrange(self._keys.out(self._job_id), start, "+"):
            self.entries.append((EntryId.parse(entry_id), parse_entry(fields)))


def follow(url: str, ns: str, run_seed: int, number: int, num_jobs: int) -> None:
    """Follow random jobs, one after the other, until told to stop. Prints one line a job that was seen to its end."""
    keys, rng = Keys(ns), random.Random(f"{run_seed}/follower/{number}")
    client = redis.Redis.from_url(url, socket_timeout=3)
    while True:
        job_id = f"job-{rng.randrange(num_jobs)}"
        try:
            known = client.exists(keys.job(job_id))
        except LINK_ERRORS:
            known = False
        if not known:
            time.sleep(0.005)
            continue
        follower = CutFollower(url, keys, job_id, rng)
        if not follower.run(timeout_s=_FOLLOW_S):
            print(f"WRONG {job_id}: no end in {_FOLLOW_S:g} s, last {follower.entries[-1:]}", flush=True)
            continue
        raw = None
        while raw is None:
            with contextlib.suppress(*LINK_ERRORS):
                raw = client.get(keys.res(job_id))
        record = FinalRecord.from_json(raw)
        ids, texts = check_entries(follower.entries)
        if ids != list(record.token_ids) or texts.get("content", "") != record.text:
            print(f"WRONG {job_id}: shown {ids} {texts}, record {record}", flush=True)
        else:
            print(f"ok {job_id}", flush=True)


# --- the world and its faults -----------------------------------------------------------------------------------------


class World:
    """Server, workers, producers, followers. A worker that dies is started again."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.args = args
        self.server = EmbeddedServer(
            folder / "server",
            persistence=Persistence(args.persistence),
            binary=Path(args.binary) if args.binary else None,
        ).start()
        self.harness = Harness(self.server, "chaos", folder)
        self.keys = self.harness.keys
        self.rng = random.Random(args.seed)
        self.workers: list[WorkerProcess] = []
        self.faults: collections.Counter[str] = collections.Counter()
        self.num_lost = 0  # within what the persistence allows
        self._folder = folder
        self._children: list[subprocess.Popen[bytes]] = []
        self._kills_ms: list[int] = []  # of the server

    def start(self) -> None:
        for _ in range(self.args.workers):
            self.workers.append(self._start_worker())
        share = self.args.jobs // self.args.producers
        for number in range(self.args.producers):
            rate = self.args.rate / self.args.producers
            self._child(f"producer-{number}", "produce", str(number * share), str(share), str(rate))
        for number in range(self.args.followers):
            self._child(f"follower-{number}", "follow", str(number), str(self.args.jobs))

    def _start_worker(self) -> WorkerProcess:
        return self.harness.start_worker("--lease-s", "0.5", "--rows", "32", wait=False, step_s=STEP_S)

    def _child(self, name: str, role: str, *args: str) -> None:
        base = [sys.executable, __file__, "--role", role, "--url", self.server.url, "--seed", str(self.args.seed)]
        with (self._folder / f"{name}.out").open("wb") as out:
            self._children.append(subprocess.Popen([*base, *args], stdout=out, stderr=subprocess.STDOUT))

    def lines(self, role: str) -> Iterator[str]:
        for path in sorted(self._folder.glob(f"{role}-*.out")):
            yield from path.read_text().splitlines()

    def accepted(self) -> dict[str, int]:
        """Ids with the time of their acknowledgement, milliseconds."""
        return {job_id: int(line.partition(" ")[0]) for line in self.lines("producer") for job_id in line.split()[1:]}

    def may_be_lost(self, at_ms: int) -> bool:
        """Whether the server may have forgotten what it acknowledged then: `everysec` promises no more."""
        if self.args.persistence == "always":
            return False
        return any(0 <= kill_ms - at_ms + 200 <= _EVERYSEC_MS for kill_ms in self._kills_ms)

    def revive(self) -> None:
        for idx, worker in enumerate(self.workers):
            if worker.process.poll() is not None:
                worker.close()
                self.workers[idx] = self._start_worker()

    def fault(self) -> None:
        faults: dict[str, tuple[int, Callable[[], None]]] = {
            "kill worker": (9, lambda: self._worker().kill()),
            "kill worker and output process": (5, lambda: self._worker().kill_group()),
            "kill output process": (3, self._kill_output),
            "terminate worker": (2, lambda: self._worker().process.terminate()),
            "stop worker": (7, self._stop_worker),
            "kill server": (3, self._restart_server),
            "stall server": (4, self._stall_server),
            "cut connections": (45, self._cut_connections),
            "cancel": (12, self._cancel),
            "lose a stream": (5, self._lose_stream),
            "lose a group": (2, self._lose_group),
            "full memory": (3, self._fill_memory),
        }
        names = list(faults)
        name = self.rng.choices(names, [faults[one][0] for one in names])[0]
        self.faults[name] += 1
        with contextlib.suppress(*LINK_ERRORS, redis.ResponseError, FileNotFoundError, ProcessLookupError):
            faults[name][1]()

    def _worker(self) -> WorkerProcess:
        return self.rng.choice(self.workers)

    def _kill_output(self) -> None:
        pid = self._worker().process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)

    def _stop_worker(self) -> None:
        worker = self._worker()
        if worker.process.poll() is None:
            worker.pause()
            time.sleep(self.rng.uniform(0.1, 3 * LEASE_S))
            with contextlib.suppress(ProcessLookupError):
                worker.resume()

    def _restart_server(self) -> None:
        self._kills_ms.append(int(time.time() * 1e3))
        self.server.kill()
        time.sleep(self.rng.uniform(0, 0.5))
        self.server.start()

    def _stall_server(self) -> None:
        self.server.pause()
        time.sleep(self.rng.uniform(0.05, 1.0))
        self.server.resume()

    def _cut_connections(self) -> None:
        """One connection of a worker: what it had sent may or may not have been carried out."""
        clients = [c for c in self.harness.redis.client_list() if c["name"].count("-") >= 2]
        if clients:
            self.harness.redis.client_kill_filter(_id=self.rng.choice(clients)["id"])

    def _cancel(self) -> None:
        job_id = self._running()
        if job_id is not None:
            self.harness.redis.xadd(self.keys.cancel, {"id": job_id})

    def _running(self) -> str | None:
        lane = self.rng.choice(list(Lane))
        pending = self.harness.redis.xpending_range(self.keys.jobs(lane), GROUP, "-", "+", 50)
        if not pending:
            return None
        entry = self.harness.redis.xrange(self.keys.jobs(lane), self.rng.choice(pending)["message_id"], count=1)
        return entry[0][1][b"id"].decode() if entry else None

    def _lose_stream(self) -> None:
        job_id = self._running()
        if job_id is not None and self.harness.state(job_id) == State.RUNNING:
            self.harness.redis.delete(self.keys.out(job_id))

    def _lose_group(self) -> None:
        self.harness.redis.xgroup_destroy(self.keys.jobs(self.rng.choice(list(Lane))), GROUP)

    def _fill_memory(self) -> None:
        self.harness.redis.config_set("maxmemory", "1mb")
        time.sleep(self.rng.uniform(0.1, 1.0))
        self.harness.redis.config_set("maxmemory", "0")

    def num_behind(self, target: float) -> int:
        """How many jobs are missing to so many finished ones. An entry lives until its job is finished."""
        with contextlib.suppress(*LINK_ERRORS):
            waiting = sum(self.harness.redis.xlen(self.keys.jobs(lane)) for lane in Lane)
            return max(0, int(target) - (len(self.accepted()) - waiting))
        return 0

    def num_finished(self) -> int:
        with contextlib.suppress(*LINK_ERRORS):
            return sum(1 for _ in self.harness.redis.scan_iter(f"{self.keys.ns}:res:*", count=5_000))
        return -1

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()
        self.harness.close()
        self.server.stop()


# --- running and judging ----------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> list[str]:
    """One run; returns everything that was wrong."""
    print(f"seed {args.seed}, {args.jobs} jobs, {args.faults} faults, persistence {args.persistence}", flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        world = World(Path(args.keep or folder), args)
        try:
            world.start()
            started_s = time.monotonic()
            _inject(world)
            wrong = _settle(world)
            wrong += judge(world)
            print(f"faults: {dict(world.faults)}; {time.monotonic() - started_s:.0f} s", flush=True)
            return wrong
        finally:
            world.close()


def _inject(world: World) -> None:
    """Faults in step with the jobs that end, so that a slow machine gets no more of them a job than a fast one."""
    args, deadline = world.args, time.monotonic() + world.args.timeout_s
    for idx in range(args.faults):
        target = args.jobs * idx / args.faults * 0.9
        patience = time.monotonic() + 15.0
        while world.num_behind(target) and time.monotonic() < min(patience, deadline):
            world.revive()
            time.sleep(0.05)
        world.revive()
        world.fault()
        time.sleep(world.rng.uniform(0.0, 0.05))
        world.revive()


def _settle(world: World) -> list[str]:
    """Wait until all accepted jobs have ended; then a control job must be served."""
    with contextlib.suppress(*LINK_ERRORS):
        world.harness.redis.config_set("maxmemory", "0")
    deadline = time.monotonic() + 60 + world.args.jobs / 50
    while time.monotonic() < deadline:
        world.revive()
        if len(world.accepted()) == world.args.jobs:
            _send_lost_again(world)
            if world.num_finished() >= world.args.jobs:
                break
        time.sleep(0.2)
    else:
        return [f"only {world.num_finished()} of {len(world.accepted())} accepted jobs ended"]
    world.harness.submit("control", max_tokens=3)
    try:
        world.harness.result("control", timeout_s=30.0)
        # Duplicates that came late are still answered and removed.
        _until(lambda: all(world.harness.redis.xlen(world.keys.jobs(lane)) == 0 for lane in Lane))
    except AssertionError as error:
        return [f"control: {error}"]
    return []


def _send_lost_again(world: World) -> None:
    """Jobs that the server was allowed to forget: their producer would miss them and send them again."""
    waiting = sum(world.harness.redis.xlen(world.keys.jobs(lane)) for lane in Lane)
    if waiting:
        return
    accepted = world.accepted()
    for idx in range(world.args.jobs):
        spec = spec_of(world.args.seed, idx)
        is_known = world.harness.redis.exists(world.keys.job(spec.job_id), world.keys.res(spec.job_id))
        if not is_known and world.may_be_lost(accepted[spec.job_id]):
            world.num_lost += 1
            world.harness.submit_raw(spec.job_id, spec.body, spec.lane)


def _until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def judge(world: World) -> list[str]:
    """Every promise, looked up job by job."""
    wrong = [line for line in world.lines("follower") if not line.startswith("ok ")]
    states: collections.Counter[str] = collections.Counter()
    epochs: collections.Counter[int] = collections.Counter()
    for idx in range(world.args.jobs):
        spec = spec_of(world.args.seed, idx)
        try:
            record = world.harness.check_stream(spec.job_id)
            _check_end(spec, record)
            states[record.state] += 1
            epochs[min(record.epoch, 5)] += 1
        except AssertionError as error:
            wrong.append(f"{spec.job_id} ({spec.kind}): {str(error)[:2_000]}")
    if sum(states.values()) != world.args.jobs:
        wrong.append(f"{world.args.jobs} accepted, {sum(states.values())} right ends: {dict(states)}")
    world.harness.job_ids = {f"job-{idx}" for idx in range(world.args.jobs)} | {"control"}
    try:
        world.harness.check_nothing_left()
    except AssertionError as error:
        wrong.append(f"keys: {str(error)[:2_000]}")
    followed = sum(1 for line in world.lines("follower") if line.startswith("ok "))
    print(f"lost by the server within its promise, and sent again: {world.num_lost}", flush=True)
    print(f"ends: {dict(states)}; epochs: {dict(sorted(epochs.items()))}; streams followed: {followed}", flush=True)
    wrong += _check_inboxes(world)
    return wrong


def _check_end(spec: Spec, record: FinalRecord) -> None:
    ids = list(record.token_ids)
    assert record.state in TERMINAL_STATES
    assert record.metadata == {"idx": int(spec.job_id.partition("-")[2])}
    if record.state == State.CANCELLED:
        assert ids == spec.expected()[: len(ids)]
    elif spec.kind == "bad":
        assert (record.state, record.error and record.error.field) == (State.ERROR, "request.temperature")
    elif spec.kind == "late":
        assert record.state == State.EXPIRED
    elif spec.kind == "stop":
        assert (record.state, record.finish_reason) == (State.DONE, "stop"), record
        assert ids == spec.expected()[: len(ids)]
        assert spec.expected()[len(ids) - 1] == ids[-1]
        (stop,) = json.loads(spec.body)["request"]["stop"]
        whole = bytes(spec.expected()).decode()
        assert record.text == whole[: whole.index(stop)]
    else:
        assert record.state == State.DONE, record
        assert ids == spec.expected()


def _check_inboxes(world: World) -> list[str]:
    """Every job with `reply_to` is there; twice only if it was sent twice or its acknowledgement was lost."""
    seen: collections.Counter[str] = collections.Counter()
    for number in range(8):
        for entry_id, fields in world.harness.redis.xrange(world.keys.inbox(f"audit-{number}")):
            job_id = fields[b"id"].decode()
            seen[job_id] += 1
            if world.may_be_lost(EntryId.parse(entry_id).epoch):
                continue
            if FinalRecord.from_json(fields[b"res"]) != world.harness.result(job_id):
                return [f"inbox: {job_id} got another record"]
    asked = {s.job_id for s in (spec_of(world.args.seed, i) for i in range(world.args.jobs)) if "reply_to" in s.body}
    return [f"inbox: {job_id} is missing" for job_id in sorted(asked - seen.keys())]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--faults", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--producers", type=int, default=2)
    parser.add_argument("--followers", type=int, default=2)
    parser.add_argument("--rate", type=float, default=60.0, help="jobs a second")
    parser.add_argument("--persistence", choices=["always", "everysec"], default="everysec")
    parser.add_argument("--binary", default=None, help="another server than the embedded Valkey")
    parser.add_argument("--timeout-s", type=float, default=900.0)
    parser.add_argument("--keep", default=None, help="a folder for logs and data, kept")
    parser.add_argument("--role", choices=["produce", "follow"], default=None, help=argparse.SUPPRESS)
    parser.add_argument("--url", default=None, help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    args = make_parser().parse_args()
    if args.role == "produce":
        produce(args.url, "chaos", args.seed, int(args.rest[0]), int(args.rest[1]), float(args.rest[2]))
        return 0
    if args.role == "follow":
        follow(args.url, "chaos", args.seed, int(args.rest[0]), int(args.rest[1]))
        return 0
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(10**6)
    args.jobs -= args.jobs % args.producers
    wrong = run(args)
    for line in wrong[:40]:
        print(f"WRONG: {line}")
    print("chaos: " + (f"{len(wrong)} things are wrong, seed {args.seed}" if wrong else "all promises held"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
