"""Nano is trained on the ids of a dictionary of words and runs on those of the library: they must be the same."""

from gewell_training.tokenizer import FIXED_IDS, VOCAB_SIZE, WordEncoder
from hypothesis import given
from hypothesis import strategies as st

from gewell.eval.tasks import words
from gewell.text.tokenizer import HFTokenizer


@given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126) | st.just("\n"), max_size=60))
def test_word_by_word_gives_the_ids_of_the_whole_text(tokenizer: HFTokenizer, text: str) -> None:
    assert WordEncoder(tokenizer)(text) == tokenizer.encode(text)


@given(st.text(max_size=30))
def test_every_text_comes_back_from_its_ids(tokenizer: HFTokenizer, text: str) -> None:
    back = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode()
    assert back == text.replace("▁", " ")  # the vocabulary writes spaces so


def test_control_tokens_have_the_ids_of_gemma_4(tokenizer: HFTokenizer) -> None:
    assert {name: tokenizer.control_id(name) for name in FIXED_IDS} == FIXED_IDS
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert all(not tokenizer.is_control(i) for i in tokenizer.encode("".join(FIXED_IDS)))


def test_a_digit_and_a_known_word_are_one_token_each(tokenizer: HFTokenizer) -> None:
    assert len(tokenizer.encode("9041")) == 4
    for word in (*words.ADJECTIVES, *words.NOUNS, *words.FIRST_NAMES, *words.CITIES, *words.ITEMS):
        assert len(tokenizer.encode(word)) == len(tokenizer.encode(f" {word}")) == 1
