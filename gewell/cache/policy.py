"""What a checkpoint is worth: seconds of prefill saved x probability of reuse / (pages only it holds x time to reuse).

Pure arithmetic over what is known. Time is counted in started requests ("ticks"), because that is what competes for
pages: a conversation that returns after 40 other jobs must outlive 40 jobs, whether they take a minute or an hour.

Known for sure: a waiting request that would resume here (probability 1, its rank in the queue). Told: `expect` (the
conversation returns after a named job). Learned: the conversation's rhythm, and how often conversations go on at all.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gewell.cache.checkpoints import Checkpoint

PRIORITY_FACTOR = {"low": 0.5, "normal": 1.0, "high": 2.0}


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


class Conversation:
    """What is known about one conversation's rhythm.

    gap            smoothed ticks between turns, 0 when only one turn was seen
    num_running    turns that are running now: their successor cannot be in the queue yet
    expect_after   job after whose end it returns; None: nothing told
    """

    __slots__ = ("expect_after", "expected", "gap", "last_start", "leaf", "num_running", "num_turns", "stable", "tails")

    def __init__(self) -> None:
        self.num_turns = 0
        self.last_start = 0
        self.gap = 0.0
        self.num_running = 0
        self.expect_after: str | None = None
        self.expected = False
        self.tails: list[Checkpoint] = []
        self.leaf: object | None = None
        self.stable = 0

    def turn_started(self, now: int) -> None:
        if self.num_turns:
            since = now - self.last_start
            self.gap = since if self.num_turns == 1 else 0.7 * self.gap + 0.3 * since
        self.num_turns += 1
        self.last_start = now


class ReusePolicy:
    """Values checkpoints. `now` is the number of requests started so far."""

    def __init__(self, costs: PrefillCost | None = None, lookahead: int = 1024) -> None:
        self.costs = costs or PrefillCost()
        self.lookahead = lookahead
        self.now = 0
        self.typical_gap = 200.0

    def turn_started(self, conversation: Conversation) -> None:
        conversation.turn_started(self.now)
        if conversation.gap:
            self.typical_gap += 0.02 * (conversation.gap - self.typical_gap)

    def value(self, checkpoint: "Checkpoint", num_pages: int, rank: int | None) -> float:
        """rank: place in the queue of the first waiting request that would resume here; None: nobody waits for it."""
        if rank is not None:
            probability, distance = 1.0, float(max(1, rank))
        else:
            probability, distance = self.guess(checkpoint)
        above = checkpoint.above
        saved = self.costs.seconds(above.position if above is not None else 0, checkpoint.position)
        return saved * probability * checkpoint.priority / (num_pages * distance)

    def guess(self, checkpoint: "Checkpoint") -> tuple[float, float]:
        """Probability and distance of a reuse that nobody in the queue has announced."""
        now = self.now
        idle = now - checkpoint.last_use
        if checkpoint.kind == "shared":
            return 1.0, max(32.0, idle, (now - checkpoint.born + 1) / (checkpoint.uses + 1))
        conversation = checkpoint.conversation
        if checkpoint.one_off or conversation is None or checkpoint.kind != "tail":
            return 0.02, 4096.0
        if checkpoint.superseded:
            return 0.01, 4096.0
        gap = conversation.gap or self.typical_gap
        seen = (conversation.num_turns + 1) / (conversation.num_turns + 2)
        probability = seen * (1.0 if idle <= 3 * gap else 0.5 if idle <= 8 * gap else 0.1)
        unseen = 0.0 if conversation.num_running else min(self.lookahead / 2, self.typical_gap / 2)
        return probability, max(gap - idle, gap / 4, unseen, 1.0)
