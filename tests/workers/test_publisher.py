"""The writing side under trouble: what it holds, what it writes later, and that it never spins."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
import redis
from gewell_workers.bench_queue import open_job
from gewell_workers.finish import Outcome
from gewell_workers.job_stream import Ending, JobStream
from gewell_workers.job_text import PlainPieces
from gewell_workers.publisher import Publisher
from gewell_workers.resp import Client, pack
from harness import check_entries, wait_for

from gewell.embedded import EmbeddedServer, Persistence
from gewell.engine.api import CacheAnswer, FinishedEvent, FinishReason
from gewell.protocol import ErrorCode, Keys, State
from gewell.text.tokenizer import ByteTokenizer

pytestmark = pytest.mark.redis
KEYS = Keys("pub")
DONE = Ending(state=State.DONE, finish_reason="length")


class Desk:
    """A publisher on a server of its own, and jobs claimed by hand."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server
        self.redis = redis.Redis.from_url(server.url)
        self.done: list[tuple[str, Outcome]] = []
        self.trouble: list[str | None] = []
        self.publisher = Publisher(
            Client(server.url, name="test", timeout_s=0.5),
            KEYS,
            flush_s=0.01,
            flush_tokens=16,
            on_done=lambda stream, outcome, record: self.done.append((stream.job.job_id, outcome)),
            on_trouble=self.trouble.append,
        )

    def open(self, job_id: str) -> JobStream:
        self.redis.hset(KEYS.job(job_id), mapping={"epoch": 1, "state": "running"})
        self.redis.xadd(KEYS.out(job_id), {"fence": "1"}, id="1-0")
        self.redis.xadd(KEYS.out(job_id), {"restart": '{"keep":0}'}, id="1-1")
        return JobStream(open_job(job_id, is_chat=False), PlainPieces(ByteTokenizer()), ByteTokenizer())

    def push(self, stream: JobStream, text: str) -> None:
        stream.push(list(text.encode()))
        self.publisher.touch(stream)

    def end(self, stream: JobStream) -> None:
        stream.end(DONE)
        self.publisher.touch(stream)

    def text(self, job_id: str) -> str:
        from gewell.protocol import EntryId, parse_entry

        raw = self.redis.xrange(KEYS.out(job_id))
        return check_entries([(EntryId.parse(i), parse_entry(f)) for i, f in raw])[1].get("content", "")


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    with EmbeddedServer(tmp_path, persistence=Persistence.ALWAYS) as server:
        made = Desk(server)
        running = asyncio.create_task(made.publisher.run())
        yield made
        made.publisher.close([])
        await asyncio.wait_for(running, 10)
        made.redis.close()


async def until(condition, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        await asyncio.sleep(0.005)


async def test_first_token_goes_at_once_and_the_rest_in_flushes(desk: Desk):
    stream = desk.open("a")
    desk.push(stream, "x")
    await until(lambda: desk.text("a") == "x")
    desk.push(stream, "yz")
    await until(lambda: desk.text("a") == "xyz")
    desk.end(stream)
    await until(lambda: desk.done == [("a", Outcome.WRITTEN)])
    assert json.loads(desk.redis.get(KEYS.res("a")))["text"] == "xyz"


async def test_note_about_a_job_that_is_over_does_not_spin(desk: Desk):
    """Found by a backlog of short jobs: the note stayed for ever, and the loop never came to read again."""
    stream = desk.open("a")
    desk.push(stream, "x")
    desk.end(stream)
    await until(lambda: desk.done == [("a", Outcome.WRITTEN)])
    desk.publisher.note_started([stream])
    other = desk.open("b")
    desk.push(other, "y")
    await until(lambda: desk.text("b") == "y")
    assert desk.redis.hget(KEYS.job("a"), "started_at_ms") is None


async def test_full_server_is_waited_for_and_nothing_is_lost(desk: Desk):
    stream, ending = desk.open("a"), desk.open("b")
    desk.redis.config_set("maxmemory", 1)
    desk.push(stream, "held")
    desk.push(ending, "too")
    desk.end(ending)
    await until(lambda: any(text and "OOM" in text for text in desk.trouble))
    desk.push(stream, " back")
    await asyncio.sleep(0.2)
    assert desk.text("a") == ""
    desk.redis.config_set("maxmemory", 0)
    await until(lambda: desk.text("a") == "held back")
    await until(lambda: desk.done == [("b", Outcome.WRITTEN)])
    assert desk.text("b") == "too"
    assert desk.trouble[-1] is None


async def test_stalled_server_is_waited_for_and_every_entry_is_written_once(desk: Desk):
    stream = desk.open("a")
    desk.push(stream, "before ")
    await until(lambda: desk.text("a") == "before ")
    desk.server.pause()
    desk.push(stream, "during ")
    await asyncio.sleep(1.2)  # past the time-out: the entry was sent, its fate is unknown
    desk.push(stream, "later")
    desk.server.resume()
    await until(lambda: desk.text("a") == "before during later")
    desk.end(stream)
    await until(lambda: desk.done == [("a", Outcome.WRITTEN)])


async def test_answer_of_a_finish_that_was_lost_is_found_again(desk: Desk):
    stream = desk.open("a")
    desk.push(stream, "x")
    await until(lambda: desk.text("a") == "x")
    desk.server.pause()
    desk.end(stream)
    await asyncio.sleep(0.2)
    desk.server.resume()  # within the time-out or after it: either way it is written once
    await until(lambda: desk.done == [("a", Outcome.WRITTEN)])
    assert desk.redis.xlen(KEYS.out("a")) == 4


async def test_epoch_that_is_over_is_left_at_once(desk: Desk):
    writing, ending = desk.open("a"), desk.open("b")
    for job_id in ("a", "b"):
        desk.redis.hset(KEYS.job(job_id), "epoch", 2)
        desk.redis.xadd(KEYS.out(job_id), {"fence": "1"}, id="2-0")
    desk.push(writing, "x")
    desk.end(ending)
    await until(lambda: len(desk.done) == 2)
    assert set(desk.done) == {("a", Outcome.FENCED), ("b", Outcome.FENCED)}
    assert not desk.redis.exists(KEYS.res("b"))


async def test_job_that_the_server_forgot_is_reported_lost(desk: Desk):
    stream = desk.open("a")
    desk.redis.delete(KEYS.job("a"), KEYS.out("a"))
    desk.push(stream, "x")
    await until(lambda: desk.done == [("a", Outcome.LOST)])


async def test_one_foreign_job_does_not_hold_up_the_ends_of_a_batch(desk: Desk):
    streams = [desk.open(f"job-{idx}") for idx in range(20)]
    desk.redis.hset(KEYS.job("job-7"), "epoch", 5)
    for stream in streams:
        stream.push(b"x")
        desk.end(stream)
    await until(lambda: len(desk.done) == 20)
    assert [job_id for job_id, outcome in desk.done if outcome is not Outcome.WRITTEN] == ["job-7"]


async def test_stream_lost_between_look_and_finish_is_written_in_full(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    """Found by chaos: the end stood in a new stream that began in the middle."""
    real = Client.batch
    left = [1]

    async def meddle(self: Client, commands, **options):
        if commands and commands[0] == pack("MULTI") and left:
            left.clear()
            desk.redis.delete(KEYS.out("a"))
        return await real(self, commands, **options)

    stream = desk.open("a")
    desk.push(stream, "x")
    await until(lambda: desk.text("a") == "x")
    monkeypatch.setattr(Client, "batch", meddle)
    stream.push(b"yz")
    desk.end(stream)
    await until(lambda: desk.done == [("a", Outcome.WRITTEN)])
    assert not left
    assert desk.text("a") == "xyz"


def test_error_codes_that_may_pass_are_marked_retryable():
    from gewell_workers.job_stream import ending_of

    event = FinishedEvent(
        request_id="a",
        reason=FinishReason.ERROR,
        num_prompt_tokens=1,
        num_output_tokens=0,
        cache=CacheAnswer(),
        error_code="numerics",
        error_message="m",
    )
    ending = ending_of(orjson.loads(orjson.dumps(event)), expired=False)
    assert ending.error is not None
    assert (ending.state, ending.error.code, ending.error.retryable) == (State.ERROR, ErrorCode.NUMERICS, True)


def test_orphaned_output_process_leaves(tmp_path: Path):
    """Its worker is killed while the server is away: it must not stay for ever."""
    import subprocess
    import sys

    with EmbeddedServer(tmp_path) as server:
        worker = subprocess.Popen(
            [sys.executable, "-m", "gewell_workers", "--redis", server.url, "--model", "scripted"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with redis.Redis.from_url(server.url) as client:
            wait_for(lambda: client.exists(Keys().info))
        children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        worker.kill()
        worker.wait()
    assert children

    def is_gone(pid: str) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
        return True

    wait_for(lambda: all(is_gone(pid) for pid in children), what="the output process leaves")


def test_orphan_whose_loop_does_not_run_leaves_all_the_same(monkeypatch: pytest.MonkeyPatch):
    """A process that spins would never see that its worker is gone; a thread beside the loop does."""
    from gewell_workers import output

    left: list[int] = []
    parents = iter([7, 7, 1])

    def leave(code: int) -> None:
        left.append(code)

    monkeypatch.setattr(output.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(output.os, "_exit", leave)
    monkeypatch.setattr(output.time, "sleep", lambda seconds: None)
    output._leave_when_orphaned(7)
    assert left == [1]


def test_memory_is_bounded_while_the_server_is_stalled(own_server: EmbeddedServer, tmp_path: Path):
    """The window bounds what is held: rows end, nothing new is pulled, and waiting costs nothing."""
    import psutil
    from harness import Harness

    harness = Harness(own_server, "held", tmp_path)
    try:
        worker = harness.start_worker("--rows", "16")
        for idx in range(600):
            harness.submit(f"job-{idx}", max_tokens=200)
        wait_for(lambda: harness.redis.exists(harness.keys.res("job-20")))
        processes = [psutil.Process(worker.process.pid), *psutil.Process(worker.process.pid).children()]
        own_server.pause()
        time.sleep(3.0)
        before = [process.memory_info().rss for process in processes]
        time.sleep(4.0)
        after = [process.memory_info().rss for process in processes]
        own_server.resume()
        assert all(late - early < 16 * 2**20 for early, late in zip(before, after, strict=True)), (before, after)
        assert harness.result("job-599", timeout_s=60).state == State.DONE
    finally:
        harness.close()
