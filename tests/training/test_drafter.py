"""The drafter's twin drafts what the engine's drafter drafts, and acceptance counts what a greedy target would keep."""

from pathlib import Path

import pytest
import torch
from gewell_training import nano
from gewell_training.drafter import NUM_STEPS, DrafterTwin, acceptance, draft_losses
from gewell_training.loading import Batch
from gewell_training.twin import Twin, attend_dense, dense_masks

from gewell.cache.page_pool import PagePool
from gewell.cache.sequence_pages import SequencePages
from gewell.engine.kv_store import KVStore
from gewell.engine.paged_batch import StepRow, draft_batch, forward_batch
from gewell.weights.checkpoint import load_drafter, load_model

NUM_LAYERS = 6


def test_exported_drafter_drafts_what_its_twin_drafts(tmp_path: Path) -> None:
    torch.manual_seed(4)
    target = Twin(nano.model_config(num_hidden_layers=NUM_LAYERS)).requires_grad_(False)
    drafter = DrafterTwin(nano.drafter_config()).requires_grad_(False)
    nano.export(target.state_dict(), tmp_path / "target", dtype=torch.float32, num_hidden_layers=NUM_LAYERS)
    nano.export_drafter(drafter.state_dict(), tmp_path / "drafter", dtype=torch.float32)
    model = load_model(tmp_path / "target", dtype=torch.float32, device="cpu")
    engine_drafter = load_drafter(tmp_path / "drafter", model)

    num_tokens = 100  # inside the window: beyond it the published code shows the drafter one token more
    ids = torch.randint(5, 2500, (1, num_tokens + NUM_STEPS))
    prompt, newest = ids[:, :num_tokens], ids[0, num_tokens:].tolist()
    positions = torch.arange(num_tokens)[None]
    masks = dense_masks(torch.zeros_like(prompt), model.config.sliding_window)
    state, kv = target.run(prompt, positions, masks, attend_dense)
    ropes = target.turns(positions + 1)

    geometry = model.kv_plan.geometry
    pool = PagePool(geometry.num_pages(num_tokens) + 4)
    store = KVStore(geometry, pool.num_pages, dtype=torch.float32, device="cpu")
    sequence = SequencePages(pool, geometry)
    appended = sequence.append(num_tokens)
    assert appended is not None
    row = StepRow(sequence=sequence, appended=appended, token_ids=prompt[0].tolist())
    with torch.inference_mode():
        states = model.forward(forward_batch([row], geometry, "cpu"), store.pages)[-1:]
        for token in newest:
            words = target.embed(torch.full_like(prompt, token), torch.float32)
            hidden, state = drafter.step(words, state, kv, ropes, masks, attend_dense)
            logits, states = engine_drafter.step(draft_batch([sequence], [token], geometry, "cpu"), states, store.pages)
            assert (hidden[0, -1] @ drafter.embed_tokens.weight.T - logits[0]).abs().max() < 1e-3
            assert (state[0, -1] - states[0]).abs().max() < 1e-3


def test_only_tokens_of_the_answer_are_drafted() -> None:
    torch.manual_seed(5)
    target = Twin(nano.model_config(num_hidden_layers=NUM_LAYERS)).requires_grad_(False)
    drafter = DrafterTwin(nano.drafter_config())
    ids = torch.randint(5, 2500, (1, 32))
    rows = torch.tensor([10, 11, 12, 13, 20, 21, 0])  # answers: tokens 11..14 and 21..22; the last slot is not used
    batch = Batch(
        ids=ids,
        positions=torch.arange(32)[None],
        document=torch.zeros(1, 32, dtype=torch.int32),
        rows=rows,
        targets=ids[0][rows + 1],
        weights=torch.tensor([1.0] * 6 + [0.0]),
        labels=torch.zeros(7),
        num_tokens=32,
    )
    masks = dense_masks(batch.document, target.config.sliding_window)
    loss, right, usable = draft_losses(target, drafter, batch, masks, attend_dense, torch.float32)
    assert usable.int().tolist() == [[1, 1, 1, 0, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]]
    assert not (right & ~usable).any()
    loss.backward()
    assert all(p.grad is not None for p in drafter.parameters() if p is not drafter.post_projection.weight)


def test_acceptance_counts_drafts_up_to_the_first_wrong_one() -> None:
    right = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1], [0, 1, 1, 1]], dtype=torch.bool)
    usable = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
    assert acceptance(right, usable) == pytest.approx((2 + 0 + 1) / 9)
