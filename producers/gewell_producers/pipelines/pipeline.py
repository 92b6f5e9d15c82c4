"""A pipeline is a plain coroutine that an item goes through: write, critique, revise, judge, in ordinary Python.

Every ask has an id made of pipeline, revision, item, role and number. A coroutine that is run again, after a crash or
on another machine, asks the same things under the same ids and gets the records that stand; only what is missing is
generated. So it must be deterministic: what it asks may depend on the item and on answers, on nothing else.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gewell.errors import ConfigError, JobFailed
from gewell.protocol import RESULT_TTL_MAX_S, FinalRecord, Lane, is_valid_id
from gewell_producers.async_client import AsyncClient
from gewell_producers.job import Job, check_digest

Item = Mapping[str, Any]
Prompt = str | Sequence[Mapping[str, Any]]  # a text to continue, or messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What `gewell pipeline run FILE` finds in the file, under the name `pipeline`.

    work       the coroutine; its result is the item's line in the output
    revision   raise it when prompts change: answers of another revision are not reused
    attempts   how often an ask that failed for a reason that may pass is made in all
    timeout_s  of one item, waiting in the queue included
    """

    name: str
    work: Callable[["ItemRun", Item], Awaitable[Any]]
    revision: int = 1
    attempts: int = 3
    timeout_s: float = 24 * 3600.0
    lane: Lane = Lane.NORMAL
    tenant: str | None = None

    def __post_init__(self) -> None:
        if not is_valid_id(self.name) or len(self.name) > 40:
            raise ConfigError("pipeline.name", self.name, "1 to 40 characters of A-Z a-z 0-9 . _ : -")
        if self.attempts < 1:
            raise ConfigError("pipeline.attempts", self.attempts, "a whole number from 1")


class ItemRun:
    """One item on its way through a pipeline. Its coroutine asks through this."""

    def __init__(self, client: AsyncClient, pipeline: Pipeline, item_id: str) -> None:
        self.item_id = item_id
        self._client = client
        self._pipeline = pipeline
        short = (
            item_id
            if is_valid_id(item_id) and len(item_id) <= 40
            else hashlib.sha256(item_id.encode()).hexdigest()[:24]
        )
        self._prefix = f"{pipeline.name}:{pipeline.revision}:{short}"
        self._asked: Counter[str] = Counter()

    async def ask(
        self,
        role: str,
        prompt: Prompt,
        *,
        back_after: str | None = None,
        back_after_count: int = 1,
        fresh: bool = False,
        last: bool = False,
        **request: Any,
    ) -> FinalRecord:
        """Ask a role one thing and return its record. Raises JobFailed when it cannot be had.

        Asks of a role continue one conversation whose state the cache keeps.
        back_after   this role comes back after the next answer of that one (`back_after_count`: after so many of them);
                     the cache is told to keep the conversation until then
        fresh        a prompt of its own, which nothing continues
        last         the conversation is over: its state may go
        """
        idx = self._asked[role]
        self._asked[role] += 1
        cache: dict[str, Any] = {}
        if back_after is not None:
            cache["expect"] = {"after": self._id(back_after, self._asked[back_after] + back_after_count - 1)}
        if last:
            cache["release"] = True
        what = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        job = Job(
            kind="completion" if isinstance(prompt, str) else "chat",
            request={**what, **request},
            id=self._id(role, idx),
            conversation=None if fresh else f"{self._prefix}:{role}",
            cache=cache or None,
            lane=self._pipeline.lane,
            tenant=self._pipeline.tenant,
            stream=False,
            result_ttl_s=RESULT_TTL_MAX_S,
        )
        return await self._answer(job)

    async def ask_all(self, role: str, prompts: Sequence[Prompt], **request: Any) -> list[FinalRecord]:
        """Ask a role several independent things at once: n critics over one draft share its prefill."""
        return await asyncio.gather(*(self.ask(role, prompt, fresh=True, **request) for prompt in prompts))

    async def _answer(self, job: Job) -> FinalRecord:
        """The record that stands, or a new one; an error that may pass is tried again under an id of its own."""
        for attempt in range(self._pipeline.attempts):
            tried = job if attempt == 0 else replace(job, id=f"{job.id}:again-{attempt}")
            try:
                return await self._stand_or_run(tried)
            except JobFailed as failure:
                error = failure.record.get("error") or {}
                if not error.get("retryable") or attempt == self._pipeline.attempts - 1:
                    raise
                await asyncio.sleep(min(2.0**attempt, 30.0))
        raise AssertionError("attempts is at least 1")

    async def _stand_or_run(self, job: Job) -> FinalRecord:
        standing = await self._client.record(job.id)
        if standing is None:
            return await self._client.run(job)
        check_digest(job, await self._client.digest(job.id))
        return await self._client.result(job.id)

    def _id(self, role: str, idx: int) -> str:
        return f"{self._prefix}:{role}:{idx}"
