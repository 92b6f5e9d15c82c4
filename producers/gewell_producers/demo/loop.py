"""The demo's loop: all scenes at once, each taking its turns through the queue, and the count of what was reused."""

import asyncio
import secrets
from dataclasses import dataclass
from typing import Protocol

from gewell.errors import QueueError
from gewell.protocol import FinalRecord, State
from gewell_producers.async_client import AsyncClient
from gewell_producers.demo.reuse import ReuseLedger
from gewell_producers.demo.scene import Ask, Play, Scene
from gewell_producers.job import Job


class View(Protocol):
    """Somebody who watches. Scenes count from 0; None: what is done before they begin."""

    def began(self, scene: int, title: str) -> None: ...

    def text(self, scene: int, label: str, text: str) -> None:
        """More of the answer that `label` is giving in this scene."""

    def answered(self, scene: int | None, label: str, text: str, record: FinalRecord) -> None: ...

    def failed(self, scene: int | None, label: str, why: str) -> None: ...


@dataclass(slots=True)
class Tally:
    num_jobs: int = 0
    num_errors: int = 0
    num_output_tokens: int = 0
    num_cached: int = 0  # prompt tokens that the worker did not compute
    num_right: int = 0  # scenes that ended as they should
    num_wrong: int = 0


class Loop:
    """One run: its job ids share a prefix drawn at random."""

    def __init__(self, client: AsyncClient, play: Play, view: View) -> None:
        self._client = client
        self._play = play
        self._view = view
        self._run_id = f"demo-{secrets.token_hex(4)}"
        self.tally = Tally()
        self.ledger = ReuseLedger()

    async def run(self, num_scenes: int, num_turns: int) -> None:
        warm_ups = [self._ask(None, ask, f"{self._run_id}:warm:{ask.label}") for ask in self._play.warm_ups()]
        await asyncio.gather(*warm_ups)
        async with asyncio.TaskGroup() as group:
            for i in range(num_scenes):
                group.create_task(self._perform(i, self._play.scene(i, num_turns)))

    async def _perform(self, index: int, scene: Scene) -> None:
        self._view.began(index, scene.title)
        step = 0
        while (ask := scene.next_ask()) is not None:
            record = await self._ask(index, ask, self._job_id(index, step), self._job_id(index, step + 1))
            if record is None:
                return
            scene.tell(record)
            step += 1
        self.tally.num_right += scene.is_right is True
        self.tally.num_wrong += scene.is_right is False

    async def _ask(self, index: int | None, ask: Ask, job_id: str, next_job_id: str = "") -> FinalRecord | None:
        """One job, streamed to the view. None: it failed, and its scene is over."""
        conversation = None if index is None else f"{self._run_id}:{index}:{ask.label}"
        expect = {"expect": {"after": next_job_id}} if ask.comes_back else {}
        cache = {**ask.cache, **expect} or None
        job = Job(kind=ask.kind, request=ask.request, id=job_id, conversation=conversation, cache=cache)
        self.tally.num_jobs += 1
        self.ledger.add_prompt(ask.prompt_ids)
        try:
            await self._client.submit(job)
            async with self._client.follow(job.id) as stream:
                async for chunk in stream:
                    if index is not None:
                        self._view.text(index, ask.label, chunk.text)
                record = await stream.record()
        except QueueError as error:
            self._fail(index, ask, str(error))
            return None
        if record.state is not State.DONE:
            self._fail(index, ask, record.error.message if record.error else str(record.state))
            return None
        self.ledger.add_answer(ask.prompt_ids, record.token_ids)
        self.tally.num_output_tokens += record.usage.completion
        self.tally.num_cached += record.usage.cached
        self._view.answered(index, ask.label, record.text.strip(), record)
        return record

    def _job_id(self, index: int, step: int) -> str:
        return f"{self._run_id}:{index}:{step}"

    def _fail(self, index: int | None, ask: Ask, why: str) -> None:
        self.tally.num_errors += 1
        self._view.failed(index, ask.label, why)
