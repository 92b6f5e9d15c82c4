"""Sampling: a wrong cut shows users tokens that their settings forbid; wrong noise makes a seed mean nothing."""

import pytest
import torch
from gewell_kernels.reference.sample import kept_ids, philox
from gewell_kernels.reference.sample import sample as reference_sample


def settings(rows: int, device, *, heat=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0):
    return (
        torch.full((rows,), heat, device=device),
        torch.full((rows,), top_k, dtype=torch.int32, device=device),
        torch.full((rows,), top_p, device=device),
        torch.full((rows,), min_p, device=device),
        torch.arange(rows, device=device) * 7919 - 3 + seed,
        torch.arange(rows, device=device) * 13 + 5,
    )


def test_philox_is_the_published_one():
    # Known answers of Random123 for philox4x32-10.
    assert philox(0, (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    every = 0xFFFFFFFF
    assert philox(2**64 - 1, (every,) * 4) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@pytest.mark.parametrize(
    "cuts",
    [
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
    ],
    ids=str,
)
def test_draws_are_the_references(cuts, device):
    from gewell_kernels.sample import sample

    logits = torch.randn(3, 1500, device=device) * 2
    logits[1] = logits[1].round()  # many equal logits at every cut
    arguments = settings(3, device, **cuts)
    before = logits.clone()
    drawn = sample(logits, *arguments)
    assert torch.equal(logits, before)
    assert torch.equal(drawn.cpu(), reference_sample(logits.cpu(), *(argument.cpu() for argument in arguments)))


def test_a_flat_row_whose_nucleus_outgrows_the_registers_is_cut_right(device):
    from gewell_kernels.sample import sample

    logits = torch.rand(1, 9000, device=device)
    for cuts in ({"top_p": 0.9}, {"top_k": 6000, "top_p": 0.9}):
        arguments = settings(1, device, **cuts)
        drawn = sample(logits, *arguments)
        want = reference_sample(logits.cpu(), *(argument.cpu() for argument in arguments))
        assert torch.equal(drawn.cpu(), want)


def test_many_seeds_draw_only_kept_ids_in_their_proportions(device):
    from gewell_kernels.sample import sample

    rows = 4000 if device.type == "cuda" else 64
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0, 2.5], device=device).repeat(rows, 1).contiguous()
    drawn = sample(logits, *settings(rows, device, top_k=3)).cpu()
    assert set(drawn.tolist()) == {2, 3, 5} == set(kept_ids(logits[0].cpu(), 1.0, 3, 1.0, 0.0).tolist())
    share = torch.tensor([(drawn == i).float().mean() for i in (2, 3, 5)])
    wanted = torch.softmax(torch.tensor([2.0, 3.0, 2.5]), dim=0)
    assert (share - wanted).abs().max() < 4 * (0.25 / rows) ** 0.5  # standard deviations of a share


def test_equal_logits_at_temperature_zero_give_the_lowest_id(device):
    from gewell_kernels.sample import sample

    logits = torch.zeros(2, 700, device=device)
    logits[0, [300, 299, 650]] = 7.0
    assert sample(logits, *settings(2, device, heat=0.0)).tolist() == [299, 0]


def test_the_same_seed_and_position_draw_the_same_token_in_any_batch(device):
    from gewell_kernels.sample import sample

    logits = torch.randn(4, 600, device=device)
    arguments = settings(4, device, top_k=50)
    together = sample(logits, *arguments)
    alone = [sample(logits[i : i + 1], *(argument[i : i + 1] for argument in arguments)) for i in range(4)]
    assert torch.equal(together, torch.cat(alone))


def test_forbidden_ids_are_never_drawn_and_nan_stays_in_its_row(device):
    from gewell_kernels.sample import sample

    logits = torch.full((3, 800), float("-inf"), device=device)
    logits[:, [17, 555]] = 0.0
    logits[1] = float("nan")
    drawn = sample(logits, *settings(3, device, top_p=0.9)).tolist()
    assert drawn[0] in (17, 555)
    assert drawn[2] in (17, 555)
    assert 0 <= drawn[1] < 800


def test_logits_of_another_dtype_are_refused(device):
    from gewell_kernels.sample import sample

    with pytest.raises(ValueError, match=r"logits has dtype torch\.float16"):
        sample(torch.zeros(1, 8, dtype=torch.float16, device=device), *settings(1, device))
