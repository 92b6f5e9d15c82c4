"""Conversations to prompt ids.

A template writes a conversation as parts (text and control tokens); the renderer tokenises the text between control
tokens with control tokens off, so that a marker typed by a user stays text. Text is tokenised once: the ids of a
segment are kept and found again when the conversation comes back with its next turn.
"""

import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gewell.errors import CheckpointError, InvalidRequest
from gewell.text.jinja_template import JinjaTurns, read_file, read_template
from gewell.text.messages import count_images, normalize_messages
from gewell.text.prompt_parts import IMAGE, Control, Mark, Message, Part, TurnTemplate
from gewell.text.tokenizer import Tokenizer
from gewell.text.turns import Gemma3Turns, Gemma4Turns, PlainTurns

SEGMENT_CACHE_CHARS = 16_000_000  # about 16 MB of text and as much of ids

Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRun:
    """Where an image's soft tokens lie among the prompt's ids: `[start, start + num_tokens)`."""

    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    ids: list[int]
    message_starts: tuple[int, ...]  # token position where each message begins; () when the template does not tell
    images: tuple[ImageRun, ...]  # in the order of the conversation's image parts


class ChatRenderer:
    """Writes conversations as prompts of one model. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, template: TurnTemplate) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._segments = _SegmentCache(tokenizer, SEGMENT_CACHE_CHARS)
        self.end_ids = tuple(i for name in template.end_tokens if (i := tokenizer.control_id(name)) is not None)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = None,
        thinking: bool = False,
        image_tokens: Sequence[int] | None = None,
    ) -> RenderedPrompt:
        """The prompt after which the model answers.

        image_tokens  soft tokens of each image, in order; None leaves one image token in each image's place
        Raises InvalidRequest when the conversation cannot be written down for this model.
        """
        normal = normalize_messages(messages)
        if image_tokens is not None and len(image_tokens) != count_images(normal):
            raise ValueError(f"{len(image_tokens)} image sizes for {count_images(normal)} images")
        return self._assemble(self._parts(normal, tools, thinking), len(normal), image_tokens)

    def render_text(self, prompt: str) -> list[int]:
        """Ids of a raw completion prompt: the beginning-of-sequence token, where the model has one, and the text."""
        bos = self.tokenizer.bos_id
        return ([] if bos is None else [bos]) + self._segments.encode(prompt)

    def stable_lengths(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = None,
        thinking: bool = False,
        image_tokens: Sequence[int] | None = None,
    ) -> tuple[int, ...]:
        """How many tokens of this prompt the next turn's prompt will repeat, ascending, without duplicates.

        One length when a user's message comes next, and with tools another when a tool's answer comes next: templates
        drop old thoughts, so the two may differ. Found by rendering both turns.
        """
        normal = normalize_messages(messages)
        prompt = self._parts(normal, tools, thinking, marks=False)
        lengths = set()
        for probe in _next_turns(tools, thinking):
            try:
                following = self._parts(normalize_messages([*normal, *probe]), tools, thinking, marks=False)
            except InvalidRequest:
                continue  # this template has no such turn
            lengths.add(self._num_common(prompt, following, image_tokens))
        return tuple(sorted(lengths - {0}))

    def _parts(self, messages: Sequence[Message], tools: Tools, thinking: bool, marks: bool = True) -> list[Part]:
        return list(_joined_text(self._template.parts(messages, tools=tools, thinking=thinking, marks=marks)))

    def _num_common(self, prompt: list[Part], following: list[Part], image_tokens: Sequence[int] | None) -> int:
        """Tokens that two prompts share at their start. Their texts are joined: marks cut the same text in two ways."""
        a, b = ([*_joined_text(p for p in parts if not isinstance(p, Mark))] for parts in (prompt, following))
        num_same = 0
        while num_same < min(len(a), len(b)) and a[num_same] == b[num_same]:
            num_same += 1
        head = self._assemble(a[:num_same], 0, image_tokens)
        common = len(head.ids)
        if num_same < min(len(a), len(b)):
            first, second = a[num_same], b[num_same]
            if isinstance(first, str) and isinstance(second, str):
                for x, y in zip(self._segments.encode(first), self._segments.encode(second), strict=False):
                    if x != y:
                        break
                    common += 1
        return common

    def _assemble(self, parts: Sequence[Part], num_messages: int, image_tokens: Sequence[int] | None) -> RenderedPrompt:
        ids: list[int] = []
        starts: dict[int, int] = {}
        images: list[ImageRun] = []
        for part in parts:
            if isinstance(part, str):
                ids += self._segments.encode(part)
            elif isinstance(part, Mark):
                starts[part.message_idx] = len(ids)
            elif part == IMAGE and image_tokens is not None:
                images.append(self._append_image(ids, image_tokens[len(images)]))
            else:
                if part == IMAGE:
                    images.append(ImageRun(start=len(ids), num_tokens=1))
                ids += self._control(part)
        return RenderedPrompt(ids=ids, message_starts=_filled(starts, num_messages), images=tuple(images))

    def _append_image(self, ids: list[int], num_tokens: int) -> ImageRun:
        ids += self._control(Control("<|image>"))
        run = ImageRun(start=len(ids), num_tokens=num_tokens)
        ids += self._control(IMAGE) * num_tokens
        ids += self._control(Control("<image|>"))
        return run

    def _control(self, control: Control) -> list[int]:
        token_id = self.tokenizer.control_id(control.name)
        if token_id is not None:
            return [token_id]
        if control.name == "<bos>":
            return []  # this vocabulary has none
        return self._segments.encode(control.name)


def load_chat(model_dir: Path | None, tokenizer: Tokenizer, template: Path | None = None) -> ChatRenderer:
    """The renderer of a model folder: by `template` (a Jinja file) when given, else by the checkpoint's own template,
    else by the built-in one of its family. None: there is no folder.

    Raises CheckpointError when a template file cannot be read or parsed.
    """
    if template is not None:
        return ChatRenderer(tokenizer, JinjaTurns(read_file(template), tokenizer, name=str(template)))
    if model_dir is None:
        return ChatRenderer(tokenizer, built_in_template(tokenizer))
    own = read_template(model_dir)
    if own is not None:
        return ChatRenderer(tokenizer, JinjaTurns(own[0], tokenizer, name=own[1]))
    return ChatRenderer(tokenizer, built_in_template(tokenizer, is_small=_has_per_layer_inputs(model_dir)))


def built_in_template(tokenizer: Tokenizer, *, is_small: bool = False) -> TurnTemplate:
    """The family's template, told by its turn tokens. `is_small`: Gemma 4 E2B or E4B, whose turns differ a little."""
    if tokenizer.control_id("<|turn>") is not None:
        return Gemma4Turns(empty_thought=not is_small)
    if tokenizer.control_id("<start_of_turn>") is not None:
        return Gemma3Turns()
    return PlainTurns()


def _filled(starts: Mapping[int, int], num_messages: int) -> tuple[int, ...]:
    """One position a message; a message without a mark begins where the one before it does."""
    if not starts:
        return ()
    result: list[int] = []
    for idx in range(num_messages):
        result.append(starts.get(idx, result[-1] if result else 0))
    return tuple(result)


def _has_per_layer_inputs(model_dir: Path) -> bool:
    """Whether the folder's model is an E2B or E4B. A folder without a config is none (a tokenizer alone)."""
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{model_dir / 'config.json'}: {e}") from e
    text = config.get("text_config", config) if isinstance(config, dict) else {}
    return bool(text.get("hidden_size_per_layer_input"))


def _next_turns(tools: Tools, thinking: bool) -> Iterator[list[dict[str, Any]]]:
    yield [{"role": "assistant", "content": "Answer"}, {"role": "user", "content": "Question"}]
    if tools:
        call = {"id": "0", "type": "function", "function": {"name": tools[0]["function"]["name"], "arguments": {}}}
        yield [
            {"role": "assistant", "content": "", "reasoning": "Reason" if thinking else "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "0", "content": "Result"},
        ]


def _joined_text(parts: Iterator[Part]) -> Iterator[Part]:
    """The parts with neighbouring texts joined: tokens may span them.

    A mark cuts text only after a newline, which no Gemma token spans; elsewhere it moves to the text's start.
    """
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += part
            continue
        if text and (isinstance(part, Control) or text.endswith("\n")):
            yield text
            text = ""
        yield part
    if text:
        yield text


class _SegmentCache:
    """Ids of texts, the least recently used dropped beyond a budget of characters."""

    def __init__(self, tokenizer: Tokenizer, max_chars: int) -> None:
        self._tokenizer = tokenizer
        self._max_chars = max_chars
        self._num_chars = 0
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        with self._lock:
            found = self._ids.get(text)
            if found is not None:
                self._ids.move_to_end(text)
                return found.tolist()
        ids = self._tokenizer.encode(text)  # outside the lock: long texts of several jobs run side by side
        with self._lock:
            if text not in self._ids:
                self._ids[text] = array("i", ids)
                self._num_chars += len(text)
                while self._num_chars > self._max_chars:
                    old, _ = self._ids.popitem(last=False)
                    self._num_chars -= len(old)
        return ids
