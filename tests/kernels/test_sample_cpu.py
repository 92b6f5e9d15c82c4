"""The CPU sampler against the naive one. It takes short cuts; a wrong one changes what a seed draws."""

import math

import numpy as np
import pytest
import torch
from gewell_kernels.cpu.sample import gumbel, philox, sample
from gewell_kernels.reference import sample as reference
from torch import Tensor


def settings(rows: int, *, heat: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[Tensor]:
    return [
        torch.full((rows,), heat),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.arange(rows) * 7919 - 3,
        torch.arange(rows) * 13 + 5,
    ]


CUTS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 700},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 100_000, "top_p": 0.3},
    {"heat": 0.0},
    {"heat": 0.3, "top_p": 0.99},
    {"heat": 5.0, "top_p": 0.99},
]


@pytest.mark.parametrize("vocab", [5, 256, 1500])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_draws_are_the_references(cuts: dict[str, float], vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(4, vocab, generator=generator) * 2
    logits[1] = logits[1].round()  # many equal logits at every cut
    logits[2, ::3] = -math.inf  # banned
    before = logits.clone()
    arguments = settings(4, **cuts)
    assert torch.equal(sample(logits, *arguments), reference.sample(logits, *arguments))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("cuts", [{}, {"top_p": 0.97}, {"min_p": 1e-4}, {"heat": 2.0, "top_k": 30_000}], ids=str)
def test_rows_too_flat_for_noise_on_every_id_draw_the_same(cuts: dict[str, float]) -> None:
    """Wide rows take other paths: a histogram for the nucleus, Philox over whole blocks, no logarithm."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 40_000, generator=generator)
    arguments = settings(3, **cuts)
    drawn = sample(logits, *arguments)
    heat = arguments[0][0]
    for row in range(3):
        ids = reference.kept_ids(
            logits[row], float(heat), int(arguments[1][row]), float(arguments[2][row]), float(arguments[3][row])
        )
        assert len(ids) > 16_384, "the case must be wide"
        seeds = np.full(len(ids), int(arguments[4][row]) & (2**64 - 1), np.uint64)
        noise = gumbel(seeds, np.full(len(ids), int(arguments[5][row]), np.uint64), ids.numpy())
        best = int((logits[row, ids].double().numpy() / float(heat) + noise).argmax())
        assert int(drawn[row]) == int(ids[best])


def test_philox_is_the_published_one() -> None:
    """Known answer of Random123 for philox4x32-10 with zeros; the others against the naive form."""
    lanes = philox(np.uint64(0), np.zeros(1, np.uint64), np.uint64(0))
    assert lanes[:, 0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    for key, first, second in ((2**64 - 1, 2**32 - 1, 2**32 - 1), (12345678901234567890, 65535, 262143)):
        lanes = philox(np.uint64(key), np.array([first], np.uint64), np.uint64(second))
        assert tuple(lanes[:, 0].tolist()) == reference.philox(key, (first, second, 0, 0))


def test_noise_is_the_references() -> None:
    for seed, position, token in ((0, 0, 0), (1, 2, 3), (2**62 + 12345, 70_000, 262_143)):
        noise = gumbel(np.array([seed], np.uint64), np.array([position], np.uint64), np.array([token]))
        assert noise[0] == pytest.approx(reference.gumbel(seed, position, token), abs=1e-12)


def test_draws_follow_the_probabilities() -> None:
    rows = 5_000
    logits = torch.tensor([0.7, 0.2, 0.1]).log().repeat(rows, 1)
    arguments = settings(rows)
    shares = torch.bincount(sample(logits, *arguments), minlength=3) / rows
    assert shares.tolist() == pytest.approx([0.7, 0.2, 0.1], abs=0.03)  # 4.6 standard deviations


def test_greedy_rows_beside_random_ones_take_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(3, 300)
    logits[:, [7, 250]] = 5.0
    arguments = settings(3)
    arguments[0][1] = 0.0
    assert int(sample(logits, *arguments)[1]) == 7


def test_a_row_of_nan_disturbs_no_other_row() -> None:
    logits = torch.randn(3, 300)
    alone = sample(logits, *settings(3))
    logits[1, 100] = math.nan
    drawn = sample(logits, *settings(3))
    assert [int(drawn[0]), int(drawn[2])] == [int(alone[0]), int(alone[2])]
    assert logits[1, drawn[1]].isnan()


def test_no_rows() -> None:
    assert sample(torch.empty(0, 256), *settings(0)).shape == (0,)


@pytest.mark.parametrize("num_allowed", [1, 3, 70])
@pytest.mark.parametrize("cuts", [{}, {"top_k": 64}, {"top_k": 64, "top_p": 0.95}, {"top_p": 0.9}], ids=str)
def test_rows_with_few_ids_left_draw_among_them(cuts: dict[str, float], num_allowed: int) -> None:
    logits = torch.full((6, 1500), -math.inf)
    allowed = torch.randperm(1500, generator=torch.Generator().manual_seed(num_allowed))[:num_allowed]
    logits[:, allowed] = torch.randn(6, num_allowed, generator=torch.Generator().manual_seed(2))
    logits[5] = -math.inf  # nothing left: any id, and its caller looks at the logit
    drawn = sample(logits, *settings(6, **cuts))
    assert set(drawn[:5].tolist()) <= set(allowed.tolist())
    assert drawn[:5].tolist() == reference.sample(logits[:5], *[each[:5] for each in settings(6, **cuts)]).tolist()
