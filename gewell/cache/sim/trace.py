"""Job traces: JSONL (gzip or plain), one job a line, in queue order.

    {"t": 0.0, "id": "j17", "conv": "c3" or null, "after": ["j4"], "segments": [["sys-a", 1800], ["c3.u1", 240]],
     "stable": 2040, "out": 410, "hints": {"one_off": true}}

t         earliest second in the queue        after    jobs whose answers this prompt is made from
segments  the prompt as [id, tokens] pieces: equal leading pieces are equal leading tokens
stable    leading tokens that the next turn repeats; equal to the prompt's length: the answer returns verbatim as
          segment "<id>/out"                  out      generated tokens
"""

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gewell.errors import ConfigError


@dataclass(slots=True, eq=False)
class Job:
    """One line of a trace. `expect_after` is derived: the job after whose end the conversation's next turn comes."""

    index: int
    job_id: str
    t: float
    conversation_id: str | None
    after: tuple[str, ...]
    segments: tuple[tuple[str, int], ...]
    stable: int
    out: int
    hints: dict[str, Any]
    prompt: int  # tokens
    expect_after: str | None = None
    dependents: list["Job"] = field(default_factory=list)


@dataclass(slots=True)
class Trace:
    """A trace by name, with its jobs in queue order."""

    name: str
    jobs: list[Job]

    @property
    def prompt_tokens(self) -> int:
        return sum(job.prompt for job in self.jobs)


def load_trace(path: Path) -> Trace:
    """Read and check a trace. Raises ConfigError naming file, line and field."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    except (OSError, EOFError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) and e.strerror else e
        raise ConfigError("trace", str(path), f"cannot be read: {why}") from e
    jobs: list[Job] = []
    known: dict[str, Job] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        job = _parse(line, len(jobs), f"{path.name}:{number}")
        missing = [name for name in job.after if name not in known]
        if missing or job.job_id in known:
            field_name, value = ("after", missing) if missing else ("id", job.job_id)
            raise ConfigError(f"{path.name}:{number} {field_name}", value, "ids are unique, `after` names earlier jobs")
        for name in job.after:
            known[name].dependents.append(job)
        known[job.job_id] = job
        jobs.append(job)
    if not jobs:
        raise ConfigError("trace", str(path), "holds no job")
    _derive_expectations(jobs)
    return Trace(path.name.split(".")[0], jobs)


def trace_from_records(name: str, records: list[dict[str, Any]]) -> Trace:
    """A trace from dicts as `load_trace` would read them, for generators and tests."""
    jobs: list[Job] = []
    known: dict[str, Job] = {}
    for record in records:
        job = _parse(json.dumps(record), len(jobs), f"{name}:{len(jobs) + 1}")
        for earlier in job.after:
            known[earlier].dependents.append(job)
        known[job.job_id] = job
        jobs.append(job)
    _derive_expectations(jobs)
    return Trace(name, jobs)


def _parse(line: str, index: int, where: str) -> Job:
    try:
        raw = json.loads(line)
        segments = tuple((str(name), int(n)) for name, n in raw["segments"])
        job = Job(
            index,
            str(raw["id"]),
            float(raw.get("t", 0.0)),
            raw.get("conv"),
            tuple(dict.fromkeys(raw.get("after", ()))),
            segments,
            int(raw["stable"]),
            int(raw["out"]),
            raw.get("hints") or {},
            sum(n for _, n in segments),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise ConfigError(where, line[:80], f"not a job of a trace: {type(e).__name__}: {e}") from e
    if job.prompt < 1 or job.out < 1 or any(n < 1 for _, n in segments) or not 0 <= job.stable <= job.prompt:
        raise ConfigError(where, line[:80], "segments and out have at least 1 token; 0 <= stable <= prompt")
    return job


def _derive_expectations(jobs: list[Job]) -> None:
    """What a pipeline could say with `expect`: of the jobs that the next turn waits for, the last one."""
    order = {job.job_id: job.index for job in jobs}
    following: dict[str, Job] = {}
    for job in reversed(jobs):
        if job.conversation_id is None:
            continue
        successor = following.get(job.conversation_id)
        if successor is not None and successor.after:
            job.expect_after = max(successor.after, key=order.__getitem__)
        following[job.conversation_id] = job


class SegmentTokens:
    """Token keys of segments, made up from their names. Different names differ from the first token on."""

    def __init__(self) -> None:
        self._keys: dict[str, bytes] = {}

    def key(self, name: str, num_tokens: int) -> bytes:
        """4 bytes a token. The high bit stays clear, so that they are valid int32 ids."""
        key = self._keys.get(name)
        if key is None:
            words = random.Random(name).getrandbits(32 * num_tokens).to_bytes(4 * num_tokens, "little")
            marker = len(self._keys).to_bytes(4, "little")  # the first token is the segment's own
            key = self._keys[name] = marker + words[4:]
        return key

    def prompt(self, job: Job) -> bytes:
        return b"".join([self.key(name, n) for name, n in job.segments])

    def answer(self, job: Job) -> bytes:
        return self.key(f"{job.job_id}/out", job.out)


def iter_paths(paths: list[Path]) -> Iterator[Path]:
    """Files as given; of a folder, the traces in it."""
    for path in paths:
        if path.is_dir():
            yield from sorted(p for p in path.iterdir() if p.name.endswith((".jsonl", ".jsonl.gz")))
        else:
            yield path
