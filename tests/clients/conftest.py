"""Clients that other people wrote, against our gateway. Runs in an environment of its own: `make test-clients`.

GEWELL_BIN is the `gewell` command of the checkout's environment; server, worker and gateway are started with it.
"""

import os
import shutil
import socket
import subprocess
import time
import urllib.request

import pytest


@pytest.fixture(scope="session")
def base_url(tmp_path_factory):
    gewell = os.environ.get("GEWELL_BIN") or shutil.which("gewell")
    if gewell is None:
        pytest.skip("GEWELL_BIN does not say where the gewell command is")
    folder = tmp_path_factory.mktemp("gewell")
    queue, http = _free_port(), _free_port()
    log = (folder / "log").open("wb")
    up = [gewell, "up", "--model", "gewell-nano", "--data", str(folder / "queue"), "--port", str(queue)]
    gateway = [gewell, "gateway", "--redis", f"redis://127.0.0.1:{queue}/0", "--port", str(http), "--any-model"]
    processes = [subprocess.Popen(command, stdout=log, stderr=log) for command in (up, gateway)]
    try:
        _wait_until_healthy(f"http://127.0.0.1:{http}/health", processes)
        yield f"http://127.0.0.1:{http}/v1"
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)
        log.close()


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_healthy(url, processes):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert all(process.poll() is None for process in processes), "a process ended at its start"
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(url)
