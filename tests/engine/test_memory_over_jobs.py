"""A worker runs for weeks: what it keeps of jobs that will never come back must not grow with their number."""

import gc
import tracemalloc

import pytest

from gewell.engine.engine import PagedEngine
from gewell.engine.scripted import build_scripted_engine
from gewell.request import CacheHints, EngineRequest
from gewell.sampling import SamplingParams
from gewell.scheduler.prefixes import CachedPrefixes

MAX_NODES = 2_000


def run_jobs(engine: PagedEngine, numbers: range, *, one_off: bool) -> None:
    for number in numbers:
        engine.add(
            EngineRequest(
                request_id=f"job{number}",
                prompt_ids=tuple(b"%d is the number of this job" % (number * 7_919)),
                sampling=SamplingParams(max_tokens=2),
                conversation_id=None if one_off else f"talk{number % 50}",
                cache=CacheHints(one_off=one_off),
            )
        )
        if number % 64 == 63:
            while engine.has_work():
                engine.step()
    while engine.has_work():
        engine.step()


@pytest.mark.parametrize("one_off", [True, False])
def test_the_index_and_the_memory_stay_bounded_however_many_jobs_pass(one_off: bool) -> None:
    engine = build_scripted_engine(num_pages=512, max_num_seqs=64)
    prefixes = engine._scheduler.prefixes
    assert isinstance(prefixes, CachedPrefixes)
    tree = prefixes.cache.tree
    tree.max_nodes = MAX_NODES
    run_jobs(engine, range(2_000), one_off=one_off)  # the index is full now
    gc.collect()
    tracemalloc.start()
    try:
        run_jobs(engine, range(2_000, 4_000), one_off=one_off)
        gc.collect()
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tree.num_nodes == sum(1 for _ in tree.nodes()) <= MAX_NODES
    assert prefixes.num_checkpoints <= 512
    # The index is made of new nodes now, and only those are counted: about 0.6 kB each.
    assert grown_bytes < MAX_NODES * 1_000
    if one_off:
        assert prefixes.num_checkpoints == 0
