"""docs/protocol.md says what is true: its snippets run, its tables name what the code names."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Harness

from gewell.embedded import EmbeddedServer
from gewell.protocol import ErrorCode, Keys

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_error_codes_of_the_page_are_those_of_the_code():
    table = PAGE.read_text().partition("<!-- error codes")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(ErrorCode)


def test_keys_of_the_page_are_those_of_the_code():
    page, keys = PAGE.read_text(), Keys("{ns}".replace("{", "").replace("}", ""))
    for name in (keys.jobs("high"), keys.cancel, keys.ctl, keys.info, keys.dead):
        assert f"`{{ns}}{name[2:]}`" in page, name
    for make in (keys.out, keys.ev, keys.res, keys.job):
        assert f"`{{ns}}{make('x')[2:-1]}<id>`" in page


@pytest.mark.redis
def test_snippets_run_as_they_stand(own_server: EmbeddedServer, tmp_path: Path):
    harness = Harness(own_server, "gewell", tmp_path)
    try:
        harness.start_worker(step_s=0.001)
        environment = os.environ | {"GEWELL_HOST": "127.0.0.1", "GEWELL_PORT": str(own_server.port)}
        bash = "\n".join(["set -eu", *blocks("bash")])
        ran = subprocess.run(["bash", "-c", bash], env=environment, capture_output=True, timeout=60)
        assert ran.returncode == 0, ran.stderr.decode()
        records = [json.loads(line) for line in ran.stdout.decode().splitlines() if line.startswith("{")]
        assert [(record["id"], record["state"]) for record in records] == [("rain-1", "done"), ("story-1", "cancelled")]
        assert records[0]["usage"]["completion"] == 24
        (python,) = blocks("python")
        python = python.replace("redis://127.0.0.1:6379/0", own_server.url)
        ran = subprocess.run([sys.executable, "-c", python], env=environment, capture_output=True, timeout=60)
        assert ran.returncode == 0, ran.stderr.decode()
        assert len(ran.stdout.strip()) > 0
    finally:
        harness.close()


def test_body_of_the_page_is_accepted_without_a_warning():
    from gewell.job import parse_job

    (body,) = blocks("json")
    assert parse_job(body.encode()).warnings == ()


def test_tests_that_the_reliability_page_names_exist():
    page = (PAGE.parent / "reliability.md").read_text()
    here = {path.name: path.read_text() for path in Path(__file__).parent.glob("*.py")}
    named = re.findall(r"(\w+\.py)`?(?:::)?(test_\w+)?", page)
    assert len(named) > 20
    for file_name, test_name in named:
        assert file_name in here, file_name
        assert f"def {test_name}" in here[file_name], f"{file_name}::{test_name}"
