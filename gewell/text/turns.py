"""The built-in turn templates: Gemma 4, Gemma 3, and plain turns for vocabularies without turn tokens."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from gewell.errors import InvalidRequest
from gewell.protocol import ErrorCode
from gewell.text.messages import text_of
from gewell.text.prompt_parts import IMAGE, Control, Mark, Message, Part

_QUOTE = Control('<|"|>')


class Gemma4Turns:
    """What the published template of the 31B and 26B-A4B prints, with four faults of it repaired.

    - A tool's parameters may be called `type`, `description`, `properties`, `required` or `nullable`.
    - A tool's declaration is closed also when its parameters name no type.
    - After an assistant message with text, tool calls and answers the model's next turn is opened.
    - A tool's answer that no call asked for is an error instead of being left out.
    """

    end_tokens = ("<turn|>", "<|tool_response>")

    def __init__(self, *, empty_thought: bool = True) -> None:
        """`empty_thought`: with thinking off the model's turn opens with an empty thought (the big models only)."""
        self._empty_thought = empty_thought

    def parts(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        thinking: bool,
        marks: bool = True,
    ) -> Iterator[Part]:
        yield Control("<bos>")
        has_system = messages[0]["role"] in ("system", "developer")
        if thinking or tools or has_system:
            if has_system:
                yield Mark(0)
            yield from self._system(messages[0] if has_system else None, tools or (), thinking)
        last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        is_open, previous_role, i = False, None, int(has_system)
        while i < len(messages):
            message = messages[i]
            if message["role"] == "tool":
                path = f"request.messages[{i}]"
                raise InvalidRequest(ErrorCode.BAD_TEMPLATE, f"{path}: a tool's answer without a call before it", path)
            answers = _answers_after(messages, i) if message.get("tool_calls") else []
            yield Mark(i)
            if message["role"] == "assistant":
                if previous_role != "assistant":
                    yield from (Control("<|turn>"), "model\n")
                is_open = not (yield from self._model_turn(message, answers, i, reasoning=i > last_user))
            else:
                yield from (Control("<|turn>"), f"{message['role']}\n")
                yield from _content(message["content"], strip=str.strip)
                yield from (Control("<turn|>"), "\n")
                is_open = False
            previous_role = message["role"]
            i += 1 + len(answers)
        if not is_open:
            yield from (Control("<|turn>"), "model\n")
            if self._empty_thought and not thinking:
                yield from (Control("<|channel>"), "thought\n", Control("<channel|>"))

    def _system(self, message: Message | None, tools: Sequence[Mapping[str, Any]], thinking: bool) -> Iterator[Part]:
        yield from (Control("<|turn>"), "system\n")
        if thinking:
            yield from (Control("<|think|>"), "\n")
        if message is not None:
            yield message["content"].strip()
        for tool in tools:
            yield Control("<|tool>")
            yield from _declaration(tool["function"])
            yield Control("<tool|>")
        yield from (Control("<turn|>"), "\n")

    def _model_turn(
        self, message: Message, answers: Sequence[Message], idx: int, *, reasoning: bool
    ) -> Generator[Part, None, bool]:
        """One assistant message with the answers to its calls; returns whether its turn was closed."""
        calls = message.get("tool_calls") or ()
        thought = message.get("reasoning") or message.get("reasoning_content")
        if thought and reasoning and calls:
            yield from (Control("<|channel>"), f"thought\n{thought}\n", Control("<channel|>"))
        for call in calls:
            yield from _call(call["function"])
        names = {call.get("id"): call["function"]["name"] for call in calls}
        for n, answer in enumerate(answers, start=1):
            yield Mark(idx + n)
            yield from _answer(names.get(answer.get("tool_call_id")) or answer.get("name") or "unknown", answer)
        yield from _content(message["content"], strip=_without_thoughts)
        if calls and not answers:
            yield Control("<|tool_response>")  # where the tools' answers will be written
            return False
        if answers and not text_of(message["content"]).strip():
            return False  # generation goes on in the same turn
        yield from (Control("<turn|>"), "\n")
        return True


class Gemma3Turns:
    """Gemma 3's template: the system message opens the first user turn. It has no tools and no thoughts."""

    end_tokens = ("<end_of_turn>",)

    def parts(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        thinking: bool,
        marks: bool = True,
    ) -> Iterator[Part]:
        _refuse_tools(messages, tools, "Gemma 3")
        yield Control("<bos>")
        prefix = ""
        for i, message in enumerate(messages):
            if message["role"] in ("system", "developer") and i == 0:
                yield Mark(0)
                prefix = message["content"].strip() + "\n\n"
                if len(messages) > 1:
                    continue
            else:
                yield Mark(i)
            role = "model" if message["role"] == "assistant" else "user"
            yield from (Control("<start_of_turn>"), f"{role}\n{prefix}")
            if not (i == 0 and prefix):
                yield from _content(message["content"], strip=str.strip, image=Control("<start_of_image>"))
            yield from (Control("<end_of_turn>"), "\n")
            prefix = ""
        yield from (Control("<start_of_turn>"), "model\n")


class PlainTurns:
    """Turns as plain text, for vocabularies without turn tokens."""

    end_tokens: tuple[str, ...] = ()

    def parts(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        thinking: bool,
        marks: bool = True,
    ) -> Iterator[Part]:
        _refuse_tools(messages, tools, "a vocabulary without turn tokens")
        yield Control("<bos>")
        for i, message in enumerate(messages):
            yield from (Mark(i), f"{message['role']}:\n")
            yield from _content(message["content"], strip=str.strip)
            yield "\n\n"
        yield "assistant:\n"


def _refuse_tools(messages: Sequence[Message], tools: object, what: str) -> None:
    if tools:
        raise InvalidRequest(ErrorCode.UNSUPPORTED, f"tools: the template of {what} has none", "request.tools")
    for i, message in enumerate(messages):
        if message["role"] == "tool" or message.get("tool_calls"):
            path = f"request.messages[{i}]"
            raise InvalidRequest(ErrorCode.UNSUPPORTED, f"{path}: the template of {what} has no tools", path)


def _answers_after(messages: Sequence[Message], idx: int) -> list[Message]:
    end = idx + 1
    while end < len(messages) and messages[end]["role"] == "tool":
        end += 1
    return list(messages[idx + 1 : end])


def _content(content: Any, *, strip: Any, image: Control = IMAGE) -> Iterator[Part]:
    if isinstance(content, str):
        yield strip(content)
        return
    for part in content:
        yield image if part["type"] == "image" else strip(part["text"])


def _without_thoughts(text: str) -> str:
    """The text without `<|channel>...<channel|>` blocks: a thought is never read again."""
    return "".join(part.partition("<|channel>")[0] for part in text.split("<channel|>")).strip()


def _call(function: Message) -> Iterator[Part]:
    yield from (Control("<|tool_call>"), f"call:{function['name']}{{")
    arguments = function["arguments"]
    if isinstance(arguments, str):
        yield arguments
    else:
        yield from _pairs(arguments, quote_keys=False)
    yield from ("}", Control("<tool_call|>"))


def _answer(name: str, message: Message) -> Iterator[Part]:
    yield from (Control("<|tool_response>"), f"response:{name}{{")
    content = message["content"]
    if isinstance(content, Mapping):
        yield from _pairs(content, quote_keys=False)
    else:
        yield "value:"
        yield from _value(text_of(content), quote_keys=False)
    yield from ("}", Control("<tool_response|>"))


def _declaration(function: Message) -> Iterator[Part]:
    yield from (f"declaration:{function['name']}{{description:", _QUOTE, function.get("description") or "", _QUOTE)
    parameters = function.get("parameters")
    if parameters:
        fields: list[Iterator[Part]] = []
        if parameters.get("properties"):
            fields.append(_wrapped("properties:{", _parameters(parameters["properties"]), "}"))
        if parameters.get("required"):
            fields.append(_named_list("required", parameters["required"]))
        if parameters.get("type"):
            fields.append(_type(parameters["type"]))
        yield ",parameters:{"
        yield from _joined(fields)
        yield "}"
    if "response" in function:
        response = function["response"] or {}
        yield ",response:{"
        if response.get("description"):
            yield from ("description:", _QUOTE, response["description"], _QUOTE, ",")
        yield from (*_type(response.get("type", "")), "}")
    yield "}"


def _parameters(properties: Mapping[str, Any]) -> Iterator[Part]:
    yield from _joined([_wrapped(f"{name}:{{", _parameter(schema), "}") for name, schema in _sorted(properties)])


_SCHEMA_KEYS = frozenset({"description", "type", "properties", "required", "nullable"})


def _parameter(schema: Mapping[str, Any]) -> Iterator[Part]:
    """The fields of one parameter, in the template's order."""
    fields: list[Iterator[Part]] = []
    kind = str(schema.get("type", "")).upper()
    if schema.get("description"):
        fields.append(iter(("description:", _QUOTE, str(schema["description"]), _QUOTE)))
    if kind == "STRING" and schema.get("enum"):
        fields.append(_wrapped("enum:", _value(schema["enum"], quote_keys=True), ""))
    if kind == "ARRAY" and isinstance(schema.get("items"), Mapping) and schema["items"]:
        fields.append(_wrapped("items:{", _items(schema["items"]), "}"))
    if schema.get("nullable"):
        fields.append(iter(("nullable:true",)))
    if kind == "OBJECT":
        inner = schema.get("properties")
        if not isinstance(inner, Mapping):
            inner = {name: value for name, value in schema.items() if name not in _SCHEMA_KEYS}
        fields.append(_wrapped("properties:{", _parameters(inner), "}"))
        if schema.get("required"):
            fields.append(_named_list("required", schema["required"]))
    fields.append(_type(kind))
    yield from _joined(fields)


def _items(items: Mapping[str, Any]) -> Iterator[Part]:
    fields: list[Iterator[Part]] = []
    for key, value in _sorted(items):
        if value is None:
            continue
        if key == "properties":
            inner = _parameters(value) if isinstance(value, Mapping) else iter(())
            fields.append(_wrapped("properties:{", inner, "}"))
        elif key == "required":
            fields.append(_named_list("required", value))
        elif key == "type":
            upper = value.upper() if isinstance(value, str) else [str(kind).upper() for kind in value]
            fields.append(_wrapped("type:", _value(upper, quote_keys=True), ""))
        else:
            fields.append(_wrapped(f"{key}:", _value(value, quote_keys=True), ""))
    yield from _joined(fields)


def _type(kind: object) -> Iterator[Part]:
    yield from ("type:", _QUOTE, str(kind).upper(), _QUOTE)


def _named_list(name: str, values: Sequence[str]) -> Iterator[Part]:
    yield f"{name}:["
    for n, value in enumerate(values):
        yield from ("," if n else "", _QUOTE, str(value), _QUOTE)
    yield "]"


def _value(value: Any, *, quote_keys: bool) -> Iterator[Part]:
    if isinstance(value, str):
        yield from (_QUOTE, value, _QUOTE)
    elif isinstance(value, bool):
        yield "true" if value else "false"
    elif isinstance(value, Mapping):
        yield from _wrapped("{", _pairs(value, quote_keys=quote_keys), "}")
    elif isinstance(value, Sequence):
        yield from _wrapped("[", _joined([_value(item, quote_keys=quote_keys) for item in value]), "]")
    else:
        yield str(value)  # numbers, and None as "None": what the model was trained on


def _pairs(mapping: Mapping[str, Any], *, quote_keys: bool) -> Iterator[Part]:
    for n, (key, value) in enumerate(_sorted(mapping)):
        yield "," if n else ""
        yield from (_QUOTE, key, _QUOTE) if quote_keys else (key,)
        yield ":"
        yield from _value(value, quote_keys=quote_keys)


def _sorted(mapping: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(mapping.items(), key=lambda item: item[0].lower())


def _joined(fields: Sequence[Iterator[Part]]) -> Iterator[Part]:
    for n, field in enumerate(fields):
        if n:
            yield ","
        yield from field


def _wrapped(before: str, inner: Iterator[Part], after: str) -> Iterator[Part]:
    yield before
    yield from inner
    yield after
