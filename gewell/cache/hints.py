"""Cache hints are advice with an answer. This module keeps one request's hints and words the answers to them.

applied    done as asked
clipped    done in part: a budget or a limit was in the way
missed     could not act: there was nothing to act on, or it was gone already
rejected   cannot mean anything for this job
"""

from collections.abc import Sequence

from gewell.cache.checkpoints import Checkpoint
from gewell.cache.prefix_tree import ImageRun
from gewell.request import EngineRequest, HintAnswer

MAX_BREAKPOINTS = 8  # each costs a sliding window, the price of 20,000 tokens of full KV


def _answer(hint: str, outcome: str, why: str = "") -> HintAnswer:
    return HintAnswer(hint=hint, outcome=outcome, why=why)


class HintBook:
    """What a request asked for and what came of it."""

    __slots__ = ("_num_clipped_pins", "_num_pins", "_positions", "_request", "num_released")

    def __init__(self, request: EngineRequest) -> None:
        self._request = request
        self._positions: tuple[int, ...] = ()
        self._num_pins = 0
        self._num_clipped_pins = 0
        self.num_released = 0

    def breakpoints(self, length: int, images: Sequence[ImageRun]) -> tuple[int, ...]:
        """The positions among the client's breakpoints that can be taken."""
        possible = [
            position
            for position in sorted(set(self._request.cache.breakpoints))
            if 0 < position <= length and not any(run.start < position < run.end for run in images)
        ]
        self._positions = tuple(possible[:MAX_BREAKPOINTS])
        return self._positions

    def count_pin(self, was_pinned: bool) -> None:
        self._num_pins += was_pinned
        self._num_clipped_pins += not was_pinned

    def answers(self, held: Sequence[Checkpoint], cached_tokens: int) -> tuple[HintAnswer, ...]:
        """One answer for each hint given. held: checkpoints that this request took and that still live."""
        hints = self._request.cache
        found: list[HintAnswer] = []
        if hints.mode != "auto":
            what = "nothing was reused or retained" if hints.mode == "off" else "nothing was retained"
            found.append(_answer(f"mode={hints.mode}", "applied", what))
        if hints.salt is not None:
            found.append(_answer("salt", "applied", "shared with the same salt only"))
        retained = bool(held)
        if hints.priority != "normal":
            found.append(self._if_retained("priority", retained))
        if hints.ttl_s is not None:
            found.append(self._if_retained("ttl_s", retained))
        if hints.one_off:
            found.append(_answer("one_off", "applied", "nothing was kept for a next turn"))
        if hints.pin:
            found.append(self._pin(retained))
        if hints.breakpoints or hints.unknown_breakpoints:
            found.append(self._breakpoints(held, cached_tokens))
        if hints.expect_after is not None:
            found.append(self._expect(retained))
        if hints.release:
            found.append(self._release())
        return tuple(found)

    def _if_retained(self, hint: str, retained: bool) -> HintAnswer:
        if retained:
            return _answer(hint, "applied")
        return _answer(hint, "missed", self._why_nothing())

    def _why_nothing(self) -> str:
        hints = self._request.cache
        if hints.mode != "auto":
            return f"mode is {hints.mode}: nothing is retained"
        if hints.one_off:
            return "one_off: nothing is retained"
        return "nothing of this job is held: it was all cached before, or gave way to more valuable prefixes"

    def _pin(self, retained: bool) -> HintAnswer:
        if self._num_clipped_pins:
            return _answer("pin", "clipped", f"{self._num_clipped_pins} resume points exceed the budget for pins")
        if self._num_pins:
            return _answer("pin", "applied")
        return self._if_retained("pin", retained)

    def _breakpoints(self, held: Sequence[Checkpoint], cached_tokens: int) -> HintAnswer:
        hints = self._request.cache
        unknown = hints.unknown_breakpoints
        which = f"no message {', '.join(map(str, unknown))} in the prompt"
        asked = len(set(hints.breakpoints)) + len(unknown)
        there = {checkpoint.position for checkpoint in held}
        num_kept = sum(position in there or position <= cached_tokens for position in self._positions)
        if unknown and not hints.breakpoints:
            return _answer("breakpoints", "rejected", which)
        if not self._positions and hints.mode == "auto":
            return _answer("breakpoints", "rejected", "no position inside the prompt and outside its images")
        if num_kept == asked:
            return _answer("breakpoints", "applied")
        if num_kept:
            why = f"{num_kept} of {asked} are kept" + (f": {which}" if unknown else "")
            return _answer("breakpoints", "clipped", why)
        return _answer("breakpoints", "missed", self._why_nothing())

    def _expect(self, retained: bool) -> HintAnswer:
        if self._request.conversation_id is None:
            return _answer("expect", "rejected", "needs conversation.id")
        return self._if_retained("expect", retained)

    def _release(self) -> HintAnswer:
        if self._request.conversation_id is None:
            return _answer("release", "rejected", "needs conversation.id")
        if self.num_released:
            return _answer("release", "applied", f"{self.num_released} resume points forgotten")
        return _answer("release", "missed", "the conversation held nothing")
