"""The vision tower of Gemma 4: patches of one image -> soft tokens in the text model's embedding space.

All patches of an image see each other. Positions are two-dimensional: the first half of each head turns with x, the
second with y. Soft tokens go into the text model as they come out here, without the embedding scale.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from gewell_kernels import ops
from torch import Tensor

from gewell.config import ModelConfig, VisionConfig
from gewell.model.gemma import Observe, Place, WeightSlot


class TowerLinear:
    """A projection, in small models with bounds on what goes in and what comes out."""

    def __init__(self, out_features: int, in_features: int, config: VisionConfig, place: Place) -> None:
        self.weight = place.empty(out_features, in_features)
        self.bounds: Tensor | None = None  # [4] float32: least and largest input, least and largest output
        if config.has_clipped_linears:
            self.bounds = torch.zeros(4, dtype=torch.float32, device=place.device)

    def __call__(self, x: Tensor) -> Tensor:
        if self.bounds is None:
            return ops.linear(x, self.weight)
        low_in, high_in, low_out, high_out = self.bounds.to(x.dtype).unbind()
        return ops.linear(x.clamp(low_in, high_in), self.weight).clamp(low_out, high_out)

    def slots(self, name: str) -> Iterator[tuple[str, WeightSlot]]:
        yield f"{name}.linear.weight", WeightSlot(self.weight)
        if self.bounds is not None:
            for bound, place in zip(("input_min", "input_max", "output_min", "output_max"), self.bounds, strict=True):
                yield f"{name}.{bound}", WeightSlot(place)


class TowerLayer:
    """Attention and gated MLP, each with a norm before and after, as in the text model."""

    def __init__(self, config: VisionConfig, place: Place) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        width = config.num_heads * config.head_dim
        self.config = config
        self.input_norm = place.norm_weight(hidden)
        self.post_attention_norm = place.norm_weight(hidden)
        self.pre_feedforward_norm = place.norm_weight(hidden)
        self.post_feedforward_norm = place.norm_weight(hidden)
        self.q_norm = place.norm_weight(config.head_dim)
        self.k_norm = place.norm_weight(config.head_dim)
        self.q_proj, self.k_proj, self.v_proj = (TowerLinear(width, hidden, config, place) for _ in range(3))
        self.o_proj = TowerLinear(hidden, width, config, place)
        self.gate_proj, self.up_proj = (TowerLinear(inner, hidden, config, place) for _ in range(2))
        self.down_proj = TowerLinear(hidden, inner, config, place)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [num_patches, hidden]; cos, sin [num_patches, 1, 2, head_dim / 4] -> [num_patches, hidden]."""
        eps, shape = self.config.rms_norm_eps, (x.shape[0], self.config.num_heads, self.config.head_dim)
        q = turn_in_plane(ops.rms_norm(self.q_proj(x).view(shape), self.q_norm, eps), cos, sin)
        k = turn_in_plane(ops.rms_norm(self.k_proj(x).view(shape), self.k_norm, eps), cos, sin)
        v = ops.rms_norm(self.v_proj(x).view(shape), None, eps)
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        return self.o_proj(out.squeeze(0).transpose(0, 1).flatten(1))

    def feedforward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.gelu_mul(torch.cat((self.gate_proj(x), self.up_proj(x)), dim=-1)))

    def slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield "input_layernorm.weight", WeightSlot(self.input_norm)
        yield "post_attention_layernorm.weight", WeightSlot(self.post_attention_norm)
        yield "pre_feedforward_layernorm.weight", WeightSlot(self.pre_feedforward_norm)
        yield "post_feedforward_layernorm.weight", WeightSlot(self.post_feedforward_norm)
        yield "self_attn.q_norm.weight", WeightSlot(self.q_norm)
        yield "self_attn.k_norm.weight", WeightSlot(self.k_norm)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield from getattr(self, name).slots(f"self_attn.{name}")
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield from getattr(self, name).slots(f"mlp.{name}")


class VisionTower:
    """Encoder, pooling and projector. Constructing allocates; `gewell.weights.checkpoint.load_vision` fills."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        assert config.vision is not None
        place = Place(dtype, torch.device(device))
        vision = config.vision
        self.config = vision
        self.dtype = dtype
        self.device = place.device
        self.input_proj = place.empty(vision.hidden_size, 3 * vision.patch_size**2)
        self.position_table = place.empty(2, vision.position_table_size, vision.hidden_size)  # by x, by y
        self.layers = tuple(TowerLayer(vision, place) for _ in range(vision.num_layers))
        self.std_bias, self.std_scale = place.norm_weight(vision.hidden_size), place.norm_weight(vision.hidden_size)
        self.projection = place.empty(config.hidden_size, vision.hidden_size)

    def __call__(self, patches: Tensor, positions: Tensor, observe: Observe | None = None) -> Tensor:
        """Soft tokens of one image.

        patches    [num_patches, 3 * patch_size^2] uint8 (0..255) or floating (0..1); row, column, channel
        positions  [num_patches, 2] int64, (x, y) of each patch: a whole grid, sides multiples of pooling_size
        returns    [num_patches / pooling_size^2, text hidden size]
        observe    called with ("vision_hidden.<i>" | "vision_soft_tokens" | "vision_projected", tensor)
        """
        eps = self.config.rms_norm_eps
        pixels = patches.float() / 255 if patches.dtype is torch.uint8 else patches.float()
        residual = ops.linear((2 * (pixels - 0.5)).to(self.dtype), self.input_proj)
        residual += self.position_table[0, positions[:, 0]] + self.position_table[1, positions[:, 1]]
        cos, sin = self._rotary(positions)
        normed = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        for i, layer in enumerate(self.layers):
            if observe:
                observe(f"vision_hidden.{i}", residual)
            branch = layer.attention(normed, cos, sin)
            residual, normed = ops.residual_norm(
                residual, branch, layer.post_attention_norm, layer.pre_feedforward_norm, eps
            )
            next_norm = self.layers[i + 1].input_norm if i + 1 < len(self.layers) else None
            branch = layer.feedforward(normed)
            residual, normed = ops.residual_norm(residual, branch, layer.post_feedforward_norm, next_norm, eps)
        soft_tokens = self._pool(residual, positions).to(self.dtype)
        projected = ops.linear(ops.rms_norm(soft_tokens, None, eps), self.projection)
        if observe:
            observe("vision_soft_tokens", soft_tokens)
            observe("vision_projected", projected)
        return projected

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [num_patches, 1, 2, head_dim / 4]: angles theta^(-2 i / (head_dim / 2)) times x, then times y."""
        half = self.config.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=positions.device) / half
        angles = positions.float().unsqueeze(-1) * self.config.rope_theta**-exponents
        return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)

    def _pool(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Mean over squares of patches, scaled and standardised, in float32: [num_cells, hidden]."""
        size = self.config.pooling_size
        cells_per_row = (int(positions[:, 0].max()) + 1) // size
        cells = positions[:, 0] // size + cells_per_row * (positions[:, 1] // size)
        sums = torch.zeros(hidden.shape[0] // size**2, hidden.shape[1], dtype=torch.float32, device=hidden.device)
        pooled: Tensor = sums.index_add_(0, cells, hidden.float()) * (self.config.hidden_size**0.5 / size**2)
        return (pooled - self.std_bias) * self.std_scale if self.config.is_standardized else pooled

    def weight_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        """Every tensor of a checkpoint by its name without `model.`."""
        yield "vision_tower.patch_embedder.input_proj.weight", WeightSlot(self.input_proj)
        yield "vision_tower.patch_embedder.position_embedding_table", WeightSlot(self.position_table)
        for i, layer in enumerate(self.layers):
            for name, slot in layer.slots():
                yield f"vision_tower.encoder.layers.{i}.{name}", slot
        if self.config.is_standardized:
            yield "vision_tower.std_bias", WeightSlot(self.std_bias)
            yield "vision_tower.std_scale", WeightSlot(self.std_scale)
        yield "embed_vision.embedding_projection.weight", WeightSlot(self.projection)


def turn_in_plane(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [num_patches, heads, head_dim]: within each half of the head, pairs (i, i + head_dim/4) turn."""
    parts = x.float().view(*x.shape[:-1], 2, 2, -1)
    a, b = parts[..., 0, :], parts[..., 1, :]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-2).flatten(-3).to(x.dtype)
