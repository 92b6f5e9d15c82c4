"""Tokenising beside the queue: the served model's own vocabulary and template, where its folder is on this machine."""

import asyncio
from pathlib import Path
from typing import Any

from gewell.errors import CheckpointError, InvalidRequest
from gewell.model_store import model_path
from gewell.protocol import ErrorCode
from gewell.text.chat import ChatRenderer, load_chat
from gewell.text.tokenizer import Tokenizer, load_tokenizer
from gewell_producers.gateway.problems import Problem


class Vocabulary:
    """Loads what a model needs on the first request for it; both calls run in a thread."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._loaded: dict[str, tuple[Tokenizer, ChatRenderer]] = {}

    async def tokenize(self, model: str, body: dict[str, Any]) -> list[int]:
        """Ids of `prompt`, or of `messages` as the worker would render them. Raises InvalidRequest, Problem 501."""
        return await asyncio.to_thread(self._tokenize, model, body)

    async def detokenize(self, model: str, body: dict[str, Any]) -> str:
        """The text of `tokens`; half a character at an end becomes a replacement character."""
        return await asyncio.to_thread(self._detokenize, model, body)

    def _tokenize(self, model: str, body: dict[str, Any]) -> list[int]:
        tokenizer, renderer = self._of(model)
        prompt, messages = body.get("prompt"), body.get("messages")
        if isinstance(messages, list) and prompt is None:
            return list(renderer.render(messages, tools=body.get("tools")).ids)
        if not isinstance(prompt, str) or messages is not None:
            raise InvalidRequest(ErrorCode.INVALID_REQUEST, "prompt: a text, or messages in its place", "prompt")
        with_start = body.get("add_special_tokens", True)
        return list(renderer.render_text(prompt) if with_start else tokenizer.encode(prompt))

    def _detokenize(self, model: str, body: dict[str, Any]) -> str:
        tokenizer, _ = self._of(model)
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(type(each) is int for each in tokens):
            raise InvalidRequest(ErrorCode.INVALID_REQUEST, "tokens: a list of token ids", "tokens")
        return b"".join(tokenizer.token_bytes(each) for each in tokens).decode(errors="replace")

    def _of(self, model: str) -> tuple[Tokenizer, ChatRenderer]:
        if model not in self._loaded:
            try:
                folder = self._folder or model_path(model)
                tokenizer = load_tokenizer(folder)
            except (CheckpointError, ModuleNotFoundError) as error:
                message = f"the vocabulary of {model} is not on this machine; start the gateway with --model FOLDER"
                raise Problem(status=501, message=message, code="unsupported") from error
            self._loaded[model] = (tokenizer, load_chat(folder, tokenizer))
        return self._loaded[model]
