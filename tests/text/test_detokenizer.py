"""Half a character in a stream shows as a black diamond to the user, and no later chunk can take it back."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gewell.text.detokenizer import Detokenizer
from gewell.text.tokenizer import ByteTokenizer, HFTokenizer

WOMAN_CODING = "👩‍💻"  # woman, zero-width joiner, laptop
TEXTS = ["🙂", WOMAN_CODING, "🏳️‍🌈", "日本語。中文", "naïve — ½", "हिन्दी ไทย", "plain"]


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(c % (len(ids) + 1) for c in cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def test_no_push_shows_half_a_character(gemma4: HFTokenizer) -> None:
    for text in TEXTS:
        detokenizer = Detokenizer(gemma4)
        shown = [detokenizer.push([i]) for i in gemma4.encode(text)]
        assert "".join(shown) == text
        assert not any("�" in part for part in shown)
        assert detokenizer.flush() == ""


def test_byte_tokens_wait_for_the_whole_character() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    assert [detokenizer.push([b]) for b in "🙂".encode()] == ["", "", "", "🙂"]


def test_bytes_that_cannot_become_a_character_are_replaced_at_once() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    assert detokenizer.push([0xF0]) == ""  # may still become one
    assert detokenizer.push([0x9F]) == ""
    assert detokenizer.push([0x41]) == "�A"  # no longer
    assert detokenizer.push([0xFF]) == "�"  # never could


def test_flush_replaces_what_nothing_will_complete() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    assert detokenizer.push([0xE6, 0x97]) == ""
    assert detokenizer.flush() == "�"
    assert detokenizer.push(b"ok") == "ok"  # ready for the next sequence


def test_control_tokens_give_no_text(gemma4: HFTokenizer) -> None:
    ids = gemma4.encode("a<turn|>b", specials=True)
    assert Detokenizer(gemma4).push(ids) == "ab"


@given(st.binary(max_size=40), st.lists(st.integers(0, 40)))
def test_any_cut_gives_the_same_text(data: bytes, cuts: list[int]) -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    parts = [detokenizer.push(part) for part in cut(list(data), cuts)]
    assert "".join(parts) + detokenizer.flush() == data.decode("utf-8", "replace")


@given(st.text(max_size=30), st.lists(st.integers(0, 120)))
def test_valid_text_is_never_replaced(text: str, cuts: list[int]) -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    parts = [detokenizer.push(part) for part in cut(list(text.encode()), cuts)]
    assert "".join(parts) == text
    assert detokenizer.flush() == ""
