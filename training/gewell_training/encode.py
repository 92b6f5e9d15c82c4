"""A sample as token ids, with a mark on every token that the model must predict.

The prompt is what the engine's own Gemma 4 turns print, and so is the answer; nothing of the format is written here.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from gewell.eval.scorers import Scorer
from gewell.eval.tasks.sample import Sample
from gewell.text.messages import normalize_messages
from gewell.text.prompt_parts import Control, Mark, Part
from gewell.text.tokenizer import Tokenizer
from gewell.text.turns import Gemma4Turns

NOT_LEARNED, HISTORY = -2, -1


class Encoded(NamedTuple):
    """ids of prompt and answer in a row, ending with the token that ends the turn.

    group   for each id: NOT_LEARNED (the prompt), HISTORY (an earlier answer: learned, not scored), else the number of
            the part of the answer that it belongs to: a part is right when all its ids are
    """

    ids: list[int]
    group: list[int]


class SampleEncoder:
    def __init__(self, tokenizer: Tokenizer, encode: Callable[[str], list[int]]) -> None:
        """`encode` gives the ids of a text; it may be faster than the tokenizer's own."""
        self._encode = encode
        self._control = {name: tokenizer.control_id(name) for name in tokenizer.control_names}
        self._newline = encode("\n")
        self._turns = Gemma4Turns()

    def __call__(self, sample: Sample) -> Encoded:
        ids: list[int] = []
        group: list[int] = []
        for is_history, chunk in self._prompt(sample):
            ids += chunk
            group += [HISTORY if is_history else NOT_LEARNED] * len(chunk)
        parts = 0
        for chunk in self._answer(sample):
            ids += chunk
            group += [parts] * len(chunk)
            parts += sample.scorer is Scorer.LINES and chunk[-1:] == self._newline
        return Encoded(ids, group)

    def prompt_ids(self, sample: Sample) -> list[int]:
        return [i for _, chunk in self._prompt(sample) for i in chunk]

    def _prompt(self, sample: Sample) -> Iterator[tuple[bool, list[int]]]:
        messages = normalize_messages(sample.messages)
        parts = list(self._turns.parts(messages, tools=sample.tools, thinking=sample.thinking))
        starts = [i for i, part in enumerate(parts) if isinstance(part, Mark)]
        yield False, self._ids(parts[: starts[0]])
        for start, end in zip(starts, [*starts[1:], len(parts)], strict=True):
            part = parts[start]
            assert isinstance(part, Mark)
            message = messages[part.message_idx]
            own = self._ids(parts[start:end])
            if message["role"] != "assistant" or message.get("tool_calls") or message is messages[-1]:
                yield False, own
                continue
            # Turn token, role, newline; then the first word of the answer, which comes at another place when the
            # turn is the last one (a thought, or an empty one, stands before it). The rest is learned, but for the
            # newline after the turn.
            yield False, own[:4]
            yield True, own[4:-1]
            yield False, own[-1:]

    def _answer(self, sample: Sample) -> Iterator[list[int]]:
        if sample.thinking:
            thought = ("thought\n", sample.thought, "\n")
            yield self._ids([Control("<|channel>"), *thought, Control("<channel|>")])
        if sample.call is None:
            lines = sample.answer.splitlines(keepends=True)
            yield from (self._encode(line) for line in lines[:-1])
            yield [*self._encode(lines[-1]), self._id("<turn|>")]
            return
        call = {"id": "1", "type": "function", "function": dict(sample.call)}
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        messages = normalize_messages([*sample.messages, reply])
        parts = list(self._turns.parts(messages, tools=sample.tools, thinking=False))
        last = max(i for i, part in enumerate(parts) if isinstance(part, Mark))
        yield self._ids(parts[last + 3 :])  # without the mark, the turn token and the role

    def _ids(self, parts: Sequence[Part]) -> list[int]:
        ids: list[int] = []
        text = ""
        for part in parts:
            if isinstance(part, str):
                text += part
            elif isinstance(part, Control):
                ids += self._encode(text)
                ids.append(self._id(part.name))
                text = ""
        return ids + self._encode(text)

    def _id(self, name: str) -> int:
        token_id = self._control.get(name)
        if token_id is None:
            raise ValueError(f"the tokenizer has no {name}")
        return token_id
