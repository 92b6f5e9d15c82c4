"""`expect` hints: which conversations return after which job, and whether that job has ended."""

from collections import OrderedDict

from gewell.cache.policy import Conversation

MAX_ENDED_JOBS = 10_000  # ids of ended jobs that a later hint may still name


class Expectations:
    """Conversations by the job that they were told to return after. At most one job a conversation."""

    def __init__(self) -> None:
        self._by_job: dict[str, list[Conversation]] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def tell(self, conversation: Conversation, after: str | None) -> None:
        """The conversation returns after that job; None: nothing is told (any more)."""
        before = conversation.expect_after
        listed = self._by_job.get(before) if before is not None else None
        if before is not None and listed is not None and conversation in listed:
            listed.remove(conversation)
            if not listed:
                del self._by_job[before]
        conversation.expect_after = after
        conversation.is_due = after is not None and after in self._ended
        if after is not None:
            conversation.has_expected = True
            if not conversation.is_due:
                self._by_job.setdefault(after, []).append(conversation)

    def job_ended(self, job_id: str, own: Conversation | None) -> None:
        """own: the conversation that the job itself belongs to. After its own turn only: it returns, but not when."""
        for conversation in self._by_job.pop(job_id, ()):
            conversation.is_due = conversation is not own
        self._ended[job_id] = None
        if len(self._ended) > MAX_ENDED_JOBS:
            self._ended.popitem(last=False)
