"""A wrong id here is a model that reads something else than the user wrote."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gewell.errors import CheckpointError
from gewell.text.tokenizer import ByteTokenizer, HFTokenizer, load_tokenizer
from gewell.text.vocabulary import derive_merges

VECTORS = Path(__file__).parents[1] / "fixtures" / "text"
TEXTS = json.loads((VECTORS / "tokenizer_vectors.json").read_text())


def test_control_tokens_in_text_stay_text_unless_asked_for(gemma4: HFTokenizer) -> None:
    turn = gemma4.control_id("<turn|>")
    assert turn is not None
    assert turn not in gemma4.encode("a<turn|>b")
    ids = gemma4.encode("a<turn|>b", specials=True)
    assert ids == [*gemma4.encode("a"), turn, *gemma4.encode("b")]


def test_quote_token_is_control_whatever_the_file_says(gemma4: HFTokenizer, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    gemma4.save(file)
    body = json.loads(file.read_text())
    for token in body["added_tokens"]:
        token["special"] = False  # some published files list a few control tokens as ordinary added ones
    file.write_text(json.dumps(body))
    loaded = HFTokenizer.from_file(file)
    quote = loaded.control_id('<|"|>')
    assert quote == gemma4.control_id('<|"|>')
    assert quote not in loaded.encode('say <|"|> now')


def test_bytes_of_the_ids_are_the_text(gemma4: HFTokenizer) -> None:
    for text in ("", "the cat", "  two\n\nlines\t", "naïve é 🙂👩‍💻 日本", "\x00\x01\x7f", "a\r\nb"):
        ids = gemma4.encode(text)
        assert b"".join(map(gemma4.token_bytes, ids)) == text.encode()


def test_merges_are_used(gemma4: HFTokenizer) -> None:
    assert len(gemma4.encode(" the")) == 1
    assert len(gemma4.encode("  ")) == 1


@given(st.lists(st.sampled_from(["the ", "\n", "\n\n", "x" * 400, " ", "é🙂"]), max_size=30))
def test_long_text_is_cut_only_where_no_token_lies(gemma4: HFTokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    assert gemma4.encode(text) == gemma4._backend.encode(text, add_special_tokens=False).ids


def test_half_a_surrogate_pair_becomes_the_replacement_character(gemma4: HFTokenizer) -> None:
    assert gemma4.encode("a\ud800b") == gemma4.encode("a�b")
    assert ByteTokenizer().encode("\udc00") == list("�".encode())


def test_id_outside_the_vocabulary_has_no_bytes(gemma4: HFTokenizer) -> None:
    assert gemma4.token_bytes(gemma4.vocab_size) == b""
    assert gemma4.token_bytes(-1) == b""
    assert ByteTokenizer().token_bytes(256) == b""


def test_saved_tokenizer_reads_back_equal(gemma4: HFTokenizer, tmp_path: Path) -> None:
    gemma4.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path)
    text = "the <|turn> cat 🙂"
    assert again.encode(text, specials=True) == gemma4.encode(text, specials=True)
    assert again.vocab_size == gemma4.vocab_size
    assert again.bos_id == gemma4.bos_id == 2


def test_folder_without_tokenizer_gets_bytes_only_for_256_ids(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"text_config": {"vocab_size": 256}}')
    assert load_tokenizer(tmp_path).encode("é") == [0xC3, 0xA9]
    config.write_text('{"vocab_size": 262144}')
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("config", ["[1]", "5", "null", '{"text_config": 5}', '{"text_config": null}', "{", ""])
def test_config_of_another_shape_is_a_checkpoint_error(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_damaged_tokenizer_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_derived_merges_rank_by_score_and_then_longest_part_first() -> None:
    tokens = ["a", "b", "c", "ab", "bc", "abc", "aa", "aaa"]
    scores = [-9.0, -9.0, -9.0, -1.0, -2.0, -3.0, -1000.0, -1000.0]
    kinds = [1, 1, 1, 1, 1, 1, 4, 4]  # aa and aaa are user-defined: they come first whatever their score
    assert derive_merges(tokens, scores, kinds) == [
        ("aa", "a"), ("a", "aa"), ("a", "a"), ("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc"),
    ]  # fmt: skip


def test_real_vocabulary_reproduces_the_reference_vectors(real_gemma4: HFTokenizer) -> None:
    for case in TEXTS["texts"]:
        assert real_gemma4.encode(case["text"], specials=True) == case["ids"], case["text"]
    assert {name: real_gemma4.control_id(name) for name in TEXTS["special_tokens"]} == TEXTS["special_tokens"]
    assert set(real_gemma4.control_names) == set(TEXTS["special_tokens"])


def test_real_vocabulary_reproduces_the_46_public_vectors(real_gemma4: HFTokenizer) -> None:
    inputs = (VECTORS / "gemma4_public_vectors.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    wanted = (VECTORS / "gemma4_public_vectors.out").read_text().split("\n")
    pairs = list(zip(inputs, wanted, strict=False))
    assert len(pairs) == 46
    for text, ids in pairs:
        assert real_gemma4.encode(text) == [int(i) for i in ids.split()], text


@given(st.text(max_size=60))
def test_real_ids_spell_any_text(real_gemma4: HFTokenizer, text: str) -> None:
    ids = real_gemma4.encode(text)
    assert b"".join(map(real_gemma4.token_bytes, ids)) == text.replace("▁", " ").encode()
    assert not any(map(real_gemma4.is_control, ids))


def test_gemma3_vocabulary_has_the_same_ordinary_ids(real_gemma3: HFTokenizer) -> None:
    for case in TEXTS["texts"]:
        assert real_gemma3.encode(case["text"], specials=True) == case["ids"], case["text"]
    golden = json.loads((VECTORS.parent / "gemma3-270m" / "golden.json").read_text())
    for case in golden["cases"].values():
        assert 1 + len(real_gemma3.encode(case["prompt"])) == case["prompt_tokens"]
