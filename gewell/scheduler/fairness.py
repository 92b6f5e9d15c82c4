"""Shares: whose turn it is to start a request. Plain arithmetic over names; knows no requests and no tokens.

Two levels. Lanes share by weight: a lane's virtual clock runs at cost / weight, the lane furthest behind goes next,
and a lane that was empty starts at the clock of those that were not, so that it cannot save up turns. Tenants of a
lane share equally, by deficit round robin: whoever has its turn spends its allowance, and each allowance grows alike.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

LANE_WEIGHTS: Mapping[str, int] = {"high": 8, "normal": 4, "low": 1}


class LaneClocks:
    """Weighted fair choice among named lanes. Under saturation served cost tends to the ratio of the weights."""

    def __init__(self, weights: Mapping[str, int] = LANE_WEIGHTS) -> None:
        if not weights or any(weight <= 0 for weight in weights.values()):
            raise ValueError(f"lane weights must be positive, got {dict(weights)}")
        self._weights = dict(weights)
        self._clock = dict.fromkeys(weights, 0.0)
        self._busy: set[str] = set()
        self._now = 0.0  # clock of the lane served last: where a lane that wakes up starts

    def wake(self, lane: str) -> None:
        """The lane got its first waiting request."""
        if lane not in self._busy:
            self._busy.add(lane)
            self._clock[lane] = max(self._clock[lane], self._now)

    def sleep(self, lane: str) -> None:
        """The lane's last waiting request left."""
        self._busy.discard(lane)

    def order(self) -> list[str]:
        """Busy lanes, the one to serve first; equal clocks go to the heavier lane."""
        return sorted(self._busy, key=lambda lane: (self._clock[lane], -self._weights[lane], lane))

    def charge(self, lane: str, cost: float) -> None:
        """A request of `cost` (any unit, the same for all) was started from the lane."""
        self._now = max(self._now, self._clock[lane])
        self._clock[lane] += cost / self._weights[lane]


@dataclass(slots=True)
class _Turn:
    deficit: float = 0.0
    has_turn: bool = False  # its allowance of this round was already added


class DeficitRoundRobin:
    """Equal shares of cost among the tenants that wait (Shreedhar and Varghese 1995), whatever their requests' sizes.

    quantum   cost added to a tenant's allowance in each round
    """

    def __init__(self, quantum: float) -> None:
        if quantum <= 0:
            raise ValueError(f"quantum must be positive, got {quantum}")
        self.quantum = quantum
        self._ring: dict[str, _Turn] = {}  # insertion order is the order of turns; the first one is in turn

    def __len__(self) -> int:
        return len(self._ring)

    def enter(self, tenant: str) -> None:
        """The tenant has waiting requests now. It joins at the end of the round, with nothing saved."""
        self._ring.setdefault(tenant, _Turn())

    def leave(self, tenant: str) -> None:
        """The tenant has none left; what it had saved is lost, as the algorithm asks."""
        self._ring.pop(tenant, None)

    def choose(self, cost_of: Callable[[str], float | None]) -> str | None:
        """The tenant whose turn it is. `cost_of(tenant)` prices its next request; None passes the tenant over for now.

        Repeated calls give the same answer until a charge, or until prices or tenants change.
        """
        ring = self._ring
        costs = {tenant: cost for tenant in ring if (cost := cost_of(tenant)) is not None}
        if not costs:
            return None
        for _ in range(2 * len(ring) + 1):
            tenant, turn = next(iter(ring.items()))
            cost = costs.get(tenant)
            if cost is not None:
                if not turn.has_turn:
                    turn.deficit += self.quantum
                    turn.has_turn = True
                if cost <= turn.deficit:
                    return tenant
            self._rotate(tenant, turn)
        # Nobody can afford its next request after a full round: play the rounds until somebody can at once.
        rounds = min(-((ring[tenant].deficit - cost) // self.quantum) - 1 for tenant, cost in costs.items())
        for tenant in costs:
            ring[tenant].deficit += max(0.0, rounds) * self.quantum
        return self.choose(cost_of)

    def charge(self, tenant: str, cost: float) -> None:
        """The tenant's request was started. (Also out of turn: the deficit may become negative.)"""
        self._ring[tenant].deficit -= cost

    def _rotate(self, tenant: str, turn: _Turn) -> None:
        turn.has_turn = False
        del self._ring[tenant]
        self._ring[tenant] = turn
