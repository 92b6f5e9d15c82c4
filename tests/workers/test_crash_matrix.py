"""`kill -9` at every exact point of a job's way through Redis, before and after the server has heard of it.

A proxy watches the worker's traffic and kills it when the given command passes. Another worker must bring the job to
its one right end, and a follower must see one seamless stream.
"""

import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from fault_proxy import FaultProxy
from harness import Follower, Harness, WorkerProcess, check_entries, expected_ids, wait_for

from gewell.embedded import EmbeddedServer
from gewell.protocol import FinalRecord, State

pytestmark = pytest.mark.redis

TOKENS = 60


class Point(NamedTuple):
    trigger: bytes
    count: int = 1
    in_reply: bool = False


POINTS = {
    "read": Point(b"body", in_reply=True),  # the server has given the entry out, the worker never sees it
    "look-up": Point(b"HSETNX"),
    "claim": Point(b"\r\nfence\r\n"),
    "prefill": Point(b":job:job\r\n$13\r\nstarted_at_ms\r\n$13\r\n"),
    "first-chunk": Point(b"NOMKSTREAM\r\n$3\r\n1-2"),
    "mid-stream": Point(b"NOMKSTREAM\r\n$3\r\n1-5"),
    "publish": Point(b"PUBLISH", count=3),
    "finish-look": Point(b"EXISTS"),
    "finish": Point(b"\r\nend\r\n"),
    "finish-publish": Point(b'"state":"done"', count=2),
}
CASES = [(name, forward) for name in POINTS for forward in (False, True) if not (POINTS[name].in_reply and forward)]
AT_ONCE = 5  # a case waits for leases and process starts more than it works


@pytest.mark.timeout(300)
def test_killed_at_every_point(server: EmbeddedServer, tmp_path: Path):
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = {case: pool.submit(kill_at, server, tmp_path, *case) for case in CASES}
    failed = {case: one.exception() for case, one in running.items() if one.exception() is not None}
    for (name, forward), error in failed.items():
        traceback.print_exception(error)
        print(f"killed at {name}, {'after' if forward else 'before'} the server had heard of it: {error}")
    assert not failed


def kill_at(server: EmbeddedServer, folder: Path, name: str, forward: bool) -> None:
    """One worker dies at the point, a second one must bring the job to its one right end."""
    point = POINTS[name]
    victim: list[WorkerProcess] = []
    folder = folder / f"{name}-{forward}"
    folder.mkdir()
    harness = Harness(server, f"kill-{name}-{int(forward)}", folder)
    proxy = FaultProxy(
        server.port,
        point.trigger,
        lambda: victim[0].kill_group(),
        count=point.count,
        forward=forward,
        in_reply=point.in_reply,
    )
    try:
        victim.append(harness.start_worker(url=proxy.url, step_s=0.01))
        follower = Follower(harness, "job")
        harness.submit("job", max_tokens=TOKENS, job={"reply_to": "reader"})
        assert proxy.has_fired.wait(20), f"{point.trigger!r} was never seen"
        harness.start_worker()
        entries = follower.run(timeout_s=60.0)
        record = harness.check_stream("job")
        assert record.state == State.DONE
        assert list(record.token_ids) == expected_ids(b"hi", 7, TOKENS)
        ids, texts = check_entries(entries)
        assert ids == list(record.token_ids)
        assert texts["content"] == record.text
        inbox = harness.redis.xrange(harness.keys.inbox("reader"))
        assert [FinalRecord.from_json(fields[b"res"]) for _, fields in inbox] == [record]  # once, and the same
        wait_for(lambda: harness.redis.xlen(harness.keys.jobs("normal")) == 0)
        harness.check_nothing_left()
    finally:
        proxy.close()
        harness.close()
