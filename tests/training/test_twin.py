"""The trainer's model is the engine's model: else nano is trained for one thing and runs another."""

from pathlib import Path

import pytest
import torch
from gewell_training import nano
from gewell_training.twin import Twin, attend_dense, dense_masks
from torch import Tensor

from gewell.cache.page_pool import PagePool
from gewell.cache.sequence_pages import SequencePages
from gewell.engine.kv_store import KVStore
from gewell.engine.paged_batch import StepRow, forward_batch
from gewell.model.gemma import GemmaModel
from gewell.weights.checkpoint import load_model

NUM_LAYERS = 6
TOLERANCE = 1e-3  # of logits within the soft-cap of 30, in float32; the order of sums differs


@pytest.fixture
def twin() -> Twin:
    torch.manual_seed(1)
    twin = Twin(nano.model_config(num_hidden_layers=NUM_LAYERS))
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if parameter.ndim == 1:  # norms and scalars at their initial value would hide that one is left out
                parameter.mul_(torch.rand_like(parameter) + 0.5)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.mul_(2.0)  # sharp attention: positions and windows matter
    return twin


def engine_logits(model: GemmaModel, ids: list[int]) -> Tensor:
    geometry = model.kv_plan.geometry
    pool = PagePool(geometry.num_pages(len(ids)) + 4)
    store = KVStore(geometry, pool.num_pages, dtype=model.dtype, device="cpu", poison=True)
    sequence = SequencePages(pool, geometry)
    appended = sequence.append(len(ids))
    assert appended is not None
    batch = forward_batch([StepRow(sequence=sequence, appended=appended, token_ids=ids)], geometry, "cpu")
    with torch.inference_mode():
        return model.logits(model.forward(batch, store.pages))


def twin_logits(twin: Twin, ids: Tensor, document: Tensor, positions: Tensor) -> Tensor:
    masks = dense_masks(document, twin.config.sliding_window)
    with torch.inference_mode():
        return twin.logits(twin(ids, positions, masks, attend_dense))


def test_exported_twin_has_the_logits_of_the_engine_past_the_window(twin: Twin, tmp_path: Path) -> None:
    nano.export(twin.state_dict(), tmp_path, dtype=torch.float32, num_hidden_layers=NUM_LAYERS)
    model = load_model(tmp_path, dtype=torch.float32, device="cpu")
    ids = torch.randint(5, 2500, (1, 300), generator=torch.Generator().manual_seed(2))
    ours = twin_logits(twin, ids, torch.zeros_like(ids), torch.arange(300)[None])[0]
    theirs = engine_logits(model, ids[0].tolist())
    assert (ours - theirs).abs().max() < TOLERANCE
    assert ours.std() > 0.5  # logits that say something


def test_packed_samples_do_not_see_each_other(twin: Twin) -> None:
    ids = torch.randint(5, 2500, (1, 200), generator=torch.Generator().manual_seed(3))
    document = (torch.arange(200) >= 80).long()[None]
    positions = torch.cat((torch.arange(80), torch.arange(120)))[None]
    packed = twin_logits(twin, ids, document, positions)[0]
    alone = twin_logits(twin, ids[:, 80:], torch.zeros(1, 120), torch.arange(120)[None])[0]
    assert (packed[80:] - alone).abs().max() < TOLERANCE
    other = twin_logits(twin, ids, torch.zeros_like(ids), positions)[0]
    assert (other[80:] - alone).abs().max() > 0.1  # without the boundary it is another result
