"""How many tokens of each layer kind a page holds. One pool of equal pages serves sliding and full layers.

`page_bytes` is the larger of 16 sliding and 16 full tokens over all layers of the kind; the other kind takes as many
tokens as fit. Gemma 4 31B in bf16: sliding 819,200 B a token, full 40,960 B (V only), so a page of 13,107,200 B
holds 16 sliding or 320 full tokens and neither kind wastes a byte.
"""

from dataclasses import dataclass

from gewell.errors import ConfigError

MIN_PAGE_TOKENS = 16  # a tensor-core tile reads at least 16 keys
CHECKPOINT_SLACK_TOKENS = 64  # how far before a checkpoint's position one can still resume


@dataclass(frozen=True, slots=True, kw_only=True)
class KindGeometry:
    """Pages of one layer kind. bytes_per_token counts all layers of the kind that store keys or values."""

    page_tokens: int
    bytes_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """Sizes of pages. `sliding` or `full` is None when the model has no layer of that kind that stores anything.

    sliding_window   tokens, counting the query itself: a query at q reads keys in (q - sliding_window, q]
    slack_tokens     extra sliding tokens that a checkpoint keeps, so that an edited tail still resumes
    """

    page_bytes: int
    sliding: KindGeometry | None
    full: KindGeometry | None
    sliding_window: int = 0
    slack_tokens: int = CHECKPOINT_SLACK_TOKENS

    def __post_init__(self) -> None:
        if self.sliding is None and self.full is None:
            raise ConfigError("kv_geometry", None, "a model stores keys and values in at least one layer kind")
        for name, kind in (("sliding", self.sliding), ("full", self.full)):
            if kind is None:
                continue
            if kind.page_tokens < 1:
                raise ConfigError(f"{name}.page_tokens", kind.page_tokens, "at least 1")
            if kind.page_tokens * kind.bytes_per_token > self.page_bytes:
                raise ConfigError(
                    f"{name}.page_tokens",
                    kind.page_tokens,
                    f"{kind.bytes_per_token} bytes a token do not fit a page of {self.page_bytes} bytes",
                )
        if self.sliding is not None and self.sliding_window < 2:
            raise ConfigError("sliding_window", self.sliding_window, "at least 2 tokens, counting the query itself")
        if self.slack_tokens < 0:
            raise ConfigError("slack_tokens", self.slack_tokens, "at least 0")

    @classmethod
    def build(
        cls,
        *,
        sliding_bytes_per_token: int,
        full_bytes_per_token: int,
        sliding_window: int,
        min_page_tokens: int = MIN_PAGE_TOKENS,
        alignment: int = 1,
        slack_tokens: int = CHECKPOINT_SLACK_TOKENS,
    ) -> "KVGeometry":
        """Geometry of a model from its bytes a token; 0 bytes: no layer of that kind stores anything.

        alignment   page_bytes is rounded up to a multiple of it, for planes (scales) that need aligned pages
        """
        largest = max(sliding_bytes_per_token, full_bytes_per_token)
        page_bytes = -(-largest * min_page_tokens // alignment) * alignment

        def kind(bytes_per_token: int) -> KindGeometry | None:
            if not bytes_per_token:
                return None
            tokens = _round_to_tiles(page_bytes // bytes_per_token, min_page_tokens)
            return KindGeometry(page_tokens=tokens, bytes_per_token=bytes_per_token)

        return cls(
            page_bytes=page_bytes,
            sliding=kind(sliding_bytes_per_token),
            full=kind(full_bytes_per_token),
            sliding_window=sliding_window if sliding_bytes_per_token else 0,
            slack_tokens=slack_tokens,
        )

    def first_needed(self, position: int) -> int:
        """First token that a sliding-layer query at `position` reads."""
        return max(0, position - self.sliding_window + 1)

    def num_pages(self, num_tokens: int) -> int:
        """Pages that a sequence of this length holds when it shares nothing: full KV and one window."""
        pages = 0
        if self.full is not None:
            pages += -(-num_tokens // self.full.page_tokens)
        if self.sliding is not None and num_tokens:
            size = self.sliding.page_tokens
            pages += -(-num_tokens // size) - self.first_needed(num_tokens - 1) // size
        return pages


def _round_to_tiles(tokens: int, min_page_tokens: int) -> int:
    """The largest multiple of 64, 32 or 16 tokens that loses at most an eighth; kernels read whole tiles of a page.

    322 -> 320 (tiles of 64), 83 -> 80 (tiles of 16: 64 would lose 23 %).
    """
    for tile in (4 * min_page_tokens, 2 * min_page_tokens):
        rounded = tokens // tile * tile
        if 8 * (tokens - rounded) <= tokens:
            return rounded
    return tokens // min_page_tokens * min_page_tokens
