"""Notices that a sequence has begun to repeat itself for good."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gewell.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionLimits:
    """When repetition is a loop: a pattern of at most `max_period` tokens that came without a change at least
    `min_repeats` times and fills at least `min_tokens`, or whitespace that fills `min_whitespace_tokens`.

    A table of equal cells stays far below; a model that is stuck gets there in seconds.
    """

    max_period: int = 64
    min_repeats: int = 8
    min_tokens: int = 256
    min_whitespace_tokens: int = 48

    def __post_init__(self) -> None:
        for name in ("max_period", "min_tokens", "min_whitespace_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.min_repeats < 2:
            raise ValueError(f"min_repeats: {self.min_repeats} must be at least 2")


class RepetitionDetector:
    """Watches one row. A few microseconds a token, whatever the row's length."""

    def __init__(self, tokenizer: Tokenizer, limits: RepetitionLimits | None = None) -> None:
        limits = limits or RepetitionLimits()
        self._tokenizer = tokenizer
        self._limits = limits
        self._recent = np.full(2 * limits.max_period, -1, dtype=np.int64)  # the last max_period ids end at _end
        self._end = limits.max_period
        self._periods = np.arange(1, limits.max_period + 1)
        self._matches = np.zeros(limits.max_period, dtype=np.int64)  # [p - 1]: ids in a row equal to the one p before
        self._wanted = np.maximum(limits.min_tokens, limits.min_repeats * self._periods) - self._periods
        self._num_whitespace = 0

    def push(self, token_ids: Iterable[int]) -> int | None:
        """Take the next ids. Once a loop is found: the index within this push of the id that completed it."""
        for n, token_id in enumerate(token_ids):
            if self._is_loop(token_id):
                return n
        return None

    def _is_loop(self, token_id: int) -> bool:
        period = self._limits.max_period
        window = self._recent[self._end - period : self._end][::-1]  # window[p - 1] is the id p before this one
        self._matches = np.where(window == token_id, self._matches + 1, 0)
        if self._end == len(self._recent):
            self._recent[:period] = self._recent[period:]
            self._end = period
        self._recent[self._end] = token_id
        self._end += 1
        text = self._tokenizer.token_bytes(token_id)
        self._num_whitespace = self._num_whitespace + 1 if text and not text.strip() else 0
        if self._num_whitespace >= self._limits.min_whitespace_tokens:
            return True
        return bool((self._matches >= self._wanted).any())
