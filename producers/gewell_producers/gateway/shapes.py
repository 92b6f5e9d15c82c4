"""Records and chunks in OpenAI's shapes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from gewell.protocol import Channel, Chunk, FinalRecord, Usage
from gewell_producers.gateway.calls import Call

_FINISH = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "repetition": "stop"}


def usage_json(usages: Sequence[Usage]) -> dict[str, Any]:
    """The choices of one prompt share it, but each is a job that read it: prompt tokens count once a job."""
    prompt, completion = sum(u.prompt for u in usages), sum(u.completion for u in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(u.cached for u in usages),
            "cache_write_tokens": sum(u.cache_write for u in usages),
        },
    }


def chat_logprobs(logprobs: Sequence[Mapping[str, Any]] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    return {"content": [_chat_token(each) | {"top_logprobs": [_chat_token(top) for top in each.get("top") or ()]}
                        for each in logprobs], "refusal": None}  # fmt: skip


def _chat_token(token: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": token["t"], "logprob": token["lp"], "bytes": token.get("b")}


def text_logprobs(logprobs: Sequence[Mapping[str, Any]] | None, offset: int = 0) -> dict[str, Any] | None:
    """The older shape of /v1/completions. `offset`: characters of the answer before these tokens.

    The first token of an echoed prompt has no log-probability and no alternatives: null.
    """
    if logprobs is None:
        return None
    offsets = []
    for each in logprobs:
        offsets.append(offset)
        offset += len(each["t"])
    return {
        "tokens": [each["t"] for each in logprobs],
        "token_logprobs": [each["lp"] for each in logprobs],
        "top_logprobs": [
            None if each["lp"] is None else {top["t"]: top["lp"] for top in each.get("top") or ()} for each in logprobs
        ],
        "text_offset": offsets,
    }


def finish_fields(finish_reason: str) -> dict[str, Any]:
    """OpenAI's clients know four reasons; what ours says beyond them stands in `x_finish`."""
    known = _FINISH.get(finish_reason, "stop")
    return {"finish_reason": known} | ({} if known == finish_reason else {"x_finish": finish_reason})


def _head(call: Call, records: Sequence[FinalRecord], kind: str) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "object": kind,
        "created": int(time.time()),
        "model": records[0].model or call.model,
        "system_fingerprint": records[0].fingerprint,
    }


def chat_completion(call: Call, records: Sequence[FinalRecord]) -> dict[str, Any]:
    choices = []
    for idx, record in enumerate(records):
        message: dict[str, Any] = {"role": "assistant", "content": record.text or None, "refusal": None}
        if not record.tool_calls:
            message["content"] = record.text
        else:
            message["tool_calls"] = [
                {
                    "id": tool["id"],
                    "type": "function",
                    "function": {"name": tool["name"], "arguments": tool["arguments"]},
                }
                for tool in record.tool_calls
            ]
        if record.reasoning:
            message |= {"reasoning": record.reasoning, "reasoning_content": record.reasoning}
        choice = {"index": idx, "message": message, "logprobs": chat_logprobs(record.logprobs)}
        choices.append(choice | finish_fields(record.finish_reason) | _ids(call, record))
    head = _head(call, records, "chat.completion")
    return head | {"choices": choices, "usage": usage_json([r.usage for r in records])} | _extras(records)


def text_completion(call: Call, records: Sequence[FinalRecord]) -> dict[str, Any]:
    choices = []
    for idx, record in enumerate(records):
        text, logprobs = record.text, record.logprobs
        if call.is_echo:
            prompt = record.prompt_logprobs or ()
            text = bytes(byte for token in prompt for byte in token["b"]).decode(errors="replace") + text
            logprobs = None if logprobs is None else (*prompt, *logprobs)
        choice = {"index": idx, "text": text, "logprobs": text_logprobs(logprobs)}
        choices.append(choice | finish_fields(record.finish_reason) | _ids(call, record))
    head = _head(call, records, "text_completion")
    return head | {"choices": choices, "usage": usage_json([r.usage for r in records])} | _extras(records)


def _ids(call: Call, record: FinalRecord) -> dict[str, Any]:
    return {"token_ids": record.token_ids} if call.return_token_ids else {}


def _extras(records: Sequence[FinalRecord]) -> dict[str, Any]:
    """What OpenAI has no place for: seeds, cache, times and whether a form is complete, of each choice."""
    jobs = [
        {
            "id": r.id,
            "seed": r.seed,
            "cache": r.cache,
            "timing": r.timing.to_dict(),
            "structured": r.structured,
            "warnings": r.warnings,
        }
        for r in records
    ]
    return {"x_jobs": jobs}


@dataclass(slots=True)
class ChunkShaper:
    """The events of one streamed choice, as JSON bytes. A chat opens with one that names the role."""

    call: Call
    index: int
    is_chat: bool
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    _opened: bool = False
    _num_chars: int = 0
    _tools_seen: set[int] = field(default_factory=set)

    def chunk(self, chunk: Chunk) -> bytes | None:
        """None: nothing in it that this surface shows."""
        return self._chat(chunk) if self.is_chat else self._text(chunk)

    @property
    def needs_opening(self) -> bool:
        return self.is_chat and not self._opened

    def opening(self) -> bytes:
        self._opened = True
        delta = {"role": "assistant", "content": ""}
        return self._event([{"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def finish(self, finish_reason: str) -> bytes:
        delta: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        return self._event([{"index": self.index, **delta, "logprobs": None, **finish_fields(finish_reason)}])

    def usage(self, usages: Sequence[Usage]) -> bytes:
        """The last event when the caller asked for it: no choices, only the numbers."""
        return self._event([], usage=usage_json(usages))

    def _chat(self, chunk: Chunk) -> bytes | None:
        delta: dict[str, Any] = {}
        if chunk.channel is Channel.CONTENT and chunk.text:
            delta["content"] = chunk.text
        elif chunk.channel is Channel.REASONING and chunk.text:
            delta |= {"reasoning": chunk.text, "reasoning_content": chunk.text}
        elif chunk.tool is not None:
            delta["tool_calls"] = [self._tool(chunk)]
        if not delta and not chunk.logprobs:
            return None
        choice = {"index": self.index, "delta": delta, "logprobs": chat_logprobs(chunk.logprobs)}
        return self._event([choice | {"finish_reason": None} | self._token_ids(chunk)])

    def _text(self, chunk: Chunk) -> bytes | None:
        text = chunk.text if chunk.channel is Channel.CONTENT else ""
        if not text and not chunk.logprobs:
            return None
        logprobs = text_logprobs(chunk.logprobs, self._num_chars)
        self._num_chars += len(text)
        choice = {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return self._event([choice | self._token_ids(chunk)])

    def _tool(self, chunk: Chunk) -> dict[str, Any]:
        tool = chunk.tool
        assert tool is not None
        function: dict[str, Any] = {"arguments": tool.arguments_delta}
        if tool.index in self._tools_seen:
            return {"index": tool.index, "function": function}
        self._tools_seen.add(tool.index)
        return {"index": tool.index, "id": tool.id, "type": "function", "function": {"name": tool.name, **function}}

    def _token_ids(self, chunk: Chunk) -> dict[str, Any]:
        return {"token_ids": chunk.ids} if self.call.return_token_ids else {}

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        event: dict[str, Any] = {
            "id": self.call.call_id,
            "object": "chat.completion.chunk" if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if self.call.include_usage:
            event["usage"] = usage
        return orjson.dumps(event)
