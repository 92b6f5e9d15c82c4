"""The output process: token ids in over a socket, text, chunks and final records out to Redis.

A process of its own, because the GIL would cost the engine its step. It imports no torch. It holds results through an
outage of the server, and when the worker dies it still writes what it had been given before it leaves.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from gewell.errors import GewellError
from gewell.protocol import ErrorCode, ErrorInfo, FinalRecord, Keys
from gewell.text.parser import OutputParser
from gewell.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from gewell_workers.finish import Outcome
from gewell_workers.job_stream import JobStream, ending_of, ending_of_end
from gewell_workers.job_text import Pieces, PlainPieces
from gewell_workers.logs import fault_of, set_up_logging
from gewell_workers.messages import EndJob, FrameProtocol, OpenJob
from gewell_workers.publisher import Publisher
from gewell_workers.resp import Client

log = logging.getLogger(__name__)

_LAST_WORDS_S = 10.0  # after the worker is gone: to write what waits


def make_pieces(tokenizer: Tokenizer, job: OpenJob) -> Pieces:
    """Of a chat: content, reasoning and tool calls, whose ids come from the job's: a continuation repeats them."""
    if job.is_chat:
        return OutputParser(tokenizer, tools=job.tools, call_id_seed=job.job_id)
    return PlainPieces(tokenizer)


class OutputProcess:
    """Owns the streams of all running jobs. `handle` takes the worker's frames, `tell` sends ours."""

    def __init__(self, setup: dict[str, Any], tokenizer: Tokenizer, tell: Callable[[str, Any], None]) -> None:
        self._tokenizer = tokenizer
        self._tell = tell
        self._streams: dict[str, JobStream] = {}
        self._expired: set[str] = set()
        self._done: list[tuple[str, int, str]] = []
        self.client = Client(
            setup["redis_url"], name=f"{setup['worker_id']}.output", timeout_s=setup["redis_timeout_s"]
        )
        self.publisher = Publisher(
            self.client,
            Keys(setup["ns"]),
            flush_s=setup["flush_s"],
            flush_tokens=setup["flush_tokens"],
            on_done=self._on_done,
            on_trouble=lambda text: tell("trouble", text),
        )

    def handle(self, frame: dict[str, Any]) -> None:
        body = frame["body"]
        match frame["kind"]:
            case "step":
                self._on_step(body)
            case "open":
                self._on_open(OpenJob(**body))
            case "end":
                self._on_end(EndJob(**body))
            case "identity":
                self.publisher.model, self.publisher.fingerprint = body["model"], body["fingerprint"]
            case "started":
                self.publisher.note_started([self._streams[job_id] for job_id in body if job_id in self._streams])
            case "expire":
                self._expired.add(body)
            case kind:
                raise ValueError(f"frame of unknown kind {kind!r}")

    def close(self) -> None:
        """The worker is gone: nothing more comes. Write what was given to us, then stop."""
        self.publisher.close(list(self._streams.values()))

    def _on_open(self, job: OpenJob) -> None:
        try:
            stream = JobStream(job, make_pieces(self._tokenizer, job), self._tokenizer)
        except Exception as error:
            stream = JobStream(replace(job, kept_ids=[], stop=[]), PlainPieces(self._tokenizer), self._tokenizer)
            self._fail(stream, error)
        old = self._streams.get(job.job_id)
        if old is not None:
            old.is_gone = True
        self._streams[job.job_id] = stream
        if stream.stopped_at is not None:  # the worker died between a stop string and the end
            self._tell("stop", (job.job_id, stream.stopped_at))
        if stream.num_spans:
            self.publisher.touch(stream)

    def _on_step(self, body: dict[str, Any]) -> None:
        stop_ids = {event["request_id"]: event["stop_token_id"] for event in body["finished"]}
        streams, touch = self._streams, self.publisher.touch
        for job_id, ids, logprobs in body["tokens"]:
            stream = streams.get(job_id)
            if stream is None:
                continue
            stop_id = stop_ids.get(job_id)
            try:
                if stream.push(ids, logprobs, last_is_stop_id=stop_id is not None and ids[-1] == stop_id):
                    self._tell("stop", (job_id, stream.stopped_at))
            except Exception as error:
                self._fail(stream, error)
            touch(stream)
        for event in body["finished"]:
            stream = streams.get(event["request_id"])
            if stream is not None:
                try:
                    stream.end(ending_of(event, expired=event["request_id"] in self._expired))
                except Exception as error:
                    self._fail(stream, error)
                touch(stream)

    def _on_end(self, end: EndJob) -> None:
        stream = self._streams.get(end.job_id)
        if stream is not None:
            stream.end(ending_of_end(end))
            self.publisher.touch(stream)

    def _fail(self, stream: JobStream, error: Exception) -> None:
        """A fault of ours with one job's text ends that job alone."""
        job_id = stream.job.job_id
        log.error("job %s: its text could not be made: %s", job_id, fault_of(error))
        stream.fail(ErrorInfo(code=ErrorCode.INTERNAL, message="the text could not be made; the worker's log has it"))
        self._tell("drop", job_id)

    def _on_done(self, stream: JobStream, outcome: Outcome, record: FinalRecord | None) -> None:
        job_id = stream.job.job_id
        if self._streams.get(job_id) is stream:
            del self._streams[job_id]
            self._expired.discard(job_id)
        self._tell("done", (job_id, stream.job.epoch, outcome))
        _log_job(stream, outcome, record)


def _log_job(stream: JobStream, outcome: Outcome, record: FinalRecord | None) -> None:
    """One line a terminal job. Ids and numbers only: an error's message may quote the request."""
    line: dict[str, Any] = {"event": "job", "id": stream.job.job_id, "epoch": stream.job.epoch, "outcome": outcome}
    if record is not None and outcome == Outcome.WRITTEN:
        line |= {
            "state": record.state,
            "finish_reason": record.finish_reason,
            "code": record.error.code if record.error else None,
            "field": _field_told(record.error),
            "usage": record.usage.to_dict(),
            "timing": record.timing.to_dict(),
            "crashes": record.crashes,
        }
    log.info("%s", orjson.dumps(line).decode())


def _field_told(error: ErrorInfo | None) -> str | None:
    """The field at fault as far as its name is one of ours: an unknown field or a key inside one is the user's text."""
    if error is None or error.field is None:
        return None
    parts = error.field.partition("[")[0].split(".")[:2]
    return ".".join(parts[:-1] if error.code == ErrorCode.UNKNOWN_FIELD else parts) or None


async def serve(link: socket.socket) -> None:
    """Run until the worker's end of the socket is closed and everything is written."""
    loop = asyncio.get_running_loop()
    setup_frame: asyncio.Future[dict[str, Any]] = loop.create_future()
    early: list[dict[str, Any]] = []
    process: OutputProcess | None = None
    ended = asyncio.Event()

    def on_frame(frame: dict[str, Any]) -> None:
        if not setup_frame.done():
            setup_frame.set_result(frame["body"])
        elif process is None:
            early.append(frame)
        else:
            process.handle(frame)

    def on_end() -> None:
        ended.set()
        if not setup_frame.done():
            setup_frame.cancel()

    _, frames = await loop.create_connection(lambda: FrameProtocol(on_frame, on_end), sock=link)
    setup = await setup_frame
    model_dir = setup["model_dir"]
    tokenizer = ByteTokenizer() if model_dir is None else load_tokenizer(Path(model_dir))
    process = OutputProcess(setup, tokenizer, frames.write)
    for frame in early:
        process.handle(frame)
    frames.write("ready", None)
    publishing = asyncio.create_task(process.publisher.run())
    waiting = asyncio.create_task(ended.wait())
    await asyncio.wait({publishing, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if publishing.done():
        waiting.cancel()
        publishing.result()  # it only returns after `close`; anything else is its exception
        return
    process.close()
    try:
        async with asyncio.timeout(_LAST_WORDS_S):
            await publishing
    except TimeoutError:
        log.warning("left with unwritten results: the server does not answer; another worker will do these jobs")


def _leave_when_orphaned(parent_pid: int) -> None:
    """The last resort, in a thread of its own: whatever the loop does, an orphan does not outlive its last words.

    Nobody waits for what it still holds: another worker goes on with its jobs.
    """
    while os.getppid() == parent_pid:
        time.sleep(1.0)
    time.sleep(_LAST_WORDS_S + 2.0)
    log.warning("an orphan that did not come to its end: leaving")
    os._exit(1)


def main() -> None:
    threading.Thread(target=_leave_when_orphaned, args=(os.getppid(),), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the worker decides when we end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    set_up_logging()
    link = socket.socket(fileno=int(sys.argv[1]))
    try:
        asyncio.run(serve(link))
    except GewellError as error:
        sys.exit(f"output process: {error}")


if __name__ == "__main__":
    main()
