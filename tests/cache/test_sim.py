"""The policy's share of what could be served, on generated traces: a change that loses reuse shows here first.

Also the simulator itself: its accounting, its input errors, its output.
"""

import gzip
import json

import pytest
from trace_patterns import PATTERNS, seats
from typer.testing import CliRunner

from gewell.cache.sim.baselines import BASELINES, ClairvoyantStore, LRUStore
from gewell.cache.sim.machine import Counts, run_trace
from gewell.cache.sim.ours import GewellStore
from gewell.cache.sim.prompt_tree import Holder, SegmentPool, SegmentTree
from gewell.cache.sim.report import SimOptions, run_one, simulate
from gewell.cache.sim.trace import SegmentTokens, load_trace, trace_from_records
from gewell.errors import ConfigError

GIB = 2**30
GPU = 12 * GIB  # about a third of what serving every repeat of these patterns needs


def write(path, records):
    path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in records).encode()))
    return path


def ours(records, host_gib=0.0, use_expect=False) -> Counts:
    trace = trace_from_records("test", records)
    return run_trace(trace, GewellStore(GPU, host_gib * GIB, use_expect=use_expect))


def baseline(name, records, host_gib=0.0) -> int:
    trace = trace_from_records("test", records)
    return max(run_trace(trace, make(trace.jobs, GPU, host_gib * GIB)).served_tokens for make in BASELINES[name])


@pytest.mark.parametrize("name", PATTERNS)
def test_ours_comes_near_the_clairvoyant_and_beats_lru_and_clock(name):
    records = PATTERNS[name]()
    served = ours(records).served_tokens
    assert served >= 0.88 * baseline("clairvoyant", records)
    assert served >= baseline("lru", records)
    assert served >= baseline("clock", records)


def test_a_host_tier_serves_nearly_what_an_infinite_cache_would():
    records = seats()
    counts = ours(records, host_gib=64)
    assert counts.served_tokens >= 0.97 * baseline("infinite", records)
    assert counts.host_tokens > counts.served_tokens / 4


def test_expect_does_not_hurt():
    records = PATTERNS["writers_and_critics"]()
    assert ours(records, use_expect=True).served_tokens >= 0.98 * ours(records).served_tokens


def test_every_page_is_free_again_when_all_checkpoints_are_gone():
    trace = trace_from_records("test", seats(num_seats=12, rounds=4))
    store = GewellStore(GPU, 8 * GIB)
    run_trace(trace, store)
    cache = store.cache
    cache.evict(store.pool.num_pages)
    for checkpoint in list(cache.index):
        cache.retention.drop(checkpoint)
    assert store.pool.num_free_pages == store.pool.num_pages
    assert cache.retention.host is not None
    assert cache.retention.host.pool.num_free_pages == cache.retention.host.pool.num_pages


def test_the_baselines_count_pages_once():
    records = [
        {"id": "a", "segments": [["sys", 640], ["a", 320]], "stable": 960, "out": 64},
        {"id": "b", "segments": [["sys", 640], ["b", 320]], "stable": 960, "out": 64},
    ]
    tree = SegmentTree(trace_from_records("test", records).jobs)
    pool = SegmentPool(1000 * GIB, Holder.GPU)
    pool.hold(tree.paths[0][-1])  # 3 full pages, 60 sliding ones
    assert pool.used == 63
    pool.hold(tree.paths[1][-1])  # shares two full pages and the first 40 sliding ones
    assert pool.used == 63 + 1 + 20
    assert pool.exclusive(tree.paths[0][-1]) == 21
    pool.release(tree.paths[0][-1])
    pool.release(tree.paths[1][-1])
    assert pool.used == 0


def test_jobs_start_in_order_and_wait_for_what_they_are_made_from():
    records = [
        {"id": "a", "segments": [["a", 1000]], "stable": 1000, "out": 100},
        {"id": "b", "after": ["a"], "segments": [["a", 1000], ["a/out", 100], ["b", 50]], "stable": 1150, "out": 10},
    ]
    trace = trace_from_records("test", records)
    for store in (GewellStore(GPU), LRUStore(trace.jobs, GPU, 0), ClairvoyantStore(trace.jobs, GPU, 0, rule="steep")):
        counts = run_trace(trace, store)
        assert (counts.prompt_tokens, counts.served_tokens) == (2150, 1100)
        assert counts.width == pytest.approx(1.0)


def test_an_expectation_names_the_last_job_that_the_next_turn_waits_for():
    records = [
        {"id": "w1", "conv": "w", "segments": [["w", 10]], "stable": 10, "out": 1},
        {"id": "k1", "after": ["w1"], "segments": [["k", 10]], "stable": 10, "out": 1},
        {"id": "w2", "conv": "w", "after": ["w1", "k1"], "segments": [["w", 10]], "stable": 10, "out": 1},
    ]
    assert [job.expect_after for job in trace_from_records("test", records).jobs] == ["k1", None, None]


def test_segments_are_equal_by_name_and_differ_at_once():
    tokens = SegmentTokens()
    a, b = tokens.key("a", 10), tokens.key("b", 10)
    assert len(a) == 40
    assert a == tokens.key("a", 10)
    assert a[:4] != b[:4]


def test_a_run_gives_the_same_numbers_again(tmp_path):
    path = write(tmp_path / "seats.jsonl.gz", seats(num_seats=16, rounds=4))
    options = SimOptions(gpu_gib=12, host_gib=4, use_expect=True)
    first, second = (run_one(path, "gewell", 0, options) for _ in range(2))
    assert first.served_tokens == second.served_tokens


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("nonsense", "not a job"),
        ('{"id": "a"}', "KeyError"),
        ('{"id": "a", "segments": [["s", 5]], "stable": 9, "out": 1}', "0 <= stable <= prompt"),
        ('{"id": "a", "segments": [["s", 0]], "stable": 0, "out": 1}', "at least 1 token"),
        ('{"id": "a", "after": ["z"], "segments": [["s", 5]], "stable": 5, "out": 1}', "earlier jobs"),
        ("", "no job"),
    ],
)
def test_a_broken_trace_is_refused_with_file_and_line(tmp_path, line, what):
    path = tmp_path / "t.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=what) as error:
        load_trace(path)
    assert "t.jsonl" in str(error.value)


def test_the_command_prints_rows_as_json(tmp_path):
    import typer

    from gewell.cache.sim.cli import sim

    path = write(tmp_path / "seats.jsonl.gz", seats(num_seats=12, rounds=4))
    app = typer.Typer()
    app.command()(sim)
    arguments = [str(path), "--gpu-gib", "12", "--processes", "1", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["policy"] for row in rows] == ["gewell", "lru", "clock", "clairvoyant", "infinite"]
    by_policy = {row["policy"]: row for row in rows}
    assert by_policy["clairvoyant"]["ratio_to_clairvoyant"] == 1.0
    assert by_policy["gewell"]["served_tokens"] <= by_policy["infinite"]["served_tokens"]
    assert by_policy["gewell"]["trace"] == "seats"
    result = CliRunner().invoke(app, [*arguments, str(tmp_path / "rows.json")])
    assert result.exit_code == 0, result.output
    assert "clairvoyant" in result.stdout
    assert len(json.loads((tmp_path / "rows.json").read_text())) == 5


def test_impossible_options_are_refused():
    for field, value in (("gpu_gib", 0), ("host_gib", -1), ("lookahead", -1), ("width", 0), ("gpu_gib", float("nan"))):
        with pytest.raises(ConfigError, match=field):
            SimOptions(**{field: value})


def test_worker_processes_give_the_rows_of_one_process(tmp_path):
    path = write(tmp_path / "seats.jsonl.gz", seats(num_seats=8, rounds=3))
    options = SimOptions(gpu_gib=8)
    alone, together = (simulate([path], ["gewell", "lru"], options, num_processes=n) for n in (1, 2))
    assert [(r.policy, r.served_tokens) for r in alone] == [(r.policy, r.served_tokens) for r in together]


def test_a_trace_that_is_not_there_is_named_once(tmp_path):
    with pytest.raises(ConfigError) as refused:
        load_trace(tmp_path / "nope.jsonl")
    assert str(refused.value).count("nope.jsonl") == 1
