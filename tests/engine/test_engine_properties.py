"""Any mix of requests, cancels and pool sizes: a fault here is a user who reads another's text, or waits for ever.

The scripted runner compares every slot that a model would read with the row's own history, so each example checks
paging, copy-on-write, prefix reuse, preemption and resume at once; on top come the books of the page pool.
"""

from collections import Counter
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gewell.cache.tiers import Tier
from gewell.engine.api import FinishedEvent, FinishReason, TokensEvent
from gewell.engine.engine import PagedEngine
from gewell.engine.scripted import EOS_ID, build_scripted_engine, scripted_token
from gewell.request import CacheHints, EngineRequest
from gewell.sampling import SamplingParams
from gewell.scheduler.prefixes import CachedPrefixes

PREFIXES = [[65 + i] * 24 + list(range(40, 40 + 17 * i)) for i in range(3)]
MAX_STEPS = 5000
WITHOUT_EXPLAIN = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)  # tracing lines costs minutes here
SLOW_DATA = (HealthCheck.too_slow, HealthCheck.data_too_large)


@dataclass(frozen=True)
class Job:
    request: EngineRequest
    add_at: int
    end_at: int | None  # step of a cancel (keep is None) or of a stop string found
    keep: int | None


@dataclass(frozen=True)
class World:
    jobs: list[Job]
    num_pages: int
    num_host_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    depth: int
    has_cache: bool
    eos_odds: int
    window: int


@st.composite
def jobs(draw: st.DrawFn, number: int) -> Job:
    prefix = draw(st.sampled_from(PREFIXES))
    cut = draw(st.integers(0, len(prefix)))
    tail = draw(st.integers(0 if cut else 1, 30))
    prompt = prefix[:cut] + [97 + (number * 7 + i) % 26 for i in range(tail)]
    request = EngineRequest(
        request_id=f"job-{number}",
        prompt_ids=prompt,
        sampling=SamplingParams(
            max_tokens=draw(st.integers(0, 40)), min_tokens=draw(st.sampled_from([0, 0, 3])), seed=number
        ),
        stable_lengths=(len(prompt),) if draw(st.booleans()) else (max(1, len(prompt) - 3),),
        conversation_id=draw(st.sampled_from([None, "a", "b"])),
        cache=CacheHints(mode=draw(st.sampled_from(["auto", "auto", "auto", "read", "off"]))),
        tenant=draw(st.sampled_from(["x", "y"])),
        lane=draw(st.sampled_from(["high", "normal", "low"])),
        deadline_ms=draw(st.sampled_from([None, None, 5])),
        eos_token_ids=(EOS_ID,),
    )
    ends = draw(st.one_of(st.none(), st.integers(0, 60)))
    keep = draw(st.one_of(st.none(), st.integers(1, 10))) if ends is not None else None
    return Job(request=request, add_at=draw(st.integers(0, 30)), end_at=ends, keep=keep)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    num_jobs = draw(st.integers(1, 12))
    max_num_seqs = draw(st.integers(1, 6))
    window = draw(st.sampled_from([5, 8, 13]))
    return World(
        jobs=[draw(jobs(number=i)) for i in range(num_jobs)],
        num_pages=draw(st.integers(16, 60)),
        num_host_pages=draw(st.sampled_from([0, 0, 10, 80])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs + 1, 50)),
        depth=draw(st.sampled_from([0, 1])),
        has_cache=draw(st.booleans()),
        eos_odds=draw(st.sampled_from([0, 12])),
        window=window,
    )


def build(world: World) -> PagedEngine:
    return build_scripted_engine(
        num_pages=world.num_pages,
        num_host_pages=world.num_host_pages,
        max_num_seqs=world.max_num_seqs,
        max_num_batched_tokens=world.max_num_batched_tokens,
        sliding_window=world.window,
        depth=world.depth,
        has_cache=world.has_cache,
        eos_odds=world.eos_odds,
        max_context=200,
    )


def expected_output(request: EngineRequest, max_context: int, eos_odds: int) -> list[int]:
    """What the request generates when nothing else exists."""
    tokens = list(request.prompt_ids)
    limit = min(request.sampling.max_tokens, max_context - len(tokens))
    output: list[int] = []
    while len(output) < limit:
        output.append(scripted_token(request.sampling.seed, len(tokens), tokens[-1], eos_odds=eos_odds))
        tokens.append(output[-1])
        if output[-1] == EOS_ID and len(output) >= request.sampling.min_tokens:
            break
    return output


def check_books(engine: PagedEngine) -> None:
    """Every page has exactly the references of live sequences, copies under way and checkpoints."""
    scheduler = engine._scheduler
    held: Counter[int] = Counter()
    for req in scheduler.running():
        assert req.pages is not None
        held.update(req.pages.full_pages)
        held.update(page for page in req.pages.sliding_pages if page >= 0)
        held.update(req.pages._copy_sources)
    if isinstance(scheduler.prefixes, CachedPrefixes):
        for checkpoint in scheduler.prefixes.cache.index:
            if checkpoint.tier is not Tier.GPU:
                continue
            held.update(checkpoint.full_pages)
            held.update(checkpoint.sliding_pages)
    pool = scheduler.pool
    assert [pool.ref_cnt(page) for page in range(pool.num_pages)] == [held[page] for page in range(pool.num_pages)]
    assert pool.num_free_pages == pool.num_pages - len(held)
    rows = [req.row_idx for req in scheduler.running()]
    assert len(set(rows)) == len(rows) == scheduler.num_running
    assert scheduler._num_reserved == sum(req.num_reserved_pages for req in scheduler.running()) >= 0


def run(engine: PagedEngine, world: World) -> tuple[dict[str, list[int]], dict[str, FinishedEvent]]:
    outputs: dict[str, list[int]] = {job.request.request_id: [] for job in world.jobs}
    ends: dict[str, FinishedEvent] = {}
    last_event = max(max(job.add_at, job.end_at or 0) for job in world.jobs)
    for step in range(MAX_STEPS):
        for job in world.jobs:
            if job.add_at == step:
                engine.add(job.request)
            if job.end_at == step:
                if job.keep is None:
                    engine.cancel(job.request.request_id)
                elif len(outputs[job.request.request_id]) >= job.keep:
                    engine.finish(job.request.request_id, job.keep)
        for event in engine.step():
            assert event.request_id not in ends, "nothing follows a FinishedEvent"
            if isinstance(event, TokensEvent):
                outputs[event.request_id].extend(event.token_ids)
            else:
                ends[event.request_id] = event
        check_books(engine)
        if step >= last_event and not engine.has_work():
            return outputs, ends
    raise AssertionError(f"requests starve: {sorted(set(outputs) - set(ends))}")


@settings(max_examples=200, deadline=None, phases=WITHOUT_EXPLAIN, suppress_health_check=SLOW_DATA)
@given(worlds())
def test_every_request_gets_the_output_it_would_get_alone(world: World) -> None:
    engine = build(world)
    outputs, ends = run(engine, world)
    assert set(ends) == set(outputs)
    for job in world.jobs:
        request_id = job.request.request_id
        end, output = ends[request_id], outputs[request_id]
        if end.error_code is not None:
            assert end.error_code == "prompt_too_long"
            assert len(job.request.prompt_ids) > engine.info.max_prompt_tokens
            continue
        expected = expected_output(job.request, engine.info.max_context, world.eos_odds)
        if end.reason is FinishReason.CANCELLED:
            assert job.end_at is not None
            assert output == expected[: len(output)]
        elif end.num_output_tokens < len(output):
            assert end.num_output_tokens == job.keep
            assert output == expected[: len(output)]
        elif job.keep is not None and end.num_output_tokens == job.keep and output != expected:
            assert output == expected[: job.keep]
        else:
            assert output == expected
            assert end.num_output_tokens == len(expected)
            assert end.stop_token_id == (EOS_ID if output and output[-1] == EOS_ID and end.reason == "stop" else None)


@settings(max_examples=40, deadline=None, phases=WITHOUT_EXPLAIN, suppress_health_check=SLOW_DATA)
@given(worlds())
def test_nothing_is_held_when_all_have_ended_and_the_cache_is_emptied(world: World) -> None:
    engine = build(world)
    run(engine, world)
    scheduler = engine._scheduler
    scheduler.prefixes.evict(scheduler.pool.num_pages)
    assert scheduler.pool.num_free_pages == scheduler.pool.num_pages
    assert scheduler.num_running == scheduler.num_waiting == 0
