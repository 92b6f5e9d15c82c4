"""What fits into a memory: weights, pages, sequences side by side. Arithmetic over a config; no torch, no device."""

from dataclasses import dataclass

from gewell_kernels.layout import KVLayout

from gewell.cache.geometry import KVGeometry
from gewell.config import LayerConfig, ModelConfig
from gewell.model.kv_plan import plan_kv
from gewell.scheduler.batch import max_tokens_alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How a memory of `memory_bytes` is used by a model.

    other_bytes   for activations, graphs, workspaces
    """

    memory_bytes: int
    weight_bytes: int
    other_bytes: int
    geometry: KVGeometry

    @property
    def num_pages(self) -> int:
        return max(0, (self.memory_bytes - self.weight_bytes - self.other_bytes) // self.geometry.page_bytes)

    @property
    def longest_alone(self) -> int:
        """Tokens of the longest sequence that the pool holds when nothing else runs."""
        return max_tokens_alone(self.num_pages, self.geometry)

    @property
    def window_bytes(self) -> int:
        """What the sliding layers of one running row hold, whatever its length."""
        if self.geometry.sliding is None:
            return 0
        return -(-self.geometry.sliding_window // self.geometry.sliding.page_tokens) * self.geometry.page_bytes

    def rows(self, num_tokens: int) -> int:
        """Sequences of that length side by side, each with pages of its own."""
        return self.num_pages // self.geometry.num_pages(num_tokens)


def capacity(
    config: ModelConfig,
    *,
    memory_bytes: int,
    weight_bytes: int | None = None,
    other_bytes: int,
    kv_bytes: int = 2,
    full_layout: KVLayout = KVLayout.V_ONLY,
) -> Capacity:
    """weight_bytes: as stored; None: the text model's parameters in bf16."""
    return Capacity(
        memory_bytes=memory_bytes,
        weight_bytes=2 * num_parameters(config) if weight_bytes is None else weight_bytes,
        other_bytes=other_bytes,
        geometry=plan_kv(config, dtype_bytes=kv_bytes, full_layout=full_layout).geometry,
    )


def num_parameters(config: ModelConfig) -> int:
    """Matrices of the text model; the tied head counts once, norm weights are left out (1 in 10,000)."""
    hidden = config.hidden_size
    total = config.vocab_size * hidden + sum(_layer_parameters(layer, config) for layer in config.layers)
    if config.per_layer_input is not None:
        size, num_layers = config.per_layer_input.size, len(config.layers)
        total += config.per_layer_input.vocab_size * size * num_layers  # a second embedding
        total += hidden * size * num_layers + 2 * hidden * size * num_layers
    return total


def _layer_parameters(layer: LayerConfig, config: ModelConfig) -> int:
    hidden = config.hidden_size
    q_width, kv_width = layer.num_q_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    num_kv_parts = (1 if layer.k_eq_v else 2) if layer.writes_kv else 0
    total = hidden * (2 * q_width + num_kv_parts * kv_width) + 3 * hidden * layer.intermediate_size
    if config.moe is not None:
        moe = config.moe
        total += moe.num_experts * (3 * hidden * moe.intermediate_size + hidden)
    return total
