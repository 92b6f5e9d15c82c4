"""What a device offers, asked once."""

from functools import cache

import torch
import triton

# Triton's interpreter runs on the CPU; any small number will do there, and few programs show that splits are joined.
_INTERPRETER_MULTIPROCESSORS = 3


@cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETER_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def refuse_capture(what: str) -> None:
    """Constants that outlive a call must not be made while a CUDA graph is captured: they would be filled at replay."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what} would be made during the capture of a CUDA graph; run the step once before capturing"
        )


NUM_ARRIVAL_COUNTERS = 1 << 16


@cache
def arrival_counters(device: torch.device) -> torch.Tensor:
    """[NUM_ARRIVAL_COUNTERS] int32 zeros. Every launch leaves them at zero; one stream at a time may use them."""
    refuse_capture("arrival counters")
    return torch.zeros(NUM_ARRIVAL_COUNTERS, dtype=torch.int32, device=device)


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """What one program may use: 227 KiB on sm_90 and sm_100, 163 KiB on sm_80, 99 KiB on sm_89 and sm_120."""
    if device.type != "cuda":
        return 227 * 1024
    index = device.index if device.index is not None else torch.cuda.current_device()
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])
