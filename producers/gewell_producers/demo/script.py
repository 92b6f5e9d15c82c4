"""What the demo's writer and critic are told. Few-shot text, since the default model is a small base model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One side of the loop: the shared beginning of its prompts, and the label before each of its answers."""

    preamble: str
    label: str
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A story grows part by part, and the writer's prompt grows with it; the critic sees the newest part alone."""

    writer: Role
    critic: Role
    titles: tuple[str, ...]
    temperature: float
    top_p: float

    def opening(self, title: str) -> str:
        return f"Title: {title}\n{self.writer.label}:"

    def reply(self, remark: str) -> str:
        """What follows the writer's answer in its next prompt."""
        return f"\n{self.critic.label}: {remark}\n{self.writer.label}:"

    def review(self, part: str) -> str:
        return f"Part: {part}\n{self.critic.label}:"


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

STORIES = Script(
    writer=Role(preamble=_WRITER, label="Writer", max_tokens=80),
    critic=Role(preamble=_CRITIC, label="Editor", max_tokens=24),
    titles=(
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
    ),
    temperature=0.7,
    top_p=0.9,
)
