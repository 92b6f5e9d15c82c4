"""An answer must not depend on where its prefix came from: computed, resumed on the device, back from host memory."""

from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from gewell_kernels.layout import KVLayout
from torch import Tensor

from gewell.engine.api import FinishedEvent, TokensEvent
from gewell.engine.build import EngineOptions, assemble
from gewell.request import CacheAnswer, EngineRequest
from gewell.sampling import SamplingParams
from gewell.weights.checkpoint import load_model

MODEL = Path(__file__).parents[1] / "fixtures" / "gemma4-dense"
PAGE_BYTES = 131_072  # 16 sliding or 32 full tokens in float32
NUM_PAGES = {"nowhere": 100, "gpu": 100, "host": 24}  # one conversation of 400 tokens has about 18
STABLE, LENGTH, NUM_ANSWERED = 301, 400, 12


@dataclass(frozen=True)
class Answer:
    logits: Tensor  # [NUM_ANSWERED, vocab]
    token_ids: list[int]
    cache: CacheAnswer


def request(name: str, prompt: list[int], stable: int, num_answered: int) -> EngineRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=num_answered, ignore_eos=True)
    return EngineRequest(
        request_id=name, prompt_ids=prompt, sampling=sampling, conversation_id=name[0], stable_lengths=(stable,)
    )


def answer_from(place: str, *, is_deterministic: bool) -> Answer:
    """The answer to the conversation's second turn, with its first turn's prefix in this place. No two share a row."""
    model = load_model(
        MODEL, dtype=torch.float32, device="cpu", full_layout=KVLayout.V_ONLY, is_deterministic=is_deterministic
    )
    rows: list[Tensor] = []
    compute = model.logits

    def recorded(hidden: Tensor) -> Tensor:
        rows.append(compute(hidden).clone())
        return rows[-1]

    model.logits = recorded
    options = EngineOptions(
        kv_memory_bytes=NUM_PAGES[place] * PAGE_BYTES,
        host_memory_bytes=400 * PAGE_BYTES if place == "host" else 0,
        max_num_seqs=1,
        max_num_batched_tokens=96,
        has_prefix_cache=place != "nowhere",
        poison_freed_pages=True,
    )
    engine = assemble(model, options, name="warm", fingerprint="warm")
    rng = Random("warm equals cold")
    prompt = [rng.randrange(32, 127) for _ in range(LENGTH)]
    before = [request("c1", [*prompt[:STABLE], 33, 34, 35], STABLE, 4)]
    if place == "host":
        for name in "defgh":
            before.append(request(name, [rng.randrange(32, 127) for _ in range(LENGTH)], LENGTH - 3, 4))
    for req in before:
        engine.add(req)
    while engine.has_work():
        engine.step()
    rows.clear()
    engine.add(request("c2", prompt, LENGTH - 3, NUM_ANSWERED))
    token_ids: list[int] = []
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, TokensEvent):
                token_ids += event.token_ids
            elif isinstance(event, FinishedEvent):
                end = event
    return Answer(torch.cat([each for each in rows if len(each)]), token_ids, end.cache)


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("place", ["gpu", "host"])
def test_a_resumed_answer_is_the_computed_one(place: str, is_deterministic: bool) -> None:
    cold = answer_from("nowhere", is_deterministic=is_deterministic)
    warm = answer_from(place, is_deterministic=is_deterministic)
    assert (cold.cache.cached_tokens, cold.cache.restored_from) == (0, None)
    assert (warm.cache.cached_tokens, warm.cache.restored_from) == (STABLE, place)
    assert warm.token_ids == cold.token_ids
    assert warm.logits.shape == cold.logits.shape == (NUM_ANSWERED, 256)
    if is_deterministic:
        assert torch.equal(warm.logits, cold.logits)
    else:
        torch.testing.assert_close(warm.logits, cold.logits, rtol=0, atol=1e-4)
