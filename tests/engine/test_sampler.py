"""What a job does to its logits. A fault here is a penalty on the wrong row, or an end id where none is allowed."""

import math
from array import array

import numpy as np
import pytest
import torch

from gewell.engine.sampler import MIN_LOGPROB, Drawn, Sampler
from gewell.request import EngineRequest
from gewell.sampling import SamplingParams
from gewell.scheduler.request import RequestState

VOCAB = 100


def row(row_idx: int, prompt: list[int], generated: list[int], *, eos: int = 1, **params: object) -> RequestState:
    sampling = SamplingParams(**{"temperature": 0.0, **params})  # type: ignore[arg-type]
    request = EngineRequest(request_id=str(row_idx), prompt_ids=prompt, sampling=sampling, eos_token_ids=(eos,))
    return RequestState(
        request=request,
        order=row_idx,
        tokens=array("i", prompt + generated),
        num_prompt_tokens=len(prompt),
        max_output_tokens=100,
        num_output_tokens=len(generated),
        stop_ids=frozenset({eos}),
        row_idx=row_idx,
    )


def draw(
    logits: torch.Tensor,
    *rows: RequestState,
    sampler: Sampler | None = None,
    mask: tuple[list[int], torch.Tensor] | None = None,
) -> Drawn:
    sampler = sampler or Sampler(8, VOCAB, torch.device("cpu"))
    for req in rows:
        sampler.join(req)
    row_idx = np.array([req.row_idx for req in rows])
    return sampler.draw(logits.clone(), rows, row_idx, np.array([req.num_tokens for req in rows]), mask)


def ramp(num_rows: int = 1) -> torch.Tensor:
    """Logits 0.0, 0.1, ... 9.9: id 99 is best, then 98."""
    return (torch.arange(VOCAB) / 10.0).repeat(num_rows, 1)


def test_greedy_takes_the_best() -> None:
    assert draw(ramp(), row(0, [5], [])).token_ids.tolist() == [99]


def test_logit_bias_moves_only_its_row() -> None:
    drawn = draw(ramp(3), row(0, [5], []), row(1, [5], [], logit_bias={3: 100.0, 99: -100.0}), row(2, [5], []))
    assert drawn.token_ids.tolist() == [99, 3, 99]


def test_suppressed_ids_are_never_drawn() -> None:
    sampler = Sampler(8, VOCAB, torch.device("cpu"), suppressed_ids=(99, 98))
    assert draw(ramp(), row(0, [5], []), sampler=sampler).token_ids.tolist() == [97]


def test_presence_counts_once_frequency_counts_each() -> None:
    generated = [99, 99, 99, 98]
    # 99 falls once to 9.82 and stays before 98 with 9.72; three times would give 9.66
    assert draw(ramp(), row(0, [97], generated, presence_penalty=0.08)).token_ids.tolist() == [99]
    assert draw(ramp(), row(0, [97], generated, frequency_penalty=0.08)).token_ids.tolist() == [98]


def test_repetition_looks_at_prompt_and_output_and_at_the_sign() -> None:
    assert draw(ramp(), row(0, [99], [98], repetition_penalty=1.5)).token_ids.tolist() == [97]
    negative = ramp() - 20.0
    assert draw(negative, row(0, [99], [98], repetition_penalty=1.5)).token_ids.tolist() == [97]


def test_penalties_follow_tokens_that_the_host_has_not_seen() -> None:
    """The request's own list of tokens is not extended here: the sampler must count what it drew itself."""
    sampler = Sampler(8, VOCAB, torch.device("cpu"))
    req = row(0, [5], [], presence_penalty=50.0)
    sampler.join(req)
    drawn = [int(sampler.draw(ramp(), [req], np.array([req.row_idx]), np.array([1 + i])).token_ids) for i in range(4)]
    assert drawn == [99, 98, 97, 96]


def test_a_row_index_given_to_another_request_forgets_the_first() -> None:
    sampler = Sampler(8, VOCAB, torch.device("cpu"))
    first = row(0, [5], [99], presence_penalty=50.0, logit_bias={99: -100.0}, logprobs=2)
    draw(ramp(), first, sampler=sampler)
    drawn = draw(ramp(), row(0, [5], []), sampler=sampler)
    assert (drawn.token_ids.tolist(), drawn.logprobs) == ([99], [])


@pytest.mark.parametrize(("num_generated", "expected"), [(0, 98), (2, 98), (3, 99), (4, 99)])
def test_stop_ids_are_banned_before_min_tokens(num_generated: int, expected: int) -> None:
    req = row(0, [5], [4] * num_generated, eos=99, min_tokens=3)
    assert draw(ramp(), req).token_ids.tolist() == [expected]


def test_logprobs_are_the_models_own_whatever_the_job_does_to_the_logits() -> None:
    drawn = draw(ramp(), row(0, [5], [], logprobs=2, logit_bias={99: -math.inf}, temperature=0.0))
    expected = torch.log_softmax(ramp()[0], dim=0)
    lp = drawn.logprobs_on_host([98])[0]
    assert lp.token_id == 98
    assert lp.logprob == pytest.approx(float(expected[98]))
    assert [token for token, _ in lp.top] == [99, 98]
    assert [value for _, value in lp.top] == pytest.approx(expected[[99, 98]].tolist())


def test_logprobs_of_the_chosen_token_alone() -> None:
    lp = draw(ramp(), row(0, [5], [], logprobs=0)).logprobs_on_host([99])[0]
    assert (lp.token_id, lp.top) == (99, ())


def test_infinite_logprobs_are_clamped() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 7] = 0.0
    lp = draw(logits, row(0, [5], [], logprobs=3)).logprobs_on_host([7])[0]
    assert lp.logprob == 0.0
    assert [value for _, value in lp.top] == [0.0, MIN_LOGPROB, MIN_LOGPROB]


def test_rows_without_a_finite_choice_are_not_sound() -> None:
    logits = ramp(3)
    logits[0, 50] = math.nan
    logits[2] = -math.inf
    drawn = draw(logits, *(row(i, [5], [], temperature=1.0, seed=i) for i in range(3)))
    assert drawn.is_sound.tolist() == [False, True, False]


def test_the_same_seed_and_position_draw_the_same_token_in_any_row() -> None:
    req = [row(i, [5, 6], [], temperature=1.0, seed=seed) for i, seed in enumerate((3, 4, 3))]
    logits = torch.zeros(3, VOCAB)
    drawn = draw(logits, *req).token_ids.tolist()
    assert drawn[0] == drawn[2] != drawn[1]
