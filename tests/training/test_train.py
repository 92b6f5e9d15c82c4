"""A run learns, ends by itself with everything on disk, and the next one goes on from there."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gewell_training.encode import SampleEncoder
from gewell_training.loading import Batch, HeldOut, make_batch
from gewell_training.optim import Muon, orthogonalize
from gewell_training.packing import Row, training_rows
from gewell_training.tokenizer import WordEncoder
from gewell_training.train import Progress, Settings, Trainer, lr_factor, read_state

from gewell.model_store import model_path
from gewell.text.tokenizer import HFTokenizer

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 6, "head_dim": 8, "global_head_dim": 16}


def settings(out: Path, **changes: object) -> Settings:
    values: dict[str, object] = {
        "out": out,
        "tokenizer": model_path("gewell-nano") / "tokenizer.json",
        "seconds": 20.0,
        "planned_seconds": 100.0,
        "resume": None,
        "batch_rows": 1,
        "row_tokens": 512,
        "num_workers": 0,
        "num_slots": 256,
        "seed": 0,
        "muon_lr": 0.02,
        "adam_lr": 5e-3,
        "eval_every_s": 100.0,
        "save_every_s": 100.0,
        "num_held_out": 1,
        "log_every": 1,
        "device": torch.device("cpu"),
        "changes": SMALL,
    }
    return Settings(**(values | changes))


class OneBatch:
    """The same batch again and again."""

    longest = 160
    num_ready = 1

    def __init__(self, row: Row) -> None:
        self.batch = make_batch([row], [row.task], 256, pin=False)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.batch


class Ticks:
    """A clock that goes on by a tenth of a second whenever it is asked: a run has the same steps on every machine."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


@pytest.fixture(scope="module")
def row(tokenizer: HFTokenizer) -> Row:
    words = WordEncoder(tokenizer)
    return next(training_rows(SampleEncoder(tokenizer, words), words.count, 512, 1, lambda: 160))


@pytest.fixture(scope="module")
def held_out(row: Row) -> HeldOut:
    batch = make_batch([row], [row.group.clip(0)], 256, pin=False)
    return HeldOut(tests=("train",), batches=[batch], test_of_group=torch.zeros(int(row.group.max()) + 1).long())


def test_a_run_learns_saves_and_is_continued(tmp_path: Path, row: Row, held_out: HeldOut) -> None:
    first = Trainer(settings(tmp_path), Progress(), clock=Ticks())
    first.run(OneBatch(row), held_out)
    losses = [entry["loss"] for entry in first.progress.log if "loss" in entry]
    assert losses[-1] < 0.95 * losses[0]
    assert first.run_seconds < 20  # ended in time

    saved = Progress(**json.loads((tmp_path / "progress.json").read_text()))
    assert saved.num_steps == first.progress.num_steps > 5
    second = Trainer(settings(tmp_path, resume=tmp_path), saved)
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], tensor), name
    best = read_state(tmp_path, "best")
    assert all(tensor.dtype is torch.bfloat16 for tensor in best.values())
    assert set(best) == set(first.model.state_dict())


def test_learning_rate_warms_up_holds_and_falls_in_a_line() -> None:
    assert lr_factor(0.0, 0) == pytest.approx(0.01)
    assert lr_factor(0.2, 500) == lr_factor(0.45, 500) == 1
    assert lr_factor(0.725, 500) == pytest.approx(0.51)
    assert lr_factor(1.0, 500) == pytest.approx(0.02)


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 24, 8), (2, 8, 24)])
def test_orthogonalized_updates_have_singular_values_near_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape), num_steps=8))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_muon_steps_down_the_gradient() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 8))
    target = torch.randn(8, 8)
    muon = Muon([weight], lr=0.1, weight_decay=0.0)

    def distance() -> float:
        return float((weight.detach() - target).pow(2).sum())

    before = distance()
    for _ in range(60):
        weight.grad = 2 * (weight.detach() - target)
        muon.step(1.0)
    assert distance() < 0.2 * before
