"""Drafters of Gemma 4 ("assistant" models): four query-only layers over the target's keys and values.

One step turns (newest token, a state of the target's size) into logits of the next token and the state for the step
after it. The state of the first step is the target's hidden vector after its final norm, at the last verified position.
The position stays the same through a round: the index of the newest token, which is not in the cache yet.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from gewell_kernels import ops
from torch import Tensor

from gewell.config import LayerKind, ModelConfig
from gewell.errors import CheckpointError
from gewell.model.gemma import ForwardBatch, GemmaModel, Layer, Linear, Place, WeightSlot, layer_slots
from gewell.model.kv_plan import plan_drafter_kv


class OrderedHead:
    """Scores only the tokens of the best clusters: every other token gets one less than the least of them."""

    def __init__(self, hidden_size: int, vocab_size: int, num_clusters: int, num_used: int, place: Place) -> None:
        self.num_used = num_used
        self.centroids = Linear(num_clusters, hidden_size, place)
        self.token_ordering = torch.empty(vocab_size, dtype=torch.int64, device=place.device)  # cluster after cluster

    def __call__(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """hidden [rows, hidden_size], embedding [vocab, hidden_size] -> [rows, vocab] float32."""
        best = self.centroids(hidden).topk(self.num_used, dim=-1).indices
        clusters = self.token_ordering.view(self.centroids.weight.shape[0], -1)
        ids = clusters[best].flatten(1)
        scores = torch.einsum("rh,rnh->rn", hidden, embedding[ids]).float()
        logits = (scores.min(dim=-1, keepdim=True).values - 1).expand(-1, embedding.shape[0]).contiguous()
        return logits.scatter_(1, ids, scores)


class Drafter:
    """Weights of a drafter bound to its target: it reads the target's embedding table, pages and key norms."""

    def __init__(
        self, config: ModelConfig, target: GemmaModel, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Allocates; `gewell.weights.checkpoint.load_drafter` fills. Raises CheckpointError when the two do not fit."""
        assert config.drafter is not None
        _check_fit(config, target)
        place = Place(dtype, torch.device(device))
        self.config = config
        self.target = target
        self.embedding = place.empty(config.vocab_size, config.hidden_size)
        backbone = config.drafter.backbone_hidden_size
        self.pre_projection = Linear(config.hidden_size, 2 * backbone, place)
        self.post_projection = Linear(backbone, config.hidden_size, place)
        plan = plan_drafter_kv(config, target.config, target.kv_plan)
        self.layers = tuple(
            Layer(layer, config, layer_kv, place) for layer, layer_kv in zip(config.layers, plan.layers, strict=True)
        )
        for layer in self.layers:
            source = target.config.layers_of(layer.kind)[-1].layer_idx
            layer.attention.k_norm = target.layers[source].attention.k_norm
        self.final_norm = place.norm_weight(config.hidden_size)
        self.ordered_head: OrderedHead | None = None
        if config.drafter.num_centroids is not None:
            self.ordered_head = OrderedHead(
                config.hidden_size,
                config.vocab_size,
                config.drafter.num_centroids,
                config.drafter.num_centroids_used,
                place,
            )

    def step(self, batch: ForwardBatch, states: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
        """One draft step for one row per sequence.

        batch     input_ids: each sequence's newest token; attention over verified keys alone (`visible_end`)
        states    [rows, backbone_hidden_size]
        returns   logits [rows, vocab_size] float32, without soft-cap, and the states of the next step
        """
        target = self.target
        words = F.embedding(batch.input_ids, target.embedding) * target.embedding_scale
        residual = self.pre_projection(torch.cat((words, states), dim=-1).to(self.embedding.dtype))
        normed = ops.rms_norm(residual, self.layers[0].input_norm, self.config.rms_norm_eps)
        for i, layer in enumerate(self.layers):
            next_norm = self.layers[i + 1].input_norm if i + 1 < len(self.layers) else self.final_norm
            attention_batch = batch.sliding if layer.kind is LayerKind.SLIDING else batch.full
            assert attention_batch is not None
            residual, normed, _ = layer(residual, normed, next_norm, None, pages, attention_batch, None, None)
        states = self.post_projection(normed)
        if self.ordered_head is not None:
            return self.ordered_head(normed, self.embedding), states
        return ops.linear(normed, self.embedding).float(), states

    def use_target_plan(self) -> None:
        """Read the pages as the target now lays them out."""
        plan = plan_drafter_kv(self.config, self.target.config, self.target.kv_plan)
        for layer, layer_kv in zip(self.layers, plan.layers, strict=True):
            layer.attention.layer_kv = layer_kv

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        """Every tensor of a checkpoint by its stored name."""
        yield "model.embed_tokens.weight", WeightSlot(self.embedding)
        yield "model.norm.weight", WeightSlot(self.final_norm)
        yield "pre_projection.weight", WeightSlot(self.pre_projection.weight)
        yield "post_projection.weight", WeightSlot(self.post_projection.weight)
        for layer in self.layers:
            for name, slot in layer_slots(layer, add=0.0):
                yield f"model.layers.{layer.layer_idx}.{name}", slot
        if self.ordered_head is not None:
            yield "masked_embedding.centroids.weight", WeightSlot(self.ordered_head.centroids.weight)
            yield "masked_embedding.token_ordering", WeightSlot(self.ordered_head.token_ordering)

    def finish_loading(self) -> None:
        for layer in self.layers:
            layer.scalar = float(layer.stored_scalar)


def _check_fit(config: ModelConfig, target: GemmaModel) -> None:
    assert config.drafter is not None
    pairs = [
        ("hidden size", config.drafter.backbone_hidden_size, target.config.hidden_size),
        ("vocabulary", config.vocab_size, target.config.vocab_size),
    ]
    for kind in LayerKind:
        own = [layer for layer in config.layers if layer.kind is kind]
        sources = target.config.layers_of(kind)
        if not own:
            continue
        if not sources:
            raise CheckpointError(f"the drafter has {kind} layers and its target has none")
        source = sources[-1]
        pairs.append((f"key-value heads of {kind} layers", own[0].num_kv_heads, source.num_kv_heads))
        pairs.append((f"head size of {kind} layers", own[0].head_dim, source.head_dim))
    for what, have, want in pairs:
        if have != want:
            raise CheckpointError(f"the drafter is made for a target with {what} {have}, this one has {want}")
