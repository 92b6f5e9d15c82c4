"""Images of a step: features from the vision tower, remembered by content, and their rows among the tokens."""

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gewell.engine.step_arrays import Int32, to_device
from gewell.model.vision import VisionTower
from gewell.request import RequestImage
from gewell.scheduler.plan import StepPlan

_MAX_CACHED_BYTES = 256 << 20  # of features: 280 soft tokens of the 31B are 3 MB in bf16


class ImageRows(NamedTuple):
    """rows [n] int64: tokens of the step; embeds [n, hidden_size]; visible_end [num_tokens] int32, or None: causal."""

    rows: Tensor
    embeds: Tensor
    visible_end: Tensor | None


class ImageFeatures:
    """Soft tokens of images, computed once for each content while they are remembered. Used by the engine thread alone.

    is_bidirectional   tokens of one image see each other in sliding layers
    """

    def __init__(
        self, tower: VisionTower, *, is_bidirectional: bool, max_cached_bytes: int = _MAX_CACHED_BYTES
    ) -> None:
        self._tower = tower
        self._is_bidirectional = is_bidirectional
        self._max_cached_bytes = max_cached_bytes
        self._cached: OrderedDict[str, Tensor] = OrderedDict()  # least recently used first
        self._cached_bytes = 0

    def of_step(self, plan: StepPlan, positions: Int32) -> ImageRows | None:
        """What the chunks of this plan hold of images; None: nothing. positions: of all tokens, decode rows first."""
        rows: list[Int32] = []
        embeds: list[Tensor] = []
        visible_end = positions + 1
        first_token = len(plan.decode_rows)
        for chunk in plan.chunks:
            for image in chunk.req.request.images:
                start, end = max(image.start, chunk.start), min(image.end, chunk.end)
                if start < end:
                    where = np.arange(start, end, dtype=np.int32) - chunk.start + first_token
                    rows.append(where)
                    embeds.append(self._features(image)[start - image.start : end - image.start])
                    visible_end[where] = image.end
            first_token += len(chunk.token_ids)
        if not rows:
            return None
        device = self._tower.device
        return ImageRows(
            rows=to_device(np.concatenate(rows).astype(np.int64), device),
            embeds=torch.cat(embeds),
            visible_end=to_device(visible_end, device) if self._is_bidirectional else None,
        )

    def _features(self, image: RequestImage) -> Tensor:
        known = self._cached.get(image.digest)
        if known is not None:
            self._cached.move_to_end(image.digest)
            return known
        height, width = image.grid
        patches = np.frombuffer(image.patches, dtype=np.uint8).reshape(height * width, -1)
        y, x = np.divmod(np.arange(height * width), width)
        device = self._tower.device
        # The bytes are the request's: torch gets a copy that it may call its own.
        features = self._tower(to_device(patches.copy(), device), to_device(np.stack((x, y), axis=1), device))
        self._cached[image.digest] = features
        self._cached_bytes += features.nbytes
        while self._cached_bytes > self._max_cached_bytes and len(self._cached) > 1:
            _, dropped = self._cached.popitem(last=False)
            self._cached_bytes -= dropped.nbytes
        return features
