"""Where every layer's keys and values lie: page geometry and one `LayerKV` per layer, from a config. No torch."""

from dataclasses import dataclass

from gewell_kernels.layout import KVLayout, LayerKV

from gewell.cache.geometry import KVGeometry
from gewell.config import LayerConfig, LayerKind, ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlan:
    """`layers[i]` is what layer i reads; layers that share another's keys and values have that one's entry."""

    geometry: KVGeometry
    layers: tuple[LayerKV, ...]
    dtype_bytes: int


def plan_kv(config: ModelConfig, *, dtype_bytes: int, full_layout: KVLayout = KVLayout.V_ONLY) -> KVPlan:
    """Lay out the pages of a model that has keys and values of its own (not a drafter).

    full_layout   form of the full layers whose value is their unnormed key; all others are PLAIN
    """
    page_tokens = dict.fromkeys(LayerKind, 0)
    elems_per_token = {
        kind: sum(_layer_kv(layer, full_layout, 0, 1).layer_elems for layer in config.layers_of(kind))
        for kind in LayerKind
    }
    geometry = KVGeometry.build(
        sliding_bytes_per_token=elems_per_token[LayerKind.SLIDING] * dtype_bytes,
        full_bytes_per_token=elems_per_token[LayerKind.FULL] * dtype_bytes,
        sliding_window=config.sliding_window,
    )
    for kind, part in ((LayerKind.SLIDING, geometry.sliding), (LayerKind.FULL, geometry.full)):
        page_tokens[kind] = part.page_tokens if part else 0
    next_offset = dict.fromkeys(LayerKind, 0)
    written: dict[int, LayerKV] = {}
    for layer in config.layers:
        if layer.writes_kv:
            kind = layer.kind
            written[layer.layer_idx] = _layer_kv(layer, full_layout, next_offset[kind], page_tokens[kind])
            next_offset[kind] += written[layer.layer_idx].layer_elems
    sources = [layer.kv_layer_idx for layer in config.layers]
    return KVPlan(
        geometry=geometry,
        layers=tuple(written[source] for source in sources if source is not None),
        dtype_bytes=dtype_bytes,
    )


def plan_drafter_kv(drafter: ModelConfig, target: ModelConfig, target_plan: KVPlan) -> KVPlan:
    """A drafter has no pages: each of its layers reads the target's last layer of the same kind that writes."""
    last = {kind: target.layers_of(kind)[-1].layer_idx for kind in LayerKind}
    return KVPlan(
        geometry=target_plan.geometry,
        layers=tuple(target_plan.layers[last[layer.kind]] for layer in drafter.layers),
        dtype_bytes=target_plan.dtype_bytes,
    )


def _layer_kv(layer: LayerConfig, full_layout: KVLayout, layer_offset: int, page_tokens: int) -> LayerKV:
    return LayerKV(
        layout=full_layout if layer.k_eq_v else KVLayout.PLAIN,
        layer_offset=layer_offset,
        page_tokens=page_tokens,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        num_live_pairs=layer.num_live_pairs,
        rope_theta=layer.rope_theta,
        rope_factor=layer.rope_factor,
    )
