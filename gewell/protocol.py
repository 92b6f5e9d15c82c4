"""The Redis contract, version 1: key names, states, stream entries, records, lifetimes; for users: `docs/protocol.md`.

Both ends import this module; nobody else writes a key by hand. The job's body is parsed in `gewell.job`.
Needs nothing but the standard library and orjson, so that producers install without torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from gewell.errors import InvalidRequest

PROTOCOL_VERSION = 1
DEFAULT_NAMESPACE = "gewell"
GROUP = "gpu"  # the consumer group of every lane
HANDBACK_CONSUMER = "handback"  # owns what a worker gave back at shutdown; anybody takes over from it
# `info.features`
ENGINE_FEATURES = ("chat", "completion", "warm", "score", "logprobs", "tools", "reasoning", "structured")

# Lifetimes. Every key the protocol allows has one, or is emptied when its jobs end.
OUT_TTL_S = 3_600.0  # after the end; the whole stream lives while the job runs
RESULT_TTL_S = 6 * 3_600.0  # `res` and the job hash, unless the job asks otherwise
RESULT_TTL_MAX_S = 7 * 86_400.0
INBOX_TTL_S = 7 * 86_400.0
BLOB_TTL_S = 7 * 86_400.0
CANCEL_STREAM_TTL_S = 86_400.0
CANCEL_MARKER_TTL_S = 7 * 86_400.0
CTL_STREAM_TTL_S = 86_400.0
WORKER_TTL_S = 10.0  # the lease: a worker whose key is gone is dead

# Sizes.
MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_METADATA_BYTES = 64 * 1024
MAX_BODY_DEPTH = 100  # lists and objects inside one another; JSON writers and recursive readers give up soon after
MAX_QUEUE_LEN = 1_000_000  # default of `info.max_queue_len`; producers hold back beyond it

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,64}")  # no colon: one namespace is never a prefix of another's keys
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Lane(StrEnum):
    """Queues by urgency, served 8:4:1 while all three have work."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class State(StrEnum):
    """A job's state. The comment says what is then true in Redis."""

    QUEUED = "queued"  # an entry in a jobs stream, perhaps pending with a worker; no claim stands: no `out`, no `res`
    RUNNING = "running"  # the entry is pending, the hash has epoch and worker, `out` is open (the row may still wait)
    DONE = "done"  # `res` stands, `out` has its end and a lifetime, the entry is acknowledged and deleted
    ERROR = "error"  # the same; `res.error` says what was wrong
    CANCELLED = "cancelled"  # the same; `res` holds what was generated before
    EXPIRED = "expired"  # the same; its deadline passed before it was done


TERMINAL_STATES = frozenset({State.DONE, State.ERROR, State.CANCELLED, State.EXPIRED})


class ErrorCode(StrEnum):
    """What went wrong, for programs. `RETRYABLE` says where the same job may succeed later."""

    INVALID_JSON = "invalid_json"  # the body is not a JSON object, or is nested deeper than `MAX_BODY_DEPTH`
    INVALID_REQUEST = "invalid_request"  # a field has a wrong type or a value out of its limits
    UNKNOWN_FIELD = "unknown_field"  # with `strict`: a field that this version does not know
    UNSUPPORTED = "unsupported"  # a known field or kind that this worker cannot honour
    BODY_TOO_LARGE = "body_too_large"  # over `MAX_BODY_BYTES`
    EMPTY_PROMPT = "empty_prompt"  # nothing to read before the first token
    PROMPT_TOO_LONG = "prompt_too_long"  # the prompt alone does not fit the context or the memory
    IMAGE_UNSUPPORTED = "image_unsupported"  # an image for a model (or worker) that reads text alone
    BAD_IMAGE = "bad_image"  # an image that cannot be decoded or is over its limits
    BAD_TEMPLATE = "bad_template"  # the conversation cannot be rendered for this model
    ID_CONFLICT = "id_conflict"  # the id belongs to a job with another digest
    DEADLINE = "deadline"  # `deadline_ms` passed
    CRASHED = "crashed"  # more worker crashes than `max_crashes` with this job running
    RESTART_IMPOSSIBLE = "restart_impossible"  # tokens are out and only another model could go on
    NUMERICS = "numerics"  # the row's logits were not numbers
    CONSTRAINT = "constraint"  # the row left its grammar, or the grammar became too complex
    NO_CAPACITY = "no_capacity"  # the engine cannot ever hold the row
    INTERNAL = "internal"  # a fault of ours


RETRYABLE = frozenset({ErrorCode.NUMERICS, ErrorCode.INTERNAL, ErrorCode.RESTART_IMPOSSIBLE, ErrorCode.DEADLINE})


class CancelKind(StrEnum):
    """What a cancel entry names: field of the entry and part of the marker's key."""

    ID = "id"
    CONVERSATION = "conv"
    TENANT = "tenant"


class ControlVerb(StrEnum):
    """Operators' commands on the `ctl` stream: `XADD {ns}:ctl * cmd <verb> [worker <wid>] [lane <lane>]`."""

    PAUSE = "pause"  # stop pulling from the lane (all lanes when none is named)
    RESUME = "resume"
    DRAIN = "drain"  # the worker (all when none is named) stops pulling, finishes what runs and exits


def is_valid_id(value: object) -> bool:
    """Whether `value` can be a job, conversation, tenant, inbox or worker id."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def is_valid_namespace(value: str) -> bool:
    return _NAMESPACE.fullmatch(value) is not None


def check_id(value: object, name: str) -> str:
    """Return `value` if it is a usable id, else raise InvalidRequest naming `name`."""
    if not isinstance(value, str) or _ID.fullmatch(value) is None:
        shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
        raise InvalidRequest(
            ErrorCode.INVALID_REQUEST, f"{name}: {shown} is not 1 to 128 characters of A-Z a-z 0-9 . _ : -", name
        )
    return value


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of every key in one namespace. An id outside the alphabet raises InvalidRequest: none escapes."""

    ns: str = DEFAULT_NAMESPACE

    def __post_init__(self) -> None:
        if not is_valid_namespace(self.ns):
            raise InvalidRequest(
                ErrorCode.INVALID_REQUEST, f"ns: {self.ns!r} is not 1 to 64 characters of A-Z a-z 0-9 . _ -", "ns"
            )

    def jobs(self, lane: Lane | str) -> str:
        return f"{self.ns}:jobs:{Lane(lane)}"

    @property
    def cancel(self) -> str:
        return f"{self.ns}:cancel"

    def cancel_marker(self, kind: CancelKind | str, name: str) -> str:
        return f"{self.ns}:cancel:{CancelKind(kind)}:{check_id(name, 'cancel')}"

    @property
    def ctl(self) -> str:
        return f"{self.ns}:ctl"

    def job(self, job_id: str) -> str:
        return f"{self.ns}:job:{check_id(job_id, 'id')}"

    def out(self, job_id: str) -> str:
        return f"{self.ns}:out:{check_id(job_id, 'id')}"

    def ev(self, job_id: str) -> str:
        return f"{self.ns}:ev:{check_id(job_id, 'id')}"

    def res(self, job_id: str) -> str:
        return f"{self.ns}:res:{check_id(job_id, 'id')}"

    def inbox(self, name: str) -> str:
        return f"{self.ns}:inbox:{check_id(name, 'reply_to')}"

    def blob(self, sha256: str) -> str:
        if _SHA256.fullmatch(sha256) is None:
            raise InvalidRequest(ErrorCode.INVALID_REQUEST, f"blob: {sha256[:80]!r} is not a lower-case sha256", "blob")
        return f"{self.ns}:blob:{sha256}"

    def worker(self, worker_id: str) -> str:
        return f"{self.ns}:worker:{check_id(worker_id, 'worker')}"

    def heartbeat_of(self, consumer: str) -> str:
        """`worker` for whoever reads in the group: a foreign reader's name need not be an id, and beats nowhere."""
        return f"{self.ns}:worker:{consumer}"

    @property
    def workers_pattern(self) -> str:
        return f"{self.ns}:worker:*"

    @property
    def info(self) -> str:
        return f"{self.ns}:info"

    @property
    def dead(self) -> str:
        return f"{self.ns}:dead"


class JobField(StrEnum):
    """Fields of the hash `{ns}:job:<id>`."""

    STATE = "state"
    EPOCH = "epoch"  # the newest claim; older writers are refused
    CRASHES = "crashes"
    WORKER = "worker"
    ENTRY = "entry"  # "<lane>/<stream id>" of the entry this job is; another entry with the id is a duplicate
    DIGEST = "digest"
    SEED = "seed"
    FINGERPRINT = "fingerprint"  # of the model that wrote the tokens in `out`
    CLAIMED_AT_MS = "claimed_at_ms"
    STARTED_AT_MS = "started_at_ms"  # first admitted to the batch
    FINISHED_AT_MS = "finished_at_ms"
    ALSO = "also"  # inboxes of duplicates that wait for the record: a JSON list


class InfoField(StrEnum):
    """Fields of the hash `{ns}:info`."""

    PROTOCOL = "protocol"
    MODEL = "model"
    FINGERPRINT = "fingerprint"
    MAX_CONTEXT = "max_context"
    MAX_PROMPT_TOKENS = "max_prompt_tokens"
    MAX_QUEUE_LEN = "max_queue_len"
    FEATURES = "features"  # comma-separated
    PROMISE = "promise"  # what the server's persistence keeps: always | everysec | none


class WorkerField(StrEnum):
    """Fields of the hash `{ns}:worker:<wid>`. It expires when its worker is dead or makes no progress."""

    MODEL = "model"
    FINGERPRINT = "fingerprint"
    STATUS = "status"  # ready | paused | draining
    PID = "pid"
    HOST = "host"
    STARTED_AT_MS = "started_at_ms"
    BEAT_AT_MS = "beat_at_ms"
    NUM_JOBS = "num_jobs"  # taken and not finished
    NUM_PARKED = "num_parked"  # of those: waiting for their `not_before_ms`
    NUM_FINISHED = "num_finished"
    NUM_RUNNING = "num_running"  # rows in the batch
    NUM_WAITING = "num_waiting"  # in the window
    MEAN_DECODE_ROWS = "mean_decode_rows"
    PROMPT_TOKENS = "prompt_tokens"
    CACHED_TOKENS = "cached_tokens"
    COMPUTED_TOKENS = "computed_tokens"
    GENERATED_TOKENS = "generated_tokens"
    NUM_PREEMPTIONS = "num_preemptions"
    NUM_PAGES = "num_pages"
    NUM_FREE_PAGES = "num_free_pages"
    NUM_CHECKPOINTS = "num_checkpoints"


# --- entries of the jobs stream ---------------------------------------------------------------------------------------


def job_entry(job_id: str, body: bytes | str) -> dict[str, bytes | str]:
    """Fields of an `XADD {ns}:jobs:<lane> *`."""
    return {"v": str(PROTOCOL_VERSION), "id": check_id(job_id, "id"), "body": body}


def expand_ids(job_id: str, n: int) -> list[str]:
    """Ids of a group of n samples; sample i runs with seed + i. n = 1 is the id itself."""
    return [job_id] if n == 1 else [f"{job_id}.{i}" for i in range(n)]


# --- entries of the out stream ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class EntryId:
    """`<epoch>-<seq>` of the out stream: seq 0 fence, 1 restart, then chunks and the end, plus one each."""

    epoch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.seq}"

    def is_next_after(self, last: "EntryId") -> bool:
        return self.epoch == last.epoch and self.seq == last.seq + 1

    @classmethod
    def parse(cls, text: str | bytes) -> "EntryId":
        epoch, _, seq = _text(text).partition("-")
        return cls(int(epoch), int(seq))


FENCE_SEQ, RESTART_SEQ, FIRST_CHUNK_SEQ = 0, 1, 2


class Channel(StrEnum):
    CONTENT = "content"
    REASONING = "reasoning"
    TOOL = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDelta:
    """A piece of one tool call. Arguments arrive as pieces of a JSON text, joined by the reader."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments_delta: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"index": self.index, "id": self.id, "name": self.name, "arguments_delta": self.arguments_delta}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New tokens and the text they released. Ids run ahead of text: joined ids are the record, text is for showing."""

    ids: tuple[int, ...] = ()
    text: str = ""
    channel: Channel = Channel.CONTENT
    tool: ToolDelta | None = None
    logprobs: tuple[dict[str, Any], ...] | None = None  # see `FinalRecord.logprobs`

    def to_json(self) -> bytes:
        data: dict[str, Any] = {"ids": self.ids, "t": self.text, "ch": self.channel}
        if self.tool is not None:
            data["tool"] = self.tool.to_dict()
        if self.logprobs is not None:
            data["lp"] = self.logprobs
        return orjson.dumps(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Chunk":
        tool = data.get("tool")
        logprobs = data.get("lp")
        return cls(
            ids=tuple(data["ids"]),
            text=data["t"],
            channel=Channel(data["ch"]),
            tool=None if tool is None else ToolDelta(**tool),
            logprobs=None if logprobs is None else tuple(logprobs),
        )


@dataclass(frozen=True, slots=True)
class Fence:
    """A new epoch claims the job; nothing of an older one comes after it."""


@dataclass(frozen=True, slots=True)
class Restart:
    """The new epoch goes on after the first `keep` tokens of the stream."""

    keep: int

    def to_json(self) -> bytes:
        return orjson.dumps({"keep": self.keep})


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Closes the stream. The final record stands in `res:<id>` by then."""

    state: State
    finish_reason: str
    usage: "Usage"
    error: "ErrorInfo | None" = None

    def to_json(self) -> bytes:
        return orjson.dumps(
            {
                "state": self.state,
                "finish_reason": self.finish_reason,
                "usage": self.usage.to_dict(),
                "error": None if self.error is None else self.error.to_dict(),
            }
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "End":
        error = data.get("error")
        return cls(
            state=State(data["state"]),
            finish_reason=data["finish_reason"],
            usage=Usage.from_dict(data.get("usage") or {}),
            error=None if error is None else ErrorInfo.from_dict(error),
        )


Entry = Fence | Restart | Chunk | End


def parse_entry(fields: Mapping[Any, Any]) -> Entry:
    """One entry of the out stream, keys and values as bytes or text. Raises ValueError for an unknown shape."""
    named = {_text(name): value for name, value in fields.items()}
    if "d" in named:
        return Chunk.from_dict(orjson.loads(named["d"]))
    if "end" in named:
        return End.from_dict(orjson.loads(named["end"]))
    if "restart" in named:
        return Restart(keep=int(orjson.loads(named["restart"])["keep"]))
    if "fence" in named:
        return Fence()
    raise ValueError(f"entry with fields {sorted(named)} is none of d, end, restart, fence")


def event_message(entry_id: EntryId, payload: bytes) -> bytes:
    """What is published on `ev:<id>` for a chunk or end that the stream has accepted."""
    return b"%d-%d %s" % (entry_id.epoch, entry_id.seq, payload)


def parse_message(message: bytes | str) -> tuple[EntryId, Chunk | End]:
    """Read a message of `ev:<id>`. An end is told from a chunk by its `state`."""
    head, _, payload = _text(message).partition(" ")
    data = orjson.loads(payload)
    return EntryId.parse(head), End.from_dict(data) if "state" in data else Chunk.from_dict(data)


# --- the final record -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0  # prompt tokens that were not computed
    cache_write: int = 0  # prompt tokens newly retained

    def to_dict(self) -> dict[str, int]:
        return {
            "prompt": self.prompt,
            "completion": self.completion,
            "cached": self.cached,
            "cache_write": self.cache_write,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Usage":
        return cls(**{name: int(data.get(name, 0)) for name in ("prompt", "completion", "cached", "cache_write")})


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds. `itl` is the mean time between tokens; None where there was no such moment."""

    queue: float | None = None  # XADD to first scheduled
    ttft: float | None = None  # XADD to first token
    itl: float | None = None
    total: float | None = None  # XADD to the end

    def to_dict(self) -> dict[str, float | None]:
        return {"queue": self.queue, "ttft": self.ttft, "itl": self.itl, "total": self.total}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Timing":
        return cls(**{name: data.get(name) for name in ("queue", "ttft", "itl", "total")})


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorInfo:
    code: str  # an `ErrorCode`; text, so that an older reader takes a newer code
    message: str
    field: str | None = None  # dotted path into the body
    retryable: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "field": self.field, "retryable": self.retryable}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ErrorInfo":
        return cls(
            code=data["code"],
            message=data.get("message", ""),
            field=data.get("field"),
            retryable=bool(data.get("retryable", False)),
        )

    @classmethod
    def of(cls, error: InvalidRequest) -> "ErrorInfo":
        return cls(code=str(error.code), message=error.message, field=error.field, retryable=error.code in RETRYABLE)


def _tuple_or_none(items: list[dict[str, Any]] | None) -> tuple[dict[str, Any], ...] | None:
    return None if items is None else tuple(items)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalRecord:
    """What a job ends in, exactly once: the JSON in `res:<id>` and in the inbox.

    logprobs   one dict a token: {"id", "t" text, "b" bytes as ints, "lp", "top": [the same without top]}; natural
               logarithm, clamped to >= -9999
    tool_calls [{"id", "name", "arguments" (JSON text)}]
    cache      {"restored_from", "hints": [{"hint", "outcome", "why"}], "miss": {"token", "message"}?}
    structured of jobs whose answer must have a form: {"valid", "reason"}; the reason says what cut it off
    prompt_logprobs  as `logprobs`, of the prompt; "lp" of its first token is None
    scores     of a score job, one a continuation: {"logprob" (the sum), "is_greedy", "tokens": [as in `logprobs`]}
    """

    id: str
    state: State
    finish_reason: str
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[dict[str, Any], ...] | None = None
    structured: dict[str, Any] | None = None
    prompt_logprobs: tuple[dict[str, Any], ...] | None = None
    scores: tuple[dict[str, Any], ...] | None = None
    usage: Usage = field(default_factory=Usage)
    cache: dict[str, Any] = field(default_factory=dict)
    timing: Timing = field(default_factory=Timing)
    seed: int | None = None
    model: str | None = None
    fingerprint: str | None = None
    epoch: int = 0
    crashes: int = 0
    warnings: tuple[str, ...] = ()
    error: ErrorInfo | None = None
    metadata: Any = None
    traceparent: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "v": PROTOCOL_VERSION,
            "id": self.id,
            "state": self.state,
            "finish_reason": self.finish_reason,
            "text": self.text,
            "reasoning": self.reasoning,
            "tool_calls": self.tool_calls,
            "token_ids": self.token_ids,
            "logprobs": self.logprobs,
            "structured": self.structured,
            "prompt_logprobs": self.prompt_logprobs,
            "scores": self.scores,
            "usage": self.usage.to_dict(),
            "cache": self.cache,
            "timing": self.timing.to_dict(),
            "seed": self.seed,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "epoch": self.epoch,
            "crashes": self.crashes,
            "warnings": self.warnings,
            "error": None if self.error is None else self.error.to_dict(),
            "metadata": self.metadata,
            "traceparent": self.traceparent,
        }

    def to_json(self) -> bytes:
        return orjson.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "FinalRecord":
        """Fields of a newer version are ignored; missing ones take their defaults."""
        error = data.get("error")
        logprobs = data.get("logprobs")
        return cls(
            id=data["id"],
            state=State(data["state"]),
            finish_reason=data["finish_reason"],
            text=data.get("text", ""),
            reasoning=data.get("reasoning", ""),
            tool_calls=tuple(data.get("tool_calls") or ()),
            token_ids=tuple(data.get("token_ids") or ()),
            logprobs=None if logprobs is None else tuple(logprobs),
            structured=data.get("structured"),
            prompt_logprobs=_tuple_or_none(data.get("prompt_logprobs")),
            scores=_tuple_or_none(data.get("scores")),
            usage=Usage.from_dict(data.get("usage") or {}),
            cache=dict(data.get("cache") or {}),
            timing=Timing.from_dict(data.get("timing") or {}),
            seed=data.get("seed"),
            model=data.get("model"),
            fingerprint=data.get("fingerprint"),
            epoch=int(data.get("epoch", 0)),
            crashes=int(data.get("crashes", 0)),
            warnings=tuple(data.get("warnings") or ()),
            error=None if error is None else ErrorInfo.from_dict(error),
            metadata=data.get("metadata"),
            traceparent=data.get("traceparent"),
        )

    @classmethod
    def from_json(cls, raw: bytes | str) -> "FinalRecord":
        return cls.from_dict(orjson.loads(raw))

    def end(self) -> End:
        return End(state=self.state, finish_reason=self.finish_reason, usage=self.usage, error=self.error)


def inbox_entry(record_json: bytes, job_id: str, state: State | str) -> dict[str, bytes | str]:
    """Fields of an entry in `inbox:<name>`: one a finished job."""
    return {"id": job_id, "state": str(state), "res": record_json}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
