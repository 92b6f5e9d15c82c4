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
from gewell_producers.demo.records import Repair
from gewell_producers.demo.reuse import ReuseLedger

from gewell.cli.main import run
from gewell.eval.tasks.writer_critic import record_text, remark
from gewell.protocol import FinalRecord, State
from gewell.text.chat import load_chat
from gewell.text.tokenizer import ByteTokenizer


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
def test_demo_runs_to_its_table_and_leaves_nothing(capfd, temporary):
    assert run(["demo", "--model", "scripted", "--plain"]) == 0
    out = capfd.readouterr().out
    lines, table = out.splitlines(), _table(out)
    assert table["jobs"] == "42"
    assert table["errors"] == "0"
    assert float(table["mean decode rows"]) >= 1
    assert sum(line.startswith("[3] Writer: ") for line in lines) == 3
    assert list(temporary.iterdir()) == []


@pytest.mark.redis
def test_demo_on_the_shipped_model_repairs_every_record(capfd):
    assert run(["demo", "--plain", "--conversations", "4"]) == 0
    table = _table(capfd.readouterr().out)
    assert (table["jobs"], table["errors"], table["came out right"]) == ("24", "0", "4")


@pytest.mark.redis
def test_demo_in_a_third_of_its_memory_reuses_what_went_to_host_memory(capfd):
    """Eight conversations of about 16 pages (a window and slack of 12, 4 of full KV) of 160 KiB in a pool of 42 pages.

    Without host memory such a run reuses 57 % of what could be reused.
    """
    working_set_gib = 8 * 16 * 163_840 / 2**30
    memory = ["--kv-gib", str(working_set_gib / 3), "--host-gib", str(2 * working_set_gib)]
    assert run(["demo", "--plain", "--conversations", "4", *memory]) == 0
    table = _table(capfd.readouterr().out)
    assert (table["errors"], table["came out right"]) == ("0", "4")


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [("--kv-gib", "0", "kv_gib"), ("--kv-gib", "inf", "kv_gib"), ("--host-gib", "-1", "host_gib")],
)
def test_demo_refuses_memory_that_cannot_be(option, value, field, capfd):
    assert run(["demo", option, value]) == 2
    assert f"{field}: " in capfd.readouterr().err


@pytest.mark.redis
def test_demo_fails_when_too_little_was_reused(capfd, monkeypatch):
    monkeypatch.setenv("GEWELL_NAMESPACE", "somebody-elses")
    monkeypatch.setenv("GEWELL_REDIS", "redis://127.0.0.1:1")
    monkeypatch.setattr(demo, "LEAST_REUSE", 1.01)
    assert run(["demo", "--model", "scripted", "--plain", "--conversations", "2", "--turns", "2"]) == 1
    assert "of the reusable prompt tokens were reused, 101% is expected" in capfd.readouterr().err


@pytest.mark.redis
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_demo_that_is_interrupted_stops_its_server_and_worker(sign, temporary):
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
    assert list(temporary.iterdir()) == []


@pytest.mark.redis
def test_demo_with_a_model_that_does_not_load_shows_the_workers_log(tmp_path, capfd, temporary):
    (tmp_path / "config.json").write_text('{"vocab_size": 256}')
    assert run(["demo", "--model", str(tmp_path), "--plain"]) == 2
    assert "the worker ended with code" in capfd.readouterr().err
    assert list(temporary.iterdir()) == []


def test_unknown_model_is_one_line(capsys):
    assert run(["demo", "--model", "no-such-model"]) == 2
    assert "no-such-model" in capsys.readouterr().err


def test_repair_asks_as_the_model_has_learned_it_and_ends_when_the_critic_accepts():
    scene = Repair(load_chat(Path(), ByteTokenizer()), 0, 3)
    said = []
    while (ask := scene.next_ask()) is not None:
        facts, draft = scene._facts, scene._draft
        if ask.label == "Writer":
            text = record_text(_repaired(draft, facts, len(said) // 2))
            assert ask.request["messages"][-1]["content"].startswith("Write" if not said else "The critic says: ")
        else:
            text = remark(facts, _repaired(draft, facts, len(said) // 2))
        said.append(text)
        scene.tell(FinalRecord(id="x", state=State.DONE, finish_reason="stop", text=text))
    assert len(said) == 6
    assert said[-1] == "accepted"
    assert scene.is_right


def _repaired(draft, facts, num_repairs):
    wrong = [name for name in facts if draft[name] != facts[name]][:num_repairs]
    return {name: facts[name] if name in wrong else value for name, value in draft.items()}


def _table(out):
    cells = [line.strip("│ ").split("│") for line in out.splitlines()]
    return {row[0].strip(): row[1].strip() for row in cells if len(row) == 2}


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """A temporary folder of the test's own, so that nothing else can leave something there."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder
