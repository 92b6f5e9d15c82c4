"""The memory behind the page pool: one tensor of equal pages, on the model's device."""

from collections.abc import Sequence

import torch
from gewell_kernels import ops

from gewell.cache.geometry import KVGeometry


class KVStore:
    """`pages` [num_pages, page_elems]. Which page serves what is `PagePool`'s business; here are only the bytes.

    poison   fill pages with NaN at the start and when they are freed, so that a read of stale keys cannot hide
    """

    def __init__(
        self,
        geometry: KVGeometry,
        num_pages: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        poison: bool = False,
    ) -> None:
        if geometry.page_bytes % dtype.itemsize:
            raise ValueError(f"pages of {geometry.page_bytes} bytes do not hold whole {dtype} elements")
        # Zeros, not just any bytes: kernels may load a whole tile and mask it, and 0 * NaN is NaN.
        self.pages = torch.zeros(num_pages, geometry.page_bytes // dtype.itemsize, dtype=dtype, device=device)
        self._poison = poison
        if poison:
            self.poison_freed(range(num_pages))

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (source, destination); no page is both."""
        if copies:
            pairs = torch.tensor(copies, dtype=torch.int64, device=self.pages.device)
            ops.copy_pages(self.pages, pairs[:, 0].contiguous(), pairs[:, 1].contiguous())

    def poison_freed(self, page_ids: Sequence[int]) -> None:
        """Without `poison` this does nothing."""
        if self._poison and len(page_ids):
            ops.poison_pages(self.pages, torch.tensor(page_ids, dtype=torch.int64, device=self.pages.device))
