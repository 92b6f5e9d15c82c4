"""Real processes for tests of the queue: a server, workers with the scripted engine, and a follower that checks all."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis

from gewell.embedded import EmbeddedServer
from gewell.engine.scripted import EOS_ID, scripted_token
from gewell.protocol import (
    TERMINAL_STATES,
    Chunk,
    End,
    EntryId,
    Fence,
    FinalRecord,
    Keys,
    Restart,
    job_entry,
    parse_entry,
)

LEASE_S = 0.6  # short, so that a take-over takes a test no longer than it must


def wait_for(condition: Callable[[], Any], *, timeout_s: float = 20.0, what: str = "condition") -> Any:
    """The condition's first true value. Fails loudly after the timeout."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.005)
    raise AssertionError(f"{what}: not within {timeout_s:g} s")


def expected_ids(prompt: bytes, seed: int, num_tokens: int, *, eos_odds: int = 0) -> list[int]:
    """What the scripted engine answers, from its rule alone."""
    ids, last = [], prompt[-1]
    for idx in range(num_tokens):
        last = scripted_token(seed, len(prompt) + idx, last, eos_odds=eos_odds)
        ids.append(last)
        if last == EOS_ID:
            break
    return ids


class WorkerProcess:
    def __init__(self, url: str, ns: str, log_path: Path, *args: str, **environment: str) -> None:
        self.log_path = log_path
        self._log = log_path.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gewell_workers", "--redis", url, "--ns", ns, "--model", "scripted", *args],
            env=os.environ | environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, f"the worker ended at start:\n{self.log}"
            return "ready after" in self.log.replace("server ready", "")

        wait_for(lambda: is_ready() and "send a job" in self.log, what="worker ready")

    def kill(self) -> None:
        """SIGKILL of the worker alone: its output process is left an orphan, as the kernel's OOM killer would do."""
        self.process.kill()
        self.process.wait()

    def kill_group(self) -> None:
        """SIGKILL of the worker with its output process, as a machine's end would do."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def pause(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def stop(self, timeout_s: float = 30.0) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(timeout_s)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.resume()
        self.kill_group()  # also the output process of a worker that is dead already
        self._log.close()


class Harness:
    """One namespace on one server, and the workers of one test."""

    def __init__(self, server: EmbeddedServer, ns: str, folder: Path) -> None:
        self.server = server
        self.ns = ns
        self.keys = Keys(ns)
        self.redis = redis.Redis.from_url(server.url)
        self._folder = folder
        self._workers: list[WorkerProcess] = []
        self.job_ids: set[str] = set()  # all that were submitted

    def start_worker(
        self, *args: str, wait: bool = True, step_s: float = 0.0, traps: bool = False, url: str | None = None
    ) -> WorkerProcess:
        worker = WorkerProcess(
            url or self.server.url,
            self.ns,
            self._folder / f"worker-{len(self._workers)}.log",
            *("--lease-s", str(LEASE_S), *args),
            GEWELL_SCRIPTED_STEP_S=str(step_s),
            GEWELL_SCRIPTED_TRAPS=str(int(traps)),
        )
        self._workers.append(worker)
        if wait:
            worker.wait_until_ready()
        return worker

    def abandon(self) -> None:
        """End the workers and leave the server as it is."""
        for worker in self._workers:
            worker.close()
        self.redis.close()

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        if self.server.is_running():
            for key in self.redis.scan_iter(f"{self.ns}:*"):
                self.redis.delete(key)
        self.redis.close()

    def submit_raw(self, job_id: str, body: bytes | str, lane: str = "normal") -> str:
        self.job_ids.add(job_id)
        return self.redis.xadd(self.keys.jobs(lane), job_entry(job_id, body)).decode()

    def submit(self, job_id: str, prompt: str = "hi", *, lane: str = "normal", job: Any = None, **request: Any) -> str:
        body = {"kind": "completion", "request": {"prompt": prompt, "seed": 7, **request}, **(job or {})}
        return self.submit_raw(job_id, json.dumps(body), lane)

    def plant(self, job_id: str, *, fingerprint: str = "scripted-1", **chunk: Any) -> None:
        """What a worker leaves behind that died after this chunk of a submitted job."""
        ((entry_id, _),) = self.redis.xrange(self.keys.jobs("normal"))
        fields = {"entry": f"normal/{entry_id.decode()}", "seed": 7, "epoch": 1, "state": "running"}
        self.redis.hset(self.keys.job(job_id), mapping=fields | {"digest": "its digest", "fingerprint": fingerprint})
        self.redis.xadd(self.keys.out(job_id), {"fence": "1"}, id="1-0")
        self.redis.xadd(self.keys.out(job_id), {"restart": '{"keep":0}'}, id="1-1")
        self.redis.xadd(self.keys.out(job_id), {"d": json.dumps({"ch": "content", **chunk})}, id="1-2")

    def result(self, job_id: str, timeout_s: float = 20.0) -> FinalRecord:
        raw = wait_for(lambda: self.redis.get(self.keys.res(job_id)), timeout_s=timeout_s, what=f"result of {job_id}")
        return FinalRecord.from_json(raw)

    def state(self, job_id: str) -> str | None:
        value = self.redis.hget(self.keys.job(job_id), "state")
        return value.decode() if value else None

    def num_streamed(self, job_id: str) -> int:
        """Tokens that the job's stream holds now."""
        return sum(len(entry.ids) for _, entry in self.entries(job_id) if isinstance(entry, Chunk))

    def entries(self, job_id: str) -> list[tuple[EntryId, Any]]:
        raw = self.redis.xrange(self.keys.out(job_id))
        return [(EntryId.parse(entry_id), parse_entry(fields)) for entry_id, fields in raw]

    def check_stream(self, job_id: str) -> FinalRecord:
        """Everything a follower relies on, read from the whole stream; returns the record."""
        record = self.result(job_id)
        entries = self.entries(job_id)
        ids, texts = check_entries(entries)
        assert isinstance(entries[-1][1], End)
        assert ids == list(record.token_ids)
        assert texts.get("content", "") == record.text
        assert texts.get("reasoning", "") == record.reasoning
        assert entries[-1][1].state == record.state
        assert entries[-1][0].epoch == record.epoch
        return record

    def check_nothing_left(self) -> None:
        """All jobs have ended. Only keys that the protocol allows remain, with lifetimes; no entry, nothing pending."""
        keys, client, job_ids = self.keys, self.redis, self.job_ids
        mortal = {key(job_id) for job_id in job_ids for key in (keys.job, keys.out, keys.res)}
        lasting = {keys.jobs(lane) for lane in ("high", "normal", "low")} | {
            keys.info,
            keys.dead,
            keys.cancel,
            keys.ctl,
        }
        found = {key.decode() for key in client.scan_iter(f"{self.ns}:*")}
        prefixes = (f"{self.ns}:worker:", f"{self.ns}:inbox:", f"{self.ns}:cancel:")
        for key in found - lasting:
            assert key in mortal or key.startswith(prefixes), f"{key} is not a key of the protocol or of these jobs"
            assert client.pttl(key) > 0, f"{key} lives for ever"
        for lane in ("high", "normal", "low"):
            assert client.xlen(keys.jobs(lane)) == 0
            assert client.xpending(keys.jobs(lane), "gpu")["pending"] == 0
        for job_id in job_ids:
            assert self.state(job_id) in TERMINAL_STATES


def check_entries(entries: list[tuple[EntryId, Any]]) -> tuple[list[int], dict[str, str]]:
    """Ids increase without a gap inside an epoch, every epoch opens with fence and restart; returns the sum.

    Only a stream that the server had lost may begin anew in mid-epoch, with a restart that keeps nothing.
    """
    ids: list[int] = []
    texts: dict[str, str] = {}
    last: EntryId | None = None
    for entry_id, entry in entries:
        assert last is None or entry_id > last, f"{last} is followed by {entry_id}"
        if isinstance(entry, Restart) and entry_id.seq > 1:
            assert entry.keep == 0, f"{entry_id} keeps {entry.keep} in mid-epoch"
        elif last is None or entry_id.epoch != last.epoch:
            assert entry_id.seq == 0, f"epoch {entry_id.epoch} opens with {entry_id}, after {last}"
            assert isinstance(entry, Fence)
        else:
            assert entry_id.is_next_after(last), f"{last} is followed by {entry_id}"
        if isinstance(entry, Restart):
            if entry.keep < len(ids):
                ids, texts = [], {}
            assert entry.keep == len(ids), f"{entry_id} keeps {entry.keep} of {len(ids)}"
        if isinstance(entry, Chunk):
            ids.extend(entry.ids)
            texts[entry.channel] = texts.get(entry.channel, "") + entry.text
        last = entry_id
    return ids, texts


class Follower:
    """Reads `ev` with `out` as its backing, as the protocol tells followers to, and keeps what it was shown."""

    def __init__(self, harness: Harness, job_id: str) -> None:
        self._harness = harness
        self._job_id = job_id
        self.entries: list[tuple[EntryId, Any]] = []
        self._pubsub = harness.redis.pubsub()
        self._pubsub.subscribe(harness.keys.ev(job_id))

    def run(self, timeout_s: float = 20.0) -> list[tuple[EntryId, Any]]:
        deadline = time.monotonic() + timeout_s
        for entry in self._items(deadline):
            self.entries.append(entry)
            if isinstance(entry[1], End):
                return self.entries
        raise AssertionError(f"no end of {self._job_id} in {timeout_s:g} s; last {self.entries[-1:]}")

    def _items(self, deadline: float) -> Iterator[tuple[EntryId, Any]]:
        from gewell.protocol import parse_message

        while time.monotonic() < deadline:
            yield from self._range()
            message = self._pubsub.get_message(ignore_subscribe_messages=True, timeout=0.2)
            while message is not None:
                entry = parse_message(message["data"])
                last = self.entries[-1][0] if self.entries else None
                if last is not None and entry[0].is_next_after(last):
                    yield entry
                elif last is None or entry[0] > last:
                    break
                message = self._pubsub.get_message(ignore_subscribe_messages=True, timeout=0.2)

    def _range(self) -> Iterator[tuple[EntryId, Any]]:
        start = f"({self.entries[-1][0]}" if self.entries else "-"
        for entry_id, fields in self._harness.redis.xrange(self._harness.keys.out(self._job_id), start, "+"):
            yield EntryId.parse(entry_id), parse_entry(fields)
