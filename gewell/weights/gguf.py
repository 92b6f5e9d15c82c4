"""Reads weights out of GGUF files. Needs the package `gguf`, no torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gewell.errors import CheckpointError


class GGUFTensor(NamedTuple):
    """One tensor. `shape` is in row-major order, as PyTorch writes it."""

    name: str
    shape: tuple[int, ...]
    raw: Any  # gguf's ReaderTensor: a view into the mapped file

    def dequantize(self) -> NDArray[np.float32]:
        """The values in float32, a new array of `shape`."""
        from gguf.quants import dequantize

        try:
            values = dequantize(self.raw.data, self.raw.tensor_type)
        except NotImplementedError as e:
            raise CheckpointError(f"tensor {self.name}: cannot dequantise {self.raw.tensor_type.name}") from e
        return np.ascontiguousarray(values, dtype=np.float32).reshape(self.shape)


class GGUFFile:
    """A GGUF file, memory-mapped. Raises CheckpointError when the file is damaged or of another kind."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as e:
            raise CheckpointError(f"{path}: not a readable GGUF file: {e}") from e
        self.path = path

    @property
    def fields(self) -> Any:
        """The metadata as the `gguf` library holds it."""
        return self._reader.fields

    def field(self, name: str) -> Any:
        """A value of the metadata, as a Python object."""
        if name not in self._reader.fields:
            raise CheckpointError(f"{self.path}: no field {name!r}")
        return self._reader.fields[name].contents()

    def __len__(self) -> int:
        return len(self._reader.tensors)

    def __iter__(self) -> Iterator[GGUFTensor]:
        for tensor in self._reader.tensors:
            yield GGUFTensor(tensor.name, tuple(int(n) for n in reversed(tensor.shape)), tensor)
