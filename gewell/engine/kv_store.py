"""The memory behind the page pools: a tensor of equal pages on the model's device, and one in host memory."""

from collections.abc import Sequence

import numpy as np
import torch
from gewell_kernels import ops

from gewell.cache.geometry import KVGeometry
from gewell.cache.tiers import Tier, Transfer
from gewell.engine.step_arrays import to_device


class KVStore:
    """`pages` [num_pages, page_elems]. Which page serves what is `PagePool`'s business; here are only the bytes.

    num_host_pages   of `host_pages`, pinned when the device is CUDA
    poison           fill pages with NaN at the start and when they are freed, so that a read of stale keys cannot hide
    """

    def __init__(
        self,
        geometry: KVGeometry,
        num_pages: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        num_host_pages: int = 0,
        poison: bool = False,
    ) -> None:
        if geometry.page_bytes % dtype.itemsize:
            raise ValueError(f"pages of {geometry.page_bytes} bytes do not hold whole {dtype} elements")
        # Zeros, not just any bytes: kernels may load a whole tile and mask it, and 0 * NaN is NaN.
        self.pages = torch.zeros(num_pages, geometry.page_bytes // dtype.itemsize, dtype=dtype, device=device)
        is_cuda = self.pages.is_cuda
        self.host_pages = torch.empty(num_host_pages, self.pages.shape[1], dtype=dtype, pin_memory=is_cuda)
        self._poison = poison
        if poison:
            self.poison_freed(range(num_pages))

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (source, destination); no page is both."""
        if copies:
            pairs = to_device(np.array(copies, dtype=np.int64).T.copy(), self.pages.device)
            ops.copy_pages(self.pages, pairs[0], pairs[1])

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Copy whole pages between device and host memory, in the stream of the steps and in the order given."""
        tensors = {Tier.GPU: self.pages, Tier.HOST: self.host_pages}
        for source, target, pairs in transfers:
            for source_page, target_page in pairs:
                tensors[target][target_page].copy_(tensors[source][source_page], non_blocking=True)

    def poison_freed(self, page_ids: Sequence[int]) -> None:
        """Without `poison` this does nothing."""
        if self._poison and len(page_ids):
            ops.poison_pages(self.pages, torch.tensor(page_ids, dtype=torch.int64, device=self.pages.device))
