"""Small vocabularies of Gemma's kind, and the real ones when this machine has them.

The small ones have every control token, a few merges and byte fallback for all else, so that the text floor is tested
without any download. `gewell model get gemma4-tokenizer` and `gewell model get gemma3-270m` fetch the real ones.
"""

import string
from pathlib import Path

import pytest

from gewell.errors import CheckpointError
from gewell.model_store import model_path
from gewell.text.tokenizer import HFTokenizer, load_tokenizer
from gewell.text.vocabulary import build_backend

GEMMA4_CONTROLS = [
    "<pad>", "<eos>", "<bos>", "<unk>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
    "<tool_response|>", '<|"|>', "<|think|>", "<|channel>", "<channel|>", "<|turn>", "<turn|>", "<|image>", "<|image|>",
    "<image|>",
]  # fmt: skip
GEMMA3_CONTROLS = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"]
MERGES = [("▁", "▁"), ("\n", "\n"), ("t", "h"), ("th", "e"), ("▁", "the"), ("l", "l"), ("é", "é")]


def small_vocabulary(controls: list[str]) -> HFTokenizer:
    letters = [c for c in string.printable if c not in " \r\x0b\x0c"]
    tokens = [*controls, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "é", *letters]
    tokens += [a + b for a, b in MERGES]
    return HFTokenizer(build_backend(tokens, MERGES, controls))


@pytest.fixture(scope="session")
def gemma4() -> HFTokenizer:
    return small_vocabulary(GEMMA4_CONTROLS)


@pytest.fixture(scope="session")
def gemma3() -> HFTokenizer:
    return small_vocabulary(GEMMA3_CONTROLS)


def stored(name: str) -> Path:
    try:
        return model_path(name)
    except CheckpointError:
        pytest.skip(f"needs `gewell model get {name}`")


@pytest.fixture(scope="session")
def real_gemma4() -> HFTokenizer:
    tokenizer = load_tokenizer(stored("gemma4-tokenizer"))
    assert isinstance(tokenizer, HFTokenizer)
    return tokenizer


@pytest.fixture(scope="session")
def real_gemma3() -> HFTokenizer:
    tokenizer = load_tokenizer(stored("gemma3-270m"))
    assert isinstance(tokenizer, HFTokenizer)
    return tokenizer
