"""The CPU ops against their naive float64 references, over ragged batches whose unused memory is NaN."""

from dataclasses import replace

import pytest
import torch
from gewell_kernels.cpu.copy_pages import copy_pages, poison_pages
from gewell_kernels.cpu.gelu_mul import gelu_mul
from gewell_kernels.cpu.linear import linear
from gewell_kernels.cpu.moe_experts import moe_experts
from gewell_kernels.cpu.paged_attention import paged_attention
from gewell_kernels.cpu.residual_norm import residual_norm
from gewell_kernels.cpu.rms_norm import rms_norm
from gewell_kernels.cpu.step import piece_elems
from gewell_kernels.cpu.write_kv import write_kv
from gewell_kernels.layout import KVLayout, LayerKV
from gewell_kernels.reference import gelu_mul as gelu_reference
from gewell_kernels.reference import paged_attention as attention_reference
from gewell_kernels.reference import residual_norm as residual_reference
from gewell_kernels.reference import rms_norm as norm_reference
from gewell_kernels.reference import write_kv as write_reference
from gewell_kernels.reference.worlds import World, make_world, with_image_runs
from torch import Tensor

from tests.kernels.tolerances import assert_close

LAYOUTS = list(KVLayout)
EPS = 1e-6


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request) -> torch.dtype:
    return request.param


def _layer(layout: KVLayout, *, head_dim: int = 64, num_kv_heads: int = 2, offset: int = 0) -> LayerKV:
    all_turn = layout is KVLayout.PLAIN
    return LayerKV(
        layout=layout,
        layer_offset=offset,
        page_tokens=16,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_live_pairs=head_dim // 2 if all_turn else head_dim // 8,
        rope_theta=1e4,
    )


def _world(layer: LayerKV, q_lens, kv_lens, window, dtype, num_decode_seqs=None) -> World:
    return make_world(
        layer,
        q_lens,
        kv_lens,
        sliding_window=window,
        dtype=dtype,
        device="cpu",
        page_elems=layer.layer_offset + layer.layer_elems + 64,
        num_decode_seqs=num_decode_seqs,
    )


def _attend(world: World, dtype: torch.dtype, *, with_new: bool = False, num_q_heads: int = 4) -> tuple[Tensor, Tensor]:
    layer, num_tokens = world.layer, int(world.batch.cu_seqlens_q[-1])
    q = (torch.randn(num_tokens, num_q_heads, layer.head_dim) / layer.head_dim**0.5).to(dtype)
    new = [torch.randn(num_tokens, layer.num_kv_heads, layer.head_dim).to(dtype) if with_new else None for _ in "kv"]
    k_weight = torch.rand(layer.head_dim) + 0.5
    before = world.pages.clone()
    arguments = (q, *new, k_weight, world.pages, layer, world.batch)
    actual, expected = paged_attention(*arguments), attention_reference.paged_attention(*arguments)
    assert torch.equal(world.pages.view(torch.uint8), before.view(torch.uint8))
    return actual, expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 40])
def test_decode_rows_of_any_length_share_a_step(layout, window, dtype):
    world = _world(_layer(layout), [1] * 5, [1, 77, 16, 130, 33], window, dtype)
    actual, expected = _attend(world, dtype)
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_and_decode_rows_share_a_step(layout, dtype):
    world = _world(_layer(layout), [1, 1, 37, 19, 1, 0], [50, 3, 37, 119, 60, 20], None, dtype, num_decode_seqs=2)
    actual, expected = _attend(world, dtype)
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize("chunk", [1, 23, 24, 25, 60, 300])
def test_sliding_chunks_read_lost_keys_from_the_step(chunk, dtype):
    """A chunk longer than the window: its early keys have no slot, and its queries still see them."""
    world = _world(_layer(KVLayout.PLAIN), [1, chunk], [50, chunk + 31], 24, dtype, num_decode_seqs=1)
    actual, expected = _attend(world, dtype, with_new=True)
    # The decode row reads its own key from the pages; given a new one, the reference does as well.
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize("kv_len", [15, 16, 17, 18, 33])
def test_the_window_counts_the_query_itself(kv_len):
    world = _world(_layer(KVLayout.PLAIN), [1], [kv_len], 17, torch.float32)
    narrow = replace(world, batch=replace(world.batch, sliding_window=16))
    torch.manual_seed(3)
    out, expected = _attend(narrow, torch.float32)
    assert_close(out, expected, torch.float32)
    torch.manual_seed(3)
    wider, _ = _attend(world, torch.float32)
    assert torch.allclose(out, wider) == (kv_len <= 16)


def test_image_runs_see_each_other_but_not_beyond(dtype):
    world = _world(_layer(KVLayout.PLAIN), [40, 30], [40, 45], 24, dtype)
    world = replace(world, batch=with_image_runs(world.batch, [(5, 17), (18, 30), (45, 62)]))
    actual, expected = _attend(world, dtype, with_new=True)
    assert_close(actual, expected, dtype)


def test_a_padding_row_without_keys_gives_zero():
    world = _world(_layer(KVLayout.V_ONLY), [1, 1, 1], [40, 0, 70], None, torch.float32)
    actual, expected = _attend(world, torch.float32)
    assert not actual[1].any()
    assert_close(actual, expected, torch.float32)


@pytest.mark.parametrize("num_q_heads", [2, 6, 16])
def test_every_group_size_reads_its_own_kv_head(num_q_heads):
    world = _world(_layer(KVLayout.V_ONLY), [1, 21], [40, 30], None, torch.float32)
    actual, expected = _attend(world, torch.float32, num_q_heads=num_q_heads)
    assert_close(actual, expected, torch.float32)


@pytest.mark.parametrize("offset", [0, 32, 48, 4096])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_offset_inside_a_page_is_found(layout, offset):
    layer = _layer(layout, offset=offset)
    world = _world(layer, [1, 20], [40, 30], None, torch.float32)
    assert world.pages.shape[1] % piece_elems(layer, world.pages.shape[1]) == 0
    actual, expected = _attend(world, torch.float32)
    assert_close(actual, expected, torch.float32)


# --- writing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_v_norm", [True, False])
@pytest.mark.parametrize(
    ("layout", "window", "num_kv_parts"),
    [
        (KVLayout.PLAIN, 6, 2),
        (KVLayout.PLAIN, None, 2),
        (KVLayout.PLAIN, None, 1),
        (KVLayout.V_ONLY, None, 1),
        (KVLayout.V_ROTK, None, 1),
        (KVLayout.PLAIN, 6, 0),
        (KVLayout.V_ONLY, None, 0),
    ],
)
def test_written_pages_and_queries_are_the_reference(layout, window, num_kv_parts, has_v_norm, dtype):
    layer = _layer(layout, offset=32)
    world = _world(layer, [1, 9, 3], [5, 11, 3], window, dtype)
    width = (4 + num_kv_parts * layer.num_kv_heads) * layer.head_dim
    qkv = torch.randn(13, width).to(dtype)
    before = qkv.clone()
    arguments = (4, torch.randn(layer.head_dim), torch.randn(layer.head_dim), EPS, 0.7, has_v_norm)
    pages, want_pages = world.pages.clone(), world.pages.clone()
    written = write_kv(qkv, *arguments, pages, layer, world.batch)
    wanted = write_reference.write_kv(qkv, *arguments, want_pages, layer, world.batch)
    assert torch.equal(qkv, before)
    for have, want in zip(written, wanted, strict=True):
        assert (have is None) == (want is None)
        if have is not None and want is not None:
            assert_close(have, want, dtype)
    assert torch.equal(pages.isnan(), want_pages.isnan())
    assert_close(pages.nan_to_num(), want_pages.nan_to_num(), dtype)


# --- rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 64), (7, 123), (3, 4, 32)])
def test_norms_are_the_reference(shape, dtype):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1])
    before = x.clone()
    assert_close(rms_norm(x, weight, EPS), norm_reference.rms_norm(x, weight, EPS), dtype)
    assert_close(rms_norm(x, None, EPS), norm_reference.rms_norm(x, None, EPS), dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("scalar", [1.0, 0.03])
def test_the_residual_is_summed_in_place_and_normed(scalar, dtype):
    residual, branch = torch.randn(5, 96).to(dtype), (100 * torch.randn(5, 96)).to(dtype)
    post, following = torch.randn(96), torch.randn(96)
    wanted = residual_reference.residual_norm(residual.clone(), branch, post, following, EPS, scalar)
    kept = residual
    residual, normed = residual_norm(residual, branch, post, following, EPS, scalar)
    assert residual is kept
    assert_close(residual, wanted[0], dtype)
    assert_close(normed, wanted[1], dtype)


def test_the_gate_is_the_first_half(dtype):
    gate_up = torch.randn(5, 2 * 48).to(dtype)
    assert_close(gelu_mul(gate_up), gelu_reference.gelu_mul(gate_up), dtype)


@pytest.mark.parametrize("out_features", [300, 17000])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 15, 16, 33, 64, 65, 130])
def test_products_of_any_number_of_rows_agree(rows, out_features, dtype):
    x, weight = torch.randn(rows, 128).to(dtype), torch.randn(out_features, 128).to(dtype)
    out = linear(x, weight)
    assert out.is_contiguous()
    assert_close(out, x.double() @ weight.double().T, dtype)


def test_each_token_gets_its_experts_in_their_shares(dtype):
    num_tokens, hidden, inner, num_experts, k = 9, 32, 24, 6, 3
    x = torch.randn(num_tokens, hidden).to(dtype)
    gate_up = (torch.randn(num_experts, 2 * inner, hidden) / hidden**0.5).to(dtype)
    down = (torch.randn(num_experts, hidden, inner) / inner**0.5).to(dtype)
    chosen = torch.stack([torch.randperm(num_experts - 1)[:k] for _ in range(num_tokens)])  # the last: by nobody
    shares = torch.rand(num_tokens, k)
    down[-1] = float("nan")
    expected = torch.zeros(num_tokens, hidden, dtype=torch.float64)
    for t in range(num_tokens):
        for e, share in zip(chosen[t].tolist(), shares[t].tolist(), strict=True):
            inside = gelu_reference.gelu_mul((gate_up[e].double() @ x[t].double())[None])[0]
            expected[t] += share * (down[e].double() @ inside.double())
    # A product whose inside is rounded to the dtype before the next: two roundings more than one op.
    tolerance = 2e-6 if dtype is torch.float32 else 1e-2
    error = (moe_experts(x, chosen, shares, gate_up, down).double() - expected).norm() / expected.norm()
    assert error < tolerance


# --- pages -------------------------------------------------------------------------------------------------------


def test_copied_pages_equal_their_sources_and_poisoned_ones_are_nan(dtype):
    pages = torch.randn(5, 32).to(dtype)
    before = pages.clone()
    copy_pages(pages, torch.tensor([0, 3]), torch.tensor([4, 1]))
    assert torch.equal(pages[[4, 1]], before[[0, 3]])
    assert torch.equal(pages[[0, 2, 3]], before[[0, 2, 3]])
    poison_pages(pages, torch.tensor([2]))
    assert pages[2].isnan().all()
    assert not pages[[0, 1, 3, 4]].isnan().any()
