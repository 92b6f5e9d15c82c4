"""Token ids to text that can be shown while it grows."""

import codecs
from collections.abc import Iterable

from gewell.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns a growing sequence of ids into text, never giving out half a character.

    Bytes of all tokens form one UTF-8 stream. Bytes that may still become a character wait; bytes that no longer can
    become U+FFFD at once, one for each maximal part. The text of all pushes and the flush joined is the same however
    the ids were cut into pushes. Control tokens give no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._is_control = tokenizer.is_control
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that these ids complete."""
        token_bytes, is_control = self._token_bytes, self._is_control
        return self._decoder.decode(b"".join([token_bytes(i) for i in ids if not is_control(i)]))

    def flush(self) -> str:
        """Text of the bytes still waiting (U+FFFD: nothing will complete them). Ready for a new sequence afterwards."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
