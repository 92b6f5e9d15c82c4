"""Text to token ids and back to bytes. No torch.

Two readers of a vocabulary share one protocol: `HFTokenizer` (a `tokenizer.json`, run by the `tokenizers` library) and
`ByteTokenizer` (ids are bytes; what a checkpoint without tokenizer files gets).
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from gewell.errors import CheckpointError

#: Control tokens of Gemma 3 and 4. Some files list a few of them as ordinary added tokens; a user who types one must
#: still get text, and a parser must still see the token, so all of them count as control whatever the file says.
GEMMA_CONTROL_TOKENS = (
    "<pad>", "<eos>", "<bos>", "<unk>", "<mask>",
    "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>",
    "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>",
    "<|channel>", "<channel|>", "<|turn>", "<turn|>", "<|image>", "<|audio>", "<|image|>", "<|audio|>", "<image|>",
    "<audio|>", "<|video|>",
)  # fmt: skip

# BPE over one long word costs n log n; lines are tokenised in pieces of about this many characters (2 cores, 328k
# characters: whole 0.66 s, pieces of 1000 0.37 s, of 16000 0.56 s).
_PIECE_CHARS = 1000

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_LINE_END = re.compile(r"\n(?!\n)")


class Tokenizer(Protocol):
    """What the rest of the house asks of a vocabulary. Safe to use from several threads."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, control tokens included."""

    @property
    def bos_id(self) -> int | None:
        """The id that starts every sequence of the model; `encode` never adds it."""

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Ids of a text. Names of control tokens inside it stay text, unless `specials` makes them those tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of a token; a byte token has one byte, possibly half a character; a control token its name.

        An id that the vocabulary lacks (a padded output head can draw one) has no bytes.
        """

    def is_control(self, token_id: int) -> bool:
        """Whether the id is a control token: never part of visible text."""

    def control_id(self, name: str) -> int | None:
        """Id of the control token with this name, e.g. "<|turn>"; None when the vocabulary has none."""

    @property
    def control_names(self) -> Collection[str]:
        """Names of all control tokens."""


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of the text; there are no control tokens."""

    vocab_size = 256
    bos_id: int | None = None

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        return list(_utf8(text))

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if 0 <= token_id < 256 else b""

    def is_control(self, token_id: int) -> bool:
        return False

    def control_id(self, name: str) -> int | None:
        return None

    @property
    def control_names(self) -> Collection[str]:
        return ()


class HFTokenizer:
    """A vocabulary of the `tokenizers` library: BPE over characters with byte fallback, spaces written as "▁"."""

    def __init__(self, backend: Any) -> None:
        """`backend` is a `tokenizers.Tokenizer`; it belongs to this object from now on and is never changed again."""
        vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        controls = {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        stray = [name for name in GEMMA_CONTROL_TOKENS if name in vocab and name not in controls]
        if stray:
            backend.add_special_tokens(stray)
            controls |= {name: vocab[name] for name in stray}
        backend.encode_special_tokens = True  # text stays text; `encode` itself cuts at control tokens when asked to
        self._backend = backend
        self._controls = controls
        self._control_ids = frozenset(controls.values())
        self._control_pattern = re.compile("|".join(map(re.escape, sorted(controls, key=len, reverse=True))) or r"(?!)")
        self._pieces = _pieces(vocab, controls)
        # Where no token goes on behind a newline, text may be cut there and gives the same ids.
        self._can_cut_lines = not any(b"\n" in piece and piece.strip(b"\n") for piece in self._pieces)

    @classmethod
    def from_file(cls, path: Path) -> "HFTokenizer":
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises bare Exception for every kind of bad file
            raise CheckpointError(f"{path}: not a usable tokenizer file: {e}") from e
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    @property
    def bos_id(self) -> int | None:
        return self._controls.get("<bos>")

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        if not specials:
            return self._encode_text(text)
        ids: list[int] = []
        done = 0
        for match in self._control_pattern.finditer(text):
            ids += self._encode_text(text[done : match.start()])
            ids.append(self._controls[match.group()])
            done = match.end()
        return ids + self._encode_text(text[done:])

    def _encode_text(self, text: str) -> list[int]:
        if not text:
            return []
        if not text.isascii():
            text = _utf8(text).decode()
        ids: list[int] = []
        for piece in _cut_lines(text) if self._can_cut_lines else (text,):
            ids += self._backend.encode(piece, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def is_control(self, token_id: int) -> bool:
        return token_id in self._control_ids

    def control_id(self, name: str) -> int | None:
        return self._controls.get(name)

    @property
    def control_names(self) -> Collection[str]:
        return self._controls.keys()

    def save(self, path: Path) -> None:
        self._backend.save(str(path), pretty=False)


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer of a model folder: its `tokenizer.json`, or bytes when it has no tokenizer files and 256 ids.

    Raises CheckpointError when the folder has neither.
    """
    file = model_dir / "tokenizer.json"
    if file.is_file():
        return HFTokenizer.from_file(file)
    if _config_vocab_size(model_dir) == ByteTokenizer.vocab_size:
        return ByteTokenizer()
    raise CheckpointError(f"{model_dir}: no tokenizer.json, and the vocabulary is not one of 256 bytes")


def _config_vocab_size(model_dir: Path) -> int | None:
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{model_dir / 'config.json'}: {e}") from e
    if not isinstance(config, dict):
        raise CheckpointError(f"{model_dir / 'config.json'}: a JSON {type(config).__name__}, not an object")
    text = config.get("text_config")
    size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None


def _pieces(vocab: dict[str, int], controls: dict[str, int]) -> Sequence[bytes]:
    """Bytes of every id, in order."""
    pieces = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        byte = _BYTE_TOKEN.fullmatch(token) if token.startswith("<0x") else None
        if byte:
            pieces[token_id] = bytes.fromhex(byte.group(1))
        else:
            pieces[token_id] = (token if token in controls else token.replace("▁", " ")).encode()
    return pieces


def _cut_lines(text: str) -> Iterator[str]:
    """The text in pieces of about `_PIECE_CHARS`, each ending behind a newline that no newline follows."""
    start = 0
    while len(text) - start > _PIECE_CHARS:
        match = _LINE_END.search(text, start + _PIECE_CHARS)
        if match is None:
            break
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]


def _utf8(text: str) -> bytes:
    """UTF-8 bytes; half a surrogate pair, which JSON can smuggle in, becomes U+FFFD as it would on any way out."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
