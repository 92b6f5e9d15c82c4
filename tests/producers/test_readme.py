"""Snippets of the README and of the producers' page, run as they stand. A reader tries these first."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gewell_producers.client import Client

from gewell.embedded import EmbeddedServer, Persistence

pytestmark = pytest.mark.redis

README = Path(__file__).parents[2] / "README.md"
PORT = "6380"  # what `gewell up` is told there; another one here
PAGES = [README, README.parent / "docs" / "producers.md"]
SNIPPETS = [
    snippet
    for page in PAGES
    for snippet in re.findall(r"^```(bash|python)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A server, a worker without weights, and a shell environment that finds both."""
    folder = tmp_path_factory.mktemp("readme")
    with EmbeddedServer(folder, persistence=Persistence.NONE) as server:
        with (folder / "worker.log").open("wb") as log:
            command = [sys.executable, "-m", "gewell_workers", "--redis", server.url, "--model", "scripted"]
            worker = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            with Client(server.url, namespace="gewell") as client:
                while not client.workers():
                    assert worker.poll() is None, (folder / "worker.log").read_text()
                    time.sleep(0.05)
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            yield os.environ | {"GEWELL_REDIS": server.url, "PATH": path, "PORT": str(server.port)}
        finally:
            worker.terminate()
            worker.wait(30)


def test_there_are_snippets():
    assert {language for language, _ in SNIPPETS} == {"bash", "python"}


@pytest.mark.parametrize(("language", "text"), SNIPPETS, ids=[f"{i}-{kind}" for i, (kind, _) in enumerate(SNIPPETS)])
def test_snippet_runs_as_written(environment, language, text):
    text = text.replace(PORT, environment["PORT"])
    command = ["bash", "-euo", "pipefail", "-c", text] if language == "bash" else [sys.executable, "-c", text]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.strip()
