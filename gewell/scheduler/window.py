"""Waiting requests, and which of them starts next.

The order of choice: the lane by weight; in it the tenant by deficit round robin; of that tenant's requests the
earliest deadline, and when none has a deadline the one with the longest warm prefix. Equal deadlines and equal warmth
keep submit order. A tenant's oldest request can be overtaken `max_overtakes` times; then it goes first: nobody starves.

Warmth is what the cache said when it was last asked. It is asked again when a request comes to the top of its heap, not
for the whole window at every choice.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from gewell.scheduler.fairness import LANE_WEIGHTS, DeficitRoundRobin, LaneClocks
from gewell.scheduler.request import RequestState

DEFAULT_QUANTUM = 64.0  # tokens: less than an ordinary request, so that turns alternate whatever their sizes


class _TenantQueue:
    """One tenant's waiting requests in one lane. Heaps with lazy deletion: `_live` says what is still there."""

    def __init__(self, warm_tokens: Callable[[RequestState], int], max_overtakes: int) -> None:
        self._warm_tokens = warm_tokens
        self._max_overtakes = max_overtakes
        self._live: dict[str, RequestState] = {}
        self._by_age: list[tuple[tuple[int, int], RequestState]] = []
        self._by_deadline: list[tuple[int, tuple[int, int], RequestState]] = []
        self._by_warmth: list[tuple[int, tuple[int, int], int, RequestState]] = []
        self._num_looks = 0  # tells heap entries of one request apart
        self._num_overtakes = 0  # of the oldest request

    def __len__(self) -> int:
        return len(self._live)

    def add(self, req: RequestState) -> None:
        self._live[req.request_id] = req
        heapq.heappush(self._by_age, (req.sort_key, req))
        if req.request.deadline_ms is not None:
            heapq.heappush(self._by_deadline, (req.request.deadline_ms, req.sort_key, req))
        else:
            self.warm(req)

    def warm(self, req: RequestState) -> None:
        """Ask the cache about the request again; a heap entry with an older answer becomes void."""
        req.num_warm_tokens = self._warm_tokens(req)
        self._num_looks += 1
        heapq.heappush(self._by_warmth, (-req.num_warm_tokens, req.sort_key, self._num_looks, req))

    def remove(self, req: RequestState, *, is_started: bool) -> None:
        oldest = self._oldest()
        del self._live[req.request_id]
        if req is oldest:
            self._num_overtakes = 0
        elif is_started:
            self._num_overtakes += 1
        self._sweep()

    def best(self) -> RequestState:
        oldest = self._oldest()
        if self._num_overtakes >= self._max_overtakes:
            return oldest
        while self._by_deadline:
            req = self._by_deadline[0][2]
            if self._is_live(req):
                return req
            heapq.heappop(self._by_deadline)
        return self._warmest()

    def _warmest(self) -> RequestState:
        heap = self._by_warmth
        asked: set[str] = set()
        while True:
            negated, _, _, req = heap[0]
            if not self._is_live(req) or -negated != req.num_warm_tokens:
                heapq.heappop(heap)
            elif req.num_warm_tokens == 0 or req.request_id in asked:
                return req  # nothing to lose, or just confirmed
            else:  # what it hoped for may have been evicted since
                asked.add(req.request_id)
                heapq.heappop(heap)
                self.warm(req)

    def _oldest(self) -> RequestState:
        while not self._is_live(self._by_age[0][1]):
            heapq.heappop(self._by_age)
        return self._by_age[0][1]

    def _sweep(self) -> None:
        """Dead entries below a heap's top would else stay, with their prompts, as long as the tenant is busy."""
        limit = 2 * len(self._live) + 64
        if len(self._by_age) > limit:
            self._by_age = [entry for entry in self._by_age if self._is_live(entry[-1])]
            heapq.heapify(self._by_age)
        if len(self._by_deadline) > limit:
            self._by_deadline = [entry for entry in self._by_deadline if self._is_live(entry[-1])]
            heapq.heapify(self._by_deadline)
        if len(self._by_warmth) > limit:
            self._by_warmth = [e for e in self._by_warmth if self._is_live(e[-1]) and -e[0] == e[-1].num_warm_tokens]
            heapq.heapify(self._by_warmth)

    def _is_live(self, req: RequestState) -> bool:
        return self._live.get(req.request_id) is req


class Window:
    """The waiting requests that this process has taken from the queue. Bounded by who fills it, not here.

    warm_tokens    how many leading tokens of a request's prompt the cache would serve now
    quantum        tokens added to a tenant's allowance in each round
    max_overtakes  how many younger requests of a tenant may start before its oldest must
    """

    def __init__(
        self,
        warm_tokens: Callable[[RequestState], int] = lambda req: 0,
        *,
        quantum: float = DEFAULT_QUANTUM,
        max_overtakes: int = 64,
        lane_weights: Mapping[str, int] = LANE_WEIGHTS,
    ) -> None:
        self._warm_tokens = warm_tokens
        self._quantum = quantum
        self._max_overtakes = max_overtakes
        self._clocks = LaneClocks(lane_weights)
        self._turns = {lane: DeficitRoundRobin(quantum) for lane in lane_weights}
        self._queues: dict[tuple[str, str], _TenantQueue] = {}
        self._requests: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._requests.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def get(self, request_id: str) -> RequestState | None:
        return self._requests.get(request_id)

    def add(self, req: RequestState) -> None:
        lane, tenant = req.request.lane, req.request.tenant
        queue = self._queues.get((lane, tenant))
        if queue is None:
            queue = self._queues[lane, tenant] = _TenantQueue(self._warm_tokens, self._max_overtakes)
            self._turns[lane].enter(tenant)
            self._clocks.wake(lane)
        self._requests[req.request_id] = req
        queue.add(req)

    def choose(self) -> RequestState | None:
        """The request that should start next; it stays here. Repeated calls agree until something changes."""
        for lane in self._clocks.order():
            tenant = self._turns[lane].choose(partial(self._price, lane))
            if tenant is not None:
                return self._queues[lane, tenant].best()
        return None

    def start(self, req: RequestState) -> None:
        """The request leaves and starts: its lane and tenant pay for it."""
        self._clocks.charge(req.request.lane, req.cost)
        self._turns[req.request.lane].charge(req.request.tenant, req.cost)
        self._take_out(req, is_started=True)

    def remove(self, req: RequestState) -> None:
        """The request leaves without starting (cancelled, or set aside); nobody pays."""
        self._take_out(req, is_started=False)

    def _price(self, lane: str, tenant: str) -> float:
        return self._queues[lane, tenant].best().cost

    def _take_out(self, req: RequestState, *, is_started: bool) -> None:
        key = req.request.lane, req.request.tenant
        del self._requests[req.request_id]
        queue = self._queues[key]
        queue.remove(req, is_started=is_started)
        if not queue:
            del self._queues[key]
            turns = self._turns[key[0]]
            turns.leave(key[1])
            if not turns:
                self._clocks.sleep(key[0])
