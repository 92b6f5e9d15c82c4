"""What every Triton wrapper asks of its arguments before a kernel sees them: a wrong stride is an error, not noise."""

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} has dtype {tensor.dtype}, want one of {', '.join(map(str, allowed))}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int | None]) -> None:
    """None matches any extent."""
    matches = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not matches:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}, want [{wanted}]")


def check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()} for shape {list(tensor.shape)}, want it contiguous")


def check_unit_stride(name: str, tensor: Tensor) -> None:
    if tensor.dim() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} on its last axis, want 1")


def check_aligned(name: str, tensor: Tensor, num_bytes: int = 16) -> None:
    """Vector loads of 16 bytes start at the tensor's first element and at every row."""
    if tensor.data_ptr() % num_bytes:
        raise ValueError(f"{name} starts {tensor.data_ptr() % num_bytes} bytes past a multiple of {num_bytes}")
