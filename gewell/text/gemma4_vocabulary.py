"""The real Gemma 4 vocabulary and chat template, out of a public source package.

`llama-cpp-python` carries llama.cpp's test vocabulary of Gemma 4 (tokens, merges, control tokens) and the published
template of the 31B. Vocabulary and template are Gemma 4's (Apache-2.0), the package is MIT.
"""

import hashlib
import shutil
import tarfile
from pathlib import Path

from gewell.errors import CheckpointError
from gewell.text.vocabulary import tokenizer_from_gguf

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
VOCAB_SHA256 = "58b1ba0b57f3b4d7c468ba4ffd91ad85190346a3d7ad7e71d1cabaae8a14bb65"

_ROOT = f"llama_cpp_python-{VERSION}/vendor/llama.cpp"
_MEMBERS = {
    f"{_ROOT}/models/ggml-vocab-gemma-4.gguf": "vocab.gguf",
    f"{_ROOT}/models/templates/google-gemma-4-31B-it.jinja": "chat_template.jinja",
    f"{_ROOT}/LICENSE": "LICENSE.llama.cpp",
}


def extract(source_package: Path, folder: Path) -> None:
    """Write `tokenizer.json`, `chat_template.jinja` and the licence into `folder`.

    Raises CheckpointError when the package is damaged or holds another vocabulary.
    """
    try:
        with tarfile.open(source_package) as archive:
            for member, name in _MEMBERS.items():
                source = archive.extractfile(member)
                if source is None:
                    raise CheckpointError(f"{source_package.name}: {member} is no file")
                with source, (folder / name).open("wb") as target:
                    shutil.copyfileobj(source, target)
    except (tarfile.TarError, KeyError, EOFError) as e:
        raise CheckpointError(f"{source_package.name}: {e}") from e
    vocab = folder / "vocab.gguf"
    digest = hashlib.sha256(vocab.read_bytes()).hexdigest()
    if digest != VOCAB_SHA256:
        raise CheckpointError(f"{source_package.name}: vocabulary has sha256 {digest}, expected {VOCAB_SHA256}")
    tokenizer_from_gguf(vocab).save(folder / "tokenizer.json")
    vocab.unlink()
