"""Gemma 4 31B as the kernels see it, and the page pool that both layer kinds share."""

from gewell_kernels.layout import KVLayout, LayerKV

HIDDEN, INTERMEDIATE, VOCAB = 5376, 21504, 262144
NUM_Q_HEADS, SLIDING_WINDOW = 32, 1024
NUM_SLIDING_LAYERS, NUM_FULL_LAYERS = 50, 10
PAGE_ELEMS = 13_107_200 // 2  # 16 sliding tokens of 50 layers, or 320 full tokens of 10 (V alone), in bf16


def sliding_layer(index: int = 0) -> LayerKV:
    elems = 2 * 16 * 16 * 256
    return LayerKV(
        layout=KVLayout.PLAIN, layer_offset=index * elems, page_tokens=16, num_kv_heads=16, head_dim=256,
        num_live_pairs=128, rope_theta=1e4,
    )  # fmt: skip


def full_layer(index: int = 0, layout: KVLayout = KVLayout.V_ONLY) -> LayerKV:
    """A page holds 320, 256 or 160 tokens: V alone, V with rotated K, K and V."""
    page_tokens = {KVLayout.V_ONLY: 320, KVLayout.V_ROTK: 256, KVLayout.PLAIN: 160}[layout]
    layer = LayerKV(
        layout=layout, layer_offset=0, page_tokens=page_tokens, num_kv_heads=4, head_dim=512, num_live_pairs=64,
        rope_theta=1e6,
    )  # fmt: skip
    return LayerKV(
        layout=layout, layer_offset=index * layer.layer_elems, page_tokens=page_tokens, num_kv_heads=4, head_dim=512,
        num_live_pairs=64, rope_theta=1e6,
    )  # fmt: skip


def projections(is_sliding: bool) -> dict[str, tuple[int, int]]:
    """[out, in] of one layer's matrices as the model holds them: q, k, v in one, gate and up in one."""
    qkv, out = (16384, 8192) if is_sliding else (18432, 16384)
    return {
        "qkv": (qkv, HIDDEN),
        "o": (HIDDEN, out),
        "gate_up": (2 * INTERMEDIATE, HIDDEN),
        "down": (HIDDEN, INTERMEDIATE),
    }
