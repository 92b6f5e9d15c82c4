"""Reads the tool calls that a Gemma 4 writes, in both dialects that it uses for arguments.

    call:get_weather{city:<|"|>Brno<|"|>,days:[1,2],raw:true}          its own
    call:get_weather{"city": "Brno", "days": [1, 2], "raw": true}      plain JSON, also only inside a container

The token `<|"|>` arrives here as the character QUOTE. It is half a surrogate pair, which no decoded text can contain.
"""

import json
import re
from collections.abc import Mapping, Sequence
from json.decoder import scanstring  # type: ignore[attr-defined]  # public in CPython, missing in the stubs
from typing import Any, NamedTuple

QUOTE = "\udcff"
MAX_DEPTH = 64

_HEAD = re.compile(r"\s*call:\s*([^\s{:][^\s{]*)\s*(?=\{)")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_SPACE = re.compile(r"\s*")
_BARE = re.compile(r"[^,\]}\s" + QUOTE + r"](?:[^,\]}" + QUOTE + r"]*[^,\]}\s" + QUOTE + r"])?")
_BARE_KEY = re.compile(r'[^:,\[\]{}\s"' + QUOTE + r"][^:,\[\]{}" + QUOTE + r"]*")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


class ToolCall(NamedTuple):
    name: str
    arguments: dict[str, Any]


class ToolCallError(ValueError):
    """The text between the call's markers is no tool call. Says where and why."""


def parse_tool_calls(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[ToolCall]:
    """The calls in the text between `<|tool_call>` and `<tool_call|>`; usually one.

    tools   declarations as the client sent them; values are brought to the types of their schemas
    Raises ToolCallError when any part of the text cannot be read.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    reader = _Reader(text)
    calls = []
    while not reader.at_end():
        name, arguments = reader.call()
        schema = schemas.get(name, {})
        calls.append(ToolCall(name, {key: _typed(value, _property(schema, key)) for key, value in arguments.items()}))
    if not calls:
        raise ToolCallError("empty tool call")
    return calls


class _Reader:
    """A recursive-descent parser over one text. `pos` only moves forward."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0

    def at_end(self) -> bool:
        self._skip_space()
        return self.pos == len(self.text)

    def call(self) -> tuple[str, dict[str, Any]]:
        head = _HEAD.match(self.text, self.pos)
        if head is not None:
            self.pos = head.end()
            return head[1], self._object(1)
        if self._peek() != "{":
            raise self._error("expected call:NAME{")
        whole = self._object(1)  # {"name": ..., "arguments": {...}}, as other models write it
        name, arguments = whole.get("name"), whole.get("arguments", whole.get("parameters"))
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise self._error("a JSON tool call needs a name and arguments")
        return name, arguments

    def _object(self, depth: int) -> dict[str, Any]:
        self._enter(depth)
        result: dict[str, Any] = {}
        while not self._closes("}"):
            key = self._key()
            self._expect(":")
            result[key] = self._value(depth)
            self._separator("}")
        return result

    def _array(self, depth: int) -> list[Any]:
        self._enter(depth)
        result: list[Any] = []
        while not self._closes("]"):
            result.append(self._value(depth))
            self._separator("]")
        return result

    def _enter(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self._error(f"nested deeper than {MAX_DEPTH}")
        self.pos += 1

    def _key(self) -> str:
        first = self._peek()
        if first == QUOTE:
            return self._quoted()
        if first == '"':
            return self._json_string()
        match = _BARE_KEY.match(self.text, self.pos)
        if match is None:
            raise self._error("expected a key")
        self.pos = match.end()
        return match[0].rstrip()

    def _value(self, depth: int) -> Any:
        first = self._peek()
        if first == QUOTE:
            return self._quoted()
        if first == '"':
            return self._json_string()
        if first == "{":
            return self._object(depth + 1)
        if first == "[":
            return self._array(depth + 1)
        match = _BARE.match(self.text, self.pos)
        if match is None:
            raise self._error("expected a value")
        self.pos = match.end()
        return _scalar(match[0])

    def _quoted(self) -> str:
        end = self.text.find(QUOTE, self.pos + 1)
        if end < 0:
            raise self._error("a string is not closed")
        value = self.text[self.pos + 1 : end]
        self.pos = end + 1
        return value

    def _json_string(self) -> str:
        try:
            value: str
            value, self.pos = scanstring(self.text, self.pos + 1, False)
        except json.JSONDecodeError as e:
            raise self._error(e.msg) from e
        # A string may hold the model's own quote token, and escapes may spell half a surrogate pair.
        return value.replace(QUOTE, '<|"|>').encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _separator(self, closing: str) -> None:
        if self._peek() == ",":
            self.pos += 1
        elif self._peek() != closing:
            raise self._error(f"expected ',' or {closing!r}")

    def _closes(self, closing: str) -> bool:
        if self._peek() != closing:
            return False
        self.pos += 1
        return True

    def _expect(self, char: str) -> None:
        if self._peek() != char:
            raise self._error(f"expected {char!r}")
        self.pos += 1

    def _peek(self) -> str:
        """The next character that is no space; "" at the end."""
        self._skip_space()
        return self.text[self.pos : self.pos + 1]

    def _skip_space(self) -> None:
        match = _SPACE.match(self.text, self.pos)
        assert match is not None
        self.pos = match.end()

    def _error(self, why: str) -> ToolCallError:
        return ToolCallError(f"{why} at character {self.pos} of {len(self.text)}")


def _scalar(word: str) -> Any:
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        return _number(word)
    return word  # an unquoted string


def _number(word: str) -> int | float | str:
    if word.lstrip("-").isdigit():
        return int(word) if len(word) < 1000 else word
    value = float(word)
    return word if value in (float("inf"), float("-inf")) else value


def _property(schema: Mapping[str, Any], key: str) -> Any:
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return schema.get("additionalProperties")


def _typed(value: Any, schema: Any) -> Any:
    """The value in the type that its schema wants, where that loses nothing; else as the model wrote it."""
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, str):
        value = _from_string(value, schema)
    elif not _allows(schema, value) and "string" in _types(schema) and not isinstance(value, (dict, list)):
        return json.dumps(value)  # 12 where a string is wanted
    if isinstance(value, float) and value.is_integer() and _types(schema) == {"integer"}:
        return int(value)
    if isinstance(value, dict):
        branch = _branch(schema, "object")
        return {key: _typed(item, _property(branch, key)) for key, item in value.items()}
    if isinstance(value, list):
        items = _branch(schema, "array").get("items")
        return [_typed(item, items) for item in value]
    return value


def _from_string(text: str, schema: Mapping[str, Any]) -> Any:
    types = _types(schema)
    if not types or "string" in types or "enum" in schema:
        return text
    try:
        reader = _Reader(text)
        value = reader._value(1)
        whole = reader.at_end()
    except ToolCallError:
        return text
    return value if whole and _allows(schema, value) else text


def _allows(schema: Mapping[str, Any], value: Any) -> bool:
    types = _types(schema)
    kinds = {
        bool: {"boolean"},
        int: {"integer", "number"},
        float: {"number", "integer"} if isinstance(value, float) and value.is_integer() else {"number"},
        str: {"string"},
        list: {"array"},
        dict: {"object"},
        type(None): {"null"},
    }
    return not types or bool(kinds[type(value)] & types)


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Lower-case JSON types that the schema allows; empty: it does not say."""
    own = schema.get("type")
    types = {own} if isinstance(own, str) else set(own) if isinstance(own, list) else set()
    for branch in _branches(schema):
        types |= _types(branch)
    types = {kind.lower() for kind in types if isinstance(kind, str)}
    return types | {"null"} if types and schema.get("nullable") else types


def _branch(schema: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The alternative of the schema that describes this kind of value."""
    own = schema.get("type")
    if own == kind or (isinstance(own, list) and kind in own) or not _branches(schema):
        return schema
    return next((branch for branch in _branches(schema) if kind in _types(branch)), schema)


def _branches(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = [b for name in ("anyOf", "oneOf", "allOf") for b in schema.get(name) or () if isinstance(b, Mapping)]
    return found
