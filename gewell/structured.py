"""What an answer must look like, as a job asks for it. `gewell.text.constraint` makes a grammar of it.

Forms of three families of clients: OpenAI's `response_format` and `tool_choice`, the `structured_outputs` object, and
the older `guided_*` fields. Whatever asks for a form and is not understood is an error: an answer made without it would
look right and be wrong.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gewell.errors import InvalidRequest
from gewell.protocol import ErrorCode

MAX_GRAMMAR_CHARS = 256_000
MAX_CHOICES = 10_000

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


class ConstraintKind(StrEnum):
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"
    TOOL_CALL = "tool_call"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintSpec:
    """What the answer must look like. `field` is the place in the request that asked for it, for errors."""

    kind: ConstraintKind
    value: Any = None  # a schema, a regex, a list of choices, a grammar, a list of tool declarations
    is_single: bool = False  # of tool calls: exactly one
    field: str = "request.response_format"


def parse_constraint(
    request: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None, *, is_chat: bool
) -> ConstraintSpec | None:
    """The one constraint of a request, None where any text will do. `tools`: those of the request, checked.

    Raises InvalidRequest for an unknown form, for two constraints at once, and for a form beside tools that the model
    is free to call: the answer would be one or the other.
    """
    found = [
        parse_response_format(request.get("response_format")),
        parse_structured_outputs(request.get("structured_outputs")),
        *(
            parse_structured_outputs({name: request[field]}, f"request.{field}")
            for field, name in _GUIDED.items()
            if request.get(field) is not None
        ),
    ]
    specs = [spec for spec in found if spec is not None]
    choice = request.get("tool_choice")
    call = parse_tool_choice(tools, choice)
    if call is not None and not is_chat:
        raise refused(call.field, f"{choice!r} is not supported outside of chat", ErrorCode.UNSUPPORTED)
    if call is not None:
        specs.append(call)
    if len(specs) > 1:
        raise refused(specs[1].field, f"one constraint at a time, {specs[0].field} is there already")
    if specs and call is None and tools and choice != "none":
        reason = "is not supported beside tools that may be called; set tool_choice to none or required"
        raise refused(specs[0].field, reason, ErrorCode.UNSUPPORTED)
    return specs[0] if specs else None


def parse_response_format(response_format: Any) -> ConstraintSpec | None:
    """OpenAI's `response_format`; None where any text will do. Raises InvalidRequest for a form nobody knows."""
    field = "request.response_format"
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        raise refused(field, "must be an object with a type")
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return ConstraintSpec(kind=ConstraintKind.JSON_OBJECT, field=field)
    if kind == "json_schema":
        holder = response_format.get("json_schema")
        schema = holder.get("schema") if isinstance(holder, Mapping) else None
        if not isinstance(schema, (Mapping, bool)):
            raise refused(f"{field}.json_schema.schema", "must be a JSON schema (an object)")
        return ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, value=schema, field=f"{field}.json_schema.schema")
    raise refused(f"{field}.type", f"{str(kind)[:80]!r} is not text, json_object or json_schema")


def parse_structured_outputs(options: Any, field: str | None = None) -> ConstraintSpec | None:
    """The `structured_outputs` object that vLLM's clients send: one of json, json_object, regex, choice, grammar.

    field: where the one option was given by itself, under a name of its own.
    """
    path = "request.structured_outputs"
    if options is not None and not isinstance(options, Mapping):
        raise refused(path, "must be an object")
    given = {name: value for name, value in (options or {}).items() if value is not None and value is not False}
    if not given:
        return None
    if len(given) > 1:
        raise refused(path, f"one constraint at a time, not {', '.join(sorted(map(str, given)))[:200]}")
    ((name, value),) = given.items()
    path = field or f"{path}.{name}"[:200]
    if name == "json_object":
        return ConstraintSpec(kind=ConstraintKind.JSON_OBJECT, field=path)
    if name == "json":
        return ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, value=_schema(value, path), field=path)
    if name == "regex" and isinstance(value, str):
        return ConstraintSpec(kind=ConstraintKind.REGEX, value=value, field=path)
    if name == "choice" and isinstance(value, list):
        return ConstraintSpec(kind=ConstraintKind.CHOICE, value=value, field=path)
    if name == "grammar" and isinstance(value, str):
        return ConstraintSpec(kind=ConstraintKind.LARK, value=value, field=path)
    raise refused(path, "is not a known constraint of the right type (json, json_object, regex, choice, grammar)")


def parse_tool_choice(tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any) -> ConstraintSpec | None:
    """A `tool_choice` that demands a call: "required", or exactly one of a function by name. None: "auto", "none"."""
    field = "request.tool_choice"
    if tool_choice is None or tool_choice in ("auto", "none"):
        return None
    if not tools:
        raise refused(field, "needs tools")
    if tool_choice == "required":
        return ConstraintSpec(kind=ConstraintKind.TOOL_CALL, value=list(tools), field=field)
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    chosen = [tool for tool in tools if tool["function"]["name"] == name]
    if not chosen:
        raise refused(field, f"{str(name)[:80]!r} is none of the tools")
    return ConstraintSpec(kind=ConstraintKind.TOOL_CALL, value=chosen, is_single=True, field=field)


def _schema(value: Any, field: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as e:
        raise refused(field, f"is not JSON: {e}") from e


def refused(field: str, why: str, code: str = ErrorCode.INVALID_REQUEST) -> InvalidRequest:
    return InvalidRequest(code, f"{field}: {why}", field)
