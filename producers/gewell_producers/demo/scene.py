"""What the demo's loop plays: scenes, each a writer and a critic who take turns. A scene says what to ask next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gewell.protocol import FinalRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One job of a scene.

    prompt_ids   the prompt as the worker will read it, for counting what could be reused
    label        who speaks; one conversation a scene and label
    comes_back   this conversation goes on after the next speaker has answered
    """

    label: str
    kind: str
    request: Mapping[str, Any]
    prompt_ids: Sequence[int]
    comes_back: bool = False
    cache: Mapping[str, Any] = field(default_factory=dict)


class Scene(Protocol):
    """One of the conversations that go on side by side."""

    @property
    def title(self) -> str: ...

    def next_ask(self) -> Ask | None:
        """What to ask now; None: the scene is over."""

    def tell(self, record: FinalRecord) -> None:
        """The answer to the last ask."""

    @property
    def is_right(self) -> bool | None:
        """Whether the scene ended as it should; None: nobody can tell."""


class Play(Protocol):
    """Makes scenes, and says what is worth computing before they all begin at once."""

    def warm_ups(self) -> Sequence[Ask]: ...

    def scene(self, index: int, num_turns: int) -> Scene: ...

    def num_jobs(self, num_turns: int) -> int:
        """Of one scene that runs to its end."""
