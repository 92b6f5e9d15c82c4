"""What the worker's main thread keeps in mind about its jobs."""

import pytest
from gewell_workers.claim import Taken
from gewell_workers.config import WorkerConfig
from gewell_workers.finish import Outcome
from gewell_workers.gpu import Worker
from gewell_workers.jobs import HeldJob
from gewell_workers.output_link import OutputLink
from gewell_workers.startup import Parts, load_renderer

from gewell.engine.api import CacheAnswer, FinishedEvent, FinishReason
from gewell.engine.scripted import build_scripted_engine
from gewell.protocol import Lane


class Heard(OutputLink):
    """An output process that is not there."""

    def _write(self, kind: str, body: object) -> None:
        pass


def make_worker() -> Worker:
    config = WorkerConfig(redis_url="redis://127.0.0.1:1/0")
    parts = Parts(engine=build_scripted_engine(), chat=load_renderer(None), output=Heard(), promise="always")
    return Worker(config, parts)


def hold(worker: Worker, job_id: str, epoch: int = 1) -> None:
    taken = Taken(lane=Lane.NORMAL, entry_id="1-1", job_id=job_id, body=b"{}")
    worker._table.entries.add(taken.entry)
    worker._table.hold(
        HeldJob(taken=taken, epoch=epoch, num_tokens=3, conversation_id=None, tenant=None, deadline_ms=None)
    )


def finished(job_id: str) -> FinishedEvent:
    return FinishedEvent(
        request_id=job_id,
        reason=FinishReason.LENGTH,
        num_prompt_tokens=1,
        num_output_tokens=1,
        cache=CacheAnswer(),
    )


@pytest.mark.parametrize("engine_was_done", [True, False])
async def test_fenced_job_can_be_taken_again_once_the_engine_has_let_go_of_it(engine_was_done: bool):
    """Found by chaos: a job fenced after the engine had finished it was waited for in vain, and never taken again."""
    worker = make_worker()
    hold(worker, "a")
    if engine_was_done:
        worker._on_events([finished("a")])
    worker._on_done("a", 1, Outcome.FENCED)
    assert ("a" in worker._leaving) is not engine_was_done
    worker._on_events([finished("a")] if not engine_was_done else [])
    assert worker._leaving == set()
    assert worker._table.held == {}
    assert worker._table.entries == set()
    assert worker._table.num_tokens == 0


async def test_done_of_an_older_epoch_does_not_drop_the_newer_claim():
    worker = make_worker()
    hold(worker, "a", epoch=2)
    worker._on_done("a", 1, Outcome.FENCED)
    assert "a" in worker._table.held
    assert worker._leaving == set()
