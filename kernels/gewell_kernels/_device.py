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


@cache
def _arrival_counters(device: torch.device, num_counters: int) -> torch.Tensor:
    return torch.zeros(num_counters, dtype=torch.int32, device=device)


def arrival_counters(device: torch.device, num_counters: int) -> torch.Tensor:
    """At least so many int32 zeros. Every launch leaves them at zero; one stream at a time may use them."""
    return _arrival_counters(device, max(4096, 1 << (num_counters - 1).bit_length()))


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """What one program may use: 227 KiB on sm_90 and sm_100, 163 KiB on sm_80, 99 KiB on sm_89 and sm_120."""
    if device.type != "cuda":
        return 227 * 1024
    index = device.index if device.index is not None else torch.cuda.current_device()
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])
