"""The README's snippets must run as written: a newcomer who copies one and meets an error is gone."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Harness

from gewell.embedded import EmbeddedServer

README = Path(__file__).parents[2] / "README.md"
BIN = Path(sys.executable).parent


def snippet(language: str) -> str:
    """The README's fenced block behind the marker `<!-- test: language -->`."""
    found = re.search(rf"<!-- test: {language} -->\n```{language}\n(.*?)```", README.read_text(), re.DOTALL)
    assert found, f"README.md has no tested {language} block"
    return found.group(1)


@pytest.fixture
def queue(own_server: EmbeddedServer, tmp_path: Path) -> Iterator[EmbeddedServer]:
    harness = Harness(own_server, "gewell", tmp_path)
    try:
        harness.start_worker(step_s=0.001)
        yield own_server
    finally:
        harness.close()


def run(command: list[str], server: EmbeddedServer) -> str:
    environment = os.environ | {"GEWELL_REDIS": server.url, "PATH": f"{BIN}:{os.environ['PATH']}"}
    ran = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert ran.returncode == 0, ran.stderr.decode()
    return ran.stdout.decode(errors="replace")


@pytest.mark.redis
def test_python_snippet_streams_and_prints_the_record(queue: EmbeddedServer):
    printed = run([sys.executable, "-c", snippet("python")], queue)
    assert re.search(r"length, 24 tokens, \d+ prompt tokens from the cache", printed)


@pytest.mark.redis
def test_bash_snippet_needs_a_socket_only_and_shows_the_result(queue: EmbeddedServer):
    script = snippet("bash").replace("/6380", f"/{queue.port}")
    printed = run(["bash", "-euc", script], queue)
    assert re.search(r"accepted as entry \d+-\d+", printed)
    assert "sea-1: done" in printed
