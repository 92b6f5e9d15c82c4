"""OpenAI-shaped messages brought to the one form that templates read."""

import json
from collections.abc import Sequence
from typing import Any

from gewell.errors import InvalidRequest
from gewell.nesting import is_deeper_than
from gewell.protocol import MAX_BODY_DEPTH, ErrorCode
from gewell.text.prompt_parts import Message

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_IMAGE_PARTS = frozenset({"image", "image_url", "input_image"})


def normalize_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of the messages in which

    - content is a string or a list of `{"type": "text", "text": ...}` and `{"type": "image"}`; a system message's is a
      string, its parts trimmed and joined with a space, since templates trim it as one text;
    - a tool call's arguments are a mapping; a string that is no JSON object, or is nested too deep to be written again,
      stays as the model wrote it.

    Raises InvalidRequest for a conversation without messages and for a part of another type.
    """
    if not messages:
        raise InvalidRequest(ErrorCode.EMPTY_PROMPT, "messages: empty", "request.messages")
    return [_normalize(message, f"request.messages[{i}]") for i, message in enumerate(messages)]


def count_images(messages: Sequence[Message]) -> int:
    """Images in normalised messages."""
    contents = [m["content"] for m in messages if isinstance(m["content"], list)]
    return sum(part["type"] == "image" for content in contents for part in content)


def text_of(content: Any) -> str:
    """All text of a normalised content, joined."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part["type"] == "text")
    return content or ""


def _normalize(message: Message, path: str) -> dict[str, Any]:
    result = dict(message)
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = [_normalize_part(part, f"{path}.content[{i}]") for i, part in enumerate(content)]
        if message.get("role") in ("system", "developer"):
            if any(part["type"] == "image" for part in content):
                raise InvalidRequest(ErrorCode.INVALID_REQUEST, f"{path}: an image in a system message", path)
            content = " ".join(part["text"].strip() for part in content)
    result["content"] = content if content is not None else ""
    calls = message.get("tool_calls")
    if calls:
        result["tool_calls"] = [_normalize_call(call) for call in calls]
    else:
        result.pop("tool_calls", None)
    return result


def _normalize_part(part: Any, path: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type")
    if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in _IMAGE_PARTS:
        return {"type": "image"}
    raise InvalidRequest(ErrorCode.UNSUPPORTED, f"{path}.type: {kind!r} is not text or an image", f"{path}.type")


def _normalize_call(call: Message) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        function["arguments"] = _mapping_of(arguments)
    elif arguments is None:
        function["arguments"] = {}
    return {**call, "function": function}


def _mapping_of(arguments: str) -> dict[str, Any] | str:
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    is_usable = isinstance(value, dict) and not is_deeper_than(value, MAX_BODY_DEPTH)
    return value if is_usable else arguments
