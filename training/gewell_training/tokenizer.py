"""The tokenizer of gewell-nano: BPE of 2560 entries learned from generated samples.

Control tokens have Gemma 4's names and, where the small vocabulary has room, its ids. Digits are tokens one by one.
Text is cut into words before BPE runs, so the ids of a text are those of its words in a row: the trainer encodes with a
dictionary of words (`WordEncoder`), a hundred times faster and with the same result.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from gewell.eval.tasks import words
from gewell.eval.tasks.sample import Sample, Split
from gewell.eval.tasks.suite import TASKS, make_sample
from gewell.text.messages import text_of
from gewell.text.tokenizer import HFTokenizer
from gewell.text.vocabulary import build_backend

VOCAB_SIZE = 2560
NUM_SAMPLES = 400  # of each task
FIXED_IDS = {
    "<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4,
    "<|tool>": 46, "<tool|>": 47, "<|tool_call>": 48, "<tool_call|>": 49, "<|tool_response>": 50,
    "<tool_response|>": 51, '<|"|>': 52, "<|think|>": 98, "<|channel>": 100, "<channel|>": 101,
    "<|turn>": 105, "<turn|>": 106,
}  # fmt: skip
LAST_IDS = ("<|image>", "<|audio>", "<|image|>", "<|audio|>", "<image|>", "<audio|>", "<|video|>")
_FIRST_BYTE_ID = 107

# A word with the space before it; a digit; a newline; spaces; any other character. Both spellings: with "▁" for the
# library, with the space itself for `WordEncoder`.
_WORD = r" ?\p{L}+|\p{N}|\n| +|[^\p{L}\p{N}\n ]"
_WORD_RE = re.compile(r" ?[^\W\d_]+|\d|\n| +|[^\n ]")


class WordEncoder:
    """The same ids as the tokenizer's, by looking up words. ASCII text only."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}
        self._counts: dict[str, int] = {}

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        known = self._ids
        for word in _WORD_RE.findall(text):
            found = known.get(word)
            if found is None:
                found = known[word] = self._tokenizer.encode(word)
            ids += found
        return ids

    def count(self, text: str) -> int:
        return len(self(text))


def train(num_samples: int = NUM_SAMPLES) -> HFTokenizer:
    trained = Tokenizer(models.BPE(byte_fallback=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = _pre_tokenizer()
    alphabet = sorted({chr(code) for code in range(33, 127)} | {"▁", "\n"})
    room = VOCAB_SIZE - _FIRST_BYTE_ID - 256 - len(LAST_IDS)
    trainer = trainers.BpeTrainer(
        vocab_size=room, initial_alphabet=alphabet, limit_alphabet=len(alphabet), show_progress=False, min_frequency=2
    )
    trained.train_from_iterator(_corpus(num_samples), trainer)
    model = json.loads(trained.to_str())["model"]
    learned = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [(a, b) for a, b in model["merges"]]
    return _assemble(learned, merges)


def _assemble(learned: list[str], merges: list[tuple[str, str]]) -> HFTokenizer:
    by_id = {i: name for name, i in FIXED_IDS.items()}
    tokens = [by_id.get(i, f"<unused{i}>") for i in range(_FIRST_BYTE_ID)]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)] + learned
    padding = VOCAB_SIZE - len(LAST_IDS) - len(tokens)
    tokens += [f"<unused{_FIRST_BYTE_ID + i}>" for i in range(padding)] + list(LAST_IDS)
    backend = build_backend(tokens, merges, [*FIXED_IDS, *LAST_IDS])
    backend.pre_tokenizer = _pre_tokenizer()
    return HFTokenizer(backend)


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(_WORD.replace(" ", "▁")), behavior="isolated")


def _corpus(num_samples: int) -> Iterator[str]:
    """Text of all tasks, and every word of the lists often enough to become one token, with and without a space."""
    for task in TASKS:
        for idx in range(num_samples):
            yield from _texts(make_sample(task, Split.TRAIN, 1_000_000, idx, count=len, num_tokens=400))
    lists = (words.ADJECTIVES, words.NOUNS, words.FIRST_NAMES, words.LAST_NAMES, words.CITIES, words.ITEMS)
    for listed in (*lists, words.COLOURS, words.DAYS, words.SIZES):
        for word in listed:
            yield f"{word}\n {word}\n" * 200


def _texts(sample: Sample) -> Iterator[str]:
    yield from (text_of(message["content"]) for message in sample.messages)
    yield from (sample.answer, sample.thought)
    yield from (json.dumps(value) for value in (sample.tools, sample.call) if value)
    yield "user\nmodel\nsystem\nthought\ndeclaration:call:response:"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="tokenizer.json to write")
    arguments = parser.parse_args()
    train().save(arguments.out)


if __name__ == "__main__":
    main()
