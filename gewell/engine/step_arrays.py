"""A step plan as numpy arrays, and their way to the device. No per-row tensors, no copy that waits for the device."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gewell.scheduler.plan import StepPlan
from gewell.scheduler.request import RequestState

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

_TORCH_TYPES = {np.int32: torch.int32, np.int64: torch.int64}


def to_device(values: "np.ndarray", device: torch.device) -> Tensor:
    """A tensor of the array's values. On CUDA through pinned memory: a pageable copy would wait for the stream."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class PageTables:
    """Page tables of all rows for one layer kind, on the host. `used` is each table's length."""

    def __init__(self, num_rows: int) -> None:
        self.pages: Int32 = np.zeros((num_rows, 16), dtype=np.int32)
        self.start: Int32 = np.zeros(num_rows, dtype=np.int32)
        self.used: Int32 = np.zeros(num_rows, dtype=np.int32)

    def load(self, row: int, pages: list[int], start: int) -> None:
        """HOLE entries (-1) become page 0: nobody reads them, but they must be a valid index."""
        num_pages = len(pages)
        if num_pages > self.pages.shape[1]:  # doubles, so it stays a multiple of 16
            width = 16 << (-(-num_pages // 16) - 1).bit_length()
            wider = np.zeros((len(self.pages), width), dtype=np.int32)
            wider[:, : self.pages.shape[1]] = self.pages
            self.pages = wider
        self.pages[row, :num_pages] = pages
        np.maximum(self.pages[row, :num_pages], 0, out=self.pages[row, :num_pages])
        self.start[row] = start
        self.used[row] = num_pages


class StepArrays:
    """Arrays of one plan: decode rows first, then chunks.

    drawing_tokens   index in the step of each token after which one is drawn; drawing_rows, draw_positions: its row
                     and the position that is drawn
    """

    def __init__(self, plan: StepPlan) -> None:
        chunks = plan.chunks
        self.num_decodes = len(plan.decode_rows)
        num_seqs = self.num_decodes + len(chunks)
        requests: list[RequestState] = [*plan.decode_rows, *(chunk.req for chunk in chunks)]
        self.row_idx: Int64 = np.fromiter((req.row_idx for req in requests), np.int64, num_seqs)
        lengths = np.ones(num_seqs, dtype=np.int32)
        lengths[self.num_decodes :] = [len(chunk.token_ids) for chunk in chunks]
        self.cu_seqlens: Int32 = np.zeros(num_seqs + 1, dtype=np.int32)
        np.cumsum(lengths, out=self.cu_seqlens[1:])
        decode_positions = np.array(plan.decode_positions, dtype=np.int32)
        self.positions: Int32 = np.concatenate(
            [decode_positions, *(np.arange(chunk.start, chunk.end, dtype=np.int32) for chunk in chunks)]
        )
        self.kv_lens: Int32 = np.concatenate([decode_positions + 1, np.array([c.end for c in chunks], dtype=np.int32)])
        self.prefill_ids: Int32 = np.concatenate(
            [np.empty(0, dtype=np.int32), *(np.frombuffer(chunk.token_ids, dtype=np.int32) for chunk in chunks)]
        )
        self.max_q_len = int(lengths.max(initial=0))
        self.max_kv_len = int(self.kv_lens.max(initial=0))
        is_drawing = np.ones(num_seqs, dtype=bool)
        is_drawing[self.num_decodes :] = [chunk.samples for chunk in chunks]
        self.drawing_tokens: Int64 = (self.cu_seqlens[1:] - 1)[is_drawing].astype(np.int64)
        self.drawing_rows: Int64 = self.row_idx[is_drawing]
        self.draw_positions: Int64 = self.kv_lens[is_drawing].astype(np.int64)
        self.all_draw = len(self.drawing_tokens) == len(self.positions)
        self.full_slots = _slots(plan.decode_full_slots, [chunk.full_slots for chunk in chunks])
        self.sliding_slots = _slots(plan.decode_sliding_slots, [chunk.sliding_slots for chunk in chunks])


def _slots(decode_slots: list[int], chunk_slots: list[Sequence[int]]) -> Int64:
    return np.concatenate(
        [np.array(decode_slots, dtype=np.int64), *(np.asarray(slots, dtype=np.int64) for slots in chunk_slots)]
    )


class Packer:
    """Named arrays of one integer type, laid end to end so that one copy carries them to the device.

    Parts start at multiples of 64 bytes: kernels are compiled anew for pointers of another alignment.
    """

    def __init__(self, dtype: type[np.int32] | type[np.int64]) -> None:
        self._dtype = dtype
        self._align = 64 // dtype().itemsize
        self._parts: list[tuple[str, int, Int32 | Int64]] = []
        self._size = 0

    def add(self, name: str, values: Int32 | Int64) -> None:
        self._parts.append((name, self._size, values))
        self._size += -(-values.size // self._align) * self._align

    def send(self, device: torch.device) -> dict[str, Tensor]:
        tensor = torch.empty(self._size, dtype=_TORCH_TYPES[self._dtype], pin_memory=device.type == "cuda")
        self.fill(tensor.numpy())
        return self.views(tensor.to(device, non_blocking=True))

    def fill(self, flat: Int32 | Int64) -> None:
        for _, start, values in self._parts:
            flat[start : start + values.size] = values.ravel()

    def views(self, tensor: Tensor) -> dict[str, Tensor]:
        return {name: tensor[start : start + v.size].view(v.shape) for name, start, v in self._parts}

    @property
    def size(self) -> int:
        return self._size
