"""Conversations that take turns through the queue, on a real model: what they come back for must still be there.

A cache that forgets it makes each turn pay for the whole history again.
"""

import json
from pathlib import Path
from random import Random

import pytest

from gewell.protocol import FinalRecord

pytestmark = [pytest.mark.redis, pytest.mark.slow]

MODEL = Path(__file__).parents[1] / "fixtures" / "gemma4-dense"
NUM_CONVERSATIONS, PREFIX_TOKENS, NUM_ROUNDS = 8, 2_500, 3
PAGE_BYTES, PAGES_EACH = 131_072, 88  # float32: 2,600 tokens of full KV at 32 a page, a window and its slack at 16
POOL_GIB = NUM_CONVERSATIONS * PAGES_EACH / 0.6 * PAGE_BYTES / 2**30  # the conversations are 60 % of it


class Talk:
    """One conversation: its history is what was said and answered, as token ids."""

    def __init__(self, harness, name: str) -> None:
        self._harness = harness
        self._name = name
        self._rng = Random(name)
        self._num_jobs = 0
        self.prompt = self.words(PREFIX_TOKENS)
        self.answer: list[int] = []

    def words(self, count: int) -> list[int]:
        return [self._rng.randrange(32, 127) for _ in range(count)]

    def submit(self, prompt: list[int]) -> str:
        self._num_jobs += 1
        job_id = f"{self._name}.{self._num_jobs}"
        request = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        job = {"kind": "completion", "request": request, "conversation": {"id": self._name}}
        self._harness.submit_raw(job_id, json.dumps(job))
        return job_id

    def next_turn(self) -> str:
        self.prompt = [*self.prompt, *self.answer, *self.words(40)]
        return self.submit(self.prompt)

    def told(self, job_id: str) -> FinalRecord:
        record = self._harness.result(job_id, timeout_s=120)
        self.answer = list(record.token_ids)
        return record

    def edit(self, count: int) -> FinalRecord:
        """The last prompt once more, with its last `count` tokens written anew."""
        prompt = [*self.prompt[:-count], self.prompt[-count] ^ 1, *self.words(count - 1)]
        return self._harness.result(self.submit(prompt), timeout_s=120)


@pytest.fixture
def talks(harness):
    options = ("--kv-gib", str(POOL_GIB), "--dtype", "float32", "--device", "cpu", "--lease-s", "10")
    harness.start_worker("--model", str(MODEL), *options)
    return [Talk(harness, f"talk{i}") for i in range(NUM_CONVERSATIONS)]


def test_what_a_conversation_said_before_is_not_computed_again(talks):
    for job_id, talk in [(talk.submit(talk.prompt), talk) for talk in talks]:
        assert talk.told(job_id).usage.cached == 0
    for _ in range(NUM_ROUNDS - 1):
        old = [len(talk.prompt) for talk in talks]
        job_ids = [talk.next_turn() for talk in talks]
        for talk, job_id, num_old in zip(talks, job_ids, old, strict=True):
            assert talk.told(job_id).usage.cached >= 0.95 * num_old
    for count in (1, 8, 33, 64):
        for talk in talks[:2]:
            usage = talk.edit(count).usage
            assert usage.prompt - usage.cached <= 64 + count, f"the last {count} tokens were edited"
