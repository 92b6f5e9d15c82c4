"""How keys and values lie in memory: one pool of equal pages, and one layer's part inside a page.

The pool is a tensor `[num_pages, page_elems]` of the KV dtype (a view of its bytes). A page serves one *kind*
of layers (sliding or full) and holds `page_tokens` positions of all layers of that kind. One layer's part starts
`layer_offset` elements into the page. Inside the part, element (plane, head, token, dim) lies at

    ((plane * num_kv_heads + head) * page_tokens + token) * row_elems + dim

with one plane per stored quantity:

PLAIN     planes K, V; row_elems = head_dim
V_ONLY    one plane; row_elems = head_dim; dims in *turning-first* order (below)
V_ROTK    one plane; row_elems = head_dim + 2 * num_live_pairs: V turning-first, then the rotated K of the turning dims

Turning-first order of a head with `num_live_pairs` = n rotary pairs (i, i + head_dim/2), i < n:
0..n-1, head_dim/2..head_dim/2+n-1, then n..head_dim/2-1, then head_dim/2+n..head_dim-1. For the 512-wide full heads of
Gemma 4 (n = 64): 0..63, 256..319, 64..255, 320..511. Only the stored order changes; weights are never permuted.
"""

from dataclasses import dataclass
from enum import StrEnum


class KVLayout(StrEnum):
    PLAIN = "plain"
    V_ONLY = "v_only"
    V_ROTK = "v_rotk"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """Where one layer's keys and values lie inside a page of its kind, and how to read them."""

    layout: KVLayout
    layer_offset: int  # elements from the page's start
    page_tokens: int
    num_kv_heads: int
    head_dim: int
    num_live_pairs: int  # rotary pairs that turn; head_dim / 2 when all do
    rope_theta: float  # inv_freq[i] = rope_theta ** (-2 i / head_dim), i < num_live_pairs, for every layer kind
    rope_factor: float = 1.0  # linear position scaling of some Gemma 3 files; 1.0 otherwise

    @property
    def num_planes(self) -> int:
        return 2 if self.layout is KVLayout.PLAIN else 1

    @property
    def row_elems(self) -> int:
        extra = 2 * self.num_live_pairs if self.layout is KVLayout.V_ROTK else 0
        return self.head_dim + extra

    @property
    def layer_elems(self) -> int:
        return self.num_planes * self.num_kv_heads * self.page_tokens * self.row_elems

    @property
    def inv_freq(self) -> list[float]:
        """Angle per position of each turning pair, in float64: readers round it to float32 once, so that all agree."""
        pairs = range(self.num_live_pairs)
        return [self.rope_theta ** (-2 * i / self.head_dim) / self.rope_factor for i in pairs]


def turning_first_order(head_dim: int, num_live_pairs: int) -> list[int]:
    """Stored position -> original dim, for V_ONLY and V_ROTK rows. A permutation of range(head_dim)."""
    half, n = head_dim // 2, num_live_pairs
    return [*range(n), *range(half, half + n), *range(n, half), *range(half + n, head_dim)]
