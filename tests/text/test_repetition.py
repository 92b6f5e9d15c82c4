"""A row that repeats itself to its token limit burns the batch; a table cut off as "repetition" loses the answer."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gewell.text.repetition import RepetitionDetector, RepetitionLimits
from gewell.text.tokenizer import ByteTokenizer

LIMITS = RepetitionLimits(max_period=4, min_repeats=3, min_tokens=8, min_whitespace_tokens=5)


def found_at(ids: bytes | list[int], limits: RepetitionLimits = LIMITS) -> int | None:
    return RepetitionDetector(ByteTokenizer(), limits).push(ids)


def naive(ids: bytes, limits: RepetitionLimits = LIMITS) -> int | None:
    """By definition: at each end, try every period."""
    for end in range(1, len(ids) + 1):
        spaces = len(ids[:end]) - len(ids[:end].rstrip())
        if spaces >= limits.min_whitespace_tokens:
            return end - 1
        for period in range(1, limits.max_period + 1):
            num = max(limits.min_tokens, limits.min_repeats * period)
            tail = ids[end - num : end] if end >= num else b""
            if tail and all(tail[i] == tail[i - period] for i in range(period, num)):
                return end - 1
    return None


def test_loop_is_found_when_it_fills_the_limit() -> None:
    assert found_at(b"xyz" + b"ab" * 10) == 3 + 8 - 1
    assert found_at(b"abcd" * 3) == 11  # three times four tokens
    assert found_at(b"abcde" * 20) is None  # a longer pattern than the limit looks for


def test_variation_starts_the_count_again() -> None:
    assert found_at(b"abababa" + b"X" + b"abababa") is None


def test_whitespace_is_cut_off_earlier() -> None:
    assert found_at(b'{"a":' + b" \n\t \n" * 2) == 5 + 5 - 1
    assert found_at(b"a    b    c") is None


def test_defaults_let_tables_and_indented_code_pass() -> None:
    row = list(b"|0|0|0|0|0|0|0|0|\n")
    assert found_at(row * 6, RepetitionLimits()) is None
    assert found_at(list(itertools.chain.from_iterable(b"%d,0,\n" % n for n in range(500))), RepetitionLimits()) is None
    assert found_at([7] * 300, RepetitionLimits()) == 255
    assert found_at(list(range(64)) * 20, RepetitionLimits()) == 64 * 8 - 1


def test_limits_that_make_no_sense_are_refused() -> None:
    for bad in ({"max_period": 0}, {"min_repeats": 1}, {"min_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            RepetitionLimits(**bad)


@given(st.lists(st.sampled_from([b"a", b"b", b" ", b"abab", b"  \n", b"abcabc"]), max_size=20), st.integers(1, 7))
def test_any_cut_finds_what_the_definition_says(parts: list[bytes], size: int) -> None:
    ids = b"".join(parts)
    detector = RepetitionDetector(ByteTokenizer(), LIMITS)
    found = None
    for start in range(0, len(ids), size):
        hit = detector.push(ids[start : start + size])
        if hit is not None:
            found = start + hit
            break
    assert found == naive(ids)
