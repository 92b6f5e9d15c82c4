"""Executes step plans on a model: page tables, ragged batch, forward pass, logits of the rows that draw, sampling.

The host side of a step is a handful of array operations: everything ragged is written into one int32 and one int64
buffer and crosses to the device in two copies. Per row there is only what changed: page tables of rows at a page
boundary. The newest token of each row stays on the device (`_last_tokens`), so that with depth 1 a step can be launched
before the host has seen the tokens of the one before.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from gewell_kernels import ops
from gewell_kernels.batch import AttentionBatch
from torch import Tensor

from gewell.cache.geometry import KindGeometry
from gewell.config import LayerKind
from gewell.engine.graphs import DecodeGraphs
from gewell.engine.images import ImageFeatures
from gewell.engine.kv_store import KVStore
from gewell.engine.sampler import Drawn, Sampler
from gewell.engine.score import Scores, score_tokens
from gewell.engine.step_arrays import Packer, PageTables, StepArrays, to_device
from gewell.model.gemma import ForwardBatch, GemmaModel
from gewell.scheduler.plan import StepPlan, StepResult
from gewell.scheduler.request import RequestState


class _Launched:
    """Results of one step on their way to the host."""

    def __init__(self, drawn: Drawn | None, scores: dict[int, Scores]) -> None:
        """drawn: None when no row drew in the step. scores: by index of the chunk."""
        self._drawn = drawn
        self._scores = scores
        self._host: Tensor | None = None
        self._is_there: torch.cuda.Event | None = None
        if drawn is not None and drawn.token_ids.is_cuda:
            both = torch.stack((drawn.token_ids, drawn.is_sound.to(torch.int64)))
            self._host = torch.empty(both.shape, dtype=torch.int64, pin_memory=True)
            self._host.copy_(both, non_blocking=True)
            self._is_there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._is_there.record()

    def result(self) -> StepResult:
        drawn = self._drawn
        scores = {i: found.on_host() for i, found in self._scores.items()}
        bad_chunks = [i for i, found in scores.items() if found is None]
        sound = {i: found for i, found in scores.items() if found is not None}
        if drawn is None:
            return StepResult(token_ids=[], scores=sound, bad_chunks=bad_chunks)
        if self._host is not None and self._is_there is not None:
            self._is_there.synchronize()
            token_ids, is_sound = self._host.tolist()
        else:
            token_ids, is_sound = drawn.token_ids.tolist(), drawn.is_sound.tolist()
        bad_rows = [i for i, sound in enumerate(is_sound) if not sound]
        return StepResult(
            token_ids=token_ids,
            bad_rows=bad_rows,
            logprobs=drawn.logprobs_on_host(token_ids),
            scores=sound,
            bad_chunks=bad_chunks,
        )


class _Undrawn(NamedTuple):
    """A step whose logits are there or on their way."""

    plan: StepPlan
    rows: Sequence[RequestState]
    step: StepArrays
    drawing: Tensor  # hidden states of the rows that draw
    logits: Tensor  # of a graph: valid until the next replay
    scores: dict[int, Scores]


class ModelRunner:
    """A `Runner` for one model on one device.

    depth    0: `launch` and `collect` belong together. 1: the device works on a step while the host plans the next
    graphs   CUDA graphs for steps of decode rows alone; None: every step is launched op by op
    """

    def __init__(
        self,
        model: GemmaModel,
        store: KVStore,
        max_num_seqs: int,
        *,
        depth: int = 0,
        max_context: int | None = None,
        images: ImageFeatures | None = None,
    ) -> None:
        """max_context   longest sequence, in tokens; when given and the device is CUDA, decode steps become graphs
        images        None: no request may have any
        """
        self.model = model
        self.store = store
        self._device = store.pages.device
        self._depth = depth
        self._images = images
        self._geometry = geometry = model.kv_plan.geometry
        self._full = PageTables(max_num_seqs) if geometry.full is not None else None
        self._sliding = PageTables(max_num_seqs) if geometry.sliding is not None else None
        # One more than there are rows: where padding rows of a graph read their token.
        self._last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=self._device)
        self._sampler = Sampler(max_num_seqs, model.config.vocab_size, self._device, model.config.tokens.suppressed)
        self._undrawn: _Undrawn | None = None
        self._launched: deque[_Launched] = deque()
        self._first_layer = {layer.kind: model.layer_kv[layer.layer_idx] for layer in reversed(model.config.layers)}
        self.graphs: DecodeGraphs | None = None
        if self._device.type == "cuda" and max_context is not None:
            self.graphs = DecodeGraphs(geometry, max_num_seqs, max_context, self._device, self._decode_forward)

    @property
    def depth(self) -> int:
        return self._depth

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        for req in plan.joined:
            self._sampler.join(req)
        for req in plan.changed_tables:
            self._load_tables(req)
        self.store.transfer(plan.transfers)
        self.store.poison_freed(plan.freed_pages)
        self.store.copy(plan.copies)
        step = StepArrays(plan)
        scores: dict[int, Scores] = {}
        if self.graphs is not None and not plan.chunks:
            drawing, logits = self.graphs.run(step, self._full, self._sliding)
        else:
            hidden = self.model.forward(self._with_images(self._batch(step), plan, step), self.store.pages)
            scores = self._score(plan, step, hidden)
            if not len(step.drawing_rows):
                self._launched.append(_Launched(None, scores))
                return
            drawing = hidden if step.all_draw else hidden[to_device(step.drawing_tokens, self._device)]
            logits = self.model.logits(drawing)
        self._undrawn = _Undrawn(plan, plan.sampling_rows(), step, drawing, logits, scores)
        if not plan.masked_rows:
            self._draw(None)

    @torch.inference_mode()
    def draw(self, masks: "np.ndarray") -> None:
        self._draw(to_device(masks.view(np.uint8), self._device))

    def _draw(self, masks: Tensor | None) -> None:
        """masks [masked rows, bytes] uint8."""
        if self._undrawn is None:
            raise RuntimeError("no step waits for its draw")
        (plan, rows, step, drawing, logits, scores), self._undrawn = self._undrawn, None
        mask = None if masks is None else (plan.masked_rows, masks)
        drawn = self._sampler.draw(logits, rows, step.drawing_rows, step.draw_positions, mask)
        self._last_tokens[to_device(step.drawing_rows, self._device)] = drawn.token_ids
        is_sound = drawn.is_sound & drawing.sum(dim=1, dtype=torch.float32).isfinite()
        self._launched.append(_Launched(replace(drawn, is_sound=is_sound), scores))

    def _score(self, plan: StepPlan, step: StepArrays, hidden: Tensor) -> dict[int, Scores]:
        """Log-probabilities of the chunks' prompt tokens, by index of the chunk."""
        found = {}
        for i, chunk in enumerate(plan.chunks):
            first, last = chunk.scored
            if first < last:
                before = int(step.cu_seqlens[step.num_decodes + i]) + first - 1 - chunk.start
                targets = np.array(chunk.req.tokens[first:last], dtype=np.int64)
                rows = hidden[before : before + last - first]
                num_top = chunk.req.request.num_score_top
                found[i] = score_tokens(self.model.logits, rows, to_device(targets, self._device), num_top)
        return found

    def collect(self) -> StepResult:
        return self._launched.popleft().result()

    def close(self) -> None:
        self._launched.clear()
        self._undrawn = None

    def _load_tables(self, req: RequestState) -> None:
        pages = req.pages
        assert pages is not None
        if self._full is not None:
            self._full.load(req.row_idx, pages.full_pages, 0)
        if self._sliding is not None:
            self._sliding.load(req.row_idx, pages.sliding_pages, pages.sliding_start)

    # ------------------------------------------------------------------------------------------------------- batch

    def _batch(self, step: StepArrays) -> ForwardBatch:
        """Pack the step into two buffers, send them, and cut them into the batch's tensors."""
        ints, longs = Packer(np.int32), Packer(np.int64)
        ints.add("cu_seqlens_q", step.cu_seqlens)
        ints.add("kv_lens", step.kv_lens)
        ints.add("positions", step.positions)
        longs.add("input_ids", step.prefill_ids)
        longs.add("decode_rows", step.row_idx[: step.num_decodes])
        for name, tables, slots in (
            ("full", self._full, step.full_slots),
            ("sliding", self._sliding, step.sliding_slots),
        ):
            if tables is not None:
                width = -(-int(tables.used[step.row_idx].max(initial=1)) // 16) * 16
                ints.add(f"{name}_table", tables.pages[step.row_idx, :width])
                ints.add(f"{name}_start", tables.start[step.row_idx])
                longs.add(f"{name}_slots", slots)
        parts = ints.send(self._device) | longs.send(self._device)
        input_ids = parts["input_ids"]
        if step.num_decodes:
            input_ids = torch.cat([self._last_tokens[parts["decode_rows"]], input_ids])
        return self._forward_batch(parts, input_ids, step.num_decodes, step.max_q_len, step.max_kv_len)

    def _with_images(self, batch: ForwardBatch, plan: StepPlan, step: StepArrays) -> ForwardBatch:
        seen = None if self._images is None else self._images.of_step(plan, step.positions)
        if seen is None:
            return batch
        sliding = batch.sliding
        if sliding is not None:
            sliding = replace(sliding, visible_end=seen.visible_end)
        return replace(batch, sliding=sliding, image_rows=seen.rows, image_embeds=seen.embeds)

    def _decode_forward(self, parts: dict[str, Tensor], num_rows: int, max_kv_len: int) -> tuple[Tensor, Tensor]:
        """Hidden states and logits of a step of decode rows alone; recorded into a graph."""
        input_ids = self._last_tokens[parts["decode_rows"]]
        batch = self._forward_batch(parts, input_ids, num_rows, 1, max_kv_len)
        hidden = self.model.forward(batch, self.store.pages)
        return hidden, self.model.logits(hidden)

    def _forward_batch(
        self, parts: dict[str, Tensor], input_ids: Tensor, num_decodes: int, max_q_len: int, max_kv_len: int
    ) -> ForwardBatch:
        def attention(kind: LayerKind, part: KindGeometry | None, sliding_window: int | None) -> AttentionBatch | None:
            if part is None:
                return None
            batch = AttentionBatch(
                cu_seqlens_q=parts["cu_seqlens_q"],
                kv_lens=parts["kv_lens"],
                positions=parts["positions"],
                page_table=parts[f"{kind}_table"],
                table_start=parts[f"{kind}_start"],
                slot_mapping=parts[f"{kind}_slots"],
                visible_end=None,
                sliding_window=sliding_window,
                max_q_len=max_q_len,
                max_kv_len=max_kv_len,
                num_decode_seqs=num_decodes,
            )
            return ops.plan_attention(batch, self._first_layer[kind], self.store.pages.element_size())

        geometry = self._geometry
        return ForwardBatch(
            input_ids=input_ids,
            sliding=attention(LayerKind.SLIDING, geometry.sliding, geometry.sliding_window),
            full=attention(LayerKind.FULL, geometry.full, None),
        )
