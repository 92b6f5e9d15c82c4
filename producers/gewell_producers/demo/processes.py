"""The demo's own server and worker: started for it, gone after it."""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from gewell.embedded import EmbeddedServer
from gewell.errors import QueueError
from gewell_producers.client import Client

NAMESPACE = "gewell"  # named outright: the caller's GEWELL_NAMESPACE is not for us
READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 40.0  # above the worker's own grace period


class WorkerFailed(QueueError):
    """The worker ended, or was not ready in time. The message holds the end of its log."""


@contextlib.contextmanager
def server_and_worker(model: str, *, rows: int | None = None, options: Sequence[str] = ()) -> Iterator[str]:
    """A server in a temporary folder and a worker on it that serves `model`; yields the server's URL.

    options   further options of `gewell up`, as on its command line
    """
    with (
        tempfile.TemporaryDirectory(prefix="gewell-demo-") as folder,
        EmbeddedServer(Path(folder) / "queue") as server,
        _worker(server.url, model, Path(folder), rows, options),
    ):
        yield server.url


@contextlib.contextmanager
def _worker(url: str, model: str, folder: Path, rows: int | None, options: Sequence[str]) -> Iterator[None]:
    log = folder / "worker.log"
    command = [sys.executable, "-m", "gewell_workers", "--redis", url, "--ns", NAMESPACE, "--model", model, *options]
    if rows is not None:
        command += ["--rows", str(rows)]
    with log.open("wb") as sink:
        # A session of its own: Ctrl-C is for the demo, which then stops the worker in order.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_until_ready(process, url, log)
        yield
    finally:
        _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    with Client(url, namespace=NAMESPACE) as client:
        while not client.workers():
            if process.poll() is not None:
                raise WorkerFailed(f"the worker ended with code {process.returncode}; its log ends:\n{_tail(log)}")
            if time.monotonic() > deadline:
                raise WorkerFailed(f"the worker was not ready in {READY_TIMEOUT_S:g} s; its log ends:\n{_tail(log)}")
            time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1_500:].rstrip()
