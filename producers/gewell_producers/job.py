"""What a producer submits: one job as a plain value, and its encoding into a stream entry."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from gewell.errors import InvalidRequest
from gewell.job import check_writable, parse_job
from gewell.protocol import MAX_BODY_BYTES, ErrorCode, Lane, check_id, job_entry


def new_job_id() -> str:
    """A fresh id of 24 hexadecimal digits."""
    return secrets.token_hex(12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job. `Job.chat` and `Job.completion` are the short ways to make one.

    request    what the model is asked: OpenAI-shaped for `chat`, `{"prompt": text or token ids, ...}` for `completion`
    id         the idempotency key: the same id submitted again is answered from the first one's record
    cache      hints: mode, priority, ttl_s, pin, breakpoints, one_off, expect, release, salt
    reply_to   name of the inbox that gets the result; `map` and `gather` fill it in
    extra      further fields of the body, passed on as they are
    """

    request: Mapping[str, Any]
    kind: str = "chat"
    id: str = field(default_factory=new_job_id)
    lane: Lane = Lane.NORMAL
    conversation: str | None = None
    cache: Mapping[str, Any] | None = None
    stream: bool = True
    reply_to: str | None = None
    tenant: str | None = None
    not_before_ms: int | None = None
    deadline_ms: int | None = None
    result_ttl_s: float | None = None
    max_crashes: int | None = None
    strict: bool = False
    metadata: Any = None
    traceparent: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_id(self.id, "id")

    @classmethod
    def chat(
        cls, messages: str | Sequence[Mapping[str, Any]], *, job: Mapping[str, Any] | None = None, **request: Any
    ) -> "Job":
        """A chat job. A bare string is one user message; `job` holds this class's own fields (id, lane, cache, ...)."""
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        return cls(kind="chat", request={"messages": turns, **request}, **(job or {}))

    @classmethod
    def completion(cls, prompt: str | Sequence[int], *, job: Mapping[str, Any] | None = None, **request: Any) -> "Job":
        """A completion job over text or token ids, continued as it stands."""
        given = prompt if isinstance(prompt, str) else list(prompt)
        return cls(kind="completion", request={"prompt": given, **request}, **(job or {}))

    @classmethod
    def from_body(cls, body: Mapping[str, Any], **own: Any) -> "Job":
        """The job whose body this is; `own` holds what is not part of a body (id, lane). Submission checks the values.

        A bare request, recognised by its `messages` or `prompt` beside no `request`, is taken as the body's request.
        """
        if "request" not in body and ("messages" in body or "prompt" in body):
            body = {"kind": "chat" if "messages" in body else "completion", "request": body}
        known = {name: body[name] for name in _BODY_FIELDS & body.keys()}
        rest = {name: value for name, value in body.items() if name not in known}
        return cls(**{"request": {}, **known, **own}, extra=rest)

    def body(self) -> bytes:
        """The body's JSON; fields left alone are not in it. Raises InvalidRequest for what JSON cannot carry."""
        conversation = None if self.conversation is None else {"id": self.conversation}
        body = {
            "kind": self.kind,
            "request": self.request,
            "conversation": conversation,
            "cache": self.cache,
            "stream": None if self.stream else False,
            "reply_to": self.reply_to,
            "tenant": self.tenant,
            "not_before_ms": self.not_before_ms,
            "deadline_ms": self.deadline_ms,
            "result_ttl_s": self.result_ttl_s,
            "max_crashes": self.max_crashes,
            "strict": self.strict or None,
            "metadata": self.metadata,
            "traceparent": self.traceparent,
            **self.extra,
        }
        check_writable(body)
        try:
            raw = orjson.dumps({name: value for name, value in body.items() if value is not None})
        except TypeError as error:
            raise InvalidRequest(ErrorCode.INVALID_JSON, f"job {self.id}: {error}") from error
        if len(raw) > MAX_BODY_BYTES:
            raise InvalidRequest(
                ErrorCode.BODY_TOO_LARGE, f"job {self.id}: body of {len(raw)} bytes, the limit is {MAX_BODY_BYTES}"
            )
        return raw

    def entry(self) -> dict[str, bytes | str]:
        """Fields of the jobs stream's entry."""
        return job_entry(self.id, self.body())


def check_digest(job: Job, standing: str | None) -> None:
    """Raise InvalidRequest when the job's id belongs to another request. `standing`: what the queue knows of the id."""
    if standing is not None and parse_job(job.body()).digest != standing:
        raise InvalidRequest(ErrorCode.ID_CONFLICT, f"id {job.id} was used for another request", "id")


# Fields of a body that are attributes of the same name and form. `conversation` is an object there and a name here.
_BODY_FIELDS = frozenset(
    {
        *("kind", "request", "cache", "reply_to", "tenant", "not_before_ms", "deadline_ms"),
        *("result_ttl_s", "max_crashes", "metadata", "traceparent"),
    }
)
