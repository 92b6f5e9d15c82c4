"""What a template makes of a conversation: text that is never parsed for control tokens, and control tokens by name."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Message = Mapping[str, Any]


class Control(NamedTuple):
    """A control token that the template itself put there."""

    name: str


class Mark(NamedTuple):
    """Here begins the message with this index."""

    message_idx: int


IMAGE = Control("<|image|>")  # one per image; the renderer expands it to the image's run of soft tokens

Part = str | Control | Mark


class TurnTemplate(Protocol):
    """A way to write conversations down. Messages have passed `normalize_messages`."""

    @property
    def end_tokens(self) -> tuple[str, ...]:
        """Control tokens that end the model's turn."""

    def parts(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        thinking: bool,
        marks: bool = True,
    ) -> Iterator[Part]:
        """The conversation and the head of the model's next turn. Without `marks` a template may leave them out.

        Raises InvalidRequest when the conversation cannot be written down.
        """
