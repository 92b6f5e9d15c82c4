"""CUDA graphs for steps of decode rows alone: one per padded number of rows, replayed from static buffers.

A step of a 60-layer model is some 700 kernels; launched one by one they take the host longer than the device takes to
run them at small batches. Recorded once, a step is two copies and one launch.

Rows are padded to a multiple of 16 (matrix products at 16 rows cost no more than at 1). A padding row has no keys
(kv_len 0), writes nothing (slot -1) and reads its token from a place of its own, so it disturbs nobody.
"""

from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import Tensor

from gewell.cache.geometry import KindGeometry, KVGeometry
from gewell.engine.step_arrays import Int32, Int64, Packer, PageTables, StepArrays

# Called with the parts of a batch, the padded number of rows and a bound of the lengths: hidden states and logits.
DecodeForward = Callable[[dict[str, Tensor], int, int], tuple[Tensor, Tensor]]


def padded_rows(num_rows: int) -> int:
    """Multiples of 16 up to 128, of 32 up to 256, of 64 up to 512: 16 graphs in all, less than a quarter padding."""
    step = 16
    while num_rows > 8 * step:
        step *= 2
    return -(-num_rows // step) * step


class _Graph:
    """One recorded step. Host buffers come in pairs: one may still be on its way when the next step is written."""

    def __init__(self, num_rows: int, shapes: Packer, longs: Packer, device: torch.device) -> None:
        self.num_rows = num_rows
        self.hosts = [
            (
                torch.empty(shapes.size, dtype=torch.int32, pin_memory=True),
                torch.empty(longs.size, dtype=torch.int64, pin_memory=True),
            )
            for _ in range(2)
        ]
        self.ints = torch.zeros(shapes.size, dtype=torch.int32, device=device)
        self.longs = torch.zeros(longs.size, dtype=torch.int64, device=device)
        self.parts = shapes.views(self.ints) | longs.views(self.longs)
        self.graph = torch.cuda.CUDAGraph()
        self.hidden: Tensor | None = None
        self.logits: Tensor | None = None
        self.num_runs = 0


class DecodeGraphs:
    """Graphs by padded number of rows. A number is recorded when it first occurs, or by `record` before serving."""

    def __init__(
        self,
        geometry: KVGeometry,
        max_num_seqs: int,
        max_context: int,
        device: torch.device,
        forward: DecodeForward,
    ) -> None:
        self._geometry = geometry
        self._max_num_seqs = max_num_seqs
        self._max_context = max_context
        self._device = device
        self._forward = forward
        self._graphs: dict[int, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        window_pages = 0
        if geometry.sliding is not None:
            window_pages = -(-geometry.sliding_window // geometry.sliding.page_tokens) + 2
        self._widths = {
            "full": self._width(geometry.full, -(-max_context // geometry.full.page_tokens) if geometry.full else 0),
            "sliding": self._width(geometry.sliding, window_pages),
        }

    @staticmethod
    def _width(kind: KindGeometry | None, num_pages: int) -> int:
        return 0 if kind is None else -(-num_pages // 16) * 16

    def record(self, num_rows: int) -> None:
        """Record the graph for this many rows now, with padding rows alone."""
        num_rows = padded_rows(num_rows)
        if num_rows not in self._graphs:
            self._graphs[num_rows] = self._record(num_rows)

    def record_small(self, up_to: int = 64) -> None:
        """Record the sizes that every start passes through, before serving; larger ones when they first occur."""
        for num_rows in range(16, min(up_to, padded_rows(self._max_num_seqs)) + 1, 16):
            self.record(num_rows)

    @property
    def recorded(self) -> list[int]:
        return sorted(self._graphs)

    def run(self, step: StepArrays, full: PageTables | None, sliding: PageTables | None) -> tuple[Tensor, Tensor]:
        """Replay a step; (hidden states, logits) of its rows, valid until the next replay on this stream."""
        self.record(step.num_decodes)
        graph = self._graphs[padded_rows(step.num_decodes)]
        ints, longs = self._pack(graph.num_rows, step, full, sliding)
        host_ints, host_longs = graph.hosts[graph.num_runs % 2]
        graph.num_runs += 1
        ints.fill(host_ints.numpy())
        longs.fill(host_longs.numpy())
        graph.ints.copy_(host_ints, non_blocking=True)
        graph.longs.copy_(host_longs, non_blocking=True)
        graph.graph.replay()
        assert graph.hidden is not None
        assert graph.logits is not None
        return graph.hidden[: step.num_decodes], graph.logits[: step.num_decodes]

    def _record(self, num_rows: int) -> _Graph:
        ints, longs = self._pack(num_rows, None, None, None)
        graph = _Graph(num_rows, ints, longs, self._device)
        ints.fill(graph.hosts[0][0].numpy())
        longs.fill(graph.hosts[0][1].numpy())
        graph.ints.copy_(graph.hosts[0][0])
        graph.longs.copy_(graph.hosts[0][1])
        with torch.inference_mode():
            self._forward(graph.parts, num_rows, self._max_context)  # compiles kernels, outside of the recording
            torch.cuda.synchronize(self._device)
            with torch.cuda.graph(graph.graph, pool=self._pool):
                graph.hidden, graph.logits = self._forward(graph.parts, num_rows, self._max_context)
        return graph

    def _pack(
        self, num_rows: int, step: StepArrays | None, full: PageTables | None, sliding: PageTables | None
    ) -> tuple[Packer, Packer]:
        """The step padded to `num_rows`, in the layout of the graph's buffers; None: padding rows alone."""
        ints, longs = Packer(np.int32), Packer(np.int64)
        num_real = 0 if step is None else step.num_decodes

        def padded(values: Int32 | Int64 | None, fill: int, dtype: type[np.int32] | type[np.int64]) -> Int32 | Int64:
            out = np.full(num_rows, fill, dtype=dtype)
            if values is not None:
                out[:num_real] = values
            return cast(Int32 | Int64, out)

        ints.add("cu_seqlens_q", np.arange(num_rows + 1, dtype=np.int32))
        ints.add("kv_lens", padded(None if step is None else step.kv_lens, 0, np.int32))
        ints.add("positions", padded(None if step is None else step.positions, 0, np.int32))
        longs.add("decode_rows", padded(None if step is None else step.row_idx, self._max_num_seqs, np.int64))
        slots: dict[str, Int64 | None] = {"full": None, "sliding": None}
        if step is not None:
            slots = {"full": step.full_slots, "sliding": step.sliding_slots}
        for name, tables in (("full", full), ("sliding", sliding)):
            width = self._widths[name]
            if not width:
                continue
            table = np.zeros((num_rows, width), dtype=np.int32)
            start = np.zeros(num_rows, dtype=np.int32)
            if tables is not None and step is not None:
                used = min(width, tables.pages.shape[1])
                table[:num_real, :used] = tables.pages[step.row_idx, :used]
                start[:num_real] = tables.start[step.row_idx]
            ints.add(f"{name}_table", table)
            ints.add(f"{name}_start", start)
            longs.add(f"{name}_slots", padded(slots[name], -1, np.int64))
        return ints, longs
