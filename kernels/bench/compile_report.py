"""Compiles the kernels for GPUs that are not here and prints registers, spills and shared memory of each.

    python kernels/bench/compile_report.py [sm ...]        default: 80 89 90 100 120

The wrappers run as they would, on CPU tensors of Gemma 4 31B's shapes; launches only compile. Needs no GPU.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from gewell_kernels import _device, paged_attention
from gewell_kernels.layout import KVLayout, LayerKV
from gewell_kernels.reference.worlds import make_batch
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

SHARED_MEMORY_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class OfflineDriver:
    """Stands in for the CUDA driver as far as compiling goes."""

    def __init__(self, sm: int) -> None:
        self.sm = sm

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.sm, 32)


def main() -> None:
    seen: dict[tuple[int, str], str] = {}
    run = JITFunction.run
    current = {"sm": 0}

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        label = f"{self.fn.__name__} {_shape_label(kwargs)}"
        try:
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
            seen[current["sm"], label] = f"{kernel.metadata.shared / 1024:6.1f} KiB  {_resources(kernel.asm['cubin'])}"
        except Exception as error:
            seen[current["sm"], label] = f"FAILED: {type(error).__name__}: {str(error).splitlines()[0][:120]}"

    JITFunction.run = compile_only
    for sm in [int(argument) for argument in sys.argv[1:]] or [80, 89, 90, 100, 120]:
        current["sm"] = sm
        triton.runtime.driver.set_active(OfflineDriver(sm))
        _device.shared_memory_bytes = paged_attention.shared_memory_bytes = lambda device, sm=sm: (
            SHARED_MEMORY_KIB[sm] * 1024
        )
        launch_everything()
        for (of, label), text in seen.items():
            if of == sm:
                print(f"sm_{sm:<4}{label:78}{text}", flush=True)


def launch_everything() -> None:
    from gewell_kernels.copy_pages import copy_pages
    from gewell_kernels.gelu_mul import gelu_mul
    from gewell_kernels.residual_norm import residual_norm
    from gewell_kernels.rms_norm import rms_norm
    from gewell_kernels.write_kv import write_kv

    bf16 = torch.bfloat16
    hidden = torch.zeros(4, 5376, dtype=bf16)
    weight = torch.zeros(5376)
    rms_norm(hidden, weight, 1e-6)
    residual_norm(hidden, hidden.clone(), weight, weight, 1e-6, 0.5)
    gelu_mul(torch.zeros(4, 43008, dtype=bf16))
    copy_pages(torch.zeros(4, 4096, dtype=bf16), torch.tensor([0]), torch.tensor([1]))
    for layout, num_kv_heads, head_dim, page_tokens, window in (
        (KVLayout.PLAIN, 16, 256, 16, 1024),
        (KVLayout.V_ONLY, 4, 512, 320, None),
        (KVLayout.V_ROTK, 4, 512, 256, None),
        (KVLayout.PLAIN, 4, 512, 160, None),
    ):
        layer = LayerKV(
            layout=layout, layer_offset=0, page_tokens=page_tokens, num_kv_heads=num_kv_heads, head_dim=head_dim,
            num_live_pairs=head_dim // 2 if window else head_dim // 8, rope_theta=1e6,
        )  # fmt: skip
        batch, num_pages = make_batch(layer, [1, 1, 33], [40, 7, 33], sliding_window=window, device="cpu")
        pages = torch.zeros(num_pages, layer.layer_elems, dtype=bf16)
        n = 1 if layout is not KVLayout.PLAIN else 2
        qkv = torch.zeros(35, (32 + n * num_kv_heads) * head_dim, dtype=bf16)
        k_weight = torch.zeros(head_dim)
        q, k_new, v_new = write_kv(qkv, 32, k_weight, k_weight, 1e-6, 1.0, True, pages, layer, batch)
        paged_attention.paged_attention(q, k_new, v_new, k_weight, pages, layer, batch)
    try:
        from gewell_kernels.sample import sample
    except ImportError:
        return
    rows = torch.zeros(2)
    sample(torch.zeros(2, 262144), rows, rows.int(), rows, rows, rows.long(), rows.long())


def _shape_label(kwargs: dict[str, Any]) -> str:
    wanted = ("HEAD_DIM", "GROUP", "V_ONLY", "BLOCK_M", "BLOCK_N", "STAGES", "num_warps")
    return " ".join(f"{name.lower()}={kwargs[name]}" for name in wanted if name in kwargs)


def _resources(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text))
    return f"{usage.get('REG')} registers, stack {usage.get('STACK')}"


if __name__ == "__main__":
    main()
