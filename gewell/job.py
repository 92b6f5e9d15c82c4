"""The body of a job: parsed and checked once, typed from then on. Needs no torch and no engine.

A wrong value raises InvalidRequest that names the field, the value and the limit. An unknown field becomes a warning,
or with `strict` an error. A known field whose neglect would change the meaning is always an error.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

import orjson

from gewell.errors import InvalidRequest
from gewell.fields import Fields, check_number, is_int, refuse, shown
from gewell.nesting import find_not_finite, is_deeper_than
from gewell.protocol import (
    MAX_BODY_BYTES,
    MAX_BODY_DEPTH,
    MAX_METADATA_BYTES,
    RESULT_TTL_MAX_S,
    ErrorCode,
)
from gewell.sampling import SamplingParams
from gewell.structured import ConstraintSpec, parse_constraint

T = TypeVar("T")

UNBOUNDED_TOKENS = 2**31 - 1  # `max_tokens` not given: as far as the context goes
MAX_SEED = 2**63 - 1
MAX_STOPS = 32
MAX_STOP_CHARS = 512
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1_024
MAX_CONTINUATIONS = 1_024
MAX_TOKEN_ID = 2**24  # larger ids belong to no vocabulary; the model's own limit is checked at ingest


class Kind(StrEnum):
    CHAT = "chat"  # OpenAI-shaped messages
    COMPLETION = "completion"  # a prompt: text or token ids
    SCORE = "score"  # log-probabilities of given continuations, nothing generated
    WARM = "warm"  # prefill and retain


_GENERATING = (Kind.CHAT, Kind.COMPLETION)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """The body's `cache` object. `breakpoints` are indexes of messages; ingest turns them into token positions."""

    mode: str = "auto"  # auto | read | off
    priority: str = "normal"  # low | normal | high
    ttl_s: float | None = None
    pin: bool = False
    breakpoints: tuple[int, ...] = ()
    one_off: bool = False
    expect_after: str | None = None
    release: bool = False
    salt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked body. Exactly one of `messages` (chat, warm) and `prompt` (completion, score, warm) is set.

    sampling   `max_tokens` is UNBOUNDED_TOKENS where none was given, `seed` is 0 where `seed` below is None
    seed       None: drawn at ingest and kept in the job hash, so that another epoch goes on with the same sample
    constraint what the answer must look like; ingest makes a grammar of it
    warnings   what was ignored, for the final record
    """

    kind: Kind
    digest: str
    sampling: SamplingParams
    seed: int | None
    messages: tuple[dict[str, Any], ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    continuations: tuple[str | tuple[int, ...], ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    thinking: bool = False
    constraint: ConstraintSpec | None = None
    ends_loops: bool = False  # a row that repeats itself for good is ended
    prompt_logprobs: int | None = None  # of the prompt's tokens too, with so many alternatives
    left_out: frozenset[str] = frozenset()  # of temperature, top_k, top_p: for the model's own defaults
    model: str | None = None  # the name the caller asked for; ingest warns when another is served
    conversation_id: str | None = None
    cache: CacheOptions = field(default_factory=CacheOptions)
    stream: bool = True
    reply_to: str | None = None
    tenant: str = "default"
    not_before_ms: int | None = None
    deadline_ms: int | None = None
    result_ttl_s: float | None = None
    max_crashes: int = 2
    strict: bool = False
    metadata: Any = None
    traceparent: str | None = None
    warnings: tuple[str, ...] = ()


def parse_job(raw: bytes) -> Job:
    """Parse and check a body. Raises InvalidRequest; nothing else for any input."""
    body = _load(raw)
    fields = Fields(body, "")
    strict = fields.boolean("strict", False)
    kind = fields.choice("kind", tuple(Kind))
    if kind is None:
        refuse("kind", None, f"one of {', '.join(Kind)}")
    kind = Kind(kind)
    request = Fields(fields.mapping("request", required=True), "request.")
    conversation = Fields(fields.mapping("conversation"), "conversation.")
    cache_fields = Fields(fields.mapping("cache"), "cache.")
    warnings: list[str] = []
    parsed = _parse_request(kind, request, warnings)
    cache = _parse_cache(cache_fields)
    job = Job(
        kind=kind,
        digest=digest(body),
        sampling=parsed.sampling,
        seed=parsed.seed,
        messages=parsed.messages,
        prompt=parsed.prompt,
        continuations=parsed.continuations,
        tools=parsed.tools,
        thinking=parsed.thinking,
        constraint=parsed.constraint,
        ends_loops=parsed.ends_loops,
        prompt_logprobs=parsed.prompt_logprobs,
        left_out=parsed.left_out,
        model=request.text("model"),
        conversation_id=conversation.identifier("id"),
        cache=cache,
        stream=fields.boolean("stream", True),
        reply_to=fields.identifier("reply_to"),
        tenant=fields.identifier("tenant") or "default",
        not_before_ms=fields.integer("not_before_ms", 0, 2**53),
        deadline_ms=fields.integer("deadline_ms", 0, 2**53),
        result_ttl_s=fields.number("result_ttl_s", 1, RESULT_TTL_MAX_S),
        max_crashes=_given(fields.integer("max_crashes", 0, 100), 2),
        strict=strict,
        metadata=fields.any("metadata"),
        traceparent=fields.text("traceparent", max_chars=256),
    )
    metadata_bytes = len(orjson.dumps(job.metadata))
    if metadata_bytes > MAX_METADATA_BYTES:
        message = f"metadata: {metadata_bytes} bytes of JSON, at most {MAX_METADATA_BYTES}"
        raise InvalidRequest(ErrorCode.INVALID_REQUEST, message, "metadata")
    for unread in (fields, request, conversation, cache_fields):
        warnings.extend(f"{name}: unknown field, ignored" for name in unread.unknown())
    if strict and warnings:
        name = warnings[0].partition(":")[0]
        raise InvalidRequest(ErrorCode.UNKNOWN_FIELD, f"{name}: unknown field, and the job is strict", name)
    return replace(job, warnings=tuple(warnings)) if warnings else job


def check_writable(body: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for what JSON would lose or refuse: orjson writes NaN as null, which means "not given"."""
    _check_depth(body)
    for name, value in body.items():
        found = find_not_finite(value)
        if found is not None:
            refuse(name + found[0], found[1], "a finite number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What can be read of any body, also of a refused one, so that its refusal finds the way back."""

    digest: str
    reply_to: str | None = None
    result_ttl_s: float | None = None
    metadata: Any = None
    traceparent: str | None = None


def read_envelope(raw: bytes) -> Envelope:
    """Never raises. Fields that cannot be used are None; without usable JSON the digest is that of the bytes."""
    try:
        body = orjson.loads(raw) if len(raw) <= MAX_BODY_BYTES else None
    except orjson.JSONDecodeError:
        body = None
    if not isinstance(body, dict):
        return Envelope(digest=hashlib.sha256(raw).hexdigest())
    is_too_deep = is_deeper_than(body, MAX_BODY_DEPTH)
    if is_too_deep:  # its plain values still serve
        body = {name: value for name, value in body.items() if not isinstance(value, dict | list)}
    fields = Fields(body, "")
    metadata = body.get("metadata")
    return Envelope(
        digest=hashlib.sha256(raw).hexdigest() if is_too_deep else digest(body),
        reply_to=_or_none(lambda: fields.identifier("reply_to")),
        result_ttl_s=_or_none(lambda: fields.number("result_ttl_s", 1, RESULT_TTL_MAX_S)),
        metadata=metadata if len(orjson.dumps(metadata)) <= MAX_METADATA_BYTES else None,
        traceparent=_or_none(lambda: fields.text("traceparent", max_chars=256)),
    )


def digest(body: Mapping[str, Any]) -> str:
    """sha256 of the canonical JSON of what decides the answer: kind, request, conversation, cache.salt."""
    cache = body.get("cache")
    deciding = {
        "kind": body.get("kind"),
        "request": body.get("request"),
        "conversation": body.get("conversation"),
        "salt": cache.get("salt") if isinstance(cache, Mapping) else None,
    }
    return hashlib.sha256(orjson.dumps(deciding, option=orjson.OPT_SORT_KEYS)).hexdigest()


# --- the request ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    sampling: SamplingParams
    seed: int | None
    messages: tuple[dict[str, Any], ...] | None
    prompt: str | tuple[int, ...] | None
    continuations: tuple[str | tuple[int, ...], ...]
    tools: tuple[dict[str, Any], ...] | None
    thinking: bool
    constraint: ConstraintSpec | None
    ends_loops: bool
    prompt_logprobs: int | None
    left_out: frozenset[str]


# Fields that OpenAI's clients or other servers know and that mean nothing here: taken without a word.
_IGNORED = (
    "user",
    "store",
    "metadata",
    "stream",
    "stream_options",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
)

# Read by `parse_constraint`.
_CONSTRAINTS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "tool_choice",
)

# Known fields that we cannot honour, with the values that ask for nothing. Anything else is an error: an answer made
# without the constraint would look right and be wrong.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "grammar": (None, ""),
    "structural_tag": (None,),
    "parallel_tool_calls": (None, True),
    "functions": (None, []),
    "function_call": (None, "auto", "none"),
    "n": (None, 1),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "echo": (None, False),
    "suffix": (None, ""),
    "bad_words": (None, []),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "truncate_prompt_tokens": (None,),
    "logits_processors": (None, []),
    "web_search_options": (None,),
}


def _parse_request(kind: Kind, request: Fields, warnings: list[str]) -> _Request:
    _refuse_unsupported(request)
    for name in _IGNORED:
        request.any(name)
    messages = _parse_messages(request, warnings) if kind in (Kind.CHAT, Kind.WARM) else None
    prompt = _parse_prompt(request, "prompt") if kind is not Kind.CHAT else None
    if kind is Kind.CHAT and messages is None:
        raise InvalidRequest(ErrorCode.INVALID_REQUEST, "request.messages: missing", "request.messages")
    if kind in (Kind.COMPLETION, Kind.SCORE) and prompt is None:
        raise InvalidRequest(ErrorCode.INVALID_REQUEST, "request.prompt: missing", "request.prompt")
    if kind is Kind.WARM and (messages is None) == (prompt is None):
        raise InvalidRequest(
            ErrorCode.INVALID_REQUEST, "request: warm takes messages or prompt, one of them", "request"
        )
    seed = request.integer("seed", 0, MAX_SEED)
    tools = _parse_tools(request)
    constraint = _parse_constraint(kind, request, tools)
    sampling = _parse_sampling(kind, request, seed)
    if constraint is not None and sampling.min_tokens:
        refuse(
            "request.min_tokens", sampling.min_tokens, f"possible beside {constraint.field}: the form says when to end"
        )
    return _Request(
        sampling=sampling,
        seed=seed,
        messages=messages,
        prompt=prompt,
        continuations=_parse_continuations(request) if kind is Kind.SCORE else (),
        tools=None if request.any("tool_choice") == "none" else tools,
        thinking=_parse_thinking(request),
        constraint=constraint,
        ends_loops=request.boolean("repetition_detection", constraint is not None),
        prompt_logprobs=request.integer("prompt_logprobs", 0, MAX_LOGPROBS) if kind in _GENERATING else None,
        left_out=frozenset(name for name in ("temperature", "top_k", "top_p") if request.any(name) is None),
    )


def _parse_constraint(kind: Kind, request: Fields, tools: tuple[dict[str, Any], ...] | None) -> ConstraintSpec | None:
    given = {name: request.any(name) for name in _CONSTRAINTS}
    constraint = parse_constraint(given, tools, is_chat=kind in (Kind.CHAT, Kind.WARM))
    return constraint if kind in _GENERATING else None


def _parse_sampling(kind: Kind, request: Fields, seed: int | None) -> SamplingParams:
    least = 1 if request.any("prompt_logprobs") is None else 0  # a prompt may be scored with nothing to follow
    max_tokens = request.integer("max_tokens", least, UNBOUNDED_TOKENS)
    max_completion = request.integer("max_completion_tokens", least, UNBOUNDED_TOKENS)
    if max_tokens is not None and max_completion is not None and max_tokens != max_completion:
        refuse("request.max_completion_tokens", max_completion, f"max_tokens says {max_tokens}")
    effective = _given(_given(max_completion, max_tokens), UNBOUNDED_TOKENS)
    min_tokens = _given(request.integer("min_tokens", 0, UNBOUNDED_TOKENS), 0)
    if min_tokens > effective:
        refuse("request.min_tokens", min_tokens, f"at most max_tokens, {effective}")
    top_k = request.integer("top_k", -1, MAX_TOKEN_ID)
    return SamplingParams(
        temperature=_given(request.number("temperature", 0, 100), 1.0),
        top_k=0 if top_k in (None, -1) else top_k,
        top_p=_given(request.number("top_p", 0, 1, open_low=True), 1.0),
        min_p=_given(request.number("min_p", 0, 1), 0.0),
        seed=_given(seed, 0),
        max_tokens=effective,
        min_tokens=min_tokens,
        ignore_eos=request.boolean("ignore_eos", False),
        stop=_parse_stop(request),
        stop_token_ids=request.integers("stop_token_ids", 0, MAX_TOKEN_ID, max_items=MAX_STOP_TOKEN_IDS),
        include_stop=request.boolean("include_stop_str_in_output", False),
        logprobs=_parse_logprobs(kind, request),
        logit_bias=_parse_logit_bias(request),
        presence_penalty=_given(request.number("presence_penalty", -2, 2), 0.0),
        frequency_penalty=_given(request.number("frequency_penalty", -2, 2), 0.0),
        repetition_penalty=_given(request.number("repetition_penalty", 0.01, 10), 1.0),
    )


def _parse_stop(request: Fields) -> tuple[str, ...]:
    value = request.any("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        refuse("request.stop", value, f"a text or a list of at most {MAX_STOPS} texts")
    for idx, stop in enumerate(stops):
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            refuse(f"request.stop[{idx}]", stop, f"a text of 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _parse_logprobs(kind: Kind, request: Fields) -> int | None:
    """Both forms: chat's `logprobs: true, top_logprobs: n` and completion's `logprobs: n`."""
    top = request.integer("top_logprobs", 0, MAX_LOGPROBS)
    value = request.any("logprobs")
    if value is None or value is False:
        if top:
            refuse("request.top_logprobs", top, "nothing unless logprobs is true")
        return None
    if value is True:
        return top or 0
    if kind is Kind.CHAT or not is_int(value) or not 0 <= value <= MAX_LOGPROBS:
        limit = "true or false" if kind is Kind.CHAT else f"true, false or a whole number from 0 to {MAX_LOGPROBS}"
        refuse("request.logprobs", value, limit)
    return int(value)


def _parse_logit_bias(request: Fields) -> dict[int, float]:
    bias: dict[int, float] = {}
    given = request.mapping("logit_bias")
    if len(given) > MAX_LOGIT_BIAS:
        refuse("request.logit_bias", f"{len(given)} entries", f"at most {MAX_LOGIT_BIAS} entries")
    for name, value in given.items():
        path = f"request.logit_bias[{name[:20]!r}]"
        if not name.isascii() or not name.isdigit() or int(name[:12]) > MAX_TOKEN_ID or len(name) > 12:
            refuse(path, name, "a token id as text")
        bias[int(name)] = check_number(path, value, -100, 100, open_low=False)
    return bias


def _parse_thinking(request: Fields) -> bool:
    """`chat_template_kwargs.enable_thinking`, or OpenAI's `reasoning_effort`: all but none and minimal turn it on."""
    kwargs = Fields(request.mapping("chat_template_kwargs"), "request.chat_template_kwargs.")
    thinking = kwargs.any("enable_thinking")
    if thinking is not None and not isinstance(thinking, bool):
        refuse("request.chat_template_kwargs.enable_thinking", thinking, "true or false")
    for name in kwargs.unknown():
        raise InvalidRequest(ErrorCode.UNSUPPORTED, f"{name}: not a variable of the built-in templates", name)
    effort = request.choice("reasoning_effort", ("none", "minimal", "low", "medium", "high", "xhigh"))
    if isinstance(thinking, bool):
        return thinking
    return effort is not None and effort not in ("none", "minimal")


def _refuse_unsupported(request: Fields) -> None:
    for name, neutral in _UNSUPPORTED.items():
        value = request.any(name)
        # `True == 1` in Python: compare types too, so that `n: true` is not taken for 1
        if not any(type(value) is type(allowed) and value == allowed for allowed in neutral):
            hint = "; send one job a sample, ids <id>.0, <id>.1, ... and seed + i" if name == "n" else ""
            raise InvalidRequest(
                ErrorCode.UNSUPPORTED, f"request.{name}: {shown(value)} is not supported{hint}", f"request.{name}"
            )


def _parse_prompt(request: Fields, name: str) -> str | tuple[int, ...] | None:
    value = request.any(name)
    return None if value is None else _text_or_ids(f"request.{name}", value)


def _parse_continuations(request: Fields) -> tuple[str | tuple[int, ...], ...]:
    value = request.any("continuations")
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CONTINUATIONS:
        refuse("request.continuations", value, f"a list of 1 to {MAX_CONTINUATIONS} texts or lists of token ids")
    return tuple(_text_or_ids(f"request.continuations[{idx}]", item) for idx, item in enumerate(value))


def _text_or_ids(path: str, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str | list) and len(value) == 0:
        raise InvalidRequest(ErrorCode.EMPTY_PROMPT, f"{path}: empty", path)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse(path, value, "a text or a list of token ids")
    for idx, token in enumerate(value):
        if not is_int(token) or not 0 <= token <= MAX_TOKEN_ID:
            refuse(f"{path}[{idx}]", token, f"a token id from 0 to {MAX_TOKEN_ID}")
    return tuple(value)


# --- messages and tools -----------------------------------------------------------------------------------------------

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_FIELDS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "refusal"}
)
_PART_TYPES = ("text", "image_url", "image")


def _parse_messages(request: Fields, warnings: list[str]) -> tuple[dict[str, Any], ...] | None:
    messages = request.any("messages")
    if messages is None:
        return None
    if not isinstance(messages, list):
        refuse("request.messages", messages, "a list of messages")
    if not messages:
        raise InvalidRequest(ErrorCode.EMPTY_PROMPT, "request.messages: empty", "request.messages")
    for idx, message in enumerate(messages):
        _check_message(f"request.messages[{idx}]", message, warnings)
    return tuple(messages)


def _check_message(path: str, message: Any, warnings: list[str]) -> None:
    if not isinstance(message, dict):
        refuse(path, message, "an object with role and content")
    if message.get("role") not in _ROLES:
        refuse(f"{path}.role", message.get("role"), f"one of {', '.join(_ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        for part_idx, part in enumerate(content):
            _check_part(f"{path}.content[{part_idx}]", part)
    elif content is None:
        if not message.get("tool_calls"):
            refuse(f"{path}.content", None, "a text or a list of parts (null only beside tool_calls)")
    elif not isinstance(content, str):
        refuse(f"{path}.content", content, "a text or a list of parts")
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if not isinstance(message.get(name), str | None):
            refuse(f"{path}.{name}", message[name], "a text")
    _check_tool_calls(f"{path}.tool_calls", message.get("tool_calls"))
    warnings.extend(f"{path}.{name}: unknown field, ignored" for name in message if name not in _MESSAGE_FIELDS)


def _check_part(path: str, part: Any) -> None:
    if not isinstance(part, dict):
        refuse(path, part, "an object with a type")
    kind = part.get("type")
    if kind not in _PART_TYPES:
        raise InvalidRequest(
            ErrorCode.UNSUPPORTED, f"{path}.type: {shown(kind)} is not one of {', '.join(_PART_TYPES)}", f"{path}.type"
        )
    if kind == "text" and not isinstance(part.get("text"), str):
        refuse(f"{path}.text", part.get("text"), "a text")
    if kind == "image_url":
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        if not isinstance(url, str):
            refuse(f"{path}.image_url.url", url, "a data: or blob: URL")
    if kind == "image" and not isinstance(part.get("image"), str):
        refuse(f"{path}.image", part.get("image"), "the sha256 of an uploaded blob")


def _check_tool_calls(path: str, calls: Any) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        refuse(path, calls, "a list of tool calls")
    for idx, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            refuse(f"{path}[{idx}].function", function, "an object with a name")
        if not isinstance(function.get("arguments"), str | dict | None):
            refuse(f"{path}[{idx}].function.arguments", function["arguments"], "a JSON text or an object")


def _parse_tools(request: Fields) -> tuple[dict[str, Any], ...] | None:
    tools = request.any("tools")
    if tools is None:
        return None
    if not isinstance(tools, list):
        refuse("request.tools", tools, "a list of tools")
    for idx, tool in enumerate(tools):
        path = f"request.tools[{idx}]"
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise InvalidRequest(ErrorCode.UNSUPPORTED, f"{path}.type: {shown(kind)} is not function", f"{path}.type")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            refuse(f"{path}.function", function, "an object with a name")
        if not isinstance(function.get("parameters"), dict | None):
            refuse(f"{path}.function.parameters", function["parameters"], "a JSON schema object")
    return tuple(tools) if tools else None


def _parse_cache(fields: Fields) -> CacheOptions:
    expect = Fields(fields.mapping("expect"), "cache.expect.")
    options = CacheOptions(
        mode=fields.choice("mode", ("auto", "read", "off")) or "auto",
        priority=fields.choice("priority", ("low", "normal", "high")) or "normal",
        ttl_s=fields.number("ttl_s", 0, 365 * 86_400, open_low=True),
        pin=fields.boolean("pin", False),
        breakpoints=fields.integers("breakpoints", 0, 2**31, max_items=64),
        one_off=fields.boolean("one_off", False),
        expect_after=expect.identifier("after"),
        release=fields.boolean("release", False),
        salt=fields.text("salt", max_chars=256),
    )
    fields.note_unknown(expect)
    return options


# --- the body as a whole ----------------------------------------------------------------------------------------------


def _load(raw: bytes) -> dict[str, Any]:
    if len(raw) > MAX_BODY_BYTES:
        raise InvalidRequest(
            ErrorCode.BODY_TOO_LARGE, f"body: {len(raw)} bytes, at most {MAX_BODY_BYTES}; send images as blobs", None
        )
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        _refuse_not_finite(raw)
        raise InvalidRequest(ErrorCode.INVALID_JSON, f"body: not JSON: {error}", None) from None
    if not isinstance(body, dict):
        raise InvalidRequest(ErrorCode.INVALID_JSON, f"body: {type(body).__name__}, but an object is wanted", None)
    _check_depth(body)
    return body


def _check_depth(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if is_deeper_than(value, MAX_BODY_DEPTH - 1):
            message = f"{name[:80]}: nested too deep, at most {MAX_BODY_DEPTH} lists and objects inside one another"
            raise InvalidRequest(ErrorCode.INVALID_JSON, message, name[:80])


def _refuse_not_finite(raw: bytes) -> None:
    """Python's json writes NaN and Infinity, which are not JSON. Name the field instead of a column."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return
    if isinstance(body, dict):
        check_writable(body)


def _or_none(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except InvalidRequest:
        return None


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value
