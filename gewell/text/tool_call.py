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
        root = schemas.get(name, {})
        schema = _Schema(root, root)
        calls.append(ToolCall(name, {key: _typed(value, schema.property(key)) for key, value in arguments.items()}))
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

    def value(self) -> Any:
        """One value of either dialect."""
        return self._value(1)

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


class _Schema:
    """One schema inside a root, with local references followed. What it does not say is unknown, never an error."""

    def __init__(self, schema: Any, root: Mapping[str, Any]) -> None:
        self._root = root
        self._alternatives = _alternatives(_resolved(schema, root), root)
        # Lower-case JSON types that the schema allows; empty: it does not say.
        self.types = {kind for alternative in self._alternatives for kind in _own_types(alternative)}

    @property
    def has_enum(self) -> bool:
        return any("enum" in alternative for alternative in self._alternatives)

    def property(self, name: str) -> "_Schema":
        holder = self._alternative("object")
        properties = holder.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return _Schema(properties[name], self._root)
        return _Schema(holder.get("additionalProperties"), self._root)

    def items(self) -> "_Schema":
        return _Schema(self._alternative("array").get("items"), self._root)

    def allows(self, value: Any) -> bool:
        return not self.types or bool(_kinds(value) & self.types)

    def _alternative(self, kind: str) -> Mapping[str, Any]:
        """The one that describes this kind of value."""
        found = (alternative for alternative in self._alternatives if kind in _own_types(alternative))
        return next(found, self._alternatives[0])


def _alternatives(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schema and all that it offers by anyOf, oneOf and allOf, each once: schemas may refer to themselves."""
    found, seen = [schema], {id(schema)}
    for current in found:  # grows while it is read
        for name in ("anyOf", "oneOf", "allOf"):
            branches = current.get(name)
            for branch in branches if isinstance(branches, list) else ():
                resolved = _resolved(branch, root)
                if resolved and id(resolved) not in seen:
                    seen.add(id(resolved))
                    found.append(resolved)
    return found


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    own = schema.get("type")
    types = {kind.lower() for kind in (own if isinstance(own, list) else [own]) if isinstance(kind, str)}
    return types | {"null"} if types and schema.get("nullable") else types


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema behind local references ("#/$defs/Item"); {} for what is no schema or cannot be found."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root if reference.startswith("#") else None
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return {}


def _typed(value: Any, schema: _Schema) -> Any:
    """The value in the type that its schema wants, where that loses nothing; else as the model wrote it."""
    if isinstance(value, str):
        value = _from_string(value, schema)
    elif not schema.allows(value) and "string" in schema.types and not isinstance(value, (dict, list)):
        return json.dumps(value)  # 12 where a string is wanted
    if isinstance(value, float) and value.is_integer() and schema.types == {"integer"}:
        return int(value)
    if isinstance(value, dict):
        return {key: _typed(item, schema.property(key)) for key, item in value.items()}
    if isinstance(value, list):
        items = schema.items()
        return [_typed(item, items) for item in value]
    return value


def _from_string(text: str, schema: _Schema) -> Any:
    types = schema.types
    if not types or "string" in types or schema.has_enum:
        return text
    try:
        reader = _Reader(text)
        value = reader.value()
        is_whole = reader.at_end()
    except ToolCallError:
        return text
    return value if is_whole and schema.allows(value) else text


def _kinds(value: Any) -> set[str]:
    """Names of the JSON types that the value belongs to."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"integer", "number"} if value.is_integer() else {"number"}
    if value is None:
        return {"null"}
    return {"string"} if isinstance(value, str) else {"array"} if isinstance(value, list) else {"object"}
