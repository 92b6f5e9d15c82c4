"""The demo, end to end on the engine without weights: real server, real worker, nothing left behind."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from gewell_producers.cli import demo
from gewell_producers.cli.terminal import printable
from gewell_producers.demo.reuse import ReuseLedger

from gewell.cli.main import run


def test_reusable_is_the_longest_beginning_that_was_there_before():
    ledger = ReuseLedger()
    assert ledger.add_prompt([1, 2, 3, 4]) == 0
    assert ledger.add_prompt([1, 2, 9]) == 2  # shares a preamble with a prompt that may still run
    ledger.add_answer([1, 2, 3, 4], [5, 6])
    assert ledger.add_prompt([1, 2, 3, 4, 5, 6, 7]) == 6  # the next turn of the first one
    assert ledger.add_prompt([1, 2, 9]) == 2  # the same prompt again: its last token is computed anew
    assert (ledger.num_prompt_tokens, ledger.num_reusable) == (17, 10)


def test_answers_cannot_move_the_cursor():
    assert printable("a\x1b[2J\x07\x9bb\r\n\tc") == "a\ufffd[2J\ufffd\ufffdb\ufffd\n\tc"


@pytest.mark.redis
def test_demo_runs_to_its_table_and_leaves_nothing(capfd):
    before = _leftovers()
    assert run(["demo", "--model", "scripted", "--plain"]) == 0
    lines = capfd.readouterr().out.splitlines()
    table = {cells[0].strip(): cells[1].strip() for line in lines if len(cells := line.strip("│ ").split("│")) == 2}
    assert table["jobs"] == "42"
    assert table["errors"] == "0"
    assert float(table["mean decode rows"]) >= 1
    assert sum(line.startswith("[3] Writer: ") for line in lines) == 3
    assert _leftovers() == before


@pytest.mark.redis
def test_demo_fails_when_too_little_was_reused(capfd, monkeypatch):
    monkeypatch.setattr(demo, "LEAST_REUSE", 1.01)
    assert run(["demo", "--model", "scripted", "--plain", "--conversations", "2", "--turns", "2"]) == 1
    assert "of the reusable prompt tokens were reused, 101% is expected" in capfd.readouterr().err


@pytest.mark.redis
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_demo_that_is_interrupted_stops_its_server_and_worker(sign):
    before = _leftovers()
    command = [sys.executable, "-m", "gewell", "demo", "--model", "scripted", "--plain"]
    slow = os.environ | {"GEWELL_SCRIPTED_STEP_S": "0.05"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=slow)
    while b"[1]" not in process.stdout.readline():
        assert process.poll() is None
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.send_signal(sign)
    assert process.wait(60) == 128 + sign
    process.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=2)
    assert alive == []
    assert _leftovers() == before


@pytest.mark.redis
def test_demo_with_a_model_that_does_not_load_shows_the_workers_log(tmp_path, capfd):
    (tmp_path / "config.json").write_text('{"vocab_size": 256}')
    before = _leftovers()
    assert run(["demo", "--model", str(tmp_path), "--plain"]) == 2
    assert "the worker ended with code" in capfd.readouterr().err
    assert _leftovers() == before


def test_unknown_model_is_one_line(capsys):
    assert run(["demo", "--model", "no-such-model"]) == 2
    assert "no-such-model" in capsys.readouterr().err


def _leftovers() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("gewell-demo-*"))
