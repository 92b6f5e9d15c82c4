"""Gemma 3 text and Gemma 4, one file from top to bottom. Ops with a layout of their own are in `gewell_kernels`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from gewell_kernels import ops
from gewell_kernels.batch import AttentionBatch
from gewell_kernels.cpu import fixed_tiles
from gewell_kernels.layout import KVLayout, LayerKV
from torch import Tensor

from gewell.config import LayerConfig, LayerKind, ModelConfig
from gewell.errors import ConfigError
from gewell.model.kv_plan import KVPlan, plan_kv

Observe = Callable[[str, Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One ragged step: the new tokens of all its sequences in a row, and how each layer kind attends."""

    input_ids: Tensor  # [num_tokens] int64
    sliding: AttentionBatch | None  # None when the model has no sliding layers
    full: AttentionBatch | None
    image_rows: Tensor | None = None  # [num_rows] int64: tokens whose embedding is an image's soft token
    image_embeds: Tensor | None = None  # [num_rows, hidden_size], projected; not multiplied by the embedding scale


# --- building blocks ---------------------------------------------------------------------------------------------


class StepOps(Protocol):
    """The ops in which rows of a step share work: `gewell_kernels.ops`, or a form where they do so in fixed tiles."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor: ...

    def soft_cap(self, logits: Tensor, cap: float) -> Tensor: ...

    def moe_experts(
        self, x: Tensor, expert_idx: Tensor, expert_weight: Tensor, gate_up_proj: Tensor, down_proj: Tensor
    ) -> Tensor: ...

    def paged_attention(
        self,
        q: Tensor,
        k_new: Tensor | None,
        v_new: Tensor | None,
        k_weight: Tensor | None,
        pages: Tensor,
        layer: LayerKV,
        batch: AttentionBatch,
    ) -> Tensor: ...


class Linear:
    """x [num_tokens, in_features] -> [num_tokens, out_features], without bias.

    Holds the rows (or the columns) of its shard: with one device, all of them. Several projections of the same input
    are one `Linear` whose weight is their concatenation along the rows.
    """

    __slots__ = ("ops", "weight")

    def __init__(self, out_features: int, in_features: int, place: "Place") -> None:
        self.ops = place.ops
        self.weight = place.empty(out_features, in_features)

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight)


class Place(NamedTuple):
    """Where a model's memory is allocated, in which type and with which ops it computes. Norm weights are float32."""

    dtype: torch.dtype
    device: torch.device
    ops: StepOps = ops

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def norm_weight(self, size: int) -> Tensor:
        return torch.ones(size, dtype=torch.float32, device=self.device)


def _step_ops(is_deterministic: bool, device: torch.device) -> StepOps:
    if not is_deterministic:
        return ops
    if device.type != "cpu":
        raise ConfigError("deterministic", True, f"has ops for the CPU alone, not for {device.type}")
    return fixed_tiles


class Attention:
    """q, k, v in one product; norms, rotation and the write into the pages in one op; attention in another."""

    def __init__(self, layer: LayerConfig, config: ModelConfig, layer_kv: LayerKV, place: Place) -> None:
        self.ops = place.ops
        self.kind = layer.kind
        self.layer_kv = layer_kv
        self.num_q_heads = layer.num_q_heads
        self.q_scale = config.q_scale
        self.has_v_norm = config.has_v_norm
        self.eps = config.rms_norm_eps
        self.writes_kv = layer.writes_kv
        q_width = layer.num_q_heads * layer.head_dim
        kv_width = layer.num_kv_heads * layer.head_dim
        num_kv_parts = (1 if layer.k_eq_v else 2) if layer.writes_kv else 0
        self.part_widths = (q_width, *[kv_width] * num_kv_parts)
        self.qkv_proj = Linear(sum(self.part_widths), config.hidden_size, place)
        self.o_proj = Linear(config.hidden_size, q_width, place)
        self.q_norm = place.norm_weight(layer.head_dim)
        # Norm weight of the keys that this layer reads: its own, or that of the layer whose pages it shares.
        self.k_norm = place.norm_weight(layer.head_dim)

    def __call__(
        self, x: Tensor, pages: Tensor, batch: AttentionBatch, new_kv: "NewKV | None"
    ) -> "tuple[Tensor, NewKV]":
        """x [num_tokens, hidden] -> ([num_tokens, hidden], this step's keys and values for layers that share them)."""
        qkv = self.qkv_proj(x)
        q, k_new, v_new = ops.write_kv(
            qkv,
            self.num_q_heads,
            self.q_norm,
            self.k_norm,
            self.eps,
            self.q_scale,
            self.has_v_norm,
            pages,
            self.layer_kv,
            batch,
        )
        if not self.writes_kv and new_kv is not None:
            k_new, v_new = new_kv
        out = self.ops.paged_attention(q, k_new, v_new, self.k_norm, pages, self.layer_kv, batch)
        return self.o_proj(out), NewKV(k_new, v_new)


class NewKV(NamedTuple):
    k: Tensor | None
    v: Tensor | None


class MLP:
    """down(gelu_tanh(gate x) * up x)."""

    def __init__(self, hidden_size: int, intermediate_size: int, place: Place) -> None:
        self.ops = place.ops
        self.gate_up_proj = Linear(2 * intermediate_size, hidden_size, place)
        self.down_proj = Linear(hidden_size, intermediate_size, place)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down_proj(self.ops.gelu_mul(self.gate_up_proj(x)))


class Router:
    """Chooses experts from the raw residual stream, which it normalises by a scale of its own."""

    def __init__(self, config: ModelConfig, place: Place) -> None:
        assert config.moe is not None
        self.num_experts_per_token = config.moe.num_experts_per_token
        self.eps = config.rms_norm_eps
        self.input_factor = config.hidden_size**-0.5
        self.scale = place.norm_weight(config.hidden_size)
        self.proj = Linear(config.moe.num_experts, config.hidden_size, place)
        self.per_expert_scale = place.norm_weight(config.moe.num_experts)

    def __call__(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """residual [num_tokens, hidden] -> expert indices [num_tokens, k] int64 and weights [num_tokens, k] float32."""
        z = ops.rms_norm(residual, self.scale * self.input_factor, self.eps)
        probabilities = torch.softmax(self.proj(z).float(), dim=-1)
        weights, experts = torch.topk(probabilities, self.num_experts_per_token, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return experts, weights * self.per_expert_scale[experts]


class MoE:
    """A dense MLP that every token takes, beside experts that the router chooses; each branch has norms of its own."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, place: Place) -> None:
        assert config.moe is not None
        hidden, inner = config.hidden_size, config.moe.intermediate_size
        self.ops = place.ops
        self.eps = config.rms_norm_eps
        self.mlp = MLP(hidden, layer.intermediate_size, place)
        self.router = Router(config, place)
        self.gate_up_proj = place.empty(config.moe.num_experts, 2 * inner, hidden)  # gate rows first
        self.down_proj = place.empty(config.moe.num_experts, hidden, inner)
        self.post_dense_norm = place.norm_weight(hidden)
        self.pre_expert_norm = place.norm_weight(hidden)
        self.post_expert_norm = place.norm_weight(hidden)

    def __call__(self, normed: Tensor, residual: Tensor, observe: Observe | None, layer_idx: int) -> Tensor:
        """normed, residual [num_tokens, hidden]: the stream with and without the pre-feed-forward norm."""
        dense = ops.rms_norm(self.mlp(normed), self.post_dense_norm, self.eps)
        experts, weights = self.router(residual)
        if observe:
            observe(f"router_index.{layer_idx}", experts)
            observe(f"router_weight.{layer_idx}", weights)
        x = ops.rms_norm(residual, self.pre_expert_norm, self.eps)
        sparse = self.ops.moe_experts(x, experts, weights, self.gate_up_proj, self.down_proj)
        return dense + ops.rms_norm(sparse, self.post_expert_norm, self.eps)


class PerLayerInput:
    """E2B, E4B: mixes this layer's slice of the second embedding into the stream, after the feed-forward part."""

    def __init__(self, size: int, hidden_size: int, place: Place) -> None:
        self.ops = place.ops
        self.gate = Linear(size, hidden_size, place)
        self.projection = Linear(hidden_size, size, place)
        self.post_norm = place.norm_weight(hidden_size)

    def __call__(self, residual: Tensor, layer_input: Tensor) -> Tensor:
        """residual [num_tokens, hidden], layer_input [num_tokens, size] -> branch [num_tokens, hidden]."""
        return self.projection(self.ops.gelu_mul(torch.cat((self.gate(residual), layer_input), dim=-1)))


class Layer:
    """Attention and feed-forward branch, each with a norm before and after; then the stream times the layer scalar."""

    def __init__(self, layer: LayerConfig, config: ModelConfig, layer_kv: LayerKV, place: Place) -> None:
        self.layer_idx = layer.layer_idx
        self.kind = layer.kind
        self.kv_layer_idx = layer.kv_layer_idx
        self.eps = config.rms_norm_eps
        self.input_norm = place.norm_weight(config.hidden_size)
        self.post_attention_norm = place.norm_weight(config.hidden_size)
        self.pre_feedforward_norm = place.norm_weight(config.hidden_size)
        self.post_feedforward_norm = place.norm_weight(config.hidden_size)
        self.attention = Attention(layer, config, layer_kv, place)
        self.feedforward: MLP | MoE
        if config.moe is None:
            self.feedforward = MLP(config.hidden_size, layer.intermediate_size, place)
        else:
            self.feedforward = MoE(config, layer, place)
        self.per_layer_input: PerLayerInput | None = None
        if config.per_layer_input is not None:
            self.per_layer_input = PerLayerInput(config.per_layer_input.size, config.hidden_size, place)
        self.has_scalar = config.has_layer_scalar
        self.stored_scalar = torch.ones(1, dtype=torch.float32)
        self.scalar = 1.0  # read from stored_scalar once: a number on the host costs the device nothing

    def __call__(
        self,
        residual: Tensor,
        normed: Tensor,
        next_norm: Tensor,
        layer_input: Tensor | None,
        pages: Tensor,
        batch: AttentionBatch,
        new_kv: NewKV | None,
        observe: Observe | None,
    ) -> tuple[Tensor, Tensor, NewKV]:
        """residual [num_tokens, hidden] (changed in place) and its input norm -> the same for the next layer."""
        branch, new_kv = self.attention(normed, pages, batch, new_kv)
        residual, normed = ops.residual_norm(
            residual, branch, self.post_attention_norm, self.pre_feedforward_norm, self.eps
        )
        if isinstance(self.feedforward, MoE):
            branch = self.feedforward(normed, residual, observe, self.layer_idx)
        else:
            branch = self.feedforward(normed)
        if self.per_layer_input is None:
            residual, normed = ops.residual_norm(
                residual, branch, self.post_feedforward_norm, next_norm, self.eps, self.scalar
            )
            return residual, normed, new_kv
        assert layer_input is not None
        residual, _ = ops.residual_norm(residual, branch, self.post_feedforward_norm, None, self.eps)
        branch = self.per_layer_input(residual, layer_input)
        residual, normed = ops.residual_norm(
            residual, branch, self.per_layer_input.post_norm, next_norm, self.eps, self.scalar
        )
        return residual, normed, new_kv


# --- the model ---------------------------------------------------------------------------------------------------


class GemmaModel:
    """Weights on one device and the forward pass over paged keys and values.

    Constructing allocates; `gewell.weights.checkpoint.load_model` or `random` fill. `layer_kv[i]`: what layer i reads.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_plan: KVPlan,
        is_deterministic: bool = False,
    ) -> None:
        """is_deterministic: a row's results do not depend on the rest of the step, to the bit (CPU; slower)."""
        place = Place(dtype, torch.device(device), _step_ops(is_deterministic, torch.device(device)))
        self.ops = place.ops
        self.config = config
        self.kv_plan = kv_plan
        self.layer_kv = kv_plan.layers
        self.dtype = dtype
        self.device = place.device
        self.embedding = place.empty(config.vocab_size, config.hidden_size)
        # Published code rounds the factor to the weights' type before it multiplies: 73.5 for the 31B, not 73.32.
        self.embedding_scale = float(torch.tensor(config.hidden_size**0.5, dtype=dtype))
        self.layers = tuple(
            Layer(layer, config, layer_kv, place) for layer, layer_kv in zip(config.layers, kv_plan.layers, strict=True)
        )
        for layer in self.layers:  # readers of another layer's keys use that layer's norm weight, not a copy
            if layer.kv_layer_idx not in (None, layer.layer_idx):
                layer.attention.k_norm = self.layers[layer.kv_layer_idx].attention.k_norm
        self.kv_donors = {layer.kv_layer_idx for layer in self.layers if layer.kv_layer_idx != layer.layer_idx}
        self.final_norm = place.norm_weight(config.hidden_size)
        self.layer_inputs = LayerInputs(config, place) if config.per_layer_input is not None else None
        # Image, video and audio ids have rows in the table for the output head; as input they read as padding.
        self.input_rows: Tensor | None = None
        placeholders = [i for i in config.tokens.placeholders if i < config.vocab_size]
        if placeholders:
            self.input_rows = torch.arange(config.vocab_size, device=place.device)
            self.input_rows[placeholders] = config.tokens.pad

    def forward(self, batch: ForwardBatch, pages: Tensor, observe: Observe | None = None) -> Tensor:
        """Run all layers over the step's tokens; keys and values are written into `pages`, in place.

        returns   [num_tokens, hidden_size], after the final norm
        observe   called with a name ("hidden.embed", "hidden.<i>", "hidden.final", "router_index.<i>", ...) and a
                  tensor; tests and `gewell verify` look inside with it. The tensors are live: copy what is kept
        """
        ids = batch.input_ids if self.input_rows is None else self.input_rows[batch.input_ids]
        residual = self.embed(ids, batch)
        layer_inputs = self.layer_inputs(ids, residual) if self.layer_inputs is not None else None
        if observe:
            observe("hidden.embed", residual)
        new_kv: dict[int, NewKV] = {}
        normed = ops.rms_norm(residual, self.layers[0].input_norm, self.config.rms_norm_eps)
        for i, layer in enumerate(self.layers):
            next_norm = self.layers[i + 1].input_norm if i + 1 < len(self.layers) else self.final_norm
            attention_batch = batch.sliding if layer.kind is LayerKind.SLIDING else batch.full
            assert attention_batch is not None, f"the step has no batch for {layer.kind} layers"
            source = i if layer.kv_layer_idx is None else layer.kv_layer_idx
            residual, normed, kv = layer(
                residual,
                normed,
                next_norm,
                layer_inputs[:, i] if layer_inputs is not None else None,
                pages,
                attention_batch,
                new_kv.get(source),
                observe,
            )
            if i in self.kv_donors:  # of the others they would pile up: 134 MB a layer of the 31B in an 8k chunk
                new_kv[i] = kv
            if observe:
                observe(f"hidden.{i}", residual)
        if observe:
            observe("hidden.final", normed)
        return normed

    def embed(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """[num_tokens, hidden_size]: scaled token embeddings, with images' rows put in unscaled."""
        x = F.embedding(ids, self.embedding) * self.embedding_scale
        if batch.image_rows is not None:
            assert batch.image_embeds is not None
            x.index_copy_(0, batch.image_rows, batch.image_embeds.to(x.dtype))
        return x

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """hidden_rows [rows, hidden_size], after the final norm -> [rows, vocab_size] float32, after the soft-cap."""
        logits = self.ops.linear(hidden_rows, self.embedding)
        cap = self.config.final_logit_softcap
        return logits.float() if cap is None else self.ops.soft_cap(logits, cap)

    def weight_slots(self) -> "Iterator[tuple[str, WeightSlot]]":
        """Every tensor of a checkpoint by its name without prefix, and the memory it is copied into."""
        return _weight_slots(self)

    def use_kv_plan(self, kv_plan: KVPlan) -> None:
        """Read and write pages of another layout from now on; the weights are the same for all."""
        self.kv_plan = kv_plan
        self.layer_kv = kv_plan.layers
        for layer, layer_kv in zip(self.layers, kv_plan.layers, strict=True):
            layer.attention.layer_kv = layer_kv

    def finish_loading(self) -> None:
        """Take over what is kept on the host; call it once after the slots are filled."""
        for layer in self.layers:
            layer.scalar = float(layer.stored_scalar)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        seed: int = 0,
        full_layout: KVLayout = KVLayout.V_ONLY,
        kv_dtype: torch.dtype | None = None,
    ) -> "GemmaModel":
        """A model of the real shape with random weights, made on the device: for benches, which need no checkpoint."""
        plan = plan_kv(config, dtype_bytes=(kv_dtype or dtype).itemsize, full_layout=full_layout)
        model = cls(config, dtype=dtype, device=device, kv_plan=plan)
        generator = torch.Generator(device=model.device).manual_seed(seed)
        for name, slot in model.weight_slots():
            if slot.target.dtype is torch.float32 and slot.target.ndim == 1:
                continue  # norm weights and scalars stay 1
            # Unit variance through every product keeps activations in range; the embedding gets sqrt(hidden) on top.
            fan_in = slot.target.shape[-1]
            slot.target.normal_(std=0.02 if name.startswith("embed") else fan_in**-0.5, generator=generator)
        return model


class LayerInputs:
    """E2B, E4B: a small vector per token and layer, from a second embedding table and the first layer's input."""

    def __init__(self, config: ModelConfig, place: Place) -> None:
        assert config.per_layer_input is not None
        self.size = config.per_layer_input.size
        self.num_layers = config.num_layers
        self.eps = config.rms_norm_eps
        width = self.num_layers * self.size
        self.embedding = place.empty(config.per_layer_input.vocab_size, width)
        self.embedding_scale = float(torch.tensor(self.size**0.5, dtype=place.dtype))
        self.projection = Linear(width, config.hidden_size, place)
        self.projection_scale = config.hidden_size**-0.5
        self.norm = place.norm_weight(self.size)

    def __call__(self, ids: Tensor, embeds: Tensor) -> Tensor:
        """ids [num_tokens] (padding at placeholders), embeds [num_tokens, hidden] -> [num_tokens, num_layers, size]."""
        words = F.embedding(ids, self.embedding) * self.embedding_scale
        context = self.projection(embeds) * self.projection_scale
        shape = (-1, self.num_layers, self.size)
        mixed: Tensor = (ops.rms_norm(context.view(shape), self.norm, self.eps) + words.view(shape)) * 2**-0.5
        return mixed


# --- names in checkpoints ----------------------------------------------------------------------------------------


class WeightSlot(NamedTuple):
    """Memory that one checkpoint tensor of the same shape is copied into, converted to the target's type."""

    target: Tensor
    add: float = 0.0  # Gemma 3 stores norm weights minus one


def _weight_slots(model: GemmaModel) -> Iterator[tuple[str, WeightSlot]]:
    add = 1.0 if model.config.norm_adds_one else 0.0
    yield "embed_tokens.weight", WeightSlot(model.embedding)
    yield "norm.weight", WeightSlot(model.final_norm, add)
    if model.layer_inputs is not None:
        yield "embed_tokens_per_layer.weight", WeightSlot(model.layer_inputs.embedding)
        yield "per_layer_model_projection.weight", WeightSlot(model.layer_inputs.projection.weight)
        yield "per_layer_projection_norm.weight", WeightSlot(model.layer_inputs.norm)
    for layer in model.layers:
        prefix = f"layers.{layer.layer_idx}."
        for name, slot in layer_slots(layer, add):
            yield prefix + name, slot


def layer_slots(layer: Layer, add: float) -> Iterator[tuple[str, WeightSlot]]:
    """One layer's tensors by their names inside the layer."""
    if layer.has_scalar:
        yield "layer_scalar", WeightSlot(layer.stored_scalar)
    yield "input_layernorm.weight", WeightSlot(layer.input_norm, add)
    yield "post_attention_layernorm.weight", WeightSlot(layer.post_attention_norm, add)
    yield "pre_feedforward_layernorm.weight", WeightSlot(layer.pre_feedforward_norm, add)
    yield "post_feedforward_layernorm.weight", WeightSlot(layer.post_feedforward_norm, add)
    attention = layer.attention
    parts = torch.split(attention.qkv_proj.weight, list(attention.part_widths))
    for part, weight in zip("qkv", parts, strict=False):
        yield f"self_attn.{part}_proj.weight", WeightSlot(weight)
    yield "self_attn.o_proj.weight", WeightSlot(attention.o_proj.weight)
    yield "self_attn.q_norm.weight", WeightSlot(attention.q_norm, add)
    if attention.writes_kv:
        yield "self_attn.k_norm.weight", WeightSlot(attention.k_norm, add)
    if isinstance(layer.feedforward, MoE):
        yield from _moe_slots(layer.feedforward)
    else:
        yield from _mlp_slots(layer.feedforward)
    if layer.per_layer_input is not None:
        yield "per_layer_input_gate.weight", WeightSlot(layer.per_layer_input.gate.weight)
        yield "per_layer_projection.weight", WeightSlot(layer.per_layer_input.projection.weight)
        yield "post_per_layer_input_norm.weight", WeightSlot(layer.per_layer_input.post_norm)


def _mlp_slots(mlp: MLP) -> Iterator[tuple[str, WeightSlot]]:
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    yield "mlp.gate_proj.weight", WeightSlot(gate)
    yield "mlp.up_proj.weight", WeightSlot(up)
    yield "mlp.down_proj.weight", WeightSlot(mlp.down_proj.weight)


def _moe_slots(moe: MoE) -> Iterator[tuple[str, WeightSlot]]:
    yield from _mlp_slots(moe.mlp)
    yield "router.proj.weight", WeightSlot(moe.router.proj.weight)
    yield "router.scale", WeightSlot(moe.router.scale)
    yield "router.per_expert_scale", WeightSlot(moe.router.per_expert_scale)
    yield "experts.gate_up_proj", WeightSlot(moe.gate_up_proj)
    yield "experts.down_proj", WeightSlot(moe.down_proj)
    yield "post_feedforward_layernorm_1.weight", WeightSlot(moe.post_dense_norm)
    yield "pre_feedforward_layernorm_2.weight", WeightSlot(moe.pre_expert_norm)
    yield "post_feedforward_layernorm_2.weight", WeightSlot(moe.post_expert_norm)
