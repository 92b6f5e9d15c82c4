"""Builds Gemma tokenizers from the vocabulary inside a GGUF file. Needs `gguf` and `tokenizers`, no torch.

Gemma's tokenizer is BPE over characters: spaces become "▁", bytes stand in for characters that the vocabulary lacks,
and nothing splits the text apart from the added tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gewell.errors import CheckpointError
from gewell.text.tokenizer import GEMMA_CONTROL_TOKENS, HFTokenizer

# llama.cpp's token kinds (enum llama_token_type)
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6


def tokenizer_from_gguf(path: Path) -> HFTokenizer:
    """The tokenizer of a Gemma 3 or Gemma 4 GGUF file, equal to the one of the published `tokenizer.json`.

    Raises CheckpointError when the file is not GGUF or holds another kind of vocabulary.
    """
    from gguf import GGUFReader

    try:
        fields = GGUFReader(path).fields
    except (OSError, ValueError, IndexError, KeyError) as e:
        raise CheckpointError(f"{path}: not a readable GGUF file: {e}") from e
    return tokenizer_from_fields(fields, path)


def tokenizer_from_fields(fields: Any, path: Path) -> HFTokenizer:
    """As `tokenizer_from_gguf`, for the metadata of an open file (the library takes seconds to read it)."""
    model = _scalar(fields, "tokenizer.ggml.model")
    if model not in ("llama", "gemma4"):
        raise CheckpointError(f"{path}: tokenizer.ggml.model is {model!r}; known are 'llama' (Gemma 3) and 'gemma4'")
    # Some converters write the whitespace runs (ids 138 to 167) with real spaces.
    tokens = [token.replace(" ", "▁") for token in _strings(fields, "tokenizer.ggml.tokens")]
    kinds = [int(kind) for kind in _numbers(fields, "tokenizer.ggml.token_type")]
    if "tokenizer.ggml.merges" in fields:
        merges = [_pair(line) for line in _strings(fields, "tokenizer.ggml.merges")]
    else:
        merges = derive_merges(tokens, _numbers(fields, "tokenizer.ggml.scores"), kinds)
    added = [t for t, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    return HFTokenizer(build_backend(tokens, merges, added))


def derive_merges(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """The BPE merges of a SentencePiece vocabulary that was stored without them, best first.

    Every way to cut a token into two tokens is a merge; its rank is the token's score, then the lengths of the parts,
    longest first. User-defined tokens score 0 whatever the file says. For Gemma 3 this gives the 514906 merges of the
    published tokenizer.json in the same order.
    """
    vocab = {token: i for i, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        if kind in (_CONTROL, _BYTE):
            continue
        score = 0.0 if kind == _USER_DEFINED else score
        cuts = [(token[:n], token[n:]) for n in range(1, len(token))]
        ranked += [(score, len(a), len(b), a, b) for a, b in cuts if a in vocab and b in vocab]
    ranked.sort(key=lambda merge: merge[:3], reverse=True)
    return [(a, b) for *_, a, b in ranked]


def build_backend(tokens: Sequence[str], merges: list[tuple[str, str]], added: Sequence[str]) -> Any:
    """A `tokenizers.Tokenizer` with the settings of the published Gemma files; `added` tokens match before BPE runs."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens([AddedToken(t, normalized=False) for t in added if t not in GEMMA_CONTROL_TOKENS])
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in added if t in GEMMA_CONTROL_TOKENS])
    return backend


def _pair(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    return left, right


def _scalar(fields: Any, name: str) -> Any:
    return fields[name].contents() if name in fields else None


def _strings(fields: Any, name: str) -> list[str]:
    """A string array. `contents()` of the gguf package takes ten seconds for 262144 strings, this takes a tenth."""
    field = _field(fields, name)
    return [bytes(field.parts[i]).decode() for i in field.data]


def _numbers(fields: Any, name: str) -> list[float]:
    field = _field(fields, name)
    return [field.parts[i].item() for i in field.data]


def _field(fields: Any, name: str) -> Any:
    if name not in fields:
        raise CheckpointError(f"GGUF file without {name}")
    return fields[name]
