"""Records that a writer repairs after a critic's remarks, for gewell-nano, which has learned exactly this.

The writer starts from an order with planted faults. The critic knows the facts and names one fault at a time; the
writer gives out the repaired record, until the critic accepts. Whether a record came out right can be told.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from gewell.eval.tasks.writer_critic import (
    ACCEPTED,
    critic_messages,
    random_fields,
    record_text,
    with_faults,
    writer_messages,
)
from gewell.protocol import FinalRecord
from gewell.text.chat import ChatRenderer
from gewell_producers.demo.scene import Ask

WRITER, CRITIC = "Writer", "Critic"
_NUM_FIELDS = 8
_MAX_FAULTS = 3  # as many as the model has seen repaired in one conversation
_MAX_TOKENS = 160


class Records:
    """The play; see `gewell_producers.demo.scene.Play`. Prompts are counted as the worker renders them."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer

    def warm_ups(self) -> Sequence[Ask]:
        return ()  # what the prompts share is a line

    def scene(self, index: int, num_turns: int) -> "Repair":
        return Repair(self._renderer, index, num_turns)

    def num_jobs(self, num_turns: int) -> int:
        return 2 * min(num_turns, _MAX_FAULTS + 1)  # the critic accepts after the last fault


class Repair:
    """One record. Both sides' conversations grow; turn n repairs what turn n - 1 was told."""

    def __init__(self, renderer: ChatRenderer, index: int, num_turns: int) -> None:
        rng = Random(f"demo record {index}")
        self._renderer = renderer
        self._facts = random_fields(rng, _NUM_FIELDS)
        num_faults = min(num_turns - 1, _MAX_FAULTS)
        self._draft = with_faults(rng, self._facts, num_faults)
        self._num_turns = num_turns
        self._record = ""  # the writer's newest
        self._awaits_remark = False
        self._rounds: list[tuple[str, str]] = []  # (record, remark)
        self.title = f"Order {index + 1}: {num_faults} faults to find"

    @property
    def is_right(self) -> bool | None:
        return self._record == record_text(self._facts)

    def next_ask(self) -> Ask | None:
        if self._awaits_remark:
            return self._ask(CRITIC, critic_messages(self._facts, self._record, self._rounds))
        is_over = len(self._rounds) == self._num_turns or (self._rounds and self._rounds[-1][1] == ACCEPTED)
        return None if is_over else self._ask(WRITER, writer_messages(self._draft, self._rounds))

    def tell(self, record: FinalRecord) -> None:
        text = record.text.strip()
        if self._awaits_remark:
            self._rounds.append((self._record, text))
        else:
            self._record = text
        self._awaits_remark = not self._awaits_remark

    def _ask(self, label: str, messages: list[dict[str, Any]]) -> Ask:
        request = {"messages": messages, "max_tokens": _MAX_TOKENS, "temperature": 0}
        prompt_ids = self._renderer.render(messages).ids
        return Ask(label=label, kind="chat", request=request, prompt_ids=prompt_ids, comes_back=True)
