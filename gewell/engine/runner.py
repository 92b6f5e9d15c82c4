"""Executes step plans on a model: page tables, ragged batch, forward pass, logits of the rows that draw, sampling.

The host side of a step is a handful of array operations: everything ragged is written into one int32 and one int64
numpy buffer and crosses to the device in two copies. Per row there is only what changed: page tables of rows at a page
boundary. The newest token of each row stays on the device (`_last_tokens`), so that with depth 1 a step can be launched
before the host has seen the tokens of the one before.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gewell_kernels.batch import AttentionBatch
from torch import Tensor

from gewell.cache.geometry import KindGeometry
from gewell.engine.kv_store import KVStore
from gewell.engine.sampler import Drawn, Sampler
from gewell.model.gemma import ForwardBatch, GemmaModel
from gewell.scheduler.plan import StepPlan, StepResult
from gewell.scheduler.request import RequestState

_Int32 = npt.NDArray[np.int32]


class _Tables:
    """Page tables of all rows for one layer kind, on the host. `used` is each table's length."""

    def __init__(self, max_num_seqs: int) -> None:
        self.pages: _Int32 = np.zeros((max_num_seqs, 16), dtype=np.int32)
        self.start: _Int32 = np.zeros(max_num_seqs, dtype=np.int32)
        self.used: _Int32 = np.zeros(max_num_seqs, dtype=np.int32)

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


class _Launched(NamedTuple):
    drawn: Drawn | None  # None: no row drew in this step
    is_sound: Tensor | None


class ModelRunner:
    """A `Runner` for one model on one device.

    depth   0: `launch` returns when the tokens are known. 1: on CUDA, one step ahead
    """

    def __init__(self, model: GemmaModel, store: KVStore, max_num_seqs: int, *, depth: int = 0) -> None:
        self.model = model
        self.store = store
        self._device = store.pages.device
        self._depth = depth
        geometry = model.kv_plan.geometry
        self._full = _Tables(max_num_seqs) if geometry.full is not None else None
        self._sliding = _Tables(max_num_seqs) if geometry.sliding is not None else None
        self._geometry = geometry
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=self._device)
        self._sampler = Sampler(max_num_seqs, model.config.vocab_size, self._device, model.config.tokens.suppressed)
        self._launched: deque[_Launched] = deque()

    @property
    def depth(self) -> int:
        return self._depth

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        for req in plan.joined:
            self._sampler.join(req)
        for req in plan.changed_tables:
            self._load_tables(req)
        self.store.poison_freed(plan.freed_pages)
        self.store.copy(plan.copies)
        step = _Step(plan)
        hidden = self.model.forward(self._batch(plan, step), self.store.pages)
        rows = plan.sampling_rows()
        if not rows:
            self._launched.append(_Launched(None, None))
            return
        drawing = hidden if step.all_draw else hidden[torch.from_numpy(step.drawing_tokens).to(self._device)]
        drawn = self._sampler.draw(self.model.logits(drawing), rows, step.draw_positions)
        self._last_tokens[torch.from_numpy(step.drawing_rows).to(self._device)] = drawn.token_ids
        is_sound = drawn.is_sound & drawing.sum(dim=1, dtype=torch.float32).isfinite()
        self._launched.append(_Launched(drawn, is_sound))

    def collect(self) -> StepResult:
        drawn, is_sound = self._launched.popleft()
        if drawn is None or is_sound is None:
            return StepResult(token_ids=[])
        token_ids = drawn.token_ids.tolist()
        bad_rows = [] if bool(is_sound.all()) else (~is_sound).nonzero()[:, 0].tolist()
        return StepResult(token_ids=token_ids, bad_rows=bad_rows, logprobs=drawn.logprobs_on_host(token_ids))

    def close(self) -> None:
        self._launched.clear()

    def _load_tables(self, req: RequestState) -> None:
        pages = req.pages
        assert pages is not None
        if self._full is not None:
            self._full.load(req.row_idx, pages.full_pages, 0)
        if self._sliding is not None:
            self._sliding.load(req.row_idx, pages.sliding_pages, pages.sliding_start)

    # ------------------------------------------------------------------------------------------------------- batch

    def _batch(self, plan: StepPlan, step: "_Step") -> ForwardBatch:
        """Pack the step into two buffers, send them, and cut them into the batch's tensors."""
        ints = _Packer(np.int32)
        longs = _Packer(np.int64)
        ints.add("cu_seqlens_q", step.cu_seqlens)
        ints.add("kv_lens", step.kv_lens)
        ints.add("positions", step.positions)
        longs.add("input_ids", step.prefill_ids)
        longs.add("decode_rows", step.row_idx[: step.num_decodes])
        for name, tables, slots in (
            ("full", self._full, step.slots(plan.decode_full_slots, [c.full_slots for c in plan.chunks])),
            ("sliding", self._sliding, step.slots(plan.decode_sliding_slots, [c.sliding_slots for c in plan.chunks])),
        ):
            if tables is None:
                continue
            width = -(-int(tables.used[step.row_idx].max(initial=1)) // 16) * 16
            ints.add(f"{name}_table", tables.pages[step.row_idx, :width])
            ints.add(f"{name}_start", tables.start[step.row_idx])
            longs.add(f"{name}_slots", slots)
        small, large = ints.send(self._device), longs.send(self._device)
        input_ids = large["input_ids"]
        if step.num_decodes:
            input_ids = torch.cat([self._last_tokens[large["decode_rows"]], input_ids])

        def attention(name: str, kind: KindGeometry | None, sliding_window: int | None) -> AttentionBatch | None:
            if kind is None:
                return None
            return AttentionBatch(
                cu_seqlens_q=small["cu_seqlens_q"],
                kv_lens=small["kv_lens"],
                positions=small["positions"],
                page_table=small[f"{name}_table"],
                table_start=small[f"{name}_start"],
                slot_mapping=large[f"{name}_slots"],
                visible_end=None,
                sliding_window=sliding_window,
                max_q_len=step.max_q_len,
                max_kv_len=step.max_kv_len,
                num_decode_seqs=step.num_decodes,
            )

        return ForwardBatch(
            input_ids=input_ids,
            sliding=attention("sliding", self._geometry.sliding, self._geometry.sliding_window),
            full=attention("full", self._geometry.full, None),
        )


class _Step:
    """Arrays of one plan: decode rows first, then chunks."""

    def __init__(self, plan: StepPlan) -> None:
        chunks = plan.chunks
        self.num_decodes = len(plan.decode_rows)
        num_seqs = self.num_decodes + len(chunks)
        self.row_idx = np.fromiter(
            (req.row_idx for req in [*plan.decode_rows, *(chunk.req for chunk in chunks)]), np.int64, num_seqs
        )
        lengths = np.ones(num_seqs, dtype=np.int32)
        lengths[self.num_decodes :] = [len(chunk.token_ids) for chunk in chunks]
        self.cu_seqlens = np.zeros(num_seqs + 1, dtype=np.int32)
        np.cumsum(lengths, out=self.cu_seqlens[1:])
        decode_positions = np.array(plan.decode_positions, dtype=np.int32)
        self.positions = np.concatenate(
            [decode_positions, *(np.arange(chunk.start, chunk.end, dtype=np.int32) for chunk in chunks)]
        )
        self.kv_lens = np.concatenate([decode_positions + 1, np.array([c.end for c in chunks], dtype=np.int32)])
        self.prefill_ids = np.concatenate(
            [np.empty(0, dtype=np.int32), *(np.frombuffer(chunk.token_ids, dtype=np.int32) for chunk in chunks)]
        )
        self.max_q_len = int(lengths.max(initial=0))
        self.max_kv_len = int(self.kv_lens.max(initial=0))
        is_drawing = np.ones(num_seqs, dtype=bool)
        is_drawing[self.num_decodes :] = [chunk.samples for chunk in chunks]
        self.drawing_tokens = (self.cu_seqlens[1:] - 1)[is_drawing].astype(np.int64)
        self.drawing_rows = self.row_idx[is_drawing]
        self.draw_positions: list[int] = self.kv_lens[is_drawing].tolist()
        self.all_draw = len(self.drawing_tokens) == len(self.positions)

    @staticmethod
    def slots(decode_slots: list[int], chunk_slots: "list[npt.ArrayLike]") -> npt.NDArray[np.int64]:
        return np.concatenate(
            [np.array(decode_slots, dtype=np.int64), *(np.asarray(slots, dtype=np.int64) for slots in chunk_slots)]
        )


class _Packer:
    """Named arrays of one integer type, laid end to end so that one copy carries them to the device.

    Parts start at multiples of 64 bytes: kernels are compiled anew for pointers of another alignment.
    """

    def __init__(self, dtype: type[np.int32] | type[np.int64]) -> None:
        self._dtype = dtype
        self._align = 64 // dtype().itemsize
        self._parts: list[tuple[str, int, npt.NDArray[np.int32] | npt.NDArray[np.int64]]] = []
        self._size = 0

    def add(self, name: str, values: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> None:
        self._parts.append((name, self._size, values))
        self._size += -(-values.size // self._align) * self._align

    def send(self, device: torch.device) -> dict[str, Tensor]:
        tensor = torch.empty(self._size, dtype=_TORCH_TYPES[self._dtype], pin_memory=device.type == "cuda")
        flat = tensor.numpy()
        for _, start, values in self._parts:
            flat[start : start + values.size] = values.ravel()
        tensor = tensor.to(device, non_blocking=True)
        return {name: tensor[start : start + v.size].view(v.shape) for name, start, v in self._parts}


_TORCH_TYPES = {np.int32: torch.int32, np.int64: torch.int64}
