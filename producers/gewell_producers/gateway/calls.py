"""An HTTP request body made into jobs. What the gateway does not use itself goes on to the worker as it is."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from gewell.errors import InvalidRequest
from gewell.fields import refuse
from gewell.job import parse_job
from gewell.protocol import MAX_BODY_BYTES, ErrorCode, Lane, check_id, expand_ids, is_valid_id
from gewell_producers.gateway.access import Caller
from gewell_producers.gateway.problems import Problem
from gewell_producers.job import Job, new_job_id

MAX_N = 128
MAX_PROMPTS = 1024

# Fields of the request that the gateway acts on; the worker does not see them.
_OURS = frozenset(
    {
        *("model", "n", "stream", "stream_options", "x_job", "request_id", "session_id", "cache_salt", "priority"),
        *("prompt_cache_key", "user", "metadata", "store", "service_tier", "safety_identifier", "return_token_ids"),
    }
)
_X_JOB_FIELDS = frozenset(
    {
        *("id", "lane", "conversation", "cache", "deadline_ms", "not_before_ms", "result_ttl_s", "max_crashes"),
        *("strict", "metadata", "on_disconnect"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request: its jobs, one a choice, and how the answer is wanted.

    digests                  of the jobs, where the caller chose the id: it may belong to another request already
    is_echo                  a text completion's answer begins with its prompt
    cancels_on_disconnect    by default only where the caller cannot come back, having chosen no id
    """

    call_id: str
    jobs: tuple[Job, ...]
    digests: tuple[str, ...]
    model: str | None
    is_stream: bool
    include_usage: bool
    return_token_ids: bool
    cancels_on_disconnect: bool
    is_echo: bool = False


def parse_body(raw: bytes) -> dict[str, Any]:
    if len(raw) > MAX_BODY_BYTES:
        raise Problem(status=413, message=f"the body has over {MAX_BODY_BYTES} bytes", code="body_too_large")
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Problem(status=400, message=f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise Problem(status=400, message="the body is not a JSON object", code="invalid_json")
    return body


def chat_call(body: dict[str, Any], headers: Mapping[str, str], caller: Caller) -> Call:
    """A call of /v1/chat/completions. Raises InvalidRequest."""
    return _call("chat", "chatcmpl", body, [{}], headers, caller)


def completion_call(body: dict[str, Any], headers: Mapping[str, str], caller: Caller) -> Call:
    """A call of /v1/completions: `prompt` is a text, token ids, or a list of either; choices count through them."""
    prompt = body.get("prompt")
    many = isinstance(prompt, list) and len(prompt) > 0 and isinstance(prompt[0], str | list)
    prompts: list[Any] = prompt if many and isinstance(prompt, list) else [prompt]
    if len(prompts) > MAX_PROMPTS:
        refuse("prompt", f"{len(prompts)} prompts", f"at most {MAX_PROMPTS} in one request")
    given = dict(body)
    given.setdefault("max_tokens", 16)  # OpenAI's default for this endpoint
    is_echo = _flag(given, "echo")
    given.pop("echo", None)
    if is_echo:
        if _flag(given, "stream"):
            raise InvalidRequest(ErrorCode.UNSUPPORTED, "echo: not supported in a streamed answer", "echo")
        logprobs = given.get("logprobs")
        given["prompt_logprobs"] = 0 if logprobs is None or isinstance(logprobs, bool) else logprobs
    call = _call("completion", "cmpl", given, [{"prompt": each} for each in prompts], headers, caller)
    return replace(call, is_echo=is_echo)


def _call(
    kind: str,
    prefix: str,
    body: dict[str, Any],
    variants: list[dict[str, Any]],
    headers: Mapping[str, str],
    caller: Caller,
) -> Call:
    x_job = _x_job(body)
    num_samples = _whole(body, "n", 1, 1, MAX_N)
    is_stream = _flag(body, "stream")
    stream_options = body.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        refuse("stream_options", stream_options, "an object")
    request = {name: value for name, value in body.items() if name not in _OURS and value is not None}
    own_id = _own_id(prefix, body, x_job, headers, caller)
    call_id = own_id or f"{prefix}-{new_job_id()}"
    options = _options(body, x_job, headers, caller)
    jobs = []
    for idx, job_id in enumerate(expand_ids(call_id, len(variants) * num_samples)):
        seeded = request | variants[idx // num_samples]
        if num_samples > 1 and isinstance(request.get("seed"), int):
            seeded["seed"] = request["seed"] + idx % num_samples
        jobs.append(Job(kind=kind, request=seeded, id=job_id, stream=is_stream, **options))
    digests = tuple(parse_job(job.body()).digest for job in jobs)
    return Call(
        call_id=call_id,
        jobs=tuple(jobs),
        digests=() if own_id is None else digests,
        model=body.get("model"),
        is_stream=is_stream,
        include_usage=bool(stream_options.get("include_usage")),
        return_token_ids=_flag(body, "return_token_ids"),
        cancels_on_disconnect=x_job.get("on_disconnect", "cancel" if own_id is None else "continue") == "cancel",
    )


def _x_job(body: Mapping[str, Any]) -> dict[str, Any]:
    """Our own object in the body; openai's client sends it by `extra_body`."""
    x_job = body.get("x_job")
    if x_job is None:
        return {}
    if not isinstance(x_job, dict):
        refuse("x_job", x_job, "an object")
    unknown = sorted(x_job.keys() - _X_JOB_FIELDS)
    if unknown:
        refuse(f"x_job.{unknown[0]}", x_job[unknown[0]], f"one of {', '.join(sorted(_X_JOB_FIELDS))}")
    if x_job.get("on_disconnect", "cancel") not in ("cancel", "continue"):
        refuse("x_job.on_disconnect", x_job["on_disconnect"], "cancel or continue")
    return x_job


def _own_id(
    prefix: str, body: Mapping[str, Any], x_job: Mapping[str, Any], headers: Mapping[str, str], caller: Caller
) -> str | None:
    """The id that the caller chose, if it did: what is sent twice is then answered once."""
    own = x_job.get("id")
    if own is not None:
        return check_id(own, "x_job.id")
    key = headers.get("idempotency-key") or body.get("request_id")
    if key is None:
        return None
    return f"{prefix}-{hashlib.sha256(f'{caller.tenant} {key}'.encode()).hexdigest()[:32]}"


def _options(
    body: Mapping[str, Any], x_job: Mapping[str, Any], headers: Mapping[str, str], caller: Caller
) -> dict[str, Any]:
    """Fields of the job beside the request."""
    cache = dict(x_job.get("cache") or {})
    if body.get("cache_salt") is not None:
        cache.setdefault("salt", body["cache_salt"])
    conversation = (
        x_job.get("conversation")
        or headers.get("x-conversation-id")
        or body.get("session_id")
        or _as_id(body.get("prompt_cache_key"))
    )
    passed = ("deadline_ms", "not_before_ms", "result_ttl_s", "max_crashes", "metadata")
    return {
        "lane": _lane(body, x_job),
        "conversation": conversation,
        "cache": cache or None,
        "tenant": caller.tenant,
        "strict": bool(x_job.get("strict")),
        "traceparent": headers.get("traceparent"),
        **{name: x_job[name] for name in passed if x_job.get(name) is not None},
    }


def _as_id(text: object) -> str | None:
    """A free text as a conversation's name: itself where it fits, else its digest."""
    if not isinstance(text, str) or not text:
        return None
    return text if is_valid_id(text) else hashlib.sha256(text.encode()).hexdigest()[:32]


def _lane(body: Mapping[str, Any], x_job: Mapping[str, Any]) -> Lane:
    """`x_job.lane`, else vLLM's `priority`: below 0 is more urgent."""
    lane = x_job.get("lane")
    if lane is not None:
        if lane not in set(Lane):
            refuse("x_job.lane", lane, f"one of {', '.join(Lane)}")
        return Lane(lane)
    priority = _whole(body, "priority", 0, -(2**31), 2**31)
    return Lane.HIGH if priority < 0 else Lane.LOW if priority > 0 else Lane.NORMAL


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        refuse(name, value, "true or false")
    return bool(value)


def _whole(body: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        refuse(name, value, f"a whole number from {least} to {most}")
    return value
