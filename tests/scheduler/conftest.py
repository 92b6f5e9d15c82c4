"""Requests and worlds small enough to check by hand."""

import itertools
from array import array
from collections.abc import Callable, Sequence

import pytest

from gewell.cache.geometry import KindGeometry, KVGeometry
from gewell.request import CacheHints, EngineRequest
from gewell.sampling import SamplingParams
from gewell.scheduler.request import RequestState

MakeRequest = Callable[..., RequestState]


@pytest.fixture
def make_request() -> MakeRequest:
    """Requests in order of arrival; the cost of each is 1 unless it is given."""
    numbers = itertools.count(1)

    def make(
        name: str = "",
        *,
        prompt: int | Sequence[int] = 4,
        max_tokens: int = 8,
        lane: str = "normal",
        tenant: str = "t",
        deadline_ms: int | None = None,
        enqueued_at_ms: int = 0,
        cost: float = 1.0,
        mode: str = "auto",
        salt: str | None = None,
    ) -> RequestState:
        number = next(numbers)
        ids = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
        request = EngineRequest(
            request_id=name or f"r{number}",
            prompt_ids=ids,
            sampling=SamplingParams(max_tokens=max_tokens),
            lane=lane,
            tenant=tenant,
            deadline_ms=deadline_ms,
            enqueued_at_ms=enqueued_at_ms,
            cache=CacheHints(mode=mode, salt=salt),
        )
        return RequestState(
            request=request,
            order=number,
            tokens=array("i", ids),
            num_prompt_tokens=len(ids),
            max_output_tokens=max_tokens,
            cost=cost,
        )

    return make


@pytest.fixture
def geometry() -> KVGeometry:
    """Window 6, pages of 4 sliding or 8 full tokens."""
    return KVGeometry(
        page_bytes=32,
        sliding=KindGeometry(page_tokens=4, bytes_per_token=8),
        full=KindGeometry(page_tokens=8, bytes_per_token=4),
        sliding_window=6,
        slack_tokens=2,
    )
