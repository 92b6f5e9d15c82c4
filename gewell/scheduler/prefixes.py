"""What the scheduler asks of a prefix cache, and the answer of an engine that has none."""

from array import array
from dataclasses import replace
from typing import Protocol

from gewell.cache.prefix_cache import PrefixCache
from gewell.cache.prefix_tree import ImageRun
from gewell.cache.sequence_pages import ResumePoint
from gewell.cache.tiers import Transfer
from gewell.request import CacheAnswer
from gewell.scheduler.request import RequestState


class Prefixes(Protocol):
    """A request's life here: add_waiting, match and start, retain ..., preempted (back to match) or finished."""

    @property
    def num_checkpoints(self) -> int: ...

    @property
    def num_evictable_pages(self) -> int:
        """Pages that eviction could free now."""

    def add_waiting(self, req: RequestState) -> None: ...

    def warm_tokens(self, req: RequestState) -> int:
        """Leading tokens of the request that would be served now. Changes nothing."""

    def match(self, req: RequestState) -> ResumePoint | None:
        """Where the request may start; its position is below the number of its tokens.

        May bring a prefix back from host memory: its bytes follow with the next `take_transfers`.
        """

    def start(self, req: RequestState, position: int) -> list[int]:
        """The request runs from `position` on. Returns the ascending positions where it should leave checkpoints."""

    def want(self, req: RequestState, position: int) -> bool:
        """A running request should leave one more checkpoint, for a sibling. False: it may not."""

    def retain(self, req: RequestState, position: int) -> None:
        """The request has computed everything before `position` and holds the window before it: keep it for others."""

    def preempted(self, req: RequestState) -> None:
        """The request is about to give its pages back and will wait again."""

    def finished(self, req: RequestState, *, is_sound: bool, is_completed: bool) -> None:
        """The request is about to give its pages back for good, if it has any. Sets `req.answer`.

        is_sound       False: what it computed must not be served to others
        is_completed   it came to its end by itself, so its history may go on from there
        """

    def evict(self, num_pages: int) -> int:
        """Free up to that many pages, the least valuable first; returns how many became free."""

    def observe_prefill(self, start: int, end: int, seconds: float) -> None:
        """Computing tokens [start, end) of a prompt took that long: what a cached prefix is worth."""

    def take_transfers(self) -> list[Transfer]:
        """Copies between device and host memory that the calls so far need, in order."""


class NoPrefixes:
    """Retains nothing."""

    num_checkpoints = 0
    num_evictable_pages = 0

    def add_waiting(self, req: RequestState) -> None:
        pass

    def warm_tokens(self, req: RequestState) -> int:
        return 0

    def match(self, req: RequestState) -> ResumePoint | None:
        return None

    def start(self, req: RequestState, position: int) -> list[int]:
        return []

    def want(self, req: RequestState, position: int) -> bool:
        return False

    def retain(self, req: RequestState, position: int) -> None:
        pass

    def preempted(self, req: RequestState) -> None:
        pass

    def finished(self, req: RequestState, *, is_sound: bool, is_completed: bool) -> None:
        req.answer = CacheAnswer(cached_tokens=0)

    def evict(self, num_pages: int) -> int:
        return 0

    def observe_prefill(self, start: int, end: int, seconds: float) -> None:
        pass

    def take_transfers(self) -> list[Transfer]:
        return []


class CachedPrefixes:
    """`PrefixCache`, asked about requests in the scheduler's terms."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache

    @property
    def num_checkpoints(self) -> int:
        return len(self.cache.index)

    @property
    def num_evictable_pages(self) -> int:
        return self.cache.num_evictable_pages

    def add_waiting(self, req: RequestState) -> None:
        images = [ImageRun(image.start, image.end, bytes.fromhex(image.digest)) for image in req.request.images]
        request = req.request
        if request.score_from is not None:  # what is scored stays its own: the cache never hears of it
            shared = array("i", request.prompt_ids[: request.score_from])
            request = replace(request, prompt_ids=shared, emitted_ids=())
        self.cache.add_waiting(request, [image for image in images if image.end <= len(request.prompt_ids)])

    def warm_tokens(self, req: RequestState) -> int:
        return self.cache.peek(req.request_id)

    def match(self, req: RequestState) -> ResumePoint | None:
        match = self.cache.match(req.request_id)
        if match.on_host:
            self.cache.restore(req.request_id)  # may have evicted what was matched, also when it found no room
            match = self.cache.match(req.request_id)
        return match.point

    def start(self, req: RequestState, position: int) -> list[int]:
        return list(self.cache.start(req.request_id, position))

    def want(self, req: RequestState, position: int) -> bool:
        return self.cache.want(req.request_id, position)

    def retain(self, req: RequestState, position: int) -> None:
        assert req.pages is not None
        self.cache.retain(req.request_id, req.pages, position)

    def preempted(self, req: RequestState) -> None:
        assert req.pages is not None
        self.cache.preempted(req.request_id, req.pages, req.tokens[: req.request.score_from])

    def finished(self, req: RequestState, *, is_sound: bool, is_completed: bool) -> None:
        if not is_sound:
            self.cache.forget_taken(req.request_id)
        ids = req.tokens[: req.num_prompt_tokens + req.num_output_tokens]
        if req.request.score_from is not None:
            ids, is_completed = ids[: req.request.score_from], False
        req.answer = self.cache.finished(req.request_id, req.pages, ids, completed=is_completed)

    def evict(self, num_pages: int) -> int:
        return self.cache.evict(num_pages)

    def observe_prefill(self, start: int, end: int, seconds: float) -> None:
        self.cache.policy.costs.observe(start, end, seconds)

    def take_transfers(self) -> list[Transfer]:
        return self.cache.take_transfers()
