"""Errors as OpenAI's clients expect them: a status, a JSON body, and whether it is worth trying again."""

from typing import Any

from gewell.errors import InvalidRequest, NoWorker, QueueError
from gewell.protocol import ErrorCode, ErrorInfo, FinalRecord, State
from gewell_producers.errors import QueueFull, Unreachable

RETRY_AFTER_S = 5

# The user's mistakes are 400 unless named here. What the same request may survive later is 5xx.
_STATUS = {
    ErrorCode.BODY_TOO_LARGE: 413,
    ErrorCode.ID_CONFLICT: 409,
    ErrorCode.DEADLINE: 504,
    ErrorCode.CRASHED: 500,
    ErrorCode.RESTART_IMPOSSIBLE: 503,
    ErrorCode.NUMERICS: 500,
    ErrorCode.INTERNAL: 500,
}


class Problem(Exception):
    """A refusal with its HTTP form. `retryable` is what `x-should-retry` says; openai's client obeys it."""

    def __init__(
        self, *, status: int, message: str, code: str, param: str | None = None, retryable: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retryable = retryable

    @property
    def body(self) -> dict[str, Any]:
        kind = (
            "invalid_request_error"
            if self.status < 429
            else "rate_limit_error"
            if self.status == 429
            else "server_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        retry = {"retry-after": str(RETRY_AFTER_S)} if self.retryable and self.status in (429, 503) else {}
        return {"x-should-retry": "true" if self.retryable else "false", **retry}


def of_request(error: InvalidRequest) -> Problem:
    """The caller's mistake; `param` is the field as the caller wrote it."""
    param = None if error.field is None else error.field.removeprefix("request.")
    message = error.message.replace("request.", "", 1) if error.message.startswith("request.") else error.message
    status = _STATUS.get(ErrorCode(error.code), 400) if error.code in set(ErrorCode) else 400
    return Problem(status=status, message=message, code=str(error.code), param=param)


def of_record(record: FinalRecord) -> Problem:
    """A job that ended without an answer."""
    if record.state is State.CANCELLED:
        return Problem(status=499, message="the job was cancelled", code="cancelled")
    if record.state is State.EXPIRED:
        return Problem(status=504, message="the job's deadline passed", code=ErrorCode.DEADLINE)
    error = record.error or ErrorInfo(code=ErrorCode.INTERNAL, message="the job ended without a reason")
    problem = of_request(InvalidRequest(error.code, error.message, error.field))
    return Problem(
        status=problem.status, message=problem.message, code=problem.code, param=problem.param,
        retryable=error.retryable and problem.status >= 500,
    )  # fmt: skip


def of_queue(error: QueueError) -> Problem:
    """The queue does not do what we need."""
    if isinstance(error, QueueFull):
        return Problem(status=429, message=str(error), code="queue_full", retryable=True)
    if isinstance(error, NoWorker):
        return Problem(status=503, message="no worker is running", code="no_worker", retryable=True)
    if isinstance(error, Unreachable):
        return Problem(status=503, message="the queue's server cannot be reached", code="no_queue", retryable=True)
    return Problem(status=500, message=str(error), code="queue_error")
