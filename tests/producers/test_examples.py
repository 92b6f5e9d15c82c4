"""The examples for other languages: anybody's producer, against a worker that loses messages, dies and is cut off."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gewell.protocol import Channel

pytestmark = pytest.mark.redis

EXAMPLES = Path(__file__).parents[2] / "producers" / "examples"
HAS_NODE = shutil.which("node") is not None and (EXAMPLES / "node" / "node_modules" / "ioredis").is_dir()
HAS_GO = shutil.which("go") is not None and (EXAMPLES / "go" / "gewell").is_file()

COMMANDS = [
    pytest.param(["bash", str(EXAMPLES / "bash" / "gewell.sh")], id="bash"),
    pytest.param([sys.executable, str(EXAMPLES / "python" / "follow.py")], id="python"),
    pytest.param(
        ["node", str(EXAMPLES / "node" / "gewell.mjs")],
        id="node",
        marks=pytest.mark.skipif(not HAS_NODE, reason="needs node and `npm install` in producers/examples/node"),
    ),
    pytest.param(
        [str(EXAMPLES / "go" / "gewell")],
        id="go",
        marks=pytest.mark.skipif(not HAS_GO, reason="needs go and `go build` in producers/examples/go"),
    ),
]


@pytest.fixture(params=COMMANDS)
def example(request, server, ns, monkeypatch):
    """Runs one example: `example(*arguments)` to its end, `example.start(*arguments)` as a process."""
    environment = os.environ | {"GEWELL_PORT": str(server.port), "GEWELL_REDIS": server.url, "GEWELL_NAMESPACE": ns}
    processes = []

    def start(*arguments):
        process = subprocess.Popen([*request.param, *arguments], stdout=subprocess.PIPE, env=environment)
        processes.append(process)
        return process

    def call(*arguments):
        process = start(*arguments)
        out, _ = process.communicate(timeout=20)
        return process.returncode, out.decode()

    call.start = start
    yield call
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_for_follower(raw, keys, job_id):
    deadline = time.monotonic() + 10
    while raw.pubsub_numsub(keys.ev(job_id))[0][1] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_job_enqueued_by_it_arrives_as_it_was_meant(example, worker):
    prompt = 'He said "hello" \\ and\nleft é 日本'
    code, entry = example("enqueue", "x1", prompt)
    job = worker.take()
    assert code == 0
    assert (entry.strip().encode(), job.id) == (job.entry_id, "x1")
    assert job.body == {"kind": "completion", "request": {"prompt": prompt, "max_tokens": 64}}


def test_follower_shows_every_chunk_once_across_gaps_epochs_and_cuts(example, worker, raw, keys):
    example("enqueue", "x2", "go")
    job = worker.take()
    process = example.start("follow", "x2")
    wait_for_follower(raw, keys, "x2")
    job.claim()
    job.chunk("a1 ")
    job.chunk("hidden", channel=Channel.REASONING)
    job.chunk("a2 ", publish=False)  # a lost message
    job.chunk("a3 ")
    job.claim()  # another worker goes on
    job.chunk('"é\n\\ü日本" ')
    job.chunk("b2 ", publish=False)
    time.sleep(1.3)  # silence
    raw.client_kill_filter(_type="pubsub")
    job.chunk("b3 ")
    wait_for_follower(raw, keys, "x2")
    job.chunk("b4\n")
    job.finish()
    out, _ = process.communicate(timeout=10)
    assert out.decode() == 'a1 a2 a3 "é\n\\ü日本" b2 b3 b4\n\n'
    assert process.returncode == 0


def test_stream_that_is_written_again_is_not_shown_again(example, worker, raw, keys):
    example("enqueue", "x3", "go")
    job = worker.take().claim()
    job.chunk("ab ")
    process = example.start("follow", "x3")
    wait_for_follower(raw, keys, "x3")
    job.chunk("cd ")
    assert read(process, 6) == b"ab cd "
    raw.delete(keys.out("x3"))
    job.claim(keep=0)
    job.chunk("ab cd ef ")
    job.chunk("gh")
    job.finish(text="ab cd ef gh")
    out, _ = process.communicate(timeout=10)
    assert out == b"ef gh\n"


def test_killed_follower_and_a_new_one_shows_the_full_stream(example, worker, raw, keys):
    example("enqueue", "x4", "go")
    job = worker.take().claim()
    job.chunk("one ")
    first = example.start("follow", "x4")
    assert read(first, 4) == b"one "
    first.kill()
    job.chunk("two ")
    job.finish()
    assert example("follow", "x4") == (0, "one two \n")
    raw.delete(keys.out("x4"))
    assert example("follow", "x4") == (0, "one two \n")  # from the record
    code, record = example("result", "x4")
    assert code == 0
    assert json.loads(record)["text"] == "one two "


def test_absent_record_is_told_by_the_exit_code(example, worker):
    assert example("result", "nope") == (1, "")


def read(process, size):
    data = b""
    while len(data) < size:
        data += os.read(process.stdout.fileno(), size - len(data))
    return data
