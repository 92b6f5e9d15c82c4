"""The bench's checks as a test: every op in bf16 at the model's real shapes against float64, twice under replay."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("checks", ["rows,write_kv", "attention", "sample,moe"])
def test_every_op_agrees_with_float64_at_real_shapes(checks):
    command = [sys.executable, "kernels/bench/check_and_time.py", "--checks", checks, "--times", "none"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "check " in done.stdout


@pytest.mark.gpu
def test_constants_are_not_made_while_a_graph_is_captured():
    import torch
    from gewell_kernels import _device

    _device.arrival_counters.cache_clear()
    with (
        pytest.raises(RuntimeError, match="run the step once before capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        _device.arrival_counters(torch.device("cuda"))
