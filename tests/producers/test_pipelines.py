"""Pipelines: nothing asked twice, nothing lost, and a cache that is told what comes next."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
from gewell_producers.async_client import AsyncClient
from gewell_producers.client import Client
from gewell_producers.pipelines import runner
from gewell_producers.pipelines.pipeline import Pipeline

from gewell.cli.main import run
from gewell.embedded import EmbeddedServer, Persistence
from gewell.errors import ConfigError
from gewell.eval.tasks.writer_critic import random_fields, record_text, with_faults
from gewell.protocol import ErrorCode, ErrorInfo, State

pytestmark = pytest.mark.redis

EXAMPLES = Path(__file__).parents[2] / "producers" / "examples" / "pipelines"
HEAD = "from gewell_producers.pipelines.pipeline import Pipeline\n"
LOOP = (
    HEAD
    + """
async def work(run, item):
    draft = await run.ask("writer", f"draft {item['id']}", back_after="critic", back_after_count=2)
    remarks = await run.ask_all("critic", [f"one {draft.text}", f"two {draft.text}"])
    final = await run.ask("writer", f"{draft.text} {remarks[0].text}", last=True)
    return {"final": final.text}

pipeline = Pipeline(name="loop", work=work)
"""
)


@pytest.fixture(autouse=True)
def environment(server, ns, monkeypatch):
    monkeypatch.setenv("GEWELL_REDIS", server.url)
    monkeypatch.setenv("GEWELL_NAMESPACE", ns)


@pytest.fixture
def files(tmp_path):
    """Writes a pipeline and its items, and returns the command line for them."""

    def write(source, items):
        (tmp_path / "pipeline.py").write_text(source)
        (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
        return ["pipeline", "run", str(tmp_path / "pipeline.py"), str(tmp_path / "items.jsonl"), "-o", str(out)]

    out = write.out = tmp_path / "out.jsonl"
    write.dead = tmp_path / "out.dead.jsonl"
    return write


def read(path):
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


def watch(worker):
    """Every job that the worker generates an answer for."""
    seen, answer = {}, worker._answer

    def watched(job):
        if not worker.link.exists(worker.keys.res(job.id)):
            seen[job.id] = job.body
        answer(job)

    worker._answer = watched
    worker.serve()
    return seen


def test_items_go_through_and_the_cache_is_told_what_comes_next(worker, files):
    seen = watch(worker)
    assert run(files(LOOP, [{"id": "a"}, {"id": "b"}, {"id": "c"}])) == 0
    assert {item_id: row["result"] for item_id, row in read(files.out).items()} == {
        item_id: {"final": f"one {item_id} draft draft {item_id}"} for item_id in "abc"
    }
    assert len(seen) == 12
    first, last = seen["loop:1:a:writer:0"], seen["loop:1:a:writer:1"]
    assert first["conversation"] == last["conversation"] == {"id": "loop:1:a:writer"}
    assert first["cache"] == {"expect": {"after": "loop:1:a:critic:1"}}
    assert last["cache"] == {"release": True}
    assert "conversation" not in seen["loop:1:a:critic:0"]
    assert not files.dead.exists()


def test_item_that_died_half_way_asks_only_for_what_is_missing(worker, files, tmp_path):
    seen = watch(worker)
    broken = LOOP.replace(
        "    final =",
        f"    if not __import__('os').path.exists({str(tmp_path / 'go')!r}): raise KeyError(7)\n    final =",
    )
    arguments = files(broken, [{"id": "a"}, {"id": "b"}])
    assert run(arguments) == 1
    assert read(files.dead)["a"]["error"].startswith("KeyError: 7 (pipeline.py:")
    assert len(seen) == 6
    (tmp_path / "go").touch()
    assert run(arguments) == 0
    assert set(read(files.out)) == {"a", "b"}
    assert len(seen) == 8  # the two last asks alone
    assert run(arguments) == 0  # all of it stands in the output
    assert len(seen) == 8


def test_changed_prompt_without_a_new_revision_is_refused_not_answered_with_the_old(worker, files):
    watch(worker)
    assert run(files(LOOP, [{"id": "a"}])) == 0
    files.out.unlink()
    assert run(files(LOOP.replace("draft {item", "sketch {item"), [{"id": "a"}])) == 1
    assert "was used for another request" in read(files.dead)["a"]["error"]
    revised = LOOP.replace("draft {item", "sketch {item").replace('name="loop"', 'name="loop", revision=2')
    assert run(files(revised, [{"id": "a"}])) == 0


def test_failure_that_may_pass_is_asked_again_and_another_is_not(worker, files):
    errors = {"passing": ErrorCode.NUMERICS, "lasting": ErrorCode.PROMPT_TOO_LONG}
    asked = []

    def answer(job):
        asked.append(job.id)
        code = errors.get(job.body["request"]["prompt"])
        if code is None or (code is ErrorCode.NUMERICS and job.id.endswith("again-1")):
            job.claim().finish(text="fine")
        else:
            error = ErrorInfo(code=code, message="no", retryable=code is ErrorCode.NUMERICS)
            job.claim().finish(State.ERROR, finish_reason="error", error=error)

    worker._answer = answer
    worker.serve()
    source = (
        HEAD
        + """
async def work(run, item):
    return (await run.ask("w", item["prompt"])).text

pipeline = Pipeline(name="retry", work=work)
"""
    )
    assert run(files(source, [{"id": "p", "prompt": "passing"}, {"id": "l", "prompt": "lasting"}])) == 1
    assert read(files.out)["p"]["result"] == "fine"
    assert "JobFailed" in read(files.dead)["l"]["error"]
    assert sorted(asked) == ["retry:1:l:w:0", "retry:1:p:w:0", "retry:1:p:w:0:again-1"]


def test_killed_run_goes_on_at_once_when_it_is_started_again(worker, files, tmp_path):
    arguments = files(LOOP, [{"id": str(i)} for i in range(6)])
    process = subprocess.Popen([sys.executable, "-m", "gewell", *arguments])
    finished = []
    for _ in range(8):  # answers the first asks and some of the critics', then the run is killed
        job = worker.take(20).claim()
        job.finish(text=" ".join(reversed(job.body["request"]["prompt"].split())))
        finished.append(job.id)
    process.kill()
    process.wait()
    seen = watch(worker)
    started_s = time.monotonic()
    assert run(arguments) == 0
    assert time.monotonic() - started_s < 20
    assert len(read(files.out)) == 6
    assert not seen.keys() & set(finished)


async def test_item_that_outlasts_its_slice_is_put_back_and_goes_on(worker, server, ns, keys):
    rounds = []

    async def work(item_run, item):
        rounds.append(len(rounds))
        return [(await item_run.ask("w", f"step {i}")).text for i in range(3)]

    def slowly(job):
        time.sleep(0.4)
        job.claim().finish(text=job.id[-1])

    worker._answer = slowly
    worker.serve()
    pipeline = Pipeline(name="slices", work=work)
    async with AsyncClient(server.url, namespace=ns) as client:
        pool = await runner.connect(server.url, runner.queue_name(pipeline, ns))
        arq_worker = runner.make_worker(pipeline, client, pool, ns, 4, slice_s=0.5)
        working = asyncio.create_task(arq_worker.async_run())
        outcomes = [o async for o in runner.run_items(pipeline, [("a", {})], client, concurrency=4, works=False)]
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await pool.aclose()
    assert outcomes == [runner.Outcome(item_id="a", result=["0", "1", "2"])]
    assert len(rounds) > 1


def test_another_process_does_the_work(worker, files, tmp_path):
    watch(worker)
    arguments = files(LOOP, [{"id": str(i)} for i in range(5)])
    helper = subprocess.Popen([sys.executable, "-m", "gewell", "pipeline", "work", str(tmp_path / "pipeline.py")])
    try:
        assert run([*arguments, "--no-works"]) == 0
        assert len(read(files.out)) == 5
    finally:
        helper.kill()
        helper.wait()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n", "a file that sets `pipeline`"),
        (LOOP.replace('name="loop"', 'name="no spaces"'), "pipeline.name"),
        (LOOP.replace('name="loop"', 'name="loop", attempts=0'), "pipeline.attempts"),
    ],
)
def test_unusable_pipelines_and_items_are_one_line(worker, files, tmp_path, capsys, source, message):
    assert run(files(source, [])) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert run(["pipeline", "run", str(tmp_path / "no.py"), str(tmp_path / "items.jsonl"), "-o", str(files.out)]) == 2
    arguments = files(LOOP, [])
    (tmp_path / "items.jsonl").write_text('{"id": "a"}\n[1]\n')
    assert run(arguments) == 2
    assert "items.jsonl:2" in capsys.readouterr().err


@pytest.mark.slow
def test_examples_run_on_the_shipped_model(data_dir, tmp_path, monkeypatch):
    def order(seed):
        facts = random_fields(Random(seed), 6)
        return {"facts": facts, "draft": with_faults(Random(seed), facts, 2)}

    orders = [order(seed) for seed in range(2)]
    groom, plan = tmp_path / "groom.jsonl", tmp_path / "plan.jsonl"
    groom.write_text("".join(json.dumps({"id": f"o{i}", **each}) + "\n" for i, each in enumerate(orders)))
    plan.write_text(json.dumps({"id": "batch", "orders": dict(zip(["300", "45"], orders, strict=True))}) + "\n")
    with EmbeddedServer(data_dir, persistence=Persistence.NONE) as server, (tmp_path / "log").open("wb") as log:
        monkeypatch.setenv("GEWELL_REDIS", server.url)
        command = [sys.executable, "-m", "gewell_workers", "--redis", server.url, "--model", "gewell-nano"]
        environment = os.environ | {"GEWELL_NAMESPACE": os.environ["GEWELL_NAMESPACE"]}
        worker = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            with Client() as client:
                while not client.workers():
                    assert worker.poll() is None
                    time.sleep(0.1)
            out = tmp_path / "out.jsonl"
            assert run(["pipeline", "run", str(EXAMPLES / "groom.py"), str(groom), "-o", str(out)]) == 0
            results = {item_id: row["result"] for item_id, row in read(out).items()}
            assert results == {
                f"o{i}": {"record": record_text(each["facts"]), "accepted": True, "rounds": 3}
                for i, each in enumerate(orders)
            }
            planned = tmp_path / "planned.jsonl"
            assert run(["pipeline", "run", str(EXAMPLES / "plan.py"), str(plan), "-o", str(planned)]) == 0
            result = read(planned)["batch"]["result"]
            assert result["plan"] == ["45", "300"]
            assert [each["votes"] for each in result["orders"]] == [2, 2]
        finally:
            worker.terminate()
            worker.wait(30)


def test_pipeline_file_must_exist(tmp_path):
    with pytest.raises(ConfigError, match="a Python file"):
        runner.load_pipeline(tmp_path / "none.py")
