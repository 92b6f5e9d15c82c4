"""What `gewell bench gpu` measures: the real engine on random weights of a real model's shape.

Workloads: `decode` (step time as the difference of two runs, so that prefill drops out), `prefill` (time to the first
token), `turns` (conversations that grow while one-off prompts pass by), `host` (the host's part of a decode step).
Token ids are uniform in [1000, 200000), Python's `random.Random(0)`.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from gewell_kernels.layout import KVLayout

from gewell.config import ModelConfig
from gewell.engine.api import FinishedEvent, TokensEvent
from gewell.engine.build import EngineOptions, assemble
from gewell.engine.engine import PagedEngine
from gewell.model.gemma import GemmaModel
from gewell.request import EngineRequest
from gewell.sampling import SamplingParams

Progress = Callable[[str], None]


@dataclass(slots=True)
class Outcome:
    """One batch of requests, awaited: seconds, and what came back."""

    seconds: float
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, FinishedEvent] = field(default_factory=dict)


class GpuBench:
    def __init__(self, config_path: Path, *, full_layout: KVLayout = KVLayout.V_ONLY, max_num_seqs: int = 256) -> None:
        start = time.perf_counter()
        config = ModelConfig.from_file(config_path)
        model = GemmaModel.random(config, dtype=torch.bfloat16, device="cuda", full_layout=full_layout)
        torch.cuda.synchronize()
        self.weights_s = time.perf_counter() - start
        options = EngineOptions(
            device="cuda",
            full_layout=full_layout,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=8192,
            max_context=40_960,
        )
        start = time.perf_counter()
        self.engine: PagedEngine = assemble(model, options, name=config_path.stem, fingerprint="random")
        self.assemble_s = time.perf_counter() - start
        self._random = random.Random(0)
        self.base = {
            "engine": "gewell",
            "shape": config_path.stem,
            "weights": "bf16",
            "maths": "bf16",
            "kv": "bf16",
            "kv_layout": str(full_layout),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "date": date.today().isoformat(),
        }

    def ids(self, num: int) -> list[int]:
        return [self._random.randrange(1000, 200_000) for _ in range(num)]

    def submit(self, requests: Sequence[EngineRequest]) -> Outcome:
        """Add all at once and step until all have ended."""
        outcome = Outcome(0.0)
        start = time.perf_counter()
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work():
            for event in self.engine.step():
                if isinstance(event, TokensEvent):
                    outcome.tokens.setdefault(event.request_id, []).extend(event.token_ids)
                else:
                    outcome.ends[event.request_id] = event
        outcome.seconds = time.perf_counter() - start
        return outcome

    @staticmethod
    def request(name: str, ids: list[int], max_tokens: int, **kwargs: Any) -> EngineRequest:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return EngineRequest(request_id=name, prompt_ids=ids, sampling=sampling, **kwargs)

    # --------------------------------------------------------------------------------------------------- workloads

    def decode(self, rows: int, ctx: int, *, long: int = 72, short: int = 8, repeats: int = 2) -> dict[str, Any]:
        """Step time of `rows` sequences: two output lengths, difference of the wall times over that of the lengths."""
        times = []
        for repeat in range(repeats + 1):
            pair = []
            for num in (short, long):
                requests = [self.request(f"d{i}", self.ids(ctx), num) for i in range(rows)]
                pair.append(self.submit(requests).seconds)
            if repeat:  # the first one records graphs and compiles kernels
                times.append((pair[1] - pair[0]) / (long - short) * 1e3)
        step_ms = min(times)
        name = "decode" if ctx <= 128 else f"decode{ctx // 1024}k"
        row = {"bench": name, "rows": rows, "ctx": ctx, "step_ms": step_ms, "tok_s": rows / step_ms * 1e3}
        return self.base | row | {"repeats": repeats, "max": max(times)}

    def prefill(self, num_tokens: int, *, repeats: int = 2) -> dict[str, Any]:
        times = []
        for repeat in range(repeats + 1):
            seconds = self.submit([self.request("p", self.ids(num_tokens), 1)]).seconds
            if repeat:
                times.append(seconds)
        ttft = min(times)
        row = {"bench": "prefill", "rows": 1, "ctx": num_tokens, "ttft_ms": ttft * 1e3, "tok_s": num_tokens / ttft}
        return self.base | row | {"repeats": repeats, "max": max(times) * 1e3}

    def turns(self, *, conversations: int = 48, rounds: int = 9, one_offs: int = 8) -> dict[str, Any]:
        """Growing conversations, a third of them active in each round, with one-off prompts beside them."""
        histories = [self.ids(2000) for _ in range(conversations)]
        known = [0] * conversations  # tokens of each history that an endless cache would hold
        prompt_tokens = reusable = reused = output = 0
        before = self.engine.stats()
        start = time.perf_counter()
        for round_idx in range(rounds):
            requests, active = [], [c for c in range(conversations) if c % 3 == round_idx % 3]
            for c in active:
                histories[c] += self.ids(400)
                requests.append(
                    self.request(
                        f"c{c}",
                        list(histories[c]),
                        100,
                        conversation_id=f"c{c}",
                        stable_lengths=(len(histories[c]),),
                    )
                )
                prompt_tokens += len(histories[c])
                reusable += known[c]
            requests += [self.request(f"o{i}", self.ids(1000), 100) for i in range(one_offs)]
            outcome = self.submit(requests)
            for c in active:
                reused += outcome.ends[f"c{c}"].cache.cached_tokens
                histories[c] += outcome.tokens[f"c{c}"]
                known[c] = len(histories[c])
            output += sum(len(ids) for ids in outcome.tokens.values())
        seconds = time.perf_counter() - start
        after = self.engine.stats()
        steps = after.num_decode_steps - before.num_decode_steps
        row = {
            "bench": "turns",
            "rows": (after.decode_rows_sum - before.decode_rows_sum) / max(1, steps),
            "seconds": seconds,
            "tok_s": output / seconds,
            "reused": reused / prompt_tokens,
            "reusable": reusable / prompt_tokens,
            "reused_of_reusable": reused / max(1, reusable),
        }
        return self.base | row

    def host_times(self, rows: int, ctx: int = 128) -> dict[str, Any]:
        """Where the host's time of a decode step goes: planning, launching, taking in the results; median ms."""
        requests = [self.request(f"h{i}", self.ids(ctx), 80) for i in range(rows)]
        for request in requests:
            self.engine.add(request)
        scheduler, runner = self.engine._scheduler, self.engine._runner
        times: dict[str, list[float]] = {"plan": [], "launch": [], "collect": []}

        def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any) -> Any:
                start = time.perf_counter()
                result = call(*args)
                times[name].append(time.perf_counter() - start)
                return result

            return wrapper

        plan, launch, collect = scheduler.plan, runner.launch, runner.collect
        scheduler.plan = timed("plan", plan)  # type: ignore[method-assign]  # timed from outside
        runner.launch = timed("launch", launch)  # type: ignore[method-assign]  # timed from outside
        runner.collect = timed("collect", collect)  # type: ignore[method-assign]  # timed from outside
        step_s = []
        while self.engine.has_work():
            start = time.perf_counter()
            self.engine.step()
            step_s.append(time.perf_counter() - start)
        scheduler.plan, runner.launch, runner.collect = plan, launch, collect  # type: ignore[method-assign]  # timed from outside
        middle = {name: 1e3 * sorted(values)[len(values) // 2] for name, values in times.items()}
        return self.base | {"bench": "host", "rows": rows, "step_ms": 1e3 * sorted(step_s)[len(step_s) // 2]} | middle


def run(config_path: Path, parts: Sequence[str], *, progress: Progress = lambda line: None) -> list[dict[str, Any]]:
    """Run the named parts in order: "decode:ROWSxCTX", "prefill:TOKENS", "turns", "host:ROWS"."""
    bench = GpuBench(config_path)
    progress(
        f"weights {bench.weights_s:.1f} s, engine {bench.assemble_s:.1f} s, {bench.engine.stats().num_pages} pages"
    )
    rows = []
    for part in parts:
        name, _, argument = part.partition(":")
        if name == "decode":
            num_rows, _, ctx = argument.partition("x")
            rows.append(bench.decode(int(num_rows), int(ctx)))
        elif name == "prefill":
            rows.append(bench.prefill(int(argument)))
        elif name == "host":
            rows.append(bench.host_times(int(argument)))
        else:
            rows.append(bench.turns())
        progress(json.dumps({key: value for key, value in rows[-1].items() if key not in bench.base}))
    return rows
