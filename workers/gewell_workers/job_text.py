"""From token ids to what a reader sees: text by channel, tool calls, stop strings. One object a running job."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from gewell.protocol import Channel, ToolDelta
from gewell.text.detokenizer import Detokenizer
from gewell.text.parser import Piece
from gewell.text.stops import StopMatcher
from gewell.text.tokenizer import Tokenizer


class Span(NamedTuple):
    """A run of new tokens and the text they released, in one channel."""

    ids: tuple[int, ...]
    channel: Channel
    text: str
    tool: ToolDelta | None = None


class Pieces(Protocol):
    """Splits ids into pieces: the chat parser, or plain text."""

    def push(self, ids: Sequence[int]) -> Sequence[Piece]: ...

    def finish(self) -> Sequence[Piece]: ...


class PlainPieces:
    """A completion: everything is content."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = Detokenizer(tokenizer)

    def push(self, ids: Sequence[int]) -> list[Piece]:
        text = self._detokenizer.push(ids)
        return [Piece(Channel.CONTENT, text)] if text else []

    def finish(self) -> list[Piece]:
        text = self._detokenizer.flush()
        return [Piece(Channel.CONTENT, text)] if text else []


class JobText:
    """The text of one job as its tokens arrive.

    Stop strings are looked for in visible content only, after parsing; one that is complete within the first
    `min_tokens` tokens is no stop. The result does not depend on how tokens were
    cut into pushes, so a continuation rebuilds the state of a dead worker by pushing the tokens that stand.
    """

    def __init__(
        self, pieces: Pieces, *, stops: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._pieces = pieces
        self._matcher = StopMatcher(stops, include_stop) if stops else None
        self._min_tokens = min_tokens
        self.num_ids = 0
        self.stopped_at: int | None = None  # number of tokens up to and with the one that completed a stop string
        self._parts: dict[Channel, list[str]] = {Channel.CONTENT: [], Channel.REASONING: []}
        self.tool_calls: list[dict[str, Any]] = []

    def text(self, channel: Channel) -> str:
        """All text released in a channel so far."""
        return "".join(self._parts[channel])

    def push(self, ids: Sequence[int]) -> list[Span]:
        """Spans whose ids joined are `ids`, or the first of them if a stop string ends within."""
        if self._matcher is None:
            self.num_ids += len(ids)
            return self._spans(tuple(ids), self._pieces.push(ids))
        spans: list[Span] = []
        for token_id in ids:  # one by one: the token that completes a stop must be known
            if self.stopped_at is not None:
                break
            self.num_ids += 1
            spans.extend(self._spans((token_id,), self._pieces.push((token_id,))))
        return spans

    def push_hidden(self, ids: Sequence[int]) -> list[Span]:
        """Tokens that are recorded and not shown: a stop id."""
        self.num_ids += len(ids)
        return [Span(tuple(ids), Channel.CONTENT, "")] if ids else []

    def finish(self) -> list[Span]:
        """Text still held back, once no token follows."""
        if self.stopped_at is not None:
            return []
        spans = self._spans((), self._pieces.finish())
        if self._matcher is not None and self.stopped_at is None:
            held = self._matcher.flush()
            if held:
                self._parts[Channel.CONTENT].append(held)
                spans.append(Span((), Channel.CONTENT, held))
        return spans

    def _spans(self, ids: tuple[int, ...], pieces: Sequence[Piece]) -> list[Span]:
        spans = []
        for channel, text, tool in pieces:
            if channel is Channel.CONTENT and self._matcher is not None:
                text, matched = self._matcher.push(text, can_match=self.num_ids > self._min_tokens)
                if matched is not None:
                    self.stopped_at = self.num_ids
            if tool is not None:
                add_tool_delta(self.tool_calls, tool)
            elif text:
                self._parts[channel].append(text)
            else:
                continue
            spans.append(Span(ids, channel, text, tool))
            ids = ()
            if self.stopped_at is not None:
                return spans
        if ids:
            spans.append(Span(ids, Channel.CONTENT, ""))
        return spans


def add_tool_delta(calls: list[dict[str, Any]], delta: ToolDelta) -> None:
    """Add a piece of a tool call to the calls so far: {"id", "name", "arguments"}, by index."""
    while len(calls) <= delta.index:
        calls.append({"id": None, "name": None, "arguments": ""})
    call = calls[delta.index]
    call["id"] = delta.id or call["id"]
    call["name"] = delta.name or call["name"]
    call["arguments"] += delta.arguments_delta


def merge(spans: Sequence[Span]) -> list[Span]:
    """Join neighbours of one channel; a span without text joins whatever stands before or after it."""
    merged: list[Span] = []
    for span in spans:
        last = merged[-1] if merged else None
        joinable = last is not None and last.tool is None and span.tool is None
        if last is not None and joinable and (span.channel == last.channel or not span.text or not last.text):
            channel = last.channel if last.text or not span.text else span.channel
            merged[-1] = Span(last.ids + span.ids, channel, last.text + span.text)
        elif last is not None and last.tool is None and not last.text and span.tool is not None:
            merged[-1] = Span(last.ids + span.ids, span.channel, span.text, span.tool)
        else:
            merged.append(span)
    return merged


def missing(job_text: JobText, kept_text: dict[str, str], kept_tools: Sequence[dict[str, Any]]) -> list[Span]:
    """What a replay released beyond what earlier epochs published, e.g. text held back when their worker died."""
    spans = []
    for channel in (Channel.REASONING, Channel.CONTENT):
        text = job_text.text(channel)
        kept = kept_text.get(channel.value, "")
        if len(text) > len(kept):
            spans.append(Span((), channel, text[len(kept) :]))
    for index, call in enumerate(job_text.tool_calls):
        kept_call = kept_tools[index] if index < len(kept_tools) else None
        kept_arguments = kept_call["arguments"] if kept_call else ""
        if kept_call is None or len(call["arguments"]) > len(kept_arguments):
            first = kept_call is None
            delta = ToolDelta(
                index=index,
                id=call["id"] if first else None,
                name=call["name"] if first else None,
                arguments_delta=call["arguments"][len(kept_arguments) :],
            )
            spans.append(Span((), Channel.TOOL, "", delta))
    return spans
