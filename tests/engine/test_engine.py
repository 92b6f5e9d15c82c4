"""The engine over scripted tokens: what a worker is promised. A fault here ends as a wrong or missing final record."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from gewell.engine.api import Event, FinishedEvent, FinishReason, TokensEvent
from gewell.engine.engine import PagedEngine
from gewell.engine.scripted import EOS_ID, build_scripted_engine, scripted_token
from gewell.errors import EngineError
from gewell.request import CacheHints, EngineRequest
from gewell.sampling import SamplingParams


def request(name: str = "a", prompt: str | list[int] = "hello", **kwargs: object) -> EngineRequest:
    sampling = {key: kwargs.pop(key) for key in list(kwargs) if key in SamplingParams.__dataclass_fields__}
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    return EngineRequest(
        request_id=name,
        prompt_ids=ids,
        sampling=SamplingParams(**{"max_tokens": 8, **sampling}),
        eos_token_ids=(EOS_ID,),
        **kwargs,
    )


AfterStep = Callable[[int, list[Event]], None]


def run(engine: PagedEngine, *, after_step: AfterStep = lambda step, events: None) -> "Outcome":
    outcome = Outcome()
    for step in range(10_000):
        if not engine.has_work():
            return outcome
        events = engine.step()
        outcome.take(events)
        after_step(step, events)
    raise AssertionError("the engine does not come to an end")


class Outcome:
    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishedEvent] = {}
        self.order: list[str] = []

    def take(self, events: list[Event]) -> None:
        for event in events:
            assert event.request_id not in self.ends
            if isinstance(event, TokensEvent):
                self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
            else:
                self.ends[event.request_id] = event
                self.order.append(event.request_id)


def script(req: EngineRequest, num: int, *, eos_odds: int = 0) -> list[int]:
    tokens = list(req.prompt_ids)
    for _ in range(num):
        tokens.append(scripted_token(req.sampling.seed, len(tokens), tokens[-1], eos_odds=eos_odds))
    return tokens[len(req.prompt_ids) :]


def seed_with_eos_at(index: int, *, odds: int = 8) -> int:
    """A seed whose first EOS is output token `index`."""
    for seed in range(10_000):
        output = script(request(seed=seed), index + 1, eos_odds=odds)
        if EOS_ID in output and output.index(EOS_ID) == index:
            return seed
    raise AssertionError("no such seed")


# ------------------------------------------------------------------------------------------------------------ endings


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_ends_at_max_tokens(depth: int) -> None:
    req = request(max_tokens=5, seed=3)
    engine = build_scripted_engine(depth=depth)
    engine.add(req)
    outcome = run(engine)
    assert outcome.tokens["a"] == script(req, 5)
    end = outcome.ends["a"]
    assert (end.reason, end.num_prompt_tokens, end.num_output_tokens) == (FinishReason.LENGTH, 5, 5)


@pytest.mark.parametrize("depth", [0, 1])
def test_an_end_id_ends_the_row_and_is_recorded(depth: int) -> None:
    req = request(max_tokens=50, seed=seed_with_eos_at(4))
    engine = build_scripted_engine(eos_odds=8, depth=depth)
    engine.add(req)
    outcome = run(engine)
    assert outcome.tokens["a"] == script(req, 5, eos_odds=8)
    end = outcome.ends["a"]
    assert (end.reason, end.stop_token_id, end.num_output_tokens) == (FinishReason.STOP, EOS_ID, 5)


def test_ignore_eos_goes_on_but_stop_token_ids_still_stop() -> None:
    seed = seed_with_eos_at(2)
    full = script(request(seed=seed), 30, eos_odds=8)
    stop = next(token for token in full[5:] if token not in full[:5] and token != EOS_ID)
    engine = build_scripted_engine(eos_odds=8)
    engine.add(request(seed=seed, max_tokens=30, ignore_eos=True, stop_token_ids=(stop,)))
    outcome = run(engine)
    assert outcome.tokens["a"] == full[: full.index(stop) + 1]
    assert outcome.ends["a"].stop_token_id == stop


def test_min_tokens_keeps_an_early_end_id_from_ending_the_row() -> None:
    engine = build_scripted_engine(eos_odds=8)
    engine.add(request(seed=seed_with_eos_at(2), max_tokens=5, min_tokens=4))
    end = run(engine).ends["a"]
    assert end.num_output_tokens >= 4


def test_a_prompt_without_output_is_computed_and_retained() -> None:  # jobs of kind `warm`
    engine = build_scripted_engine()
    engine.add(request("warm", "x" * 200, max_tokens=0))
    outcome = run(engine)
    end = outcome.ends["warm"]
    assert (end.reason, end.num_output_tokens, outcome.tokens) == (FinishReason.LENGTH, 0, {})
    engine.add(request("next", "x" * 200 + "y"))
    assert run(engine).ends["next"].cache.cached_tokens == 200


def test_max_tokens_is_clamped_to_the_context() -> None:
    engine = build_scripted_engine(max_context=20)
    engine.add(request(prompt="x" * 12, max_tokens=1000))
    end = run(engine).ends["a"]
    assert (end.reason, end.num_output_tokens) == (FinishReason.LENGTH, 8)


def test_a_cancelled_request_ends_with_what_it_has() -> None:
    engine = build_scripted_engine()
    req = request(max_tokens=50)
    engine.add(req)
    outcome = run(engine, after_step=lambda step, events: engine.cancel("a") if step == 3 else None)
    assert outcome.ends["a"].reason is FinishReason.CANCELLED
    assert outcome.tokens["a"] == script(req, 4)


def test_a_waiting_request_can_be_cancelled() -> None:
    engine = build_scripted_engine(max_num_seqs=1)
    engine.add(request("first", max_tokens=30))
    engine.add(request("second"))
    outcome = run(engine, after_step=lambda step, events: engine.cancel("second") if step == 1 else None)
    assert outcome.ends["second"].reason is FinishReason.CANCELLED
    assert outcome.ends["second"].started_at_s is None
    assert outcome.ends["first"].reason is FinishReason.LENGTH


def test_commands_for_unknown_requests_have_no_effect() -> None:
    engine = build_scripted_engine()
    engine.cancel("nobody")
    engine.finish("nobody", 3)
    engine.add(request())
    assert run(engine).ends.keys() == {"a"}


@pytest.mark.parametrize("depth", [0, 1])
def test_finish_keeps_the_first_tokens_and_drops_those_past_them(depth: int) -> None:
    engine = build_scripted_engine(depth=depth)
    engine.add(request(max_tokens=50))
    seen: list[int] = []

    def stop_found_late(step: int, events: list[Event]) -> None:
        tokens = [event.token_ids[0] for event in events if isinstance(event, TokensEvent)]
        seen.extend(tokens)
        if tokens and len(seen) == 6:
            engine.finish("a", 3)

    end = run(engine, after_step=stop_found_late).ends["a"]
    assert (end.reason, end.num_output_tokens) == (FinishReason.STOP, 3)


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("bad", "code", "words"),
    [
        (request(prompt=[]), "empty_prompt", "no tokens"),
        (request(prompt="x" * 64), "prompt_too_long", "64 tokens"),
        (request(lane="express"), "invalid_request", "express"),
    ],
)
def test_a_request_that_cannot_be_served_is_answered_and_disturbs_nobody(
    bad: EngineRequest, code: str, words: str
) -> None:
    engine = build_scripted_engine(max_context=64)
    engine.add(replace(bad, request_id="bad"))
    good = request("good")
    engine.add(good)
    outcome = run(engine)
    end = outcome.ends["bad"]
    assert (end.reason, end.error_code) == (FinishReason.ERROR, code)
    assert words in (end.error_message or "")
    assert outcome.tokens["good"] == script(good, 8)


def test_a_prompt_that_the_pool_could_never_hold_is_refused_with_the_numbers() -> None:
    engine = build_scripted_engine(num_pages=12, max_context=100_000)
    assert engine.info.max_prompt_tokens < 12 * 16
    engine.add(request("huge", "x" * (engine.info.max_prompt_tokens + 1)))
    engine.add(request("just fits", "x" * engine.info.max_prompt_tokens, max_tokens=1))
    outcome = run(engine)
    assert outcome.ends["huge"].error_code == "prompt_too_long"
    assert "12 KV pages" in (outcome.ends["huge"].error_message or "")
    assert outcome.ends["just fits"].num_output_tokens == 1


def test_a_second_request_with_a_live_id_is_dropped() -> None:
    engine = build_scripted_engine()
    engine.add(request("a", "first"))
    engine.add(request("a", "second"))
    outcome = run(engine)
    assert outcome.tokens["a"] == script(request("a", "first"), 8)


# ------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("depth", [0, 1])
def test_broken_numbers_end_their_row_alone(depth: int) -> None:
    engine = build_scripted_engine(depth=depth, is_bad=lambda req, position: req.request_id == "bad" and position == 8)
    good = request("good")
    engine.add(request("bad", max_tokens=20))
    engine.add(good)
    outcome = run(engine)
    end = outcome.ends["bad"]
    assert (end.reason, end.error_code, end.num_output_tokens) == (FinishReason.ERROR, "numerics", 3)
    assert outcome.tokens["good"] == script(good, 8)


def test_what_a_broken_row_computed_is_not_served_to_others() -> None:
    prompt = "shared prompt " * 10
    engine = build_scripted_engine(is_bad=lambda req, position: req.request_id == "bad")
    engine.add(request("bad", prompt))
    assert run(engine).ends["bad"].error_code == "numerics"
    engine.add(request("good", prompt))
    end = run(engine).ends["good"]
    assert (end.error_code, end.cache.cached_tokens) == (None, 0)


def test_a_fault_of_the_device_is_an_engine_error() -> None:
    engine = build_scripted_engine(fail_at_step=2)
    engine.add(request(max_tokens=50))
    engine.step()
    engine.step()
    with pytest.raises(EngineError, match=r"step 2.*scripted fault"):
        engine.step()


# ---------------------------------------------------------------------------------------------------------- continuing


@pytest.mark.parametrize("num_emitted", [1, 4, 7])
def test_the_next_epoch_goes_on_with_the_same_sample(num_emitted: int) -> None:
    whole = script(request(seed=9), 8)
    engine = build_scripted_engine()
    engine.add(request(seed=9, emitted_ids=tuple(whole[:num_emitted])))
    outcome = run(engine)
    assert outcome.tokens["a"] == whole[num_emitted:]
    assert outcome.ends["a"].num_output_tokens == 8


def test_an_epoch_that_finds_everything_generated_ends_at_once() -> None:
    engine = build_scripted_engine()
    engine.add(request("length", max_tokens=3, emitted_ids=(65, 66, 67)))
    engine.add(request("stop", max_tokens=30, emitted_ids=(65, EOS_ID)))
    outcome = run(engine)
    assert outcome.tokens == {}
    assert (outcome.ends["length"].reason, outcome.ends["length"].num_output_tokens) == (FinishReason.LENGTH, 3)
    assert (outcome.ends["stop"].reason, outcome.ends["stop"].stop_token_id) == (FinishReason.STOP, EOS_ID)


def test_finish_right_after_add_cuts_even_a_complete_epoch_shorter() -> None:
    engine = build_scripted_engine()
    engine.add(request("whole", max_tokens=3, emitted_ids=(65, 66, 67)))
    engine.finish("whole", 2)
    engine.add(request("part", max_tokens=30, emitted_ids=(65, 66, 67)))
    engine.finish("part", 1)
    outcome = run(engine)
    assert outcome.tokens == {}
    ends = [(outcome.ends[name].reason, outcome.ends[name].num_output_tokens) for name in ("whole", "part")]
    assert ends == [(FinishReason.STOP, 2), (FinishReason.STOP, 1)]


# ----------------------------------------------------------------------------------------------------- cache and books


def test_the_next_turn_resumes_at_the_stable_end() -> None:
    engine = build_scripted_engine()
    first = list(b"You are a poet. Write about the sea.")
    engine.add(request("t1", first, conversation_id="c", stable_lengths=(len(first),), max_tokens=10))
    answer = run(engine).tokens["t1"]
    second = first + answer + list(b" And now about the sky.")
    engine.add(request("t2", second, conversation_id="c", stable_lengths=(len(second),)))
    end = run(engine).ends["t2"]
    assert end.cache.cached_tokens >= len(first)
    assert end.cache.cache_write_tokens == len(second) - end.cache.cached_tokens
    assert end.cache.restored_from == "gpu"


def test_a_prefix_that_left_the_pool_comes_back_from_host_memory() -> None:
    engine = build_scripted_engine(num_pages=24, num_host_pages=200, max_num_seqs=1)
    prompts = {f"c{i}": [65 + i] * 60 for i in range(8)}
    for name, ids in prompts.items():  # eight conversations of a pool's third each
        engine.add(request(f"{name}.1", ids, conversation_id=name, stable_lengths=(len(ids),)))
    answers = run(engine).tokens
    for name, ids in prompts.items():
        longer = [*ids, *answers[f"{name}.1"], 97, 98, 99]
        req = request(f"{name}.2", longer, conversation_id=name, stable_lengths=(len(longer),))
        engine.add(req)
        outcome = run(engine)
        assert outcome.tokens[req.request_id] == script(req, 8)
        answer = outcome.ends[req.request_id].cache
        assert answer.cached_tokens >= len(ids) - 1
    assert answer.restored_from == "host"


def test_mode_off_neither_reads_nor_retains() -> None:
    engine = build_scripted_engine()
    prompt = "x" * 100
    engine.add(request("writes", prompt))
    run(engine)
    engine.add(request("off", prompt, cache=CacheHints(mode="off")))
    assert run(engine).ends["off"].cache.cached_tokens == 0


def test_counters_add_up() -> None:
    engine = build_scripted_engine(max_num_seqs=3)
    for i in range(5):
        engine.add(request(f"r{i}", "prompt " * (i + 1), max_tokens=6))
    outcome = run(engine)
    stats = engine.stats()
    assert stats.generated_tokens == sum(map(len, outcome.tokens.values())) == 30
    assert stats.prompt_tokens == sum(end.num_prompt_tokens for end in outcome.ends.values())
    assert stats.computed_tokens == stats.prompt_tokens - stats.cached_tokens
    assert stats.cached_tokens == sum(end.cache.cached_tokens for end in outcome.ends.values())
    assert stats.decode_rows_sum == 25  # the first token of each comes from its prefill
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_engine_time_counts_only_the_steps_that_a_request_took_part_in() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    engine = build_scripted_engine(max_num_seqs=1, clock=clock)
    engine.add(request("first", max_tokens=4))
    engine.add(request("second", max_tokens=4))
    ends = run(engine).ends
    total = engine.stats().step_time_s
    assert ends["first"].engine_time_s + ends["second"].engine_time_s == pytest.approx(total)
    assert ends["second"].started_at_s is not None
    assert ends["first"].first_token_at_s is not None
    assert ends["second"].started_at_s > ends["first"].first_token_at_s


def test_preempted_requests_give_the_same_output() -> None:
    engine = build_scripted_engine(num_pages=40, max_num_seqs=6, max_context=300)
    requests = [request(f"r{i}", "p" * (5 + i), max_tokens=100, seed=i) for i in range(6)]
    for _ in range(8):  # answers this short make admission optimistic
        engine.add(request(f"short{_}", max_tokens=100, stop_token_ids=tuple(range(32, 127))))
    run(engine)
    for req in requests:
        engine.add(req)
    outcome = run(engine)
    assert engine.stats().num_preemptions > 0
    for req in requests:
        assert outcome.tokens[req.request_id] == script(req, 100)


def test_lanes_share_the_engine_8_to_4_to_1_under_saturation() -> None:
    engine = build_scripted_engine(max_num_seqs=2, num_pages=400)
    for i in range(120):
        for lane in ("low", "normal", "high"):
            engine.add(request(f"{lane}.{i}", f"{lane:6} {i:4}", lane=lane, max_tokens=3))
    started: list[str] = []
    engine.on_started = started.extend
    while len(started) < 130:
        engine.step()
    lanes = [name.split(".")[0] for name in started[:130]]
    assert {lane: lanes.count(lane) for lane in set(lanes)} == {"high": 80, "normal": 40, "low": 10}


def test_a_low_job_gets_through_a_high_lane_that_never_empties() -> None:
    engine = build_scripted_engine(max_num_seqs=1, num_pages=400)
    engine.add(request("patient", lane="low", max_tokens=2))
    outcome = Outcome()
    for i in range(100):
        engine.add(request(f"high.{i}", lane="high", max_tokens=2))
        outcome.take(engine.step())
        if "patient" in outcome.ends:
            return
    raise AssertionError("the low lane starves")


def test_one_tenants_flood_does_not_delay_anothers_job() -> None:
    engine = build_scripted_engine(max_num_seqs=1, num_pages=400)
    for i in range(200):
        engine.add(request(f"flood.{i}", tenant="flood", max_tokens=2))
    for _ in range(20):
        engine.step()
    engine.add(request("lone", tenant="lone", max_tokens=2))
    started: list[str] = []
    engine.on_started = started.extend
    while "lone" not in started:
        engine.step()
    assert len(started) <= 12  # a tenant's turn is 64 tokens, some ten of these jobs; 180 are waiting


def test_an_engine_without_work_steps_to_nothing() -> None:
    engine = build_scripted_engine()
    assert not engine.has_work()
    assert engine.step() == []
    assert engine.stats().num_steps == 0


def test_other_threads_may_add_and_cancel_while_it_steps() -> None:
    engine = build_scripted_engine(num_pages=400)

    def produce(worker: int) -> None:
        for i in range(50):
            engine.add(request(f"{worker}.{i}", max_tokens=5))
            if i % 5 == 0:
                engine.cancel(f"{worker}.{i}")

    threads = [threading.Thread(target=produce, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    outcome = Outcome()
    while any(thread.is_alive() for thread in threads) or engine.has_work():
        outcome.take(engine.step())
    for thread in threads:
        thread.join()
    assert len(outcome.ends) == 200
    kept = [end for end in outcome.ends.values() if end.reason is FinishReason.LENGTH]
    assert len(kept) >= 160
