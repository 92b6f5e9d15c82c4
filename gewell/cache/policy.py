"""What a checkpoint is worth: seconds of prefill saved x probability of reuse / (pages only it holds x time to reuse).

Pure arithmetic over what is known. Time is counted in started requests ("ticks"), because that is what competes for
pages: a conversation that returns after 40 other jobs must outlive 40 jobs, whether they take a minute or an hour.

Known for sure: a waiting request that would resume here (probability 1, its distance in the queue). Told: `expect` (the
conversation returns after a named job). Learned: each conversation's rhythm, how long after an answer the next turn
shows up in the queue, how far from the queue's head it shows up, and whether tails live long enough to be of use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gewell.cache.checkpoints import Checkpoint
    from gewell.cache.prefix_tree import Node

PRIORITY_FACTOR = {"low": 0.5, "normal": 1.0, "high": 1.25}
RARE = (0.02, 4096.0)  # probability and distance of a reuse that nothing speaks for: an edit, a prompt sent again
ENDED = (0.05, 4096.0)  # a conversation that announced each return so far, and did not announce this one
PROMPT_TICKS = 8  # a next turn that shows up within so many ticks of the last one's end was there all along
_NUM_BUCKETS = 24


class PrefillCost:
    """Seconds to compute tokens [start, end) of a prompt: linear in tokens plus attention over what stands before.

    Measured while serving: `observe` moves the linear part towards what a prefill really took.
    """

    __slots__ = ("seconds_per_token", "seconds_per_token_pair")

    def __init__(self, seconds_per_token: float = 1e-4, seconds_per_token_pair: float = 0.0) -> None:
        self.seconds_per_token = seconds_per_token
        self.seconds_per_token_pair = seconds_per_token_pair

    def seconds(self, start: int, end: int) -> float:
        num_tokens = end - start
        return num_tokens * (self.seconds_per_token + self.seconds_per_token_pair * (start + end) / 2)

    def observe(self, start: int, end: int, seconds: float) -> None:
        """A prefill of [start, end) took that long. Smoothed over about 64k tokens."""
        num_tokens = end - start
        if num_tokens <= 0 or seconds <= 0:
            return
        measured = max(0.0, seconds / num_tokens - self.seconds_per_token_pair * (start + end) / 2)
        weight = min(1.0, num_tokens / 65536)
        self.seconds_per_token += weight * (measured - self.seconds_per_token)


class Delays:
    """Distribution of a delay in ticks, in powers of two. Old samples fade: each weighs 1 % less than the next."""

    __slots__ = ("_num_samples", "_remaining", "_survival", "_unit", "_weights")

    def __init__(self) -> None:
        self._weights = [0.0] * _NUM_BUCKETS
        self._unit = 1.0
        self._num_samples = 0
        self._survival = [1.0] * _NUM_BUCKETS
        self._remaining = [1.0] * _NUM_BUCKETS

    def add(self, ticks: int) -> None:
        self._unit *= 1.01
        self._weights[_bucket(ticks)] += self._unit
        self._num_samples += 1
        if self._num_samples < 16 or self._num_samples % 16 == 0:
            self._tabulate()

    def survival(self, ticks: int) -> float:
        """Share of delays longer than that; 1 as long as too little is known."""
        return self._survival[_bucket(ticks)] if self._num_samples >= 8 else 1.0

    def remaining(self, ticks: int) -> float:
        """Harmonic mean of what is left of delays longer than that: worth goes with the inverse of the distance."""
        return self._remaining[_bucket(ticks)]

    def _tabulate(self) -> None:
        if self._unit > 1e12:
            self._weights = [weight / self._unit for weight in self._weights]
            self._unit = 1.0
        total, before = sum(self._weights), 0.0
        for i, weight in enumerate(self._weights):
            self._survival[i] = 1 - (before + weight / 2) / total
            before += weight
            middle = 0.75 * 2**i if i else 0.0
            longer = weight / 2
            rate = longer / max(1.0, 0.25 * 2**i)
            for j in range(i + 1, _NUM_BUCKETS):
                longer += self._weights[j]
                rate += self._weights[j] / max(1.0, 0.75 * 2**j - middle)
            self._remaining[i] = longer / rate if rate > 0 else 2.0**i


def _bucket(ticks: int) -> int:
    return min(_NUM_BUCKETS - 1, max(0, ticks).bit_length())


class Conversation:
    """What is known about one conversation.

    gap            smoothed ticks between turns (harmonic: short ones count), 0 when only one turn was seen
    num_running    turns that are running now: their successor cannot be in the queue yet
    expect_after   job after whose end it returns; None: nothing told. is_due: that job has ended
    leaf, stable   end of the last sequence, and how many of its tokens the next turn should repeat
    """

    __slots__ = (
        "expect_after",
        "gap",
        "has_expected",
        "is_due",
        "last_finish",
        "last_start",
        "leaf",
        "num_running",
        "num_turns",
        "stable",
        "tails",
    )

    def __init__(self) -> None:
        self.num_turns = self.num_running = 0
        self.last_start = self.last_finish = 0
        self.gap = 0.0
        self.expect_after: str | None = None
        self.has_expected = self.is_due = False
        self.tails: list[Checkpoint] = []
        self.leaf: Node | None = None
        self.stable = 0


class ReusePolicy:
    """Values checkpoints. `now` is the number of requests started so far."""

    def __init__(self, costs: PrefillCost | None = None) -> None:
        self.costs = costs or PrefillCost()
        self.now = 0
        self.typical_gap = 200.0  # mean over conversations
        self.entry_distance = 32.0  # harmonic mean distance from the queue's head at which requests show up
        self.turn_distance = 32.0  # mean distance at which a conversation's next turn shows up
        self.run_ticks = 16.0  # mean ticks that pass while a request runs
        self.show_delays = Delays()  # ticks from the end of a turn until the next one shows up in the queue
        self.tail_survival = 0.5  # share of tails that are resumed from before they are evicted

    # ------------------------------------------------------------------------------------------------ learning

    def request_shown(self, distance: int, conversation: Conversation | None) -> None:
        distance = max(1, distance)
        self.entry_distance = 1 / (0.98 / self.entry_distance + 0.02 / distance)
        if conversation is not None and conversation.num_turns:
            self.turn_distance += 0.02 * (distance - self.turn_distance)
            if not conversation.num_running:
                self.show_delays.add(self.now - conversation.last_finish)

    def turn_started(self, conversation: Conversation) -> None:
        if conversation.num_turns:
            since = max(1, self.now - conversation.last_start)
            conversation.gap = 1 / (0.7 / conversation.gap + 0.3 / since) if conversation.gap else since
            self.typical_gap += 0.02 * (conversation.gap - self.typical_gap)
        conversation.num_turns += 1
        conversation.num_running += 1
        conversation.last_start = self.now

    def turn_finished(self, conversation: Conversation) -> None:
        conversation.num_running -= 1
        conversation.last_finish = self.now

    def request_finished(self, num_ticks: int) -> None:
        self.run_ticks += 0.02 * (num_ticks - self.run_ticks)

    def tail_ended(self, was_used: bool) -> None:
        self.tail_survival += 0.01 * (was_used - self.tail_survival)

    # ------------------------------------------------------------------------------------------------ valuing

    @property
    def strictness(self) -> float:
        """How much of the lowest value held a new tail must reach to be taken at all, 0 .. 0.8.

        Where nearly all tails are evicted before they are of use (many conversations taking turns in a small pool),
        taking each new one only pushes out others shortly before their return. Not so where the next turn shows up
        as soon as a turn has ended: then it is soon known which to keep.
        """
        rarely_used = min(1.0, max(0.0, (0.3 - self.tail_survival) / 0.15))
        return 0.8 * rarely_used * self.show_delays.survival(PROMPT_TICKS)

    def value(self, checkpoint: "Checkpoint", num_pages: int, wait: int | None, told_wait: float | None) -> float:
        """Seconds saved per page and tick.

        wait        ticks until the first waiting request starts that would resume here; None: nobody waits for it
        told_wait   the same for the conversation's return, from an `expect` hint
        """
        if wait is not None:
            probability, distance = 1.0, float(max(1, wait))
        elif checkpoint.kind == "shared":
            idle, age = self.now - checkpoint.last_use, self.now - checkpoint.born
            probability, distance = 1.0, max(self.entry_distance, idle, (age + 1) / (checkpoint.uses + 1))
        elif checkpoint.kind != "tail" or checkpoint.conversation is None or checkpoint.is_superseded:
            probability, distance = RARE
        else:
            idle = self.now - checkpoint.last_use
            probability, distance = self.next_turn(checkpoint.conversation, idle, told_wait)
        above = checkpoint.above
        saved = self.costs.seconds(above.position if above is not None else 0, checkpoint.position)
        return saved * probability * checkpoint.priority / (num_pages * distance)

    def prospect(
        self,
        kind: str,
        conversation: Conversation | None,
        start: int,
        end: int,
        num_pages: int,
        told_wait: float | None,
    ) -> float:
        """Value of a checkpoint that has not been taken yet and would save the tokens [start, end)."""
        if kind == "shared":
            probability, distance = 1.0, self.entry_distance
        elif kind != "tail" or conversation is None:
            probability, distance = RARE
        else:
            probability, distance = self.next_turn(conversation, 0, told_wait)
        return self.costs.seconds(start, end) * probability / (num_pages * distance)

    def next_turn(self, conversation: Conversation, idle: int, told_wait: float | None) -> tuple[float, float]:
        """Probability and distance of a conversation's next turn that is not in the queue."""
        if told_wait is not None:
            return 0.98, max(1.0, told_wait)
        gap = self._gap(conversation)
        by_rhythm = max(gap - idle, gap / 4, 1.0)
        since_end = self.now - conversation.last_finish
        if conversation.expect_after is not None:
            if not conversation.num_running:
                by_rhythm = max(by_rhythm, self.show_delays.remaining(since_end) + self.turn_distance)
            return 0.98, by_rhythm
        if conversation.has_expected:
            return ENDED
        again = (conversation.num_turns + 1) / (conversation.num_turns + 2)
        if conversation.num_running:
            return again, by_rhythm
        # Had it a next turn, it would be in the queue by now in all but `unseen` of the cases.
        unseen = self.show_delays.survival(since_end)
        probability = again * again * unseen / (again * unseen + 1 - again)
        if idle > 3 * gap:
            probability *= 0.5 if idle <= 8 * gap else 0.1
        return probability, max(1.0, self.show_delays.remaining(since_end) + 0.75 * self.turn_distance)

    def _gap(self, conversation: Conversation) -> float:
        """The conversation's own gap between turns, held near the typical one while only few turns were seen."""
        if not conversation.gap:
            return self.typical_gap
        num_gaps = min(conversation.num_turns - 1, 4)  # older ones have faded from the smoothed gap
        return (num_gaps + 3) / (num_gaps / conversation.gap + 3 / self.typical_gap)
