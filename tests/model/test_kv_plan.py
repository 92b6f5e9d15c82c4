"""Where keys lie: an offset that is off by one row mixes layers."""

import pytest
import torch
from gewell_kernels.layout import KVLayout

from gewell.config import LayerKind, ModelConfig
from gewell.engine.kv_store import KVStore
from gewell.model.kv_plan import plan_drafter_kv, plan_kv
from tests.model.golden_folders import FIXTURES
from tests.model.published import TEXT_26B, TEXT_31B


def test_31b_pages_hold_16_sliding_or_320_full_tokens():
    plan = plan_kv(ModelConfig.from_dict(TEXT_31B), dtype_bytes=2)
    assert plan.geometry.page_bytes == 16 * 819_200
    assert plan.geometry.sliding is not None
    assert plan.geometry.full is not None
    assert (plan.geometry.sliding.page_tokens, plan.geometry.sliding.bytes_per_token) == (16, 819_200)
    assert (plan.geometry.full.page_tokens, plan.geometry.full.bytes_per_token) == (320, 40_960)
    assert plan.geometry.sliding_window == 1024


def test_26b_stores_a_quarter_of_the_31b():
    plan = plan_kv(ModelConfig.from_dict(TEXT_26B), dtype_bytes=2)
    assert plan.geometry.sliding is not None
    assert plan.geometry.full is not None
    assert (plan.geometry.sliding.bytes_per_token, plan.geometry.full.bytes_per_token) == (204_800, 10_240)


@pytest.mark.parametrize(
    ("layout", "bytes_per_token"), [(KVLayout.V_ONLY, 40_960), (KVLayout.V_ROTK, 51_200), (KVLayout.PLAIN, 81_920)]
)
def test_full_layers_cost_what_their_layout_says(layout, bytes_per_token):
    plan = plan_kv(ModelConfig.from_dict(TEXT_31B), dtype_bytes=2, full_layout=layout)
    assert plan.geometry.full is not None
    assert plan.geometry.full.bytes_per_token == bytes_per_token


@pytest.mark.parametrize("layout", list(KVLayout))
@pytest.mark.parametrize("name", ["gemma3-text", "gemma4-dense", "gemma4-moe", "gemma4-edge", "gemma4-vision"])
def test_layers_of_a_kind_lie_side_by_side_and_fit_the_page(name, layout):
    config = ModelConfig.from_dir(FIXTURES / name)
    plan = plan_kv(config, dtype_bytes=2, full_layout=layout)
    for kind in LayerKind:
        end = 0
        for layer in config.layers_of(kind):
            layer_kv = plan.layers[layer.layer_idx]
            assert layer_kv.layer_offset == end
            end += layer_kv.layer_elems
        assert end * 2 <= plan.geometry.page_bytes


def test_sharing_layers_read_where_their_source_wrote():
    plan = plan_kv(ModelConfig.from_dir(FIXTURES / "gemma4-edge"), dtype_bytes=4)
    assert plan.layers[2] is plan.layers[0]
    assert plan.layers[3] is plan.layers[1]


def test_a_drafter_reads_the_targets_last_layers():
    target = ModelConfig.from_dir(FIXTURES / "gemma4-dense")
    plan = plan_kv(target, dtype_bytes=4)
    drafter = plan_drafter_kv(ModelConfig.from_dir(FIXTURES / "gemma4-drafter"), target, plan)
    assert drafter.layers == (plan.layers[2],) * 3 + (plan.layers[3],)


def test_freed_pages_are_nan_only_when_asked():
    geometry = plan_kv(ModelConfig.from_dir(FIXTURES / "gemma3-text"), dtype_bytes=4).geometry
    plain = KVStore(geometry, 3, dtype=torch.float32, device="cpu")
    plain.poison_freed([1])
    assert not plain.pages.any()
    poisoned = KVStore(geometry, 3, dtype=torch.float32, device="cpu", poison=True)
    assert poisoned.pages.isnan().all()
    poisoned.pages.zero_()
    poisoned.poison_freed([1])
    assert poisoned.pages[1].isnan().all()
    assert not poisoned.pages[[0, 2]].any()


def test_whole_pages_are_copied():
    geometry = plan_kv(ModelConfig.from_dir(FIXTURES / "gemma3-text"), dtype_bytes=2).geometry
    store = KVStore(geometry, 4, dtype=torch.bfloat16, device="cpu")
    assert store.pages.shape[1] * 2 == geometry.page_bytes
    store.pages[2] = 7
    store.copy([(2, 0)])
    store.copy([])
    assert torch.equal(store.pages[0], store.pages[2])
    assert not store.pages[[1, 3]].any()
