"""A checkpoint's own Jinja chat template, run in a sandbox.

The template's output is one text in which control tokens and users' words look alike. To tell them apart, an escape
character is put behind every "<" (the first character of control tokens) of the conversation before rendering and taken
out after it: whatever control token's name is found whole was written by the template. Breaking only whole names would
not do, since templates join the parts of a content.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from gewell.errors import CheckpointError, InvalidRequest
from gewell.protocol import ErrorCode
from gewell.text.prompt_parts import Control, Mark, Message, Part
from gewell.text.tokenizer import Tokenizer

# Unicode noncharacters: no text needs them; the first that a conversation does not contain serves.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
# A template removes thoughts from the history by these two; what it leaves of them is the model's own writing.
_THOUGHT_MARKERS = frozenset({"<|channel>", "<channel|>"})
_TURN_STARTS = frozenset({"<|turn>", "<start_of_turn>", "<|tool_response>"})


class JinjaTurns:
    """A `TurnTemplate` around a Jinja template in the form that Hugging Face tokenizers use."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, name: str = "template") -> None:
        """Raises CheckpointError when the template cannot be parsed."""
        import jinja2

        environment = _sandbox()
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise CheckpointError(f"{name}: line {e.lineno}: {e.message}") from e
        self._name = name
        self._recent: deque[tuple[Any, str]] = deque(maxlen=8)
        names = sorted(tokenizer.control_names, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        openings = "|".join(sorted({re.escape(n[0]) for n in names}))
        self._opening = re.compile(openings or r"(?!)")
        kept = "|".join(map(re.escape, sorted(_THOUGHT_MARKERS.intersection(names))))
        self._opening_but_thoughts = re.compile(f"({kept})|{openings}" if kept else self._opening.pattern)
        self._bos = "<bos>" if tokenizer.bos_id is not None else ""
        known = [n for n in ("<turn|>", "<|tool_response>", "<end_of_turn>") if tokenizer.control_id(n) is not None]
        self.end_tokens = tuple(known)

    def parts(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        thinking: bool,
        marks: bool = True,
    ) -> Iterator[Part]:
        escape, mark = self._escape_characters(messages, tools)
        safe_messages = [self._escaped_message(message, escape) for message in messages]
        safe_tools = self._escaped(tools, escape) if tools else None
        text = self._render(safe_messages, safe_tools, thinking)
        starts: list[int] = []
        if marks:
            marked = self._render([_marked(m, i, mark) for i, m in enumerate(safe_messages)], safe_tools, thinking)
            starts = self._turn_starts(text, _message_offsets(marked, text, mark, len(messages)))
        return self._split(text, escape, starts)

    def _render(self, messages: Sequence[Any], tools: Any, thinking: bool) -> str:
        import jinja2

        asked = (messages, tools, thinking)
        for known, text in list(self._recent):  # a prompt's stable lengths are asked for right after it
            if known == asked:
                return text
        try:
            text = str(
                self._template.render(
                    messages=messages,
                    tools=tools,
                    add_generation_prompt=True,
                    enable_thinking=thinking,
                    bos_token=self._bos,
                    eos_token="<eos>",
                )
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as e:
            # Whatever goes wrong in a template is wrong between it and this conversation; the message holds no prompt.
            why = str(e) if isinstance(e, jinja2.TemplateError) else type(e).__name__
            raise InvalidRequest(ErrorCode.BAD_TEMPLATE, f"{self._name}: {why}", "request.messages") from e
        self._recent.append((asked, text))
        return text

    def _escape_characters(self, messages: object, tools: object) -> tuple[str, str]:
        text = json.dumps([messages, tools], ensure_ascii=False, default=str)
        unused = [char for char in _NONCHARACTERS if char not in text]
        if len(unused) < 2:
            raise InvalidRequest(ErrorCode.INVALID_REQUEST, "messages: all Unicode noncharacters at once", "request")
        return unused[0], unused[1]

    def _escaped(self, value: Any, escape: str) -> Any:
        return _map_strings(value, lambda text: self._opening.sub(lambda match: match[0] + escape, text))

    def _escaped_message(self, message: Message, escape: str) -> dict[str, Any]:
        result: dict[str, Any] = self._escaped(message, escape)
        if message["role"] == "assistant":  # the template must find the thoughts that it removes from the history
            result["content"] = _map_strings(
                message["content"],
                lambda text: self._opening_but_thoughts.sub(
                    lambda m: m[0] if m[0] in _THOUGHT_MARKERS else m[0] + escape, text
                ),
            )
        return result

    def _split(self, text: str, escape: str, starts: Sequence[int]) -> Iterator[Part]:
        """Text and control tokens, with a mark before the part where each message starts."""
        done, next_mark = 0, 0
        for match in [*self._control.finditer(text), None]:
            end = match.start() if match else len(text)
            if done < end:
                yield text[done:end].replace(escape, "")
            while next_mark < len(starts) and starts[next_mark] <= end:
                yield Mark(next_mark)
                next_mark += 1
            if match:
                yield Control(match.group())
                done = match.end()

    def _turn_starts(self, text: str, content_offsets: Sequence[int]) -> list[int]:
        """Where the turns begin to which these contents belong: at the last turn token before the content."""
        turns = [m.start() for m in self._control.finditer(text) if m.group() in _TURN_STARTS]
        starts: list[int] = []
        previous_content = 0
        for offset in content_offsets:
            start = max((t for t in turns if previous_content <= t <= offset), default=offset)
            starts.append(max(start, starts[-1] if starts else 0))
            previous_content = offset
        return starts


def _sandbox() -> Any:
    """Jinja's immutable sandbox, with its checks of harmless look-ups made cheap.

    The published template looks at every message before each message, by attributes of a `namespace`, and the sandbox
    spends 5 us on each (201 messages, render and stable lengths: 384 ms, with the short cuts 76 ms).
    """
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Sandbox(ImmutableSandboxedEnvironment):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._is_safe: dict[tuple[type, str], bool] = {}

        def getattr(self, obj: Any, attribute: str) -> Any:
            if type(obj) is Namespace and not attribute.startswith("_"):
                try:
                    return getattr(obj, attribute)  # what the template itself put there, checked when it got it
                except AttributeError:
                    return self.undefined(obj=obj, name=attribute)
            return super().getattr(obj, attribute)

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            key = type(obj), attr
            if key[0] not in (dict, list, str):
                return super().is_safe_attribute(obj, attr, value)
            if key not in self._is_safe:  # for these the answer depends on type and name alone
                self._is_safe[key] = super().is_safe_attribute(obj, attr, value)
            return self._is_safe[key]

    return Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value


def _marked(message: Message, idx: int, mark: str) -> Message:
    """The message with `mark idx mark` before its first visible character: trimming leaves it in place."""
    tag = f"{mark}{idx}{mark}"

    def put(text: str) -> str:
        head = len(text) - len(text.lstrip())
        return f"{text[:head]}{tag}{text[head:]}"

    content = message.get("content")
    if message.get("tool_calls"):
        first, *rest = message["tool_calls"]
        function = {**first["function"], "name": put(first["function"]["name"])}
        return {**message, "tool_calls": [{**first, "function": function}, *rest]}
    if isinstance(content, str) and content.strip():
        return {**message, "content": put(content)}
    if isinstance(content, list):
        for n, part in enumerate(content):
            if part["type"] == "text" and part["text"].strip():
                return {**message, "content": [*content[:n], {**part, "text": put(part["text"])}, *content[n + 1 :]]}
    return message


def _message_offsets(marked: str, text: str, mark: str, num_messages: int) -> list[int]:
    """Offset in `text` of each message's first visible character; [] when marking changed what the template does."""
    pattern = re.compile(f"{mark}(\\d+){mark}")
    if pattern.sub("", marked) != text:
        return []
    offsets: dict[int, int] = {}
    removed = 0
    for match in pattern.finditer(marked):
        offsets.setdefault(int(match[1]), match.start() - removed)
        removed += len(match[0])
    result: list[int] = []
    for idx in range(num_messages):  # a message without text begins where the one before it does
        result.append(offsets.get(idx, result[-1] if result else 0))
    return result


def read_template(model_dir: Path) -> tuple[str, str] | None:
    """The template of a model folder and where it stands: `chat_template.jinja`, else inside one of two JSON files."""
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return read_file(file), str(file)
    for file_name in ("chat_template.json", "tokenizer_config.json"):
        file = model_dir / file_name
        if file.is_file():
            try:
                template = json.loads(read_file(file)).get("chat_template")
            except (ValueError, AttributeError) as e:
                raise CheckpointError(f"{file}: {e}") from e
            if isinstance(template, list):  # several by name
                template = next((t.get("template") for t in template if t.get("name") == "default"), None)
            if isinstance(template, str):
                return template, str(file)
    return None


def read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise CheckpointError(f"{path}: {e}") from e
