"""Writes a safetensors file of bfloat16 tensors one by one, so that a model never has to fit in memory. No torch."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bit patterns of the nearest bfloat16 values, ties to even; a NaN stays a NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def write_bfloat16(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, NDArray[np.float32]]],
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write `path` with the tensors named in `shapes`, rounded to bfloat16.

    shapes    every tensor of the file, in the order in which `tensors` brings them
    progress  called with the number of bytes just written
    Raises ValueError when name or shape of a tensor differs from what was announced.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map the data: keep it aligned
    expected = iter(shapes.items())
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, values in tensors:
            if (name, values.shape) != next(expected, None):
                raise ValueError(f"tensor {name} {values.shape} was not announced at this place")
            data = to_bfloat16(values)
            file.write(data.data)
            progress(data.nbytes)
    missing = next(expected, None)
    if missing is not None:
        raise ValueError(f"tensor {missing[0]} was announced but never came")
