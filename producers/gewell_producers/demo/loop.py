"""The writer + critic loop: many conversations at once, each turn two jobs through the queue.

Prompts are token ids. A writer's next prompt is its last prompt, the ids of its answer as the record gives them, and
the critic's remark: exactly what the model has read, so that all of it but the remark can come from the cache.
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gewell.errors import QueueError
from gewell.protocol import FinalRecord, State
from gewell.text.tokenizer import Tokenizer
from gewell_producers.async_client import AsyncClient
from gewell_producers.demo.reuse import ReuseLedger
from gewell_producers.demo.script import Role, Script
from gewell_producers.job import Job


class View(Protocol):
    """Somebody who watches. Conversations count from 0."""

    def began(self, conversation: int, title: str) -> None: ...

    def text(self, conversation: int, label: str, text: str) -> None:
        """More of the answer that `label` is giving in this conversation."""

    def answered(self, conversation: int, label: str, text: str, record: FinalRecord) -> None: ...

    def warmed(self, label: str, record: FinalRecord) -> None:
        """The shared beginning of this role's prompts is in the cache."""

    def failed(self, conversation: int | None, label: str, why: str) -> None: ...


@dataclass(slots=True)
class Tally:
    num_jobs: int = 0
    num_errors: int = 0
    num_output_tokens: int = 0
    num_cached: int = 0  # prompt tokens that the worker did not compute


class WriterCritic:
    """Runs the loop and counts. One instance is one run: its job ids share a prefix drawn at random."""

    def __init__(self, client: AsyncClient, script: Script, tokenizer: Tokenizer, view: View) -> None:
        self._client = client
        self._script = script
        self._tokenizer = tokenizer
        self._view = view
        self._run_id = f"demo-{secrets.token_hex(4)}"
        self.tally = Tally()
        self.ledger = ReuseLedger()

    @staticmethod
    def num_jobs(num_conversations: int, num_turns: int) -> int:
        return 2 + num_conversations * (2 * num_turns - 1)  # two warm up; the last part is not criticised

    async def run(self, num_conversations: int, num_turns: int) -> None:
        await asyncio.gather(*(self._warm(role) for role in (self._script.writer, self._script.critic)))
        async with asyncio.TaskGroup() as group:
            for i in range(num_conversations):
                group.create_task(self._converse(i, num_turns))

    async def _warm(self, role: Role) -> None:
        """Have the beginning that all prompts of a role share computed and kept, before they come all at once."""
        prompt = self._preamble(role)
        job = Job(kind="warm", request={"prompt": prompt}, id=f"{self._run_id}:warm:{role.label}")
        self.tally.num_jobs += 1
        self.ledger.add_prompt(prompt)
        try:
            record = await self._client.run(job)
        except QueueError as error:
            self._fail(None, role, str(error))
        else:
            self.tally.num_cached += record.usage.cached
            self._view.warmed(role.label, record)

    async def _converse(self, conversation: int, num_turns: int) -> None:
        script = self._script
        title = script.titles[conversation % len(script.titles)]
        self._view.began(conversation, title)
        prompt = [*self._preamble(script.writer), *self._tokenizer.encode(script.opening(title))]
        for turn in range(num_turns):
            is_last = turn == num_turns - 1
            hints = (
                {"release": True} if is_last else {"expect": {"after": self._job_id(conversation, turn, script.critic)}}
            )
            part = await self._ask(conversation, turn, script.writer, prompt, hints)
            if part is None or is_last:
                return
            review = [*self._preamble(script.critic), *self._tokenizer.encode(script.review(part.text.strip()))]
            remark = await self._ask(conversation, turn, script.critic, review, {})
            if remark is None:
                return
            prompt = [*prompt, *self._answer_ids(part), *self._tokenizer.encode(script.reply(remark.text.strip()))]

    async def _ask(
        self, conversation: int, turn: int, role: Role, prompt: Sequence[int], hints: Mapping[str, Any]
    ) -> FinalRecord | None:
        """One job, streamed to the view. None: it failed, and the conversation is over."""
        job = Job.completion(
            prompt,
            max_tokens=role.max_tokens,
            temperature=self._script.temperature,
            top_p=self._script.top_p,
            seed=conversation * 1000 + turn,
            stop=["\n"],
            job={
                "id": self._job_id(conversation, turn, role),
                "conversation": f"{self._run_id}:{conversation}:{role.label}",
                "cache": hints,
            },
        )
        self.tally.num_jobs += 1
        self.ledger.add_prompt(prompt)
        try:
            await self._client.submit(job)
            async with self._client.follow(job.id) as stream:
                async for chunk in stream:
                    self._view.text(conversation, role.label, chunk.text)
                record = await stream.record()
        except QueueError as error:
            self._fail(conversation, role, str(error))
            return None
        if record.state is not State.DONE:
            self._fail(conversation, role, record.error.message if record.error else str(record.state))
            return None
        self.ledger.add_answer(prompt, record.token_ids)
        self.tally.num_output_tokens += record.usage.completion
        self.tally.num_cached += record.usage.cached
        self._view.answered(conversation, role.label, record.text.strip(), record)
        return record

    def _fail(self, conversation: int | None, role: Role, why: str) -> None:
        self.tally.num_errors += 1
        self._view.failed(conversation, role.label, why)

    def _job_id(self, conversation: int, turn: int, role: Role) -> str:
        return f"{self._run_id}:{conversation}:{turn}:{role.label}"

    def _preamble(self, role: Role) -> list[int]:
        bos = self._tokenizer.bos_id
        return ([] if bos is None else [bos]) + self._tokenizer.encode(role.preamble)

    def _answer_ids(self, record: FinalRecord) -> list[int]:
        """Tokens of the visible text: those that hold the stop string, and what came after it, are not said again."""
        num_bytes, ids = len(record.text.encode()), []
        for token in record.token_ids:
            num_bytes -= len(self._tokenizer.token_bytes(token))
            if num_bytes < 0:
                break
            ids.append(token)
        return ids
