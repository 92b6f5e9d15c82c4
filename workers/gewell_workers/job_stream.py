"""One claimed job in the output process: tokens in, chunks and the final record out. Knows no Redis commands."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gewell.protocol import (
    FIRST_CHUNK_SEQ,
    RETRYABLE,
    Channel,
    Chunk,
    EntryId,
    ErrorCode,
    ErrorInfo,
    FinalRecord,
    Restart,
    State,
    Timing,
    ToolDelta,
    Usage,
)
from gewell.text.repetition import RepetitionDetector
from gewell.text.tokenizer import Tokenizer
from gewell_workers.job_text import JobText, Pieces, Span, merge, missing
from gewell_workers.messages import EndJob, OpenJob

OutEntry = tuple[EntryId, str, bytes]  # id, name of the one field, JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a job ended, from the engine's last event or from the worker."""

    state: State
    finish_reason: str
    error: ErrorInfo | None = None
    cache: dict[str, Any] | None = None
    num_cached: int = 0
    num_cache_write: int = 0
    is_satisfied: bool | None = None  # of a constrained job: its form is complete
    prompt_logprobs: Sequence[dict[str, Any]] | None = None  # TokenLogprobs as they came over the pipe
    scores: Sequence[Sequence[dict[str, Any]]] | None = None
    started_at_s: float | None = None  # time.monotonic(), one clock for all processes of a machine
    first_token_at_s: float | None = None


def ending_of(event: dict[str, Any], expired: bool) -> Ending:
    """From a FinishedEvent as it came over the pipe."""
    reason, code, cache = event["reason"], event["error_code"], event["cache"]
    state, error = State.DONE, None
    if reason == "cancelled":
        state = State.EXPIRED if expired else State.CANCELLED
        if expired:
            error = ErrorInfo(code=ErrorCode.DEADLINE, message="deadline_ms passed while the job ran", retryable=True)
    elif reason == "error" or code is not None:
        code = code or ErrorCode.INTERNAL
        state, reason = State.ERROR, "error"
        error = ErrorInfo(code=code, message=event["error_message"] or "", retryable=code in RETRYABLE)
    miss = cache["miss_token"]
    return Ending(
        state=state,
        finish_reason=reason,
        error=error,
        cache={
            "restored_from": cache["restored_from"],
            "hints": cache["hints"],
            "miss": None if miss is None else {"token": miss, "message": cache["miss_message"]},
        },
        num_cached=cache["cached_tokens"],
        num_cache_write=cache["cache_write_tokens"],
        is_satisfied=event["is_satisfied"],
        prompt_logprobs=event["prompt_logprobs"],
        scores=event["scores"],
        started_at_s=event["started_at_s"],
        first_token_at_s=event["first_token_at_s"],
    )


def ending_of_end(end: EndJob) -> Ending:
    error = None
    if end.code is not None:
        error = ErrorInfo(code=end.code, message=end.message, field=end.field, retryable=end.code in RETRYABLE)
    return Ending(state=State(end.state), finish_reason=end.finish_reason, error=error)


class JobStream:
    """Text state, unsent tokens and unacknowledged entries of one job under one epoch.

    unacked    entries sent or to be sent, in order, that the server has not yet accepted
    """

    def __init__(self, job: OpenJob, pieces: Pieces, tokenizer: Tokenizer) -> None:
        self.job = job
        self._tokenizer = tokenizer
        self._text = JobText(pieces, stops=job.stop, include_stop=job.include_stop, min_tokens=job.min_tokens)
        self._loops = RepetitionDetector(tokenizer) if job.ends_loops else None
        self._looped_at: int | None = None  # number of tokens up to and with the one that closed a loop
        self._eager = bool(job.stop)  # a stop string should end its row soon, so every token is looked at when it comes
        self._raw_ids: list[int] = []  # arrived, not yet parsed
        self._spans: list[Span] = []
        self._logprobs: list[dict[str, Any]] = list(job.kept_logprobs)
        self._num_logprobs_sent = len(job.kept_logprobs)
        self.ids: list[int] = list(job.kept_ids)
        self.unacked: list[OutEntry] = []
        self._next_seq = FIRST_CHUNK_SEQ
        self.ending: Ending | None = None
        self.is_queued = False  # waits for the publisher
        self.is_gone = False  # finished, or another epoch's
        self.has_sent = False
        self.due_at_s = 0.0  # when its waiting text must go; 0: nothing waits
        self._replay()

    @property
    def stopped_at(self) -> int | None:
        """How many tokens stand, once a stop string or a loop among them has ended the row."""
        return self._looped_at if self._text.stopped_at is None else self._text.stopped_at

    @property
    def num_waiting(self) -> int:
        """Tokens that no entry holds yet."""
        return len(self._raw_ids) + sum(len(span.ids) for span in self._spans)

    @property
    def num_spans(self) -> int:
        return len(self._spans)

    def push(self, ids: Sequence[int], logprobs: Sequence[Any] | None = None, *, last_is_stop_id: bool = False) -> bool:
        """Take new tokens. True when a stop string or a loop was completed by them; what follows is dropped."""
        if self.ending is not None or self.stopped_at is not None:
            return False
        end = self._find_loop(ids[:-1] if last_is_stop_id else ids)
        if end is not None:
            ids, last_is_stop_id = ids[:end], False
            logprobs = None if logprobs is None else logprobs[:end]
        self._raw_ids.extend(ids[:-1] if last_is_stop_id else ids)
        self.ids.extend(ids)
        if logprobs is not None and self.job.wants_logprobs:
            self._logprobs.extend(self._logprob(*entry) for entry in logprobs)
        if self._eager or last_is_stop_id:
            self._parse()
        if last_is_stop_id and self.stopped_at is None:
            self._spans += self._text.push_hidden(ids[-1:])
        return self.stopped_at is not None

    def end(self, ending: Ending) -> None:
        """No token follows. Everything held back becomes ready."""
        if self.ending is None:
            self._parse()
            self._spans += self._text.finish()
            if self.stopped_at is not None and ending.state is not State.ERROR:
                # The engine may have come to its own end before it heard of the stop string.
                reason = "stop" if self._text.stopped_at is not None else "repetition"
                ending = replace(ending, state=State.DONE, finish_reason=reason, error=None)
            self.ending = ending

    def fail(self, error: ErrorInfo) -> None:
        """End in an error without looking at what is not parsed yet: looking failed."""
        self._raw_ids = []
        if self.ending is None:
            self.ending = Ending(state=State.ERROR, finish_reason="error", error=error)

    def make_entries(self) -> None:
        """Turn everything that waits into entries of the stream."""
        self._parse()
        for span in merge(self._spans):
            logprobs = None
            if self.job.wants_logprobs:
                end = self._num_logprobs_sent + len(span.ids)
                logprobs = tuple(self._logprobs[self._num_logprobs_sent : end])
                self._num_logprobs_sent = end
            chunk = Chunk(ids=span.ids, text=span.text, channel=span.channel, tool=span.tool, logprobs=logprobs)
            self.unacked.append((self._take_id(), "d", chunk.to_json()))
        self._spans = []

    def peek_id(self) -> EntryId:
        """The id after the last one taken."""
        return EntryId(self.job.epoch, self._next_seq)

    def _take_id(self) -> EntryId:
        entry_id = self.peek_id()
        self._next_seq += 1
        return entry_id

    def reopen(self) -> list[OutEntry]:
        """The server lost the stream: everything so far once more, after a restart that keeps nothing."""
        self._parse()
        self.unacked, self._spans, self._num_logprobs_sent = [], [], len(self._logprobs)
        entries: list[OutEntry] = [(self._take_id(), "restart", Restart(keep=0).to_json())]
        chunks = []
        if reasoning := self._text.text(Channel.REASONING):
            chunks.append(Chunk(text=reasoning, channel=Channel.REASONING))
        for index, call in enumerate(self._text.tool_calls):
            chunks.append(_tool_chunk(index, call))
        logprobs = tuple(self._logprobs) if self.job.wants_logprobs else None
        chunks.append(Chunk(ids=tuple(self.ids), text=self._text.text(Channel.CONTENT), logprobs=logprobs))
        return entries + [(self._take_id(), "d", chunk.to_json()) for chunk in chunks]

    def record(self, model: str, fingerprint: str) -> FinalRecord:
        """The final record. Needs `end` to have been called."""
        assert self.ending is not None
        job, ending = self.job, self.ending
        tool_calls = tuple(call for call in self._text.tool_calls if call["name"])
        reason = ending.finish_reason
        if reason == "stop" and tool_calls:
            reason = "tool_calls"
        return FinalRecord(
            id=job.job_id,
            state=ending.state,
            finish_reason=reason,
            text=self._text.text(Channel.CONTENT),
            reasoning=self._text.text(Channel.REASONING),
            tool_calls=tool_calls,
            token_ids=tuple(self.ids),
            logprobs=tuple(self._logprobs) if job.wants_logprobs else None,
            structured=self._structured(),
            prompt_logprobs=self._prompt_logprobs(),
            scores=None if ending.scores is None else tuple(map(self._score, ending.scores)),
            usage=Usage(
                prompt=job.num_prompt_tokens,
                completion=len(self.ids),
                cached=ending.num_cached,
                cache_write=ending.num_cache_write,
            ),
            cache=ending.cache or {"restored_from": None, "hints": [], "miss": None},
            timing=self._timing(),
            seed=job.seed,
            model=model,
            fingerprint=fingerprint,
            epoch=job.epoch,
            crashes=job.crashes,
            warnings=tuple(job.warnings),
            error=ending.error,
            metadata=job.metadata,
            traceparent=job.traceparent,
        )

    def _structured(self) -> dict[str, Any] | None:
        """Whether a constrained job's answer has its form; a cut one never should be taken for a whole one."""
        assert self.ending is not None
        if self.ending.is_satisfied is None:
            return None
        if self.ending.is_satisfied and self.stopped_at is None:
            return {"valid": True, "reason": None}
        reason = self.ending.finish_reason
        return {"valid": False, "reason": "truncated" if reason == "length" else reason}

    def _prompt_logprobs(self) -> tuple[dict[str, Any], ...] | None:
        assert self.ending is not None
        first_id, others = self.job.first_prompt_id, self.ending.prompt_logprobs
        if first_id is None or others is None:
            return None
        return ({**self._token(first_id, None), "top": []}, *map(self._entry, others))

    def _score(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One continuation: the sum, and whether the model would have chosen each of its tokens."""
        return {
            "logprob": sum(entry["logprob"] for entry in entries),
            "is_greedy": all(entry["logprob"] >= entry["top"][0][1] for entry in entries),
            "tokens": [self._entry(entry) for entry in entries],
        }

    def _entry(self, entry: dict[str, Any]) -> dict[str, Any]:
        return self._logprob(entry["token_id"], entry["logprob"], entry["top"])

    def _find_loop(self, ids: Sequence[int]) -> int | None:
        """How many of these new tokens stand, if a loop is closed by them."""
        at = None if self._loops is None else self._loops.push(ids)
        if at is None:
            return None
        self._looped_at = len(self.ids) + at + 1
        return at + 1

    def _replay(self) -> None:
        """Rebuild the text state from the tokens that stand, and find what they released but nobody published."""
        kept = self.job.kept_ids
        visible = kept[:-1] if self.job.kept_ends_with_stop_id else kept
        if self._loops is not None and (at := self._loops.push(visible)) is not None:
            self._looped_at = at + 1  # the worker died between the loop and the end
        self._text.push(visible)
        self._text.push_hidden(kept[len(visible) :])
        self._spans = missing(self._text, self.job.kept_text, self.job.kept_tools)
        self._cut_at_stop()

    def _parse(self) -> None:
        if self._raw_ids:
            raw, self._raw_ids = self._raw_ids, []
            self._spans += self._text.push(raw)
            self._cut_at_stop()

    def _cut_at_stop(self) -> None:
        if self.stopped_at is not None:
            del self.ids[self.stopped_at :]
            del self._logprobs[self.stopped_at :]

    def _logprob(self, token_id: int, logprob: float, top: Sequence[tuple[int, float]]) -> dict[str, Any]:
        return {**self._token(token_id, logprob), "top": [self._token(other, value) for other, value in top]}

    def _token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"id": token_id, "t": raw.decode(errors="replace"), "b": list(raw), "lp": logprob}

    def _timing(self) -> Timing:
        assert self.ending is not None
        now_ms = time.time() * 1e3 + self.job.clock_offset_ms
        monotonic_to_ms = now_ms - time.monotonic() * 1e3
        started, first = self.ending.started_at_s, self.ending.first_token_at_s

        def since_enqueued(at_s: float | None) -> float | None:
            return None if at_s is None else round(at_s * 1e3 + monotonic_to_ms - self.job.enqueued_at_ms, 3)

        total = round(now_ms - self.job.enqueued_at_ms, 3)
        ttft = since_enqueued(first)
        num_new = len(self.ids) - len(self.job.kept_ids)
        itl = round((total - ttft) / (num_new - 1), 3) if ttft is not None and num_new > 1 else None
        return Timing(queue=since_enqueued(started), ttft=ttft, itl=itl, total=total)


def _tool_chunk(index: int, call: dict[str, Any]) -> Chunk:
    delta = ToolDelta(index=index, id=call["id"], name=call["name"], arguments_delta=call["arguments"])
    return Chunk(channel=Channel.TOOL, tool=delta)
