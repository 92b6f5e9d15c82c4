"""Timing under CUDA graphs, the ceilings of the device at hand, and result rows."""

import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

import torch
import triton
import triton.language as tl


def time_ms(launches: Sequence[Callable[[], Any]], *, replays: int = 9) -> list[float]:
    """Milliseconds per launch, one number per replay of a graph that holds all launches once.

    Give launches that touch different memory, as the layers of a model do, so that the L2 cache stays as cold as there.
    """
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / len(launches))
    return times


@triton.jit
def _read_kernel(x_ptr, out_ptr, num_elems, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for at in range(tl.program_id(0).to(tl.int64) * BLOCK, num_elems, step):
        total ^= tl.load(x_ptr + at + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, axis=0))


def ceilings() -> dict[str, float]:
    """Copy and read bandwidth (GB/s, copies count both ways) and bf16 matmul rate (TFLOP/s) of this device, now."""
    source = torch.randint(0, 100, (1 << 30,), dtype=torch.int32, device="cuda")  # 4 GiB
    target = torch.empty_like(source)
    out = torch.empty(132 * 32, dtype=torch.int32, device="cuda")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(200):  # clocks rise within the first tenth of a second of work
        torch.matmul(a, b.T)
    matmul = statistics.median(time_ms([lambda: torch.matmul(a, b.T)] * 10))
    copy = statistics.median(time_ms([lambda: torch.bitwise_not(source, out=target)]))
    read = statistics.median(
        time_ms([lambda: _read_kernel[(out.numel(),)](source, out, source.numel(), BLOCK=2048, num_warps=4)])
    )
    num_bytes = source.numel() * 4
    return {
        "copy_gb_s": 2 * num_bytes / copy / 1e6,
        "read_gb_s": num_bytes / read / 1e6,
        "matmul_tflop_s": 2 * 8192**3 / matmul / 1e9,
    }


def environment() -> dict[str, str]:
    def first_line(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            return "unknown"

    return {
        "device": torch.cuda.get_device_name(),
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": first_line("git", "rev-parse", "--short", "HEAD"),
        "date": date.today().isoformat(),
    }


def result_row(
    bench: str, times: Sequence[float], *, num_bytes: float = 0, flops: float = 0, roof: dict[str, float], **fields: Any
) -> dict[str, Any]:
    """One row: the median, its spread, and the share of the floor max(bytes / read, FLOPs / matmul rate)."""
    median = statistics.median(times)
    floor = max(num_bytes / roof["read_gb_s"] / 1e6, flops / roof["matmul_tflop_s"] / 1e9)
    row = {
        "bench": bench,
        **fields,
        "step_ms": round(median, 5),
        "floor_ms": round(floor, 5),
        "share_of_floor": round(floor / median, 3),
        "repeats": len(times),
        "min": round(min(times), 5),
        "median": round(median, 5),
        "max": round(max(times), 5),
    }
    if num_bytes:
        row["gb_s"] = round(num_bytes / median / 1e6, 1)
    if flops:
        row["tflop_s"] = round(flops / median / 1e9, 1)
    return row


def format_row(row: dict[str, Any]) -> str:
    skipped = {"step_ms", "floor_ms", "share_of_floor", "repeats", "min", "median", "max", "gb_s", "tflop_s", "bench"}
    what = " ".join(f"{key}={value}" for key, value in row.items() if key not in skipped)
    rates = f"{row.get('gb_s', 0):8.0f} GB/s {row.get('tflop_s', 0):6.0f} TFLOP/s"
    return f"{row['bench']:18}{what:58}{row['step_ms'] * 1e3:10.1f} us {row['share_of_floor']:6.1%} {rates}"
