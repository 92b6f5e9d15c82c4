"""Zero for the same distribution, the textbook's number for two different ones."""

import math

import pytest

from gewell.eval.divergence import kl_divergence, spread_positions, summarize


def logs(**shares: float) -> dict[int, float]:
    return {ord(name): math.log(share) for name, share in shares.items()}


def test_equal_distributions_do_not_diverge() -> None:
    assert kl_divergence(logs(a=0.7, b=0.2), logs(b=0.2, a=0.7)) == pytest.approx(0, abs=1e-12)


def test_unlisted_mass_is_one_token() -> None:
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert kl_divergence(logs(a=0.5), logs(a=0.25)) == pytest.approx(expected)


def test_a_token_that_the_other_does_not_list_counts_as_its_least_likely_one() -> None:
    assert kl_divergence(logs(a=0.6, b=0.4), logs(a=0.9, c=0.05)) == pytest.approx(
        0.6 * math.log(0.6 / 0.9) + 0.4 * math.log(0.4 / 0.05)
    )


def test_summary_over_positions() -> None:
    same, far = (logs(a=0.9, b=0.1), logs(a=0.9, b=0.1)), (logs(a=0.9, b=0.1), logs(a=0.1, b=0.9))
    found = summarize([same] * 3 + [far])
    assert found.num_positions == 4
    assert found.same_choice == 0.75
    assert found.max_kl == found.p99_kl == pytest.approx(0.8 * math.log(9))
    assert found.mean_kl == pytest.approx(found.max_kl / 4)
    with pytest.raises(ValueError, match="no positions"):
        summarize([])


def test_positions_are_spread_over_the_answer() -> None:
    assert spread_positions(3, 8) == [0, 1, 2]
    assert spread_positions(100, 4) == [0, 25, 50, 75]
