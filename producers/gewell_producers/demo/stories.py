"""Stories that grow part by part, for a base model: few-shot text that it continues.

Prompts are token ids. A writer's next prompt is its last prompt, the ids of its answer as the record gives them, and
the critic's remark: exactly what the model has read, so that all of it but the remark can come from the cache.
"""

from collections.abc import Sequence
from typing import Any

from gewell.protocol import FinalRecord
from gewell.text.tokenizer import Tokenizer
from gewell_producers.demo.scene import Ask

_WRITER = """\
A writer tells stories for children, two sentences at a time. After each part an editor asks about what comes next.

Title: The Lighthouse
Writer: Every evening old Tom climbed the hundred steps of the lighthouse and lit the lamp. Far out at sea the \
fishermen saw the golden light and knew which way was home.
Editor: What went wrong one night?
Writer: But one night in autumn the wind broke the window and blew the lamp out. Tom had no match left, and he could \
already hear the boats calling from the dark.
Editor: Who helped Tom?
Writer: Then his little dog Pip ran down to the village and barked at every door. Soon forty people stood on the \
cliff with forty lanterns, and all the boats came safely home.

Title: The Smallest Baker
Writer: Mina was the smallest baker in town, so small that she stood on a flour sack to reach the table. Her rolls \
were as tiny as acorns, and nobody wanted to buy them.
Editor: Who came into the shop?
Writer: One morning a mouse in a blue coat came into the shop and put a silver coin on the counter. "Twelve rolls, \
please," he said, "for my daughter is getting married today."
Editor: How did the wedding go?
Writer: The mice danced all night, and the next day there was a long line in front of the shop. From then on Mina \
baked for everyone who was small, and she was never sad again.

"""

_CRITIC = """\
An editor reads one part of a story for children and asks about what comes next.

Part: The king had lost his crown, and he looked for it under every bed in the castle. Only the cook was not told.
Editor: Where did the cook find the crown?

Part: A paper boat sailed down the gutter and around the corner. Nobody saw it but a girl at the window.
Editor: Did the girl run after the boat?

Part: The giant sat down on the hill and cried, and his tears made a lake. The farmers did not know what to do.
Editor: Who dared to talk to the giant?

Part: Leo's kite flew higher than the church tower. Then the string broke.
Editor: Whom did the kite meet in the sky?

"""

_TITLES = (
    "The Dragon Who Was Afraid of Fire",
    "The Lost Umbrella",
    "The Last Train to the Mountains",
    "The Robot and the Little Garden",
    "The Fox Who Wanted the Moon",
    "The Piano in the Attic",
    "The Night Market",
    "The Bear and the First Snow",
    "The Clock That Ran Backwards",
    "The Girl Who Spoke to Whales",
    "The Blue Balloon",
    "The Farmer and the Talking Goose",
)

WRITER, CRITIC = "Writer", "Editor"
_MAX_TOKENS = {WRITER: 80, CRITIC: 24}
_PREAMBLES = {WRITER: _WRITER, CRITIC: _CRITIC}


class Stories:
    """The play; see `gewell_producers.demo.scene.Play`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def warm_ups(self) -> Sequence[Ask]:
        """The preambles: all prompts of a role begin with one."""
        asks = []
        for label in (WRITER, CRITIC):
            ids = self.preamble(label)
            asks.append(Ask(label=label, kind="warm", request={"prompt": ids}, prompt_ids=ids))
        return asks

    def scene(self, index: int, num_turns: int) -> "Story":
        return Story(self, self._tokenizer, index, num_turns)

    def num_jobs(self, num_turns: int) -> int:
        return 2 * num_turns - 1

    def preamble(self, label: str) -> list[int]:
        bos = self._tokenizer.bos_id
        return ([] if bos is None else [bos]) + self._tokenizer.encode(_PREAMBLES[label])


class Story:
    """The writer's prompt grows with the story; the critic sees the newest part alone. The last part is not judged."""

    is_right: bool | None = None

    def __init__(self, play: Stories, tokenizer: Tokenizer, index: int, num_turns: int) -> None:
        self.title = _TITLES[index % len(_TITLES)]
        self._play = play
        self._tokenizer = tokenizer
        self._seed = 1000 * index
        self._turns_left = num_turns
        self._prompt = [*play.preamble(WRITER), *tokenizer.encode(f"Title: {self.title}\n{WRITER}:")]
        self._part: FinalRecord | None = None  # waits for the critic's remark

    def next_ask(self) -> Ask | None:
        if self._part is not None:
            review = self._tokenizer.encode(f"Part: {self._part.text.strip()}\n{CRITIC}:")
            return self._ask(CRITIC, [*self._play.preamble(CRITIC), *review])
        if self._turns_left == 0:
            return None
        is_last = self._turns_left == 1
        return self._ask(WRITER, self._prompt, comes_back=not is_last, cache={"release": True} if is_last else {})

    def tell(self, record: FinalRecord) -> None:
        self._seed += 1
        if self._part is None:
            self._turns_left -= 1
            self._part = record if self._turns_left else None
            return
        said = self._tokenizer.encode(f"\n{CRITIC}: {record.text.strip()}\n{WRITER}:")
        self._prompt = [*self._prompt, *self._visible_ids(self._part), *said]
        self._part = None

    def _ask(self, label: str, prompt: list[int], **hints: Any) -> Ask:
        request = {
            "prompt": prompt,
            "max_tokens": _MAX_TOKENS[label],
            "temperature": 0.7,
            "top_p": 0.9,
            "seed": self._seed,
            "stop": ["\n"],
        }
        return Ask(label=label, kind="completion", request=request, prompt_ids=prompt, **hints)

    def _visible_ids(self, record: FinalRecord) -> list[int]:
        """Tokens of the visible text: those that hold the stop string, and what came after it, are not said again."""
        num_bytes, ids = len(record.text.encode()), []
        for token in record.token_ids:
            num_bytes -= len(self._tokenizer.token_bytes(token))
            if num_bytes < 0:
                break
            ids.append(token)
        return ids
