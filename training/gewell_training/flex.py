"""Attention over packed rows on a GPU: block masks by document, compiled to one kernel per layer kind."""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from gewell_training.twin import Attend, Masks


def attend_flex(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
    """As `attend_dense`; only inside a compiled function."""
    assert isinstance(mask, BlockMask)
    out = flex_attention(q, k, v, block_mask=mask, scale=1.0, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out


def compiled_attend_flex() -> Attend:
    """`attend_flex` for code that is not compiled otherwise: a short run cannot wait for whole layers to compile."""
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        assert isinstance(mask, BlockMask)
        out = compiled(q, k, v, block_mask=mask, scale=1.0, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out

    return attend


class FlexMasks:
    """Makes the masks of one batch after the other. The documents lie in one buffer, so that nothing compiles twice.

    compile   make the masks by a compiled function: faster, and seconds later
    """

    def __init__(
        self, batch_rows: int, row_tokens: int, window: int, device: torch.device, *, compile: bool = True
    ) -> None:
        self._document = document = torch.zeros(batch_rows, row_tokens, dtype=torch.int32, device=device)
        self._create = torch.compile(create_block_mask, dynamic=False) if compile else create_block_mask

        def full(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (q >= kv) & (document[b, q] == document[b, kv])

        def sliding(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return full(b, h, q, kv) & (q - kv < window)

        self._full, self._sliding = full, sliding

    def __call__(self, document: Tensor) -> Masks:
        """Valid until the next call."""
        self._document.copy_(document)
        rows, tokens = document.shape
        return Masks(
            *(
                self._create(mod, rows, None, tokens, tokens, device=document.device)
                for mod in (self._sliding, self._full)
            )
        )
