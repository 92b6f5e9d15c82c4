"""Images of a job: from an uploaded file to patches that the vision tower reads. No torch.

A file is judged by its header before a pixel is decoded, so that a small file cannot unfold into gigabytes. The picture
is turned as its EXIF data says, laid on white where it is transparent, brought to 8-bit RGB, resized (bicubic with
antialiasing) to whole patches near its own proportions, and cut into patches row by row.
"""

import hashlib
import io
import math
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from gewell.config import VisionConfig
from gewell.errors import ConfigError, InvalidRequest
from gewell.protocol import ErrorCode

SOFT_TOKEN_BUDGETS = (70, 140, 280, 560, 1120)  # what the published models were trained with
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_WHITE = (255, 255, 255, 255)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What one image may be. `max_images` is for a whole job; ingest counts."""

    max_bytes: int = 20_000_000
    max_pixels: int = 40_000_000
    max_images: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchSettings:
    """How pictures are cut. Part of an image's identity: other settings, other features."""

    max_soft_tokens: int = 280
    patch_size: int = 16
    pooling_size: int = 3  # patches per side of one soft token
    max_patches_per_side: int = 10240  # positions that the tower knows

    def __post_init__(self) -> None:
        if self.max_soft_tokens not in SOFT_TOKEN_BUDGETS:
            limit = f"must be one of {', '.join(map(str, SOFT_TOKEN_BUDGETS))}"
            raise ConfigError("max_soft_tokens", self.max_soft_tokens, limit)

    @classmethod
    def of_model(cls, vision: VisionConfig, max_soft_tokens: int | None = None) -> Self:
        return cls(
            max_soft_tokens=max_soft_tokens or vision.default_soft_tokens,
            patch_size=vision.patch_size,
            pooling_size=vision.pooling_size,
            max_patches_per_side=vision.position_table_size,
        )


class Size(NamedTuple):
    height: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePatches:
    """One image, ready for the tower.

    patches   [num_patches, 3 * patch_size^2] uint8: row, column, channel inside a patch; patches row by row
    grid      patches per column and row, both multiples of the pooling size
    digest    identity for caches: the file's bytes and the settings
    """

    patches: NDArray[np.uint8]
    grid: Size
    num_soft_tokens: int
    digest: str

    @property
    def positions(self) -> NDArray[np.int64]:
        """[num_patches, 2]: (x, y) of each patch."""
        y, x = np.divmod(np.arange(len(self.patches)), self.grid.width)
        return np.stack((x, y), axis=1)


def target_size(height: int, width: int, settings: PatchSettings) -> Size | None:
    """Pixels after resizing: the largest whole number of soft tokens per side within the budget, near the proportions.

    480 x 640 with 280 soft tokens -> 672 x 912 = 14 x 19 = 266 soft tokens. Small images grow. A side that would vanish
    becomes one soft token wide. None: both would.
    """
    side = settings.patch_size * settings.pooling_size
    budget = settings.max_soft_tokens
    factor = math.sqrt(budget * side**2 / (height * width))
    rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
    if not rows and not columns:
        return None
    if not rows:
        rows, columns = 1, min(width // height, budget)
    elif not columns:
        rows, columns = min(height // width, budget), 1
    return Size(rows * side, columns * side)


def decode(data: bytes, limits: ImageLimits, field: str) -> Image.Image:
    """The picture in a file as 8-bit RGB, upright, first frame, on white.

    Raises InvalidRequest (`bad_image`, naming `field`) for what is no image, damaged or over the limits.
    """
    if len(data) > limits.max_bytes:
        raise _bad(field, f"{len(data)} bytes, at most {limits.max_bytes}")
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)  # reads the header alone
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as e:
        raise _bad(field, f"too many pixels, at most {limits.max_pixels}") from e
    except Exception as e:  # a hostile file makes decoders raise nearly anything
        raise _bad(field, f"not readable as {', '.join(FORMATS)}") from e
    width, height = picture.size
    if not width or not height or width * height > limits.max_pixels:
        raise _bad(field, f"{width} x {height} pixels, at most {limits.max_pixels} in all")
    try:
        picture.load()
        return _to_rgb(ImageOps.exif_transpose(picture))
    except Exception as e:
        raise _bad(field, f"damaged {picture.format} data") from e


def cut(picture: Image.Image, settings: PatchSettings, digest: str, field: str) -> ImagePatches:
    """Resize an RGB picture and cut it into patches. Raises InvalidRequest when it is too thin for the budget."""
    size = target_size(picture.height, picture.width, settings)
    if size is None:
        raise _bad(field, f"{picture.width} x {picture.height} pixels leave no patch")
    if max(size) > settings.max_patches_per_side * settings.patch_size:
        raise _bad(field, f"{picture.width} x {picture.height} pixels are too long and thin for this model")
    if size != (picture.height, picture.width):
        picture = picture.resize((size.width, size.height), Image.Resampling.BICUBIC)
    patch = settings.patch_size
    grid = Size(size.height // patch, size.width // patch)
    pixels = np.asarray(picture, dtype=np.uint8).reshape(grid.height, patch, grid.width, patch, 3)
    patches = np.ascontiguousarray(pixels.transpose(0, 2, 1, 3, 4)).reshape(grid.height * grid.width, -1)
    return ImagePatches(
        patches=patches, grid=grid, num_soft_tokens=len(patches) // settings.pooling_size**2, digest=digest
    )


class ImageProcessor:
    """Decodes and cuts, and remembers what it cut by content. Usable from several threads."""

    def __init__(
        self,
        settings: PatchSettings | None = None,
        limits: ImageLimits | None = None,
        *,
        max_cached_bytes: int = 128_000_000,
    ) -> None:
        self.settings = settings or PatchSettings()
        self.limits = limits or ImageLimits()
        self._max_cached_bytes = max_cached_bytes
        self._cached: OrderedDict[str, ImagePatches] = OrderedDict()  # least recently used first
        self._cached_bytes = 0
        self._lock = threading.Lock()

    def __call__(self, data: bytes, field: str = "image") -> ImagePatches:
        """Raises InvalidRequest (`bad_image`) that names `field`."""
        digest = self.digest(data)
        with self._lock:
            known = self._cached.get(digest)
            if known is not None:
                self._cached.move_to_end(digest)
                return known
        made = cut(decode(data, self.limits, field), self.settings, digest, field)
        with self._lock:
            if digest not in self._cached:
                self._cached[digest] = made
                self._cached_bytes += made.patches.nbytes
            while self._cached_bytes > self._max_cached_bytes:
                _, dropped = self._cached.popitem(last=False)
                self._cached_bytes -= dropped.patches.nbytes
        return made

    def digest(self, data: bytes) -> str:
        """Hexadecimal sha256 of the file and of all that decides about its features."""
        settings = f"{self.settings.max_soft_tokens}/{self.settings.patch_size}/{self.settings.pooling_size}"
        return hashlib.sha256(hashlib.sha256(data).digest() + settings.encode()).hexdigest()


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode in ("I", "F") or picture.mode.startswith("I;"):
        # 16-bit grey: Pillow's own conversion would clip everything above 255 to white.
        wide = np.asarray(picture)
        if picture.mode == "F" or wide.min() < 0 or wide.max() > 65535:
            raise ValueError("grey values beyond 16 bit")
        picture = Image.fromarray((wide >> 8).astype(np.uint8))
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        overlay = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", overlay.size, _WHITE), overlay)
    return picture.convert("RGB")


def _bad(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest(ErrorCode.BAD_IMAGE, f"{field}: {problem}", field)
