"""What can go wrong for a producer, beside the kinds in `gewell.errors`.

QueueError (gewell.errors)
+-- Unreachable            no connection to Redis within the client's patience
+-- QueueFull              the queue is over the worker's limit and stayed there
+-- UnknownJob             no trace of the id: never submitted here, or its result has expired
+-- StreamExpired          the stream is gone, only the result stands
+-- StreamDiverged         the server lost a stream in mid-job and the job was sampled anew
"""

from gewell.errors import QueueError


class Unreachable(QueueError):
    """No connection to Redis within the client's patience."""


class QueueFull(QueueError):
    """The lane holds more jobs than `info.max_queue_len` and did not shrink in time."""

    def __init__(self, lane: str, length: int, limit: int, waited_s: float) -> None:
        super().__init__(f"lane {lane} holds {length} jobs, its limit is {limit}; waited {waited_s:g} s for room")
        self.lane = lane
        self.length = length
        self.limit = limit


class UnknownJob(QueueError):
    """No trace of the id in Redis: it was never submitted in this namespace, or its result has expired."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"job {job_id} is unknown here: never submitted, or its result has expired")
        self.job_id = job_id


class StreamExpired(QueueError):
    """A reader wanted to resume, but the stream's time is over. The result may still stand."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"the stream of job {job_id} has expired and cannot be resumed; read its result instead")
        self.job_id = job_id


class StreamDiverged(QueueError):
    """The server lost the stream, and it was written anew with other tokens. The job's result has the truth."""

    def __init__(self, job_id: str, token_idx: int) -> None:
        super().__init__(
            f"job {job_id} was sampled anew and differs from token {token_idx} on; read its result instead"
        )
        self.job_id = job_id
        self.token_idx = token_idx
