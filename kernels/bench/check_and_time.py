"""Checks every kernel on the GPU against float64, then times it at Gemma 4 31B's shapes.

    python kernels/bench/check_and_time.py [--out FILE.json] [--skip-checks] [--keep-going] [--tune]

A wrong kernel is not timed unless asked: failed checks end the run with status 1. Times are medians over CUDA graph
replays that walk through the layers of a 58 GB pool, as a model does; shares are of ceilings measured in the same run.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gewell_kernels import paged_attention as attention
from gewell_kernels.copy_pages import copy_pages, poison_pages
from gewell_kernels.gelu_mul import gelu_mul
from gewell_kernels.layout import KVLayout, LayerKV
from gewell_kernels.moe_experts import moe_experts
from gewell_kernels.reference.gelu_mul import gelu_mul as reference_gelu_mul
from gewell_kernels.reference.moe_experts import moe_experts as reference_moe
from gewell_kernels.reference.paged_attention import paged_attention as reference_attention
from gewell_kernels.reference.residual_norm import residual_norm as reference_residual_norm
from gewell_kernels.reference.rms_norm import rms_norm as reference_rms_norm
from gewell_kernels.reference.worlds import make_batch, make_world, with_image_runs
from gewell_kernels.reference.write_kv import write_kv as reference_write_kv
from gewell_kernels.residual_norm import residual_norm
from gewell_kernels.rms_norm import rms_norm
from gewell_kernels.write_kv import write_kv
from measure import ceilings, environment, format_row, result_row, time_ms
from shapes import (
    HIDDEN,
    INTERMEDIATE,
    NUM_FULL_LAYERS,
    NUM_Q_HEADS,
    NUM_SLIDING_LAYERS,
    PAGE_ELEMS,
    SLIDING_WINDOW,
    VOCAB,
    full_layer,
    projections,
    sliding_layer,
)
from torch import Tensor

BF16, EPS = torch.bfloat16, 1e-6
TOLERANCE = 6e-3  # relative Frobenius error: a few roundings of 2^-9, one of them of the softmax weights
POOL_PAGES = 4400


FAILURES: list[str] = []


def fail(message: str) -> None:
    """Note a failure and go on: one run shows them all."""
    FAILURES.append(message)
    print("FAILED", message, flush=True)


def compare(name: str, actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    difference = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12)
    error = float(difference)
    print(f"check {name:86} {error:.2e}", flush=True)
    if not error <= tolerance:
        fail(f"{name}: relative error {error:.3g}, want at most {tolerance}")


def replays_equal(name: str, launch: Callable[[], Tensor]) -> None:
    """Two graph replays and the eager call give the same bits."""
    eager = launch().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launch()
    for _ in range(2):
        captured.fill_(float("nan"))
        graph.replay()
        if not torch.equal(captured, eager):
            fail(f"{name}: a graph replay differs from the eager call")


def check_rows() -> None:
    for rows in (1, 5, 512):
        x = (torch.randn(rows, HIDDEN, device="cuda") * 20).to(BF16)
        branch = torch.randn_like(x)
        w, w_next = torch.randn(HIDDEN, device="cuda"), torch.randn(HIDDEN, device="cuda")
        compare(f"rms_norm {rows}x{HIDDEN}", rms_norm(x, w, EPS), reference_rms_norm(x, w, EPS))
        replays_equal("rms_norm", partial(rms_norm, x, w, EPS))
        want = reference_residual_norm(x, branch, w, w_next, EPS, 0.03)
        have = residual_norm(x.clone(), branch, w, w_next, EPS, 0.03)
        compare(f"residual_norm {rows}x{HIDDEN}: stream", have[0], want[0])
        compare(f"residual_norm {rows}x{HIDDEN}: normed", have[1], want[1])
        gate_up = torch.randn(rows, 2 * INTERMEDIATE, device="cuda", dtype=BF16) * 3
        compare(f"gelu_mul {rows}x{2 * INTERMEDIATE}", gelu_mul(gate_up), reference_gelu_mul(gate_up))
        if rows > 1:
            x[1, 3] = float("nan")
            bad = rms_norm(x, w, EPS).isnan().any(dim=1)
            if bad.sum() != 1 or not bad[1]:
                fail("rms_norm: NaN left its row")
    pages = torch.randn(40, PAGE_ELEMS, device="cuda", dtype=BF16)
    before = pages.clone()
    copy_pages(pages, torch.tensor([3, 30], device="cuda"), torch.tensor([7, 0], device="cuda"))
    poison_pages(pages, torch.tensor([9], device="cuda"))
    before[7], before[0] = before[3].clone(), before[30].clone()
    if not pages[9].isnan().all() or not torch.equal(
        torch.cat((pages[:9], pages[10:])), torch.cat((before[:9], before[10:]))
    ):
        fail("copy_pages or poison_pages: a page differs from what was asked")


def layer_kinds() -> Iterator[tuple[str, LayerKV, int | None]]:
    yield "sliding", replace(sliding_layer(), layer_offset=0), SLIDING_WINDOW
    for layout in KVLayout:
        yield f"full {layout}", full_layer(layout=layout), None


def check_write_kv() -> None:
    for name, layer, window in layer_kinds():
        world = make_world(
            layer, [1, 1, 1500, 700, 1], [9, 2000, 1500, 7000, 1], sliding_window=window, dtype=BF16, device="cuda"
        )
        parts = 2 if window else 1
        qkv = torch.randn(2203, (NUM_Q_HEADS + parts * layer.num_kv_heads) * layer.head_dim, device="cuda", dtype=BF16)
        q_w, k_w = (torch.rand(layer.head_dim, device="cuda") + 0.5 for _ in range(2))
        world.batch.positions[0] = 262143  # far out, where a fast sine would be off
        world.batch.positions[1] = 131071
        want_pages, pages = world.pages.clone(), world.pages.clone()
        want = reference_write_kv(qkv, NUM_Q_HEADS, q_w, k_w, EPS, 1.0, True, want_pages, layer, world.batch)
        have = write_kv(qkv, NUM_Q_HEADS, q_w, k_w, EPS, 1.0, True, pages, layer, world.batch)
        for part, actual, expected in zip(("q", "k_new", "v_new"), have, want, strict=True):
            if expected is not None:
                compare(f"write_kv {name}: {part}", actual, expected)
        if not torch.equal(pages.isnan(), want_pages.isnan()):
            fail(f"write_kv {name}: wrote where it should not, or did not where it should")
        compare(f"write_kv {name}: pages", pages.nan_to_num(), want_pages.nan_to_num())
        q_only = write_kv(
            qkv[:, : NUM_Q_HEADS * layer.head_dim], NUM_Q_HEADS, q_w, k_w, EPS, 1.0, True, pages, layer, world.batch
        )
        compare(f"write_kv {name}: q alone", q_only[0], want[0])


def check_attention() -> None:
    short = [1 + 37 * i % 300 for i in range(512)]
    cases: dict[str, tuple[list[int], list[int], int]] = {
        "decode 1 row x 1": ([1], [1], 1),
        "decode 1 x 1023": ([1], [1023], 1),
        "decode 1 x 200000": ([1], [200_000], 1),
        "decode 7 ragged": ([1] * 7, [1024, 1, 1025, 0, 3000, 16, 40_000], 7),
        "decode 512 short": ([1] * 512, short, 512),
        "prefill 1500 of 1500": ([1500], [1500], 0),
        "prefill ragged": ([300, 17, 1, 2049, 64], [5000, 17, 900, 2049, 60_000], 0),
        "mixed": ([1, 1, 1, 130, 5], [700, 20_000, 33, 4000, 5], 3),
    }
    for name, layer, window in layer_kinds():
        for case, (q_lens, kv_lens, num_decode) in cases.items():
            world = make_world(
                layer, q_lens, kv_lens, sliding_window=window, dtype=BF16, device="cuda", num_decode_seqs=num_decode
            )
            num_tokens = sum(q_lens)
            q = torch.randn(num_tokens, NUM_Q_HEADS, layer.head_dim, device="cuda").div(layer.head_dim**0.5).to(BF16)
            k_weight = torch.rand(layer.head_dim, device="cuda") + 0.5
            new = (None, None)
            if window:
                new = tuple(
                    torch.randn(num_tokens, layer.num_kv_heads, layer.head_dim, device="cuda", dtype=BF16)
                    for _ in range(2)
                )
            batches = {"": world.batch}
            if window and case == "prefill ragged":
                batches[" with images"] = with_image_runs(world.batch, [(10, 200), (320, 600), (601, 1900)])
            for suffix, batch in batches.items():
                arguments = (q, *new, k_weight, world.pages, layer, batch)
                actual = attention.paged_attention(*arguments)
                compare(f"attention {name}: {case}{suffix}", actual, reference_attention(*arguments))
                replays_equal(f"attention {name}: {case}", partial(attention.paged_attention, *arguments))
            if case == "decode 7 ragged":
                world.pages[world.batch.page_table[4, 0].long()] = float("nan")
                bad = attention.paged_attention(q, None, None, k_weight, world.pages, layer, world.batch).isnan()
                if bad.any(dim=1).nonzero().tolist() != [[4]]:
                    fail(f"attention {name}: NaN of row 4 is in rows {bad.any(dim=1).nonzero().tolist()}")
            del world
    torch.cuda.empty_cache()


def check_sample() -> None:
    from gewell_kernels.reference.sample import kept_ids
    from gewell_kernels.reference.sample import sample as reference_sample
    from gewell_kernels.sample import sample

    rows = 24
    logits = torch.randn(rows, VOCAB, device="cuda") * 3
    logits[::3] = logits[::3].to(BF16).float()  # many equal logits
    heat = torch.tensor([0.0, 0.7, 1.0, 1.3] * 6, device="cuda")
    top_k = torch.tensor([0, 64, 1, 5, 1000, 0] * 4, dtype=torch.int32, device="cuda")
    top_p = torch.tensor([1.0, 0.95, 0.5] * 8, device="cuda")
    min_p = torch.tensor([0.0, 0.0, 0.05, 0.0] * 6, device="cuda")
    seeds = torch.randint(-(2**62), 2**62, (rows,), device="cuda")
    positions = torch.arange(rows, device="cuda") * 4099
    arguments = (logits, heat, top_k, top_p, min_p, seeds, positions)
    drawn = sample(*arguments)
    on_cpu = [argument.cpu() for argument in arguments]
    narrow = [
        row
        for row in range(rows)
        if float(heat[row]) == 0.0
        or kept_ids(logits[row].cpu(), float(heat[row]), int(top_k[row]), float(top_p[row]), float(min_p[row])).numel()
        < 5000
    ]  # the reference draws one id at a time in Python
    want = reference_sample(*(argument[narrow] for argument in on_cpu))
    differing = int((drawn.cpu()[narrow] != want).sum())
    print(f"check sample: {len(narrow)} rows, {differing} differ from float64", flush=True)
    if differing or len(narrow) < rows // 2:
        fail(f"sample: {differing} of {len(narrow)} rows differ")
    logits[5] = float("nan")
    again = sample(*arguments)
    rest = [row for row in range(rows) if row != 5]
    if not torch.equal(again[rest], drawn[rest]):
        fail("sample: NaN in one row changes another row's token")


def check_moe() -> None:
    """Gemma 4 26B-A4B: 128 experts of 704, 8 a token, hidden 2816."""
    gate_up = (torch.randn(128, 1408, 2816, device="cuda") / 2816**0.5).to(BF16)
    down = (torch.randn(128, 2816, 704, device="cuda") / 704**0.5).to(BF16)
    for tokens in (1, 16, 100, 3000):
        x = torch.randn(tokens, 2816, device="cuda", dtype=BF16)
        idx = torch.rand(tokens, 128, device="cuda").topk(8, dim=1).indices
        weight = torch.rand(tokens, 8, device="cuda")
        actual = moe_experts(x, idx, weight, gate_up, down)
        some = slice(0, 100)
        compare(f"moe {tokens}", actual[some], reference_moe(x[some], idx[some], weight[some], gate_up, down))
        replays_equal(f"moe {tokens}", partial(moe_experts, x, idx, weight, gate_up, down))


def time_moe(roof: dict[str, float]) -> Iterator[dict[str, Any]]:
    weights = [
        (
            (torch.randn(128, 1408, 2816, device="cuda") / 2816**0.5).to(BF16),
            (torch.randn(128, 2816, 704, device="cuda") / 704**0.5).to(BF16),
        )
        for _ in range(2)
    ]
    for tokens in (1, 16, 64, 256, 8192):
        x = torch.randn(tokens, 2816, device="cuda", dtype=BF16)
        idx = torch.rand(tokens, 128, device="cuda").topk(8, dim=1).indices
        weight = torch.rand(tokens, 8, device="cuda")
        touched = int(idx.unique().numel())
        yield result_row(
            "moe_experts",
            time_ms([partial(moe_experts, x, idx, weight, *pair) for pair in weights]),
            num_bytes=touched * 3 * 704 * 2816 * 2,
            flops=2 * tokens * 8 * 3 * 704 * 2816,
            roof=roof,
            rows=tokens,
            experts_touched=touched,
        )


CHECKS: dict[str, Callable[[], None]] = {
    "rows": check_rows,
    "write_kv": check_write_kv,
    "attention": check_attention,
    "sample": check_sample,
    "moe": check_moe,
}


def time_everything(parts: list[str], roof: dict[str, float], tune: bool) -> Iterator[dict[str, Any]]:
    if {"decode", "prefill", "rows"} & set(parts):
        pages = torch.empty(POOL_PAGES, PAGE_ELEMS, device="cuda", dtype=BF16)
        for part in pages.split(200):
            part.normal_()
        if "decode" in parts:
            yield from time_decode(pages, roof, tune)
        if "prefill" in parts:
            yield from time_prefill(pages, roof, tune)
        if "rows" in parts:
            yield from time_rows(pages, roof)
        del pages
        torch.cuda.empty_cache()
    if "moe" in parts:
        yield from time_moe(roof)
    if "projections" in parts:
        yield from time_projections(roof)


def attention_launches(
    pages: Tensor, layers: list[LayerKV], q_lens: list[int], kv_lens: list[int], window: int | None, num_decode: int
) -> list[Callable[[], Tensor]]:
    """One launch per layer, over shuffled pages of the pool."""
    layer = layers[0]
    batch, _ = make_batch(
        layer, q_lens, kv_lens, sliding_window=window, device="cuda", num_pages=POOL_PAGES, num_decode_seqs=num_decode
    )
    batch = attention.plan_attention(batch, layer, 2)
    q = torch.randn(sum(q_lens), NUM_Q_HEADS, layer.head_dim, device="cuda").div(layer.head_dim**0.5).to(BF16)
    k_weight = torch.rand(layer.head_dim, device="cuda") + 0.5
    new = (None, None)
    if window and num_decode < len(q_lens):
        new = tuple(torch.randn(sum(q_lens), 16, 256, device="cuda", dtype=BF16) for _ in range(2))
    return [partial(attention.paged_attention, q, *new, k_weight, pages, one, batch) for one in layers]


def time_decode(pages: Tensor, roof: dict[str, float], tune: bool) -> Iterator[dict[str, Any]]:
    sliding = [sliding_layer(i) for i in range(0, NUM_SLIDING_LAYERS, 5)]
    cases = [
        (sliding, SLIDING_WINDOW, rows, ctx) for rows, ctx in ((1, 168), (64, 168), (256, 168), (1, 2048), (64, 2048))
    ]
    for layout in (KVLayout.V_ONLY, KVLayout.V_ROTK, KVLayout.PLAIN):
        full = [full_layer(i, layout) for i in range(NUM_FULL_LAYERS)]
        lengths = ((64, 2048), (8, 32768), (64, 8192), (1, 131072))
        if layout is KVLayout.V_ONLY:
            lengths = ((1, 168), (64, 168), (256, 168), *lengths)
        cases += [(full, None, rows, ctx) for rows, ctx in lengths]
    choose = attention.decode_tiles
    for layers, window, rows, ctx in cases:
        layer = layers[0]
        keys = min(ctx, window or ctx)
        num_bytes = rows * keys * layer.num_planes * layer.num_kv_heads * layer.row_elems * 2
        fields = {
            "kind": "sliding" if window else "full",
            "kv": "bf16",
            "kv_layout": layer.layout.value,
            "rows": rows,
            "ctx": ctx,
        }
        chosen = choose(layer, 2, torch.device("cuda"))
        candidates = [chosen]
        if tune and layer.layout is not KVLayout.V_ROTK:
            candidates = TUNE_DECODE[layer.layout is KVLayout.PLAIN, layer.head_dim]
        for tiles in candidates:
            attention.decode_tiles = lambda *_, tiles=tiles: tiles
            try:
                launches = attention_launches(pages, layers, [1] * rows, [ctx] * rows, window, rows)
                times = time_ms(launches)
            except Exception as error:  # a candidate that does not fit is no result
                print("failed", tiles, str(error).splitlines()[0][:100], flush=True)
                continue
            yield result_row(
                "attention_decode",
                times,
                num_bytes=num_bytes,
                roof=roof,
                **fields,
                **({"tiles": _short(tiles)} if tune else {}),
            )
        attention.decode_tiles = choose


def _tiles(text: str) -> list[attention.DecodeTiles]:
    rows = [tuple(map(int, one.split("."))) for one in text.split()]
    return [
        attention.DecodeTiles(keys=keys, heads=h, num_warps=w, num_stages=s, programs_per_sm=p)
        for keys, h, w, s, p in rows
    ]


def _short(tiles: Any) -> str:
    return ".".join(str(getattr(tiles, name)) for name in tiles.__dataclass_fields__)


TUNE_DECODE = {
    (True, 256): _tiles("16.2.4.3.3 32.1.4.3.3 16.4.8.3.1"),
    (False, 512): _tiles("64.1.8.3.1 32.1.4.3.2"),
    (True, 512): _tiles("32.1.4.3.1"),
}
TUNE_PREFILL = {
    256: "128.64.8.2",
    512: "64.64.8.2 64.32.8.3 64.32.8.4",
}


def time_prefill(pages: Tensor, roof: dict[str, float], tune: bool) -> Iterator[dict[str, Any]]:
    choose = attention.prefill_tiles
    cases = [
        ([sliding_layer(0), sliding_layer(9)], SLIDING_WINDOW, 8192, 8192),
        ([full_layer(0), full_layer(5)], None, 8192, 8192),
        ([full_layer(0), full_layer(5)], None, 2048, 32768),
        ([full_layer(0, KVLayout.V_ROTK), full_layer(5, KVLayout.V_ROTK)], None, 8192, 8192),
        ([full_layer(0, KVLayout.PLAIN), full_layer(5, KVLayout.PLAIN)], None, 8192, 8192),
    ]
    for layers, window, chunk, ctx in cases:
        layer = layers[0]
        first = ctx - chunk
        seen = sum(min(position + 1, window or ctx) for position in range(first, ctx))
        flops = 4 * NUM_Q_HEADS * layer.head_dim * seen
        candidates = [choose(layer, 2, torch.device("cuda"))]
        if tune and layer.layout is not KVLayout.V_ROTK:
            rows = [tuple(map(int, one.split("."))) for one in TUNE_PREFILL[layer.head_dim].split()]
            candidates = [
                attention.PrefillTiles(block_m=m, block_n=n, num_warps=w, num_stages=s) for m, n, w, s in rows
            ]
        for tiles in candidates:
            attention.prefill_tiles = lambda *_, tiles=tiles: tiles
            try:
                times = time_ms(attention_launches(pages, layers, [chunk], [ctx], window, 0), replays=5)
            except Exception as error:
                print("failed", tiles, str(error).splitlines()[0][:100], flush=True)
                continue
            yield result_row(
                "attention_prefill",
                times,
                flops=flops,
                roof=roof,
                kind="sliding" if window else "full",
                kv="bf16",
                kv_layout=layer.layout.value,
                rows=chunk,
                ctx=ctx,
                **({"tiles": _short(tiles)} if tune else {}),
            )
        attention.prefill_tiles = choose


def time_rows(pages: Tensor, roof: dict[str, float]) -> Iterator[dict[str, Any]]:
    w = torch.randn(HIDDEN, device="cuda")
    for rows in (1, 64, 8192):
        copies = 8
        streams = torch.randn(copies, rows, HIDDEN, device="cuda", dtype=BF16)
        branches = torch.randn_like(streams)
        row_bytes = rows * HIDDEN * 2
        launches = [partial(rms_norm, streams[i], w, EPS) for i in range(copies)]
        yield result_row("rms_norm", time_ms(launches), num_bytes=2 * row_bytes, roof=roof, rows=rows)
        launches = [partial(residual_norm, streams[i], branches[i], w, w, EPS, 0.9) for i in range(copies)]
        yield result_row("residual_norm", time_ms(launches), num_bytes=4 * row_bytes, roof=roof, rows=rows)
        gate_up = torch.randn(4, rows, 2 * INTERMEDIATE, device="cuda", dtype=BF16)
        launches = [partial(gelu_mul, gate_up[i]) for i in range(4)]
        yield result_row("gelu_mul", time_ms(launches), num_bytes=6 * rows * INTERMEDIATE, roof=roof, rows=rows)
        for kind, layers, window in (
            ("sliding", [sliding_layer(i) for i in range(8)], SLIDING_WINDOW),
            ("full", [full_layer(i) for i in range(8)], None),
        ):
            layer, parts = layers[0], 2 if window else 1
            q_lens, kv_lens = ([8192], [8192]) if rows == 8192 else ([1] * rows, [1000] * rows)
            batch, _ = make_batch(layer, q_lens, kv_lens, sliding_window=window, device="cuda", num_pages=POOL_PAGES)
            width = (NUM_Q_HEADS + parts * layer.num_kv_heads) * layer.head_dim
            qkv = torch.randn(rows, width, device="cuda", dtype=BF16)
            head_w = torch.rand(layer.head_dim, device="cuda")
            launches = [
                partial(write_kv, qkv, NUM_Q_HEADS, head_w, head_w, EPS, 1.0, True, pages, one, batch) for one in layers
            ]
            times = time_ms(launches)
            yield result_row("write_kv", times, num_bytes=2 * rows * width * 2, roof=roof, kind=kind, rows=rows)
    src, dst = (torch.arange(i, 400, 2, device="cuda") for i in range(2))
    times = time_ms([partial(copy_pages, pages, src, dst)])
    yield result_row("copy_pages", times, num_bytes=2 * 200 * PAGE_ELEMS * 2, roof=roof, rows=200)
    try:
        from gewell_kernels.sample import sample
    except ImportError:
        return
    for rows in (1, 64, 256):
        logits = torch.randn(rows, VOCAB, device="cuda") * 3
        zeros = torch.zeros(rows, device="cuda")
        for name, heat, top_k, top_p in (
            ("greedy", 0.0, 0, 1.0),
            ("k64 p0.95", 1.0, 64, 0.95),
            ("p0.95", 1.0, 0, 0.95),
        ):
            arguments = (
                logits, zeros + heat, zeros.int() + top_k, zeros + top_p, zeros, zeros.long() + 7, zeros.long()
            )  # fmt: skip
            times = time_ms([partial(sample, *arguments)] * 3)
            yield result_row("sample", times, num_bytes=rows * VOCAB * 4, roof=roof, rows=rows, kind=name)


def time_projections(roof: dict[str, float]) -> Iterator[dict[str, Any]]:
    """The model's matrices with cuBLAS, each from memory that the L2 does not hold."""
    for is_sliding in (True, False):
        for name, (out_features, in_features) in projections(is_sliding).items():
            if not is_sliding and name in ("gate_up", "down"):
                continue
            weights = [torch.randn(out_features, in_features, device="cuda", dtype=BF16) * 0.02 for _ in range(3)]
            for rows in (1, 16, 64, 256, 8192):
                x = torch.randn(rows, in_features, device="cuda", dtype=BF16)
                times = time_ms([partial(torch.nn.functional.linear, x, w) for w in weights])
                yield result_row(
                    "projection cublas",
                    times,
                    num_bytes=out_features * in_features * 2,
                    flops=2 * rows * out_features * in_features,
                    roof=roof,
                    kind="sliding" if is_sliding else "full",
                    shape=name,
                    rows=rows,
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the result rows here, as JSON")
    parser.add_argument("--checks", default=",".join(CHECKS), help="which ops to check (default: %(default)s)")
    parser.add_argument(
        "--times", default="decode,prefill,rows,moe,projections", help="what to time (default: %(default)s)"
    )
    parser.add_argument("--skip-checks", action="store_true", help="time only; for repeats of a checked commit")
    parser.add_argument("--keep-going", action="store_true", help="time after failed checks too, to see both at once")
    parser.add_argument("--tune", action="store_true", help="time all tile candidates, not the chosen ones alone")
    options = parser.parse_args()
    torch.manual_seed(0)
    begin = time.monotonic()
    if not options.skip_checks:
        for name in options.checks.split(","):
            try:
                CHECKS[name]()
            except Exception as error:
                fail(f"{name}: {type(error).__name__}: {str(error)[:400]}")
        if FAILURES:
            print(len(FAILURES), "checks failed", *FAILURES, sep="\n  ")
            if not options.keep_going:
                return 1
    print(f"checks took {time.monotonic() - begin:.0f} s", flush=True)
    roof = ceilings()
    print({name: round(value, 1) for name, value in roof.items()}, flush=True)
    rows = []
    for row in time_everything(options.times.split(","), roof, options.tune):
        rows.append(row)
        print(format_row(row), flush=True)
    if options.out:
        command = "python kernels/bench/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
        document = {**environment(), "command": command, "ceilings": roof, "rows": rows}
        options.out.write_text(json.dumps(document, indent=1))
    print(f"all took {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
