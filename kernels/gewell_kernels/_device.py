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
def shared_memory_bytes(device: torch.device) -> int:
    """What one program may use: 227 KiB on sm_90 and sm_100, 163 KiB on sm_80, 99 KiB on sm_89 and sm_120."""
    if device.type != "cuda":
        return 227 * 1024
    index = device.index if device.index is not None else torch.cuda.current_device()
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])
