"""Times whole decode steps and prefills of Gemma 4 with random weights: the model as it serves, under one CUDA graph.

    python kernels/bench/bench_step.py [--out FILE.json] [--shape FILE.json] [--cases decode:64:168 prefill:8192]

A case is `decode:rows:ctx` (one captured step: plan, all layers, logits, greedy sampling) or `prefill:tokens[:chunk]`
(eager, chunk after chunk, the last row's logits). A floor is the sum over phases (projections, attention of each kind,
head) of the larger of bytes over read bandwidth and FLOPs over matmul rate, both measured in the same run.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gewell_kernels import ops
from gewell_kernels import paged_attention as attention
from gewell_kernels.batch import AttentionBatch
from gewell_kernels.layout import KVLayout, LayerKV
from gewell_kernels.reference.worlds import make_batch
from measure import ceilings, environment

from gewell.config import LayerKind, ModelConfig
from gewell.model.gemma import ForwardBatch, GemmaModel

BF16 = torch.bfloat16
DEFAULT_CASES = (
    "decode:1:168 decode:64:168 decode:256:168 decode:64:2048 decode:8:32768 "
    "prefill:1024 prefill:8192 prefill:32768:8192"
)


class Bench:
    def __init__(self, shape: Path, roof: dict[str, float]) -> None:
        self.roof = roof
        self.config = ModelConfig.from_file(shape)
        self.model = GemmaModel.random(self.config, dtype=BF16, device="cuda")
        kinds = [layer.kind for layer in self.config.layers]
        self.layer_of = {kind: self.model.layer_kv[kinds.index(kind)] for kind in set(kinds)}
        self.num_layers = {kind: kinds.count(kind) for kind in set(kinds)}
        self.pages = torch.empty(0, 0, dtype=BF16, device="cuda")

    def batch(self, q_lens: list[int], kv_lens: list[int]) -> tuple[ForwardBatch, int]:
        """Sliding pages first in the pool, then full ones; the pool's size in pages."""
        batches: dict[LayerKind, AttentionBatch] = {}
        num_pages = 0
        for kind, layer in self.layer_of.items():
            window = self.config.sliding_window if kind is LayerKind.SLIDING else None
            own, own_pages = make_batch(layer, q_lens, kv_lens, sliding_window=window, device="cuda")
            shift = torch.where(own.slot_mapping >= 0, num_pages * layer.page_tokens, 0)
            batches[kind] = replace(own, page_table=own.page_table + num_pages, slot_mapping=own.slot_mapping + shift)
            num_pages += own_pages
        ids = torch.randint(1000, 200_000, (sum(q_lens),), device="cuda") % self.config.vocab_size
        return ForwardBatch(
            input_ids=ids, sliding=batches.get(LayerKind.SLIDING), full=batches.get(LayerKind.FULL)
        ), num_pages

    def fill_pool(self, num_pages: int) -> None:
        if self.pages.shape[0] >= num_pages:
            return
        self.pages = torch.empty(0, 0, dtype=BF16, device="cuda")
        torch.cuda.empty_cache()
        page_elems = self.model.kv_plan.geometry.page_bytes // 2
        self.pages = torch.empty(num_pages, page_elems, dtype=BF16, device="cuda")
        for part in self.pages.split(100):
            part.normal_()

    def planned(self, batch: ForwardBatch) -> ForwardBatch:
        sliding, full = (
            ops.plan_attention(one, self.layer_of[kind], 2) if one is not None else None
            for kind, one in ((LayerKind.SLIDING, batch.sliding), (LayerKind.FULL, batch.full))
        )
        return replace(batch, sliding=sliding, full=full)

    def decode(self, rows: int, ctx: int, replays: int = 15) -> dict[str, Any]:
        padded = -(-rows // 16) * 16
        batch, num_pages = self.batch([1] * padded, [ctx] * rows + [0] * (padded - rows))
        self.fill_pool(num_pages)
        zeros = torch.zeros(padded, device="cuda")
        settings = (zeros, zeros.int(), zeros + 1, zeros, zeros.long(), zeros.long())

        def step() -> torch.Tensor:
            hidden = self.model.forward(self.planned(batch), self.pages)
            return ops.sample(self.model.logits(hidden), *settings)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            drawn = step()
        times = self.timed(graph.replay, replays)
        assert bool(((drawn >= 0) & (drawn < self.config.vocab_size)).all())
        groups = profile(graph.replay)
        floor = self.floor_ms([1] * rows, [ctx] * rows, rows)
        row = self.row(
            "decode", times, floor, rows=rows, ctx=ctx, tok_s=round(rows / statistics.median(times) * 1e3, 1)
        )
        row["groups_ms"] = groups
        row["sm_mhz"] = sm_clock()
        if self.config.moe is not None:
            row["experts_touched"] = self.experts_touched(batch, rows)
        return row

    def prefill(self, tokens: int, chunk: int, repeats: int = 3) -> dict[str, Any]:
        chunks = [(min(chunk, tokens - at), min(at + chunk, tokens)) for at in range(0, tokens, chunk)]
        batches = []
        for q_len, kv_len in chunks:
            batch, num_pages = self.batch([q_len], [kv_len])
            self.fill_pool(num_pages)
            batches.append(batch)

        def run() -> None:
            for batch in batches:
                hidden = self.model.forward(batch, self.pages)
            self.model.logits(hidden[-1:])

        run()
        times = self.timed(run, repeats)
        floor = sum(self.floor_ms([q], [kv], 1 if kv == tokens else 0) for q, kv in chunks)
        median = statistics.median(times)
        row = self.row("prefill", times, floor, rows=1, ctx=tokens, chunk=chunk, tok_s=round(tokens / median * 1e3, 1))
        row["ttft_ms"] = row.pop("step_ms")
        row["groups_ms"] = profile(run)
        return row

    def experts_touched(self, batch: ForwardBatch, rows: int) -> float:
        """Distinct experts a layer, on average, that the step's real rows chose."""
        counts: list[int] = []

        def observe(name: str, tensor: torch.Tensor) -> None:
            if name.startswith("router_index"):
                counts.append(int(tensor[:rows].unique().numel()))

        self.model.forward(batch, self.pages, observe)
        return round(statistics.mean(counts), 1)

    def timed(self, run: Callable[[], Any], repeats: int) -> list[float]:
        run()
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return times

    def floor_ms(self, q_lens: list[int], kv_lens: list[int], num_logits: int) -> float:
        """Projections, sliding attention, full attention and head, each max(bytes / read, FLOPs / matmul)."""
        tokens = sum(q_lens)
        weights = [slot.target for name, slot in self.model.weight_slots() if not name.startswith("embed")]
        projections = sum(weight.numel() for weight in weights if weight.ndim == 2)
        head = self.config.vocab_size * self.config.hidden_size
        phases = [(2.0 * projections, 2.0 * projections * tokens)]
        if self.config.moe is not None:
            # Uniform routing: an expert is left alone by all tokens with probability (1 - k / E) ^ tokens.
            experts = sum(weight.numel() for weight in weights if weight.ndim == 3)
            share = self.config.moe.num_experts_per_token / self.config.moe.num_experts
            phases.append((2.0 * experts * (1 - (1 - share) ** tokens), 2.0 * experts * share * tokens))
        if num_logits:
            phases.append((2.0 * head, 2.0 * head * num_logits))
        for kind, layer in self.layer_of.items():
            window = self.config.sliding_window if kind is LayerKind.SLIDING else None
            row_bytes = layer.num_planes * layer.num_kv_heads * layer.row_elems * 2
            num_bytes = flops = 0.0
            for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
                read = kv_len if window is None else min(kv_len, q_len + window - 1)
                num_bytes += read * row_bytes
                pairs = sum(min(kv_len - q_len + i + 1, window or kv_len) for i in range(q_len))
                flops += 4.0 * pairs * self.num_q_heads(kind) * layer.head_dim
            phases.append((num_bytes * self.num_layers[kind], flops * self.num_layers[kind]))
        return sum(
            max(num_bytes / self.roof["read_gb_s"] / 1e6, flops / self.roof["matmul_tflop_s"] / 1e9)
            for num_bytes, flops in phases
        )

    def num_q_heads(self, kind: LayerKind) -> int:
        return next(layer.num_q_heads for layer in self.config.layers if layer.kind is kind)

    def row(self, bench: str, times: list[float], floor: float, **fields: Any) -> dict[str, Any]:
        median = statistics.median(times)
        return {
            "bench": bench,
            "weights": "bf16",
            "maths": "bf16",
            "kv": "bf16",
            "kv_layout": "v_only",
            **fields,
            "step_ms": round(median, 3),
            "floor_ms": round(floor, 3),
            "share_of_floor": round(floor / median, 3),
            "repeats": len(times),
            "min": round(min(times), 3),
            "median": round(median, 3),
            "max": round(max(times), 3),
        }


def sm_clock() -> int:
    """MHz just now: says whether the device ran slower to keep within its power limit."""
    text = subprocess.run(
        ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"], capture_output=True, text=True
    ).stdout
    return int(text.split()[0]) if text.strip() else 0


def profile(run: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of one run per group of kernels, and what is left between them."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    groups: dict[str, float] = defaultdict(float)
    spans = []
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            groups[group_of(event.name)] += event.time_range.elapsed_us() / 1e3
            spans.append((event.time_range.start, event.time_range.end))
    if spans:
        whole = (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e3
        groups["between kernels"] = whole - sum(groups.values())
        groups["launches"] = len(spans)
    return {name: round(value, 3) for name, value in sorted(groups.items(), key=lambda item: -item[1])}


def group_of(kernel: str) -> str:
    for part, group in (
        ("decode_plain", "attention plain"),
        ("decode_shared", "attention v_only"),
        ("prefill_plain", "attention plain"),
        ("prefill_shared", "attention v_only"),
        ("rotate_keys", "attention v_only"),
        ("join_parts", "attention join"),
        ("plan_decode", "attention plan"),
        ("write_kv", "write_kv"),
        ("residual_norm", "norms"),
        ("rms_norm", "norms"),
        ("gelu_mul", "gelu_mul"),
        ("_linear", "projections"),
        ("_sample", "sample"),
        ("soft_cap", "soft-cap"),
        ("chunk_maxima", "sample"),
        ("gate_up_kernel", "experts"),
        ("down_kernel", "experts"),
        ("place_pairs", "experts"),
        ("sum_pairs", "experts"),
        ("gemm", "projections"),
        ("nvjet", "projections"),
        ("cutlass", "projections"),
        ("gemv", "projections"),
        ("splitK", "projections"),
    ):
        if part in kernel:
            return group
    return f"other: {kernel[:40]}"


def override_tiles(sliding: str | None, full: str | None) -> None:
    choose = attention.decode_tiles

    def chosen(layer: LayerKV, kv_bytes: int, device: torch.device) -> attention.DecodeTiles:
        text = sliding if layer.layout is KVLayout.PLAIN else full
        if text is None:
            return choose(layer, kv_bytes, device)
        keys, heads, warps, stages, programs = map(int, text.split("."))
        return attention.DecodeTiles(
            keys=keys, heads=heads, num_warps=warps, num_stages=stages, programs_per_sm=programs
        )

    attention.decode_tiles = chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the result rows here, as JSON")
    parser.add_argument("--shape", type=Path, default=Path(__file__).parent / "gemma4-31b.json")
    parser.add_argument("--cases", nargs="+", default=DEFAULT_CASES.split(), help="default: %(default)s")
    parser.add_argument(
        "--sliding-tiles", help="keys.heads.warps.stages.programs_per_sm, to try others than the chosen"
    )
    parser.add_argument("--full-tiles", help="likewise for full layers")
    options = parser.parse_args()
    override_tiles(options.sliding_tiles, options.full_tiles)
    torch.manual_seed(0)
    roof = ceilings()
    torch.cuda.empty_cache()
    print({name: round(value, 1) for name, value in roof.items()}, flush=True)
    bench = Bench(options.shape, roof)
    rows = []
    with torch.inference_mode():
        for case in options.cases:
            kind, *numbers = case.split(":")
            sizes = [int(number) for number in numbers]
            if kind == "decode":
                row = bench.decode(sizes[0], sizes[1])
            else:
                row = bench.prefill(sizes[0], sizes[1] if len(sizes) > 1 else sizes[0])
            rows.append({"shape": options.shape.stem, **row})
            print(json.dumps(rows[-1]), flush=True)
            if options.out:
                command = "python kernels/bench/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
                document = {**environment(), "command": command, "ceilings": roof, "rows": rows}
                options.out.write_text(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
