"""Batches of requests: every line answered once in the right file, also when the run is killed in the middle."""

import json
import subprocess
import sys
import time

import pytest

from gewell.cli.main import run
from gewell.protocol import Lane

pytestmark = pytest.mark.redis


@pytest.fixture(autouse=True)
def environment(server, ns, monkeypatch):
    monkeypatch.setenv("GEWELL_REDIS", server.url)
    monkeypatch.setenv("GEWELL_NAMESPACE", ns)


def line(custom_id, prompt="a b", url="/v1/completions", **body):
    request = {"messages": [{"role": "user", "content": prompt}]} if "chat" in url else {"prompt": prompt}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "fake", **request, **body}}


def write(path, lines):
    path.write_text("".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in lines))
    return str(path)


def read(path):
    return {row["custom_id"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_answers_stand_in_openais_format(worker, tmp_path, capsys):
    worker.serve()
    out = tmp_path / "out.jsonl"
    lines = [line(f"r{i}", f"a {i}") for i in range(300)] + [line("chat", "x y", "/v1/chat/completions")]
    assert run(["batch", write(tmp_path / "in.jsonl", lines), "-o", str(out)]) == 0
    rows = read(out)
    assert len(rows) == 301
    assert rows["r7"]["response"]["status_code"] == 200
    assert rows["r7"]["error"] is None
    assert rows["r7"]["response"]["body"]["choices"][0]["text"] == "7 a"
    assert rows["chat"]["response"]["body"]["choices"][0]["message"]["content"] == "y x"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert "301 done, 0 failed" in capsys.readouterr().err


def test_failures_go_to_their_own_file_with_line_and_reason(worker, tmp_path, capsys):
    worker.serve()
    out = tmp_path / "out.jsonl"
    lines = [
        line("good"), "{not json\n", line("hot", temperature=-1), line("", "x"), line("where", url="/v1/embeddings"),
        "\n", line("failing", "fail"), line("streamed", stream=True),
        '{"custom_id": "no-body", "url": "/v1/completions"}\n',
    ]  # fmt: skip
    assert run(["batch", write(tmp_path / "in.jsonl", lines), "-o", str(out)]) == 1
    assert list(read(out)) == ["good"]
    failures = [json.loads(row) for row in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    told = {
        row["error"]["line"]: (row["custom_id"], row["response"]["status_code"], row["error"]["code"])
        for row in failures
    }
    assert told == {
        2: (None, 400, "invalid_json"),
        3: ("hot", 400, "invalid_request"),
        4: (None, 400, "invalid_request"),
        5: ("where", 404, "invalid_url"),
        7: ("failing", 500, "internal"),
        8: ("streamed", 400, "invalid_request"),
        9: ("no-body", 400, "invalid_request"),
    }
    assert "1 done, 7 failed" in capsys.readouterr().err


def test_samples_of_a_line_are_one_answer(worker, tmp_path):
    worker.serve()
    out = tmp_path / "out.jsonl"
    assert run(["batch", write(tmp_path / "in.jsonl", [line("n", n=3), line("m")]), "-o", str(out)]) == 0
    rows = read(out)
    assert [choice["index"] for choice in rows["n"]["response"]["body"]["choices"]] == [0, 1, 2]
    assert len(rows["m"]["response"]["body"]["choices"]) == 1


def test_killed_run_goes_on_without_generating_anything_twice(worker, raw, keys, tmp_path, capsys):
    out, requests = tmp_path / "out.jsonl", tmp_path / "in.jsonl"
    write(requests, [line(f"r{i}", f"a {i}") for i in range(60)])
    command = [sys.executable, "-m", "gewell", "batch", str(requests), "-o", str(out), "--in-flight", "16"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    finished = []
    for _ in range(20):
        job = worker.take().claim()
        job.finish(text=job.id)
        finished.append(job.id)
    deadline = time.monotonic() + 10
    while len(out.read_text().splitlines()) < 20 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    with out.open("a") as file:
        file.write('{"id": "half a li')  # as a kill in mid-write leaves it
    for _ in range(5):  # these end while nobody listens
        job = worker.take().claim()
        job.finish(text=job.id)
        finished.append(job.id)
    generated = []
    original = worker._answer
    worker._answer = lambda job: (raw.exists(keys.res(job.id)) or generated.append(job.id), original(job))
    worker.serve()
    assert run(["batch", str(requests), "-o", str(out), "--in-flight", "16"]) == 0
    assert len(read(out)) == len(out.read_text().splitlines()) == 60
    assert not set(generated) & set(finished)
    assert len(generated) == 35
    assert "skipped (done before)" in capsys.readouterr().err
    assert raw.xlen(keys.jobs(Lane.LOW)) == 0


def test_second_run_over_a_finished_output_does_nothing(worker, tmp_path, capsys):
    worker.serve()
    arguments = ["batch", write(tmp_path / "in.jsonl", [line("a"), line("b")]), "-o", str(tmp_path / "out.jsonl")]
    assert run(arguments) == 0
    assert run(arguments) == 0
    assert "0 done, 0 failed, 2 skipped" in capsys.readouterr().err


def test_unusable_files_and_absent_workers_are_one_line(worker, tmp_path, capsys):
    assert run(["batch", str(tmp_path / "nope.jsonl"), "-o", str(tmp_path / "o")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    requests = write(tmp_path / "in.jsonl", [line("a")])
    (tmp_path / "folder.jsonl").mkdir()
    assert run(["batch", requests, "-o", str(tmp_path / "folder.jsonl")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    worker.die()
    assert run(["batch", requests, "-o", str(tmp_path / "o.jsonl")]) == 2
    assert "gewell up" in capsys.readouterr().err


def test_run_again_leaves_one_line_for_each_failure_and_still_tells_of_them(worker, tmp_path, capsys):
    worker.serve()
    lines = [line("a"), line("where", url="/v1/embeddings"), line("failing", "fail"), "{not json\n"]
    arguments = ["batch", write(tmp_path / "in.jsonl", lines), "-o", str(tmp_path / "out.jsonl")]
    assert run(arguments) == 1
    first = (tmp_path / "out.errors.jsonl").read_text()
    assert len(first.splitlines()) == 3
    capsys.readouterr()
    assert run(arguments) == 1
    assert (tmp_path / "out.errors.jsonl").read_text() == first
    assert "0 done, 0 failed, 1 skipped (done before), 3 failed before" in capsys.readouterr().err


def test_an_id_that_failed_and_comes_again_in_the_same_run_is_not_settled_twice(worker, tmp_path):
    worker.serve()
    lines = [line("a", url="/v1/embeddings"), line("a")]
    assert run(["batch", write(tmp_path / "in.jsonl", lines), "-o", str(tmp_path / "out.jsonl")]) == 1
    assert list(read(tmp_path / "out.errors.jsonl")) == ["a"]
    assert (tmp_path / "out.jsonl").read_text() == ""


def test_warnings_of_the_answers_are_counted_in_the_end(worker, tmp_path, capsys):
    worker._answer = lambda job: job.claim().finish(warnings=("request.temprature: unknown, ignored",))
    worker.serve()
    arguments = ["batch", write(tmp_path / "in.jsonl", [line("a"), line("b")]), "-o", str(tmp_path / "out.jsonl")]
    assert run(arguments) == 0
    assert "warning in 2 answers: request.temprature: unknown, ignored" in capsys.readouterr().err
