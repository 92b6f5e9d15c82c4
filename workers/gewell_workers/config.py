"""Settings of one worker process, with their units."""

import os
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path

from gewell.errors import ConfigError
from gewell.protocol import DEFAULT_NAMESPACE, MAX_QUEUE_LEN, WORKER_TTL_S, Keys, is_valid_namespace
from gewell.redis_url import check_url


def new_worker_id() -> str:
    """New for every process: a restarted worker must not look like the one that died."""
    host = "".join(
        char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in socket.gethostname()
    )
    return f"{host[:64]}-{os.getpid()}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    redis_url: str
    ns: str = DEFAULT_NAMESPACE
    worker_id: str = field(default_factory=new_worker_id)
    lease_s: float = WORKER_TTL_S  # life of the heartbeat key; beaten three times in it
    min_idle_ms: int = 1_000  # an entry that a dead worker touched this recently is not taken over yet
    window_rows: int | None = None  # jobs held beyond the running rows; None: max(256, 8 x rows)
    window_prompt_tokens: int = 4_000_000  # of all jobs held; one job always fits
    max_parked: int = 10_000  # jobs held back by `not_before_ms`, kept as bare entry ids
    flush_s: float = 0.05  # text waits at most so long; the first token never does
    flush_tokens: int = 16
    stall_s: float = 30.0  # no step in so long with work waiting: the process ends
    drain_s: float = 30.0  # SIGTERM: running jobs may finish so long, the rest is handed back
    redis_timeout_s: float = 5.0  # without an answer for so long the connection is taken for lost
    max_queue_len: int = MAX_QUEUE_LEN
    wait_for_redis: bool = True  # at start: wait for the server; False: exit with an error
    chat_template: Path | None = None  # a Jinja file; None: the model folder's own, else the built-in one

    def __post_init__(self) -> None:
        for name, low in (("lease_s", 0.2), ("stall_s", 0.5), ("drain_s", 0.0), ("redis_timeout_s", 0.1)):
            value = getattr(self, name)
            if not low <= value <= 86_400:
                raise ConfigError(name, value, f"{low} to 86400 seconds")
        check_url(self.redis_url)
        if not is_valid_namespace(self.ns):
            raise ConfigError("ns", self.ns, "1 to 64 characters of A-Z a-z 0-9 . _ -")
        if self.chat_template is not None and not self.chat_template.is_file():
            raise ConfigError("chat_template", str(self.chat_template), "a file with a Jinja template")
        if self.window_rows is not None and self.window_rows < 1:
            raise ConfigError("window_rows", self.window_rows, "at least 1")

    @property
    def keys(self) -> Keys:
        return Keys(self.ns)
