"""Paged attention: a key too many, too few or from another page is another user's text in this user's answer."""

from dataclasses import replace

import pytest
import torch
from gewell_kernels.layout import KVLayout, LayerKV
from gewell_kernels.reference.paged_attention import paged_attention as reference_paged_attention
from gewell_kernels.reference.worlds import World, make_world, with_image_runs

from tests.kernels.tolerances import assert_close

LAYOUTS = list(KVLayout)


def make_layer(layout: KVLayout, head_dim: int = 128, num_kv_heads: int = 2, page_tokens: int = 16) -> LayerKV:
    return LayerKV(
        layout=layout,
        layer_offset=32,
        page_tokens=page_tokens,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_live_pairs=head_dim // 8,
        rope_theta=1e6,
    )


def attend(world: World, num_q_heads: int, dtype: torch.dtype, *, with_new: bool = False, k_weight=None):
    """The op and its reference on the same random queries; sizes of q keep the softmax from being one-hot."""
    from gewell_kernels.paged_attention import paged_attention

    layer, batch = world.layer, world.batch
    device = world.pages.device
    num_tokens = int(batch.cu_seqlens_q[-1])
    q = (torch.randn(num_tokens, num_q_heads, layer.head_dim, device=device) / layer.head_dim**0.5).to(dtype)
    k_new = v_new = None
    if with_new:
        k_new, v_new = (
            torch.randn(num_tokens, layer.num_kv_heads, layer.head_dim, device=device).to(dtype) for _ in range(2)
        )
    if k_weight is None:
        k_weight = torch.rand(layer.head_dim, device=device) + 0.5
    before = world.pages.clone()
    arguments = (q, k_new, v_new, k_weight, world.pages, layer, batch)
    actual = paged_attention(*arguments)
    assert torch.equal(world.pages.view(torch.uint8), before.view(torch.uint8))
    return actual, reference_paged_attention(*arguments)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 40])
def test_decode_of_ragged_rows(layout, window, dtype, device):
    kv_lens = [1, 77, 16, 130, 33]
    world = make_world(make_layer(layout), [1] * 5, kv_lens, sliding_window=window, dtype=dtype, device=device)
    actual, expected = attend(world, 4, dtype)
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_of_one_long_row_joins_the_shares_of_many_programs(layout, dtype, device):
    world = make_world(make_layer(layout), [1], [700], sliding_window=None, dtype=dtype, device=device)
    actual, expected = attend(world, 6, dtype)
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shares_are_joined_alike_by_the_last_program_and_by_a_second_kernel(layout, device, monkeypatch):
    from gewell_kernels import paged_attention as module

    world = make_world(
        make_layer(layout), [1] * 3, [300, 0, 90], sliding_window=None, dtype=torch.float32, device=device
    )
    q = torch.randn(3, 4, 128, device=device)
    k_weight = torch.rand(128, device=device)
    arguments = (q, None, None, k_weight, world.pages, world.layer, world.batch)
    apart = module.paged_attention(*arguments)
    monkeypatch.setattr(module, "_FUSED_UNITS", 1)
    for _ in range(2):  # the arrival counters are back at zero
        assert_close(module.paged_attention(*arguments), apart.double(), torch.float32)


def test_keys_rotated_before_or_while_reading_are_the_same(device, monkeypatch):
    from gewell_kernels import paged_attention as module

    world = make_world(
        make_layer(KVLayout.V_ONLY), [30, 5], [90, 40], sliding_window=None, dtype=torch.float32, device=device
    )
    before, expected = attend(world, 4, torch.float32)
    assert_close(before, expected, torch.float32)
    monkeypatch.setattr(module, "_ROTATED_BYTES", 0)
    while_reading, expected = attend(world, 4, torch.float32)
    assert_close(while_reading, expected, torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 24])
def test_prefill_of_ragged_chunks_over_old_pages(layout, window, dtype, device):
    # A chunk from nothing, one onto a long past, a single token and an empty sequence; decode rows stand before them.
    q_lens, kv_lens = [1, 1, 37, 19, 1, 0], [50, 3, 37, 119, 60, 20]
    world = make_world(
        make_layer(layout), q_lens, kv_lens, sliding_window=window, dtype=dtype, device=device, num_decode_seqs=2
    )
    with_new = window is not None and layout is KVLayout.PLAIN
    if window is not None and not with_new:  # without k_new every key must be in the pages
        world = make_world(make_layer(layout), [1, 1, 9], [50, 3, 24], sliding_window=24, dtype=dtype, device=device)
    actual, expected = attend(world, 4, dtype, with_new=with_new)
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize("num_q_heads", [2, 3 * 2, 32 * 2])
def test_every_group_size_reads_its_own_kv_head(num_q_heads, device):
    for layout in (KVLayout.PLAIN, KVLayout.V_ONLY):
        world = make_world(
            make_layer(layout), [1, 21], [40, 30], sliding_window=None, dtype=torch.float32, device=device
        )
        actual, expected = attend(world, num_q_heads, torch.float32)
        assert_close(actual, expected, torch.float32)


@pytest.mark.parametrize(
    ("layout", "head_dim", "num_kv_heads", "page_tokens"),
    [
        (KVLayout.PLAIN, 256, 2, 16),
        (KVLayout.V_ONLY, 512, 1, 320),
        (KVLayout.PLAIN, 512, 1, 320),
        (KVLayout.PLAIN, 16, 1, 16),
    ],
)
def test_the_models_head_sizes_and_pages(layout, head_dim, num_kv_heads, page_tokens, dtype, device):
    layer = make_layer(layout, head_dim, num_kv_heads, page_tokens)
    world = make_world(layer, [1, 1, 20], [330, 64, 90], sliding_window=None, dtype=dtype, device=device)
    actual, expected = attend(world, 2 * num_kv_heads, dtype)
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize("kv_len", [15, 16, 17, 31, 32, 33])
def test_the_window_counts_the_query_itself(kv_len, device):
    """Window 16: the key 16 places back is one too many. Its value alone is not zero, so any leak shows."""
    layer = make_layer(KVLayout.PLAIN, 32, 1)
    world = make_world(layer, [1], [kv_len], sliding_window=17, dtype=torch.float32, device=device)
    world = replace(world, batch=replace(world.batch, sliding_window=16))
    out, expected = attend(world, 1, torch.float32)
    assert_close(out, expected, torch.float32)
    wider, _ = attend(replace(world, batch=replace(world.batch, sliding_window=17)), 1, torch.float32)
    assert (kv_len <= 16) or not torch.allclose(out, wider)  # the control: one key more does change the result


def test_image_runs_see_each_other_but_not_beyond(dtype, device):
    layer = make_layer(KVLayout.PLAIN)
    world = make_world(layer, [40, 30], [40, 45], sliding_window=24, dtype=dtype, device=device)
    world = replace(world, batch=with_image_runs(world.batch, [(5, 17), (18, 30), (45, 62)]))
    actual, expected = attend(world, 4, dtype, with_new=True)
    assert_close(actual, expected, dtype)
    causal = replace(world, batch=replace(world.batch, visible_end=None))
    torch.manual_seed(1)
    seeing, _ = attend(world, 4, dtype, with_new=True)
    torch.manual_seed(1)
    blind, _ = attend(causal, 4, dtype, with_new=True)
    differs = (seeing != blind).any(dim=1).cpu()
    assert differs[5:16].all()  # all but a run's last token
    assert not differs[[0, 1, 2, 3, 4, 16, 17, 29, 30]].any()


def test_a_padding_row_without_keys_gives_zero_and_changes_nobody(device):
    layer = make_layer(KVLayout.V_ONLY)
    world = make_world(layer, [1, 1, 1], [40, 0, 70], sliding_window=None, dtype=torch.float32, device=device)
    actual, expected = attend(world, 4, torch.float32)
    assert not actual[1].any()
    assert_close(actual, expected, torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_in_one_row_stays_in_that_row(layout, device):
    world = make_world(
        make_layer(layout), [1, 1, 1], [40, 90, 70], sliding_window=None, dtype=torch.float32, device=device
    )
    world.pages[world.batch.page_table[1, 0].long()] = float("nan")
    actual, _ = attend(world, 4, torch.float32)
    assert torch.equal(actual.isnan().any(dim=1).cpu(), torch.tensor([False, True, False]))


def test_a_plan_made_once_serves_like_one_made_per_layer(device):
    from gewell_kernels.paged_attention import paged_attention, plan_attention

    world = make_world(
        make_layer(KVLayout.PLAIN), [1] * 3, [40, 90, 70], sliding_window=48, dtype=torch.float32, device=device
    )
    q = torch.randn(3, 4, 128, device=device)
    planned = plan_attention(world.batch, world.layer, 4)
    assert planned.first_tiles is not None
    apart = paged_attention(q, None, None, None, world.pages, world.layer, world.batch)
    assert torch.equal(apart, paged_attention(q, None, None, None, world.pages, world.layer, planned))


def test_wrong_arguments_are_named_with_their_value(device):
    from gewell_kernels.paged_attention import paged_attention

    layer = make_layer(KVLayout.PLAIN)
    world = make_world(layer, [1], [5], sliding_window=None, dtype=torch.float32, device=device)
    q = torch.randn(1, 4, 128, device=device)
    with pytest.raises(ValueError, match="5 query heads over 2 kv heads"):
        paged_attention(torch.randn(1, 5, 128, device=device), None, None, None, world.pages, layer, world.batch)
    with pytest.raises(ValueError, match="q has strides"):
        paged_attention(
            torch.randn(1, 4, 256, device=device)[..., ::2], None, None, None, world.pages, layer, world.batch
        )
    with pytest.raises(ValueError, match="the layer ends at element"):
        paged_attention(q, None, None, None, world.pages, replace(layer, layer_offset=64), world.batch)
    with pytest.raises(ValueError, match="k_new and v_new come together"):
        paged_attention(q, torch.randn(1, 2, 128, device=device), None, None, world.pages, layer, world.batch)
