"""Splits what a model writes into answer, thoughts and tool calls."""

import codecs
import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from gewell.protocol import Channel, ToolDelta
from gewell.text.tokenizer import Tokenizer
from gewell.text.tool_call import QUOTE, ToolCallError, parse_tool_calls

_THOUGHT_HEAD = "thought\n"
_QUOTE_NAME = '<|"|>'


class Piece(NamedTuple):
    """A part of the output in order. Of a tool call the text is empty and `tool_delta` says all: it is whole."""

    channel: Channel
    text: str
    tool_delta: ToolDelta | None = None


class _State(Enum):
    CONTENT = "content"
    THOUGHT_HEAD = "thought head"  # behind <|channel>, the channel's name not yet read
    THOUGHT = "thought"
    TOOL = "tool"


class OutputParser:
    """One state machine over token ids; the same result however the ids are cut into pushes.

    - `<|channel>thought\\n ... \\n<channel|>` is reasoning. Text before, between and after thoughts is content. A
      thought that is never closed is reasoning to the end.
    - `<|tool_call> ... <tool_call|>` is one or more tool calls, given out when they are whole. What cannot be read as a
      call (or was cut off, or written although no tools were offered) comes back as content, markers included, and
      `parse_errors` says why: text is never lost.
    - Other control tokens are no text. A vocabulary without control tokens gives content only.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        in_thought: bool = False,
        call_id_seed: str | None = None,
    ) -> None:
        """
        tools         declarations of the request; they give argument values their types
        in_thought    the prompt ended inside an open thought
        call_id_seed  tool call ids are derived from it (the job's id: a continued job repeats its ids); None draws one
        """
        self._tokenizer = tokenizer
        self._tools = tools
        self._call_id_seed = secrets.token_hex(16) if call_id_seed is None else call_id_seed
        actions = {
            "<|channel>": self._open_thought,
            "<channel|>": self._close_thought,
            "<|tool_call>": self._open_call,
            "<tool_call|>": self._close_call,
            _QUOTE_NAME: self._quote,
        }
        self._actions = {i: act for name, act in actions.items() if (i := tokenizer.control_id(name)) is not None}
        self._control_ids = frozenset(tokenizer.control_id(name) for name in tokenizer.control_names)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._state = _State.THOUGHT if in_thought else _State.CONTENT
        self._held = ""  # THOUGHT_HEAD: the head so far; THOUGHT: a newline that may be the last
        self._call: list[str] = []  # TOOL: the call so far
        self._out: list[Piece] = []
        self.num_tool_calls = 0
        self.num_reasoning_tokens = 0
        self.parse_errors: list[str] = []

    def push(self, ids: Iterable[int]) -> list[Piece]:
        """Pieces that these ids complete; neighbours differ in channel, none is empty."""
        control_ids, token_bytes = self._control_ids, self._tokenizer.token_bytes
        text: list[bytes] = []  # of the ordinary tokens since the last control token
        for token_id in ids:
            if token_id not in control_ids:
                text.append(token_bytes(token_id))
                continue
            self._tokens(text)
            text = []
            self._count(1)
            action = self._actions.get(token_id)
            if action is not None:
                self._text(self._decoder.decode(b"", final=True))
                action()
        self._tokens(text)
        return self._take()

    def finish(self) -> list[Piece]:
        """What was held back; the sequence has ended."""
        self._text(self._decoder.decode(b"", final=True))
        if self._state is _State.TOOL:
            self._give_back("the tool call was cut off", closed=False)
        elif self._held:
            self._emit(Channel.REASONING, self._held)
        self._held, self._state = "", _State.CONTENT
        return self._take()

    def _tokens(self, parts: list[bytes]) -> None:
        if parts:
            self._count(len(parts))
            self._text(self._decoder.decode(b"".join(parts)))

    def _count(self, num_tokens: int) -> None:
        if self._state in (_State.THOUGHT, _State.THOUGHT_HEAD):
            self.num_reasoning_tokens += num_tokens

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._state is _State.CONTENT:
            self._emit(Channel.CONTENT, text)
        elif self._state is _State.TOOL:
            self._call.append(text)
        elif self._state is _State.THOUGHT:
            self._thought(text)
        else:
            self._head(text)

    def _head(self, text: str) -> None:
        """Drop the channel's name; a thought without one keeps all its text."""
        text = self._held + text
        if _THOUGHT_HEAD.startswith(text) and text != _THOUGHT_HEAD:
            self._held = text
            return
        self._held, self._state = "", _State.THOUGHT
        self._thought(text.removeprefix(_THOUGHT_HEAD))

    def _thought(self, text: str) -> None:
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._emit(Channel.REASONING, text.removesuffix("\n"))

    def _open_thought(self) -> None:
        if self._state is _State.TOOL:
            self._call.append("<|channel>")
        elif self._state is _State.CONTENT:
            self._state = _State.THOUGHT_HEAD

    def _close_thought(self) -> None:
        if self._state is _State.TOOL:
            self._call.append("<channel|>")
            return
        if self._state is _State.THOUGHT_HEAD and self._held != _THOUGHT_HEAD.rstrip("\n"):
            self._emit(Channel.REASONING, self._held)
        self._held, self._state = "", _State.CONTENT

    def _open_call(self) -> None:
        if self._state is _State.TOOL:
            self._give_back("a tool call inside a tool call", closed=False)
        elif self._state is not _State.CONTENT:
            self._close_thought()  # the model went over from thinking to calling without closing the thought
        self._state = _State.TOOL

    def _close_call(self) -> None:
        if self._state is not _State.TOOL:
            return
        try:
            if not self._tools:
                raise ToolCallError("a tool call, but no tools were offered")
            calls = parse_tool_calls("".join(self._call), self._tools)
        except ToolCallError as e:
            self._give_back(str(e), closed=True)
        else:
            for call in calls:
                arguments = json.dumps(call.arguments, ensure_ascii=False, separators=(",", ":"))
                delta = ToolDelta(
                    index=self.num_tool_calls, id=self._call_id(), name=call.name, arguments_delta=arguments
                )
                self._out.append(Piece(Channel.TOOL, "", delta))
                self.num_tool_calls += 1
        self._call, self._state = [], _State.CONTENT

    def _quote(self) -> None:
        if self._state is _State.TOOL:
            self._call.append(QUOTE)

    def _call_id(self) -> str:
        digest = hashlib.sha256(f"{self._call_id_seed}:{self.num_tool_calls}".encode())
        return f"call_{digest.hexdigest()[:24]}"

    def _give_back(self, why: str, *, closed: bool) -> None:
        """The call so far as content, exactly as the model wrote it."""
        self.parse_errors.append(why)
        raw = "".join(self._call).replace(QUOTE, _QUOTE_NAME)
        self._emit(Channel.CONTENT, f"<|tool_call>{raw}{'<tool_call|>' if closed else ''}")
        self._call = []

    def _emit(self, channel: Channel, text: str) -> None:
        if not text:
            return
        if self._out and self._out[-1].channel == channel and self._out[-1].tool_delta is None:
            self._out[-1] = Piece(channel, self._out[-1].text + text)
        else:
            self._out.append(Piece(channel, text))

    def _take(self) -> list[Piece]:
        out, self._out = self._out, []
        return out
