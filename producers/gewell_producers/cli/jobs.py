"""Commands for single jobs: run, submit, follow, result, cancel."""

import sys
from pathlib import Path
from typing import Annotated, Any, TextIO

import orjson
import typer

from gewell.errors import InvalidRequest, JobFailed, NoWorker
from gewell.protocol import Channel, Chunk, EntryId, FinalRecord, Lane, State
from gewell_producers.cli.options import AsJson, Namespace, Redis, connect, parse_pairs
from gewell_producers.cli.terminal import printable
from gewell_producers.client import Client, Stream
from gewell_producers.job import Job, check_digest, new_job_id

JobId = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]
LaneOption = Annotated[Lane, typer.Option("--lane", help="Queue by urgency.")]


def run(
    prompt: Annotated[str, typer.Argument(help="What to ask; `-` reads it from standard input.")],
    completion: Annotated[bool, typer.Option("--completion", help="Continue the text as it stands, no chat.")] = False,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="A picture to ask about; may be repeated.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of the answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest token.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    option: Annotated[list[str] | None, typer.Option("-o", help="Any other request field, as name=value.")] = None,
    lane: LaneOption = Lane.HIGH,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print tokens and times to standard error at the end.")
    ] = False,
    as_json: AsJson = False,
    redis: Redis = None,
    ns: Namespace = None,
) -> None:
    """Ask the model one thing and stream its answer.

    Needs a running worker (`gewell up`). Ctrl-C cancels the job.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "stop": stop or None}
    request = {name: value for name, value in given.items() if value is not None} | parse_pairs(option or [], "-o")
    job: dict[str, Any] = {"lane": lane, "cache": {"one_off": True}}
    pictures = [_read_picture(path) for path in image or ()]
    if pictures and completion:
        raise InvalidRequest("invalid_request", "--image: a completion has no place for pictures", "--image")
    with connect(redis, ns, advice=" (Ctrl-C cancels the job)") as client:
        client.require_worker()
        if completion:
            made = Job.completion(text, job=job, **request)
        else:
            parts: list[dict[str, Any]] = [{"type": "image", "image": client.upload(data)} for data in pictures]
            content = [*parts, {"type": "text", "text": text}] if parts else text
            turns = [{"role": "system", "content": system}] if system else []
            made = Job.chat([*turns, {"role": "user", "content": content}], job=job, **request)
        client.submit(made)
        try:
            with client.follow(made.id) as stream:
                record = _show(stream, as_json)
        except KeyboardInterrupt:
            client.cancel(made.id)
            print("\ncancelled", file=sys.stderr)
            raise
        except NoWorker:
            print(f"gewell: job {made.id} stays in the queue; `gewell follow {made.id}` shows it", file=sys.stderr)
            raise
    if not as_json:
        _print_warnings(record, sys.stderr)
    if stats:
        print(_numbers(record), file=sys.stderr)
    _raise_unless_done(record)


def _read_picture(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise InvalidRequest("bad_image", f"--image {path}: {e.strerror}", "--image") from e


def submit(
    body: Annotated[str | None, typer.Argument(help="The job's body as JSON; default: standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the body from a file.")] = None,
    job_id: Annotated[str | None, typer.Option("--id", help="The job's id, its idempotency key.")] = None,
    lane: LaneOption = Lane.NORMAL,
    redis: Redis = None,
    ns: Namespace = None,
) -> None:
    """Enqueue a job and print its id.

    An --id that another request had is refused; one that this very request had is answered from the first one's record.
    The body is what docs/protocol.md describes, or a bare request such as {"prompt": "Once upon a time"} or
    {"messages": [{"role": "user", "content": "Hello"}]}.
    """
    job = Job.from_body(_read_body(body, file), id=job_id or new_job_id(), lane=lane)
    with connect(redis, ns) as client:
        standing = client.digest(job.id) if job_id else None
        check_digest(job, standing)
        print(client.submit(job), flush=True)
        if standing is not None:
            print(f"gewell: {job.id} was submitted before; that job's record is the answer", file=sys.stderr)
        elif not client.workers():
            print("gewell: no worker is running; the job waits in the queue", file=sys.stderr)


def follow(
    job_id: JobId,
    after: Annotated[str | None, typer.Option(help="Resume behind this entry, as --json prints it.")] = None,
    as_json: AsJson = False,
    redis: Redis = None,
    ns: Namespace = None,
) -> None:
    """Show a job's whole stream from its start, and go on until it ends."""
    with connect(redis, ns) as client, client.follow(job_id, after=_entry(after)) as stream:
        record = _show(stream, as_json)
    if not as_json:
        _print_warnings(record, sys.stderr)
    _raise_unless_done(record)


def result(
    job_id: JobId,
    wait: Annotated[bool, typer.Option(help="Wait for the end of a job that still runs.")] = True,
    timeout_s: Annotated[float | None, typer.Option("--timeout", help="Seconds to wait at most.")] = None,
    as_json: AsJson = False,
    text_only: Annotated[bool, typer.Option("--text", help="Print the answer's text alone.")] = False,
    redis: Redis = None,
    ns: Namespace = None,
) -> None:
    """Print a job's final record; exit code 1 when it did not end well."""
    with connect(redis, ns) as client:
        record = _find(client, job_id, wait, timeout_s)
    if as_json:
        sys.stdout.buffer.write(orjson.dumps(record.to_dict(), option=orjson.OPT_INDENT_2) + b"\n")
    elif text_only:
        print(record.text, flush=True)
        _print_warnings(record, sys.stderr)
    else:
        _print_record(record, sys.stdout)
    if record.state is not State.DONE:
        raise typer.Exit(1)


def cancel(
    job_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="The job to cancel.")] = None,
    conversation: Annotated[str | None, typer.Option(help="Cancel all jobs of a conversation.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Cancel all jobs of a tenant.")] = None,
    redis: Redis = None,
    ns: Namespace = None,
) -> None:
    """Cancel a job, or all jobs of a conversation or tenant that are there now."""
    with connect(redis, ns) as client:
        client.cancel(job_id, conversation=conversation, tenant=tenant)


# --- showing ----------------------------------------------------------------------------------------------------------


def _show(stream: Stream, as_json: bool) -> FinalRecord:
    """Print a stream as it comes. Reasoning and tool calls go to standard error, so that a pipe gets the answer."""
    ends_line, is_terminal = True, sys.stdout.isatty()
    for chunk in stream:
        if as_json:
            line = {"entry": str(stream.last), **orjson.loads(chunk.to_json())}
            print(orjson.dumps(line).decode(), flush=True)
        elif chunk.channel is Channel.CONTENT:
            print(printable(chunk.text) if is_terminal else chunk.text, end="", flush=True)
            ends_line = chunk.text.endswith("\n") if chunk.text else ends_line
        else:
            print(_aside(chunk), end="", file=sys.stderr, flush=True)
    record = stream.record()
    if as_json:
        print(orjson.dumps({"end": record.to_dict()}).decode(), flush=True)
    elif not ends_line:
        print()
    return record


def _aside(chunk: Chunk) -> str:
    text = chunk.text
    if chunk.tool is not None:
        text = (f"\n{chunk.tool.name} " if chunk.tool.name else "") + chunk.tool.arguments_delta
    return f"\x1b[2m{printable(text)}\x1b[0m" if sys.stderr.isatty() else text


def _print_record(record: FinalRecord, out: TextIO) -> None:
    model = f", {record.model}" if record.model else ""
    print(f"{record.id}: {record.state} ({record.finish_reason}){model}", file=out)
    if record.error is not None:
        where = f" at {record.error.field}" if record.error.field else ""
        print(f"error {record.error.code}{where}: {record.error.message}", file=out)
    _print_warnings(record, out)
    print(_numbers(record), file=out)
    for call in record.tool_calls:
        print(f"\n{call['name']} {call['arguments']}", file=out)
    if record.reasoning:
        print(f"\n[reasoning]\n{record.reasoning}\n[answer]", end="", file=out)
    if record.text:
        print(f"\n{record.text}", file=out)


def _print_warnings(record: FinalRecord, out: TextIO) -> None:
    for warning in record.warnings:
        print(f"warning: {warning}", file=out)


def _numbers(record: FinalRecord) -> str:
    usage, timing = record.usage, record.timing
    parts = [f"prompt {usage.prompt} tokens ({usage.cached} from cache)", f"answer {usage.completion} tokens"]
    names = {"queue": timing.queue, "first token": timing.ttft, "total": timing.total}
    parts += [f"{name} {value:.0f} ms" for name, value in names.items() if value is not None]
    if timing.itl:
        parts.append(f"{1000 / timing.itl:.1f} tokens/s")
    return ", ".join(parts)


# --- reading ----------------------------------------------------------------------------------------------------------


def _entry(text: str | None) -> EntryId | None:
    try:
        return None if text is None else EntryId.parse(text)
    except ValueError as error:
        raise InvalidRequest(
            "invalid_request", f"--after {text!r}: expected an entry as --json prints it, such as 1-7"
        ) from error


def _read_body(body: str | None, file: Path | None) -> dict[str, Any]:
    if body is not None and file is not None:
        raise InvalidRequest("invalid_request", "give a body or --file, not both")
    if file is not None:
        try:
            raw = file.read_bytes()
        except OSError as error:
            raise InvalidRequest("invalid_request", f"--file {file}: {error.strerror}") from error
    else:
        raw = sys.stdin.buffer.read() if body is None else body.encode()
    try:
        parsed = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest("invalid_json", f"the body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidRequest("invalid_json", f"the body is a JSON {type(parsed).__name__}, not an object")
    return parsed


def _find(client: Client, job_id: str, wait: bool, timeout_s: float | None) -> FinalRecord:
    record = client.record(job_id)
    if record is not None:
        return record
    if not wait:
        state = client.state(job_id) or "not started, or unknown"
        raise InvalidRequest("invalid_request", f"job {job_id} has no result yet: {state}")
    try:
        with client.follow(job_id, timeout_s=timeout_s) as stream:
            return stream.record()
    except TimeoutError as error:
        raise InvalidRequest("invalid_request", f"{error} ({timeout_s:g} s)") from error


def _raise_unless_done(record: FinalRecord) -> None:
    if record.state is not State.DONE:
        raise JobFailed(record.id, record.to_dict())
