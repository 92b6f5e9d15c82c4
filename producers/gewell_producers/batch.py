"""Files of requests in OpenAI's batch format, through the queue. Streams both files; memory holds what is in flight.

A run can be killed at any moment and started again with the same files. What stands in the output is skipped; what had
finished meanwhile waits in the run's inbox or is answered from its record; nothing is generated twice. The run's name,
which its job ids and its inbox are made of, stands beside the output in a small file that goes when all is done.
"""

import hashlib
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from gewell.errors import ConfigError, InvalidRequest
from gewell.protocol import FinalRecord, Lane, State
from gewell_producers.client import Client
from gewell_producers.gateway import problems, shapes
from gewell_producers.gateway.access import ANYBODY
from gewell_producers.gateway.calls import Call, chat_call, completion_call
from gewell_producers.gateway.problems import Problem
from gewell_producers.inbox import MAX_IN_FLIGHT
from gewell_producers.job import Job

_CALLS = {"/v1/chat/completions": chat_call, "/v1/completions": completion_call}
MAX_WARNINGS = 20

_SHAPES = {"/v1/chat/completions": shapes.chat_completion, "/v1/completions": shapes.text_completion}


@dataclass(slots=True)
class BatchCounts:
    """Lines: done + failed + skipped + failed before adds up to what was read.

    warnings   how many answers came with each of the first MAX_WARNINGS different ones
    """

    num_read: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_skipped: int = 0  # stood in the output, or came twice
    num_failed_before: int = 0  # stood in the errors of an earlier run
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    warnings: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFiles:
    """output  answers, one a line; errors: requests that failed; state: the run's name, while it is not done"""

    output: Path
    errors: Path
    state: Path

    @classmethod
    def beside(cls, output: Path, errors: Path | None = None) -> "BatchFiles":
        """The usual names: out.jsonl, out.errors.jsonl, out.jsonl.run."""
        return cls(
            output=output,
            errors=errors or output.with_suffix(f".errors{output.suffix}"),
            state=output.with_name(output.name + ".run"),
        )


@dataclass(slots=True)
class _Open:
    """A line of several samples that are not all there yet."""

    num_samples: int
    records: dict[int, FinalRecord] = field(default_factory=dict)


class Batch:
    """One run. Iterate over `run` to drive it: it yields after every line that is settled."""

    def __init__(
        self, client: Client, files: BatchFiles, *, lane: Lane = Lane.LOW, max_in_flight: int = MAX_IN_FLIGHT
    ) -> None:
        self._client = client
        self._files = files
        self._lane = lane
        self._max_in_flight = max_in_flight
        self._settled: set[bytes] = set()  # digests of custom ids: 16 bytes a line instead of the id itself
        self._failed_before: set[bytes] = set()  # of these, those in the errors of earlier runs
        self._failed_lines: set[int] = set()  # and the numbers of lines there that had no custom id
        self._open: dict[str, _Open] = {}
        self.counts = BatchCounts()

    def run(self, lines: Iterable[bytes]) -> Iterator[BatchCounts]:
        name = self._name()
        with _append(self._files.output) as output, _append(self._files.errors) as errors:
            self._settled.update(_digest(row["custom_id"]) for row in _rows(self._files.output))
            for row in _rows(self._files.errors):
                if row["custom_id"] is None:
                    self._failed_lines.add(row["error"]["line"])
                else:
                    self._failed_before.add(_digest(row["custom_id"]))
            self._settled |= self._failed_before
            for record in self._client.drain(name):  # what finished after an earlier run was killed
                if record.metadata["n"] == 1:
                    yield from self._settle(record, output, errors)
            for record in self._client.map(
                self._jobs(lines, name, errors), inbox=name, max_in_flight=self._max_in_flight
            ):
                yield from self._settle(record, output, errors)
        self._files.state.unlink()
        if self.counts.num_failed == 0 and self._files.errors.stat().st_size == 0:
            self._files.errors.unlink()
        yield self.counts

    def _name(self) -> str:
        """The name of the run that the output belongs to; a new one for a new output."""
        state = self._files.state
        try:
            if state.exists():
                return str(orjson.loads(state.read_bytes())["run"])
            name = f"batch-{secrets.token_hex(8)}"
            state.parent.mkdir(parents=True, exist_ok=True)
            state.write_bytes(orjson.dumps({"run": name}))
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError("output", str(self._files.output), f"its state file cannot be used ({error})") from error
        return name

    def _jobs(self, lines: Iterable[bytes], name: str, errors: BinaryIO) -> Iterator[Job]:
        """Jobs of all lines that are not settled. A line that is no request goes to the errors at once."""
        for number, raw in enumerate(lines, start=1):
            if not raw.strip():
                continue
            self.counts.num_read += 1
            custom_id: str | None = None
            try:
                line = _parse_line(raw)
                custom_id = line["custom_id"]
                digest = _digest(line["custom_id"])
                if digest in self._settled:
                    if digest in self._failed_before:
                        self.counts.num_failed_before += 1
                    else:
                        self.counts.num_skipped += 1
                    continue
                self._settled.add(digest)
                _check_line(line)
                call = _call(line, f"{name}:{digest.hex()}")
            except (Problem, InvalidRequest) as error:
                if custom_id is None and number in self._failed_lines:
                    self.counts.num_failed_before += 1
                    continue
                problem = error if isinstance(error, Problem) else problems.of_request(error)
                self.counts.num_failed += 1
                _write(errors, _failure(custom_id, number, problem))
                continue
            facts = {
                "custom_id": custom_id,
                "line": number,
                "url": line["url"],
                "n": len(call.jobs),
                "model": call.model,
            }
            if len(call.jobs) > 1:
                self._open[call.call_id] = _Open(len(call.jobs))
            for idx, job in enumerate(call.jobs):
                yield replace(job, lane=self._lane, metadata={**facts, "idx": idx})

    def _settle(self, record: FinalRecord, output: BinaryIO, errors: BinaryIO) -> Iterator[BatchCounts]:
        facts = record.metadata
        call_id = record.id if facts["n"] == 1 else record.id.rpartition(".")[0]
        records = [record]
        if facts["n"] > 1:
            opened = self._open[call_id]
            opened.records[facts["idx"]] = record
            if len(opened.records) < opened.num_samples:
                return
            del self._open[call_id]
            records = [opened.records[i] for i in range(opened.num_samples)]
        self._settled.add(_digest(facts["custom_id"]))
        for each in records:
            self.counts.prompt_tokens += each.usage.prompt
            self.counts.cached_tokens += each.usage.cached
            self.counts.output_tokens += each.usage.completion
            for warning in each.warnings:
                if warning in self.counts.warnings or len(self.counts.warnings) < MAX_WARNINGS:
                    self.counts.warnings[warning] += 1
        failed = next((each for each in records if each.state is not State.DONE), None)
        if failed is None:
            self.counts.num_done += 1
            _write(output, _answer(facts, call_id, records))
        else:
            self.counts.num_failed += 1
            _write(errors, _failure(facts["custom_id"], facts["line"], problems.of_record(failed)))
        yield self.counts


# --- lines ------------------------------------------------------------------------------------------------------------


def _parse_line(raw: bytes) -> dict[str, Any]:
    try:
        line = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Problem(status=400, message=f"the line is not JSON: {error}", code="invalid_json") from error
    if not isinstance(line, dict) or not isinstance(line.get("custom_id"), str) or not line["custom_id"]:
        raise Problem(status=400, message="custom_id: missing, or no text", code="invalid_request", param="custom_id")
    return line


def _check_line(line: dict[str, Any]) -> None:
    if line.get("method", "POST") != "POST" or line.get("url") not in _CALLS:
        message = f"url: {str(line.get('url'))[:80]!r} is not one of {', '.join(_CALLS)}, by POST"
        raise Problem(status=404, message=message, code="invalid_url", param="url")
    if not isinstance(line.get("body"), dict):
        raise Problem(status=400, message="body: missing, or no object", code="invalid_request", param="body")
    if line["body"].get("stream"):
        raise Problem(status=400, message="stream: not in a batch", code="invalid_request", param="stream")


def _call(line: dict[str, Any], job_id: str) -> Call:
    body = dict(line["body"])
    body["x_job"] = {**(body.get("x_job") or {}), "id": job_id}
    return _CALLS[line["url"]](body, {}, ANYBODY)


def _answer(facts: dict[str, Any], call_id: str, records: list[FinalRecord]) -> dict[str, Any]:
    call = Call(
        call_id=call_id, jobs=(), digests=(), model=facts["model"], is_stream=False, include_usage=False,
        return_token_ids=False, cancels_on_disconnect=False,
    )  # fmt: skip
    body = _SHAPES[facts["url"]](call, records)
    response = {"status_code": 200, "request_id": call_id, "body": body}
    return {"id": f"batch_req_{call_id}", "custom_id": facts["custom_id"], "response": response, "error": None}


def _failure(custom_id: str | None, number: int, problem: Problem) -> dict[str, Any]:
    response = {"status_code": problem.status, "request_id": None, "body": problem.body}
    error = {"code": problem.code, "message": problem.message, "line": number}
    return {"id": f"batch_req_line_{number}", "custom_id": custom_id, "response": response, "error": error}


def _digest(custom_id: str) -> bytes:
    return hashlib.sha256(custom_id.encode()).digest()[:16]


def _write(file: BinaryIO, line: dict[str, Any]) -> None:
    """At once: a result leaves the inbox only after it stands here."""
    file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    file.flush()


def _append(path: Path) -> BinaryIO:
    """Open for appending, behind the last whole line: a killed run may have left half of one."""
    try:
        path.touch()
        file = path.open("r+b")
    except OSError as error:
        raise ConfigError("output", str(path), f"cannot be written ({error.strerror})") from error
    end = 0
    for raw in file:
        if not raw.endswith(b"\n"):
            break
        end += len(raw)
    file.truncate(end)
    file.seek(end)
    return file


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for raw in file:
            yield orjson.loads(raw)
