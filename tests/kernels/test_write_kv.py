"""Norm, rotation and KV write: an error here makes a conversation remember something else than was said."""

import pytest
import torch
from gewell_kernels.layout import KVLayout, LayerKV
from gewell_kernels.reference.worlds import make_world
from gewell_kernels.reference.write_kv import write_kv as reference_write_kv

from tests.kernels.tolerances import assert_close

EPS = 1e-6


def make_layer(layout: KVLayout, head_dim: int, num_kv_heads: int, *, page_tokens: int = 4, all_turn: bool = False):
    return LayerKV(
        layout=layout,
        layer_offset=16,
        page_tokens=page_tokens,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_live_pairs=head_dim // 2 if all_turn else head_dim // 8,
        rope_theta=1e4,
    )


CASES = {
    "sliding": (make_layer(KVLayout.PLAIN, 32, 2, all_turn=True), 6, 4, 2),
    "full, keys and values": (make_layer(KVLayout.PLAIN, 64, 1), None, 3, 2),
    "full, one projection, plain": (make_layer(KVLayout.PLAIN, 64, 2), None, 4, 1),
    "V alone": (make_layer(KVLayout.V_ONLY, 128, 2), None, 4, 1),
    "V and rotated K": (make_layer(KVLayout.V_ROTK, 128, 2), None, 4, 1),
    "queries only": (make_layer(KVLayout.PLAIN, 32, 1, all_turn=True), 6, 4, 0),
    "queries only, V alone": (make_layer(KVLayout.V_ONLY, 128, 1), None, 4, 0),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("has_v_norm", [True, False])
def test_queries_new_keys_and_pages_are_the_reference(case, has_v_norm, dtype, device):
    from gewell_kernels.write_kv import write_kv

    layer, window, num_q_heads, num_kv_parts = CASES[case]
    world = make_world(layer, [1, 9, 3], [5, 11, 3], sliding_window=window, dtype=dtype, device=device, page_elems=2048)
    width = (num_q_heads + num_kv_parts * layer.num_kv_heads) * layer.head_dim
    qkv = torch.randn(13, width + 5, device=device).to(dtype)[:, :width]  # rows at a stride
    before = qkv.clone()
    q_weight, k_weight = torch.randn(layer.head_dim, device=device), torch.randn(layer.head_dim, device=device)
    if num_kv_parts == 0 and layer.layout is KVLayout.PLAIN:
        k_weight = None
    want_pages, pages = world.pages.clone(), world.pages.clone()
    arguments = (num_q_heads, q_weight, k_weight, EPS, 0.7, has_v_norm)
    wanted = reference_write_kv(qkv, *arguments, want_pages, layer, world.batch)
    written = write_kv(qkv, *arguments, pages, layer, world.batch)
    assert torch.equal(qkv, before)
    for have, want in zip(written, wanted, strict=True):
        assert (have is None) == (want is None)
        if want is not None:
            assert_close(have, want, dtype)
    # Whatever the step does not own keeps its bytes, poison included.
    assert torch.equal(pages.isnan(), want_pages.isnan())
    changed = ~torch.eq(want_pages, world.pages) & ~want_pages.isnan()
    assert bool(changed.any()) == (num_kv_parts > 0)
    assert_close(pages[changed], want_pages[changed], dtype)
    assert torch.equal(pages[~changed & ~pages.isnan()], world.pages[~changed & ~pages.isnan()])


def test_a_token_without_a_slot_writes_nothing_but_is_in_k_new(device):
    from gewell_kernels.write_kv import write_kv

    layer, window, num_q_heads, _ = CASES["sliding"]
    world = make_world(layer, [9], [9], sliding_window=window, dtype=torch.float32, device=device)
    assert (world.batch.slot_mapping == -1).sum() == 3  # 9 tokens, a window of 6
    qkv = torch.randn(9, (num_q_heads + 4) * 32, device=device)
    weight = torch.ones(32, device=device)
    pages = torch.zeros_like(world.pages)
    _, k_new, _ = write_kv(qkv, num_q_heads, weight, weight, EPS, 1.0, True, pages, layer, world.batch)
    assert (k_new != 0).all()
    assert int((pages != 0).sum()) == 6 * 2 * 2 * 32  # tokens in the window, planes, heads, dims


@pytest.mark.parametrize("position", [0, 1, 1023, 131071, 262143])
def test_rotation_is_right_at_far_positions(position, device):
    from gewell_kernels.write_kv import write_kv

    layer, window, num_q_heads, _ = CASES["sliding"]
    world = make_world(layer, [1], [1], sliding_window=window, dtype=torch.float32, device=device)
    world.batch.positions.fill_(position)
    qkv = torch.randn(1, (num_q_heads + 4) * 32, device=device)
    weight = torch.ones(32, device=device)
    arguments = (qkv, num_q_heads, weight, weight, EPS, 1.0, True, world.pages, layer, world.batch)
    assert_close(write_kv(*arguments)[0], reference_write_kv(*arguments)[0], torch.float32)


def test_a_width_that_fits_no_heads_is_refused(device):
    from gewell_kernels.write_kv import write_kv

    layer, window, num_q_heads, _ = CASES["sliding"]
    world = make_world(layer, [1], [1], sliding_window=window, dtype=torch.float32, device=device)
    weight = torch.ones(32, device=device)
    with pytest.raises(ValueError, match="qkv has 200 columns"):
        write_kv(
            torch.zeros(1, 200, device=device),
            num_q_heads,
            weight,
            weight,
            EPS,
            1.0,
            True,
            world.pages,
            layer,
            world.batch,
        )
