"""What the scheduler asks of a prefix cache, and the answer of an engine that has none."""

from typing import Protocol

from gewell.cache.sequence_pages import ResumePoint
from gewell.scheduler.request import RequestState


class Prefixes(Protocol):
    @property
    def num_evictable_pages(self) -> int:
        """Pages that eviction could free now."""

    @property
    def num_checkpoints(self) -> int: ...

    def warm_tokens(self, req: RequestState) -> int:
        """Leading tokens of the request that would be served now. Changes nothing."""

    def match(self, req: RequestState) -> ResumePoint | None:
        """Where the request may start; its position is below the number of its tokens."""

    def keep_positions(self, req: RequestState, start: int) -> list[int]:
        """Ascending positions after `start` where the request's prefill should leave a checkpoint."""

    def retain(self, req: RequestState, position: int) -> None:
        """The request has computed everything before `position` and holds the window before it: keep it for others."""

    def evict(self, num_pages: int) -> int:
        """Free up to that many pages, the least valuable first; returns how many became free."""

    def finished(self, req: RequestState, *, is_sound: bool) -> None:
        """The request is about to give its pages back. Not sound: what it computed must not be served to others."""

    def add_waiting(self, req: RequestState) -> None: ...

    def drop_waiting(self, req: RequestState) -> None: ...


class NoPrefixes:
    """Retains nothing."""

    num_evictable_pages = 0
    num_checkpoints = 0

    def warm_tokens(self, req: RequestState) -> int:
        return 0

    def match(self, req: RequestState) -> ResumePoint | None:
        return None

    def keep_positions(self, req: RequestState, start: int) -> list[int]:
        return []

    def retain(self, req: RequestState, position: int) -> None:
        pass

    def evict(self, num_pages: int) -> int:
        return 0

    def finished(self, req: RequestState, *, is_sound: bool) -> None:
        pass

    def add_waiting(self, req: RequestState) -> None:
        pass

    def drop_waiting(self, req: RequestState) -> None:
        pass
