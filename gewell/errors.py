"""The tree of our exceptions. Callers catch kinds, never strings.

GewellError
+-- ConfigError            a setting, flag or environment variable has a value that cannot be used
+-- CheckpointError        a model folder or file is missing, damaged or of an unknown form
+-- InvalidRequest         the user's mistake in a job: becomes the job's `error` result
+-- EngineError            the engine cannot go on (a device fault, a broken invariant of the host)
+-- QueueError             Redis does not do what the protocol needs
    +-- JobFailed          a job ended in `error`, `cancelled` or `expired` (raised by clients)
    +-- NoWorker           nobody serves the queue
"""

from typing import Any


class GewellError(Exception):
    """Root of everything this project raises on purpose."""


class ConfigError(GewellError):
    """A setting that cannot be used. Names the field, the value and what would be accepted."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}: {value!r} is not usable: {limit}")
        self.field = field
        self.value = value
        self.limit = limit

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.limit)  # so that it travels between processes


class CheckpointError(GewellError):
    """A model folder or file is missing, damaged or of an unknown form."""


class InvalidRequest(GewellError):
    """The user's mistake. Travels back as the job's final record, and disturbs nothing else.

    code     one of `gewell.protocol.ErrorCode`, as a string
    field    dotted path into the body, e.g. "request.temperature"; None when no field is to blame
    """

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field


class EngineError(GewellError):
    """The engine cannot go on: a device fault or a broken invariant. Ends the process."""


class QueueError(GewellError):
    """Redis does not do what the protocol needs (unreachable, read-only, wrong type of key)."""


class NoWorker(QueueError):
    """No worker has a live heartbeat in this namespace."""


class JobFailed(QueueError):
    """A job ended in another state than `done`. `record` is the final record as a dict."""

    def __init__(self, job_id: str, record: dict[str, Any]) -> None:
        error = record.get("error") or {}
        super().__init__(f"job {job_id} ended as {record.get('state')}: {error.get('message', '')}".rstrip(": "))
        self.job_id = job_id
        self.record = record
