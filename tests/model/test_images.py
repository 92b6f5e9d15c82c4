"""A user's picture reaches the tower as the model was trained to see it; a hostile file costs a message and no more."""

import io
import resource
import struct
import time
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from gewell.engine.golden import GoldenFolder
from gewell.errors import ConfigError, InvalidRequest
from gewell.protocol import ErrorCode
from gewell.text.images import (
    SOFT_TOKEN_BUDGETS,
    ImageLimits,
    ImagePatches,
    ImageProcessor,
    PatchSettings,
    decode,
    target_size,
)
from tests.model.golden_folders import FIXTURES

GOLDEN = GoldenFolder.read(FIXTURES / "gemma4-vision")
RED, BLUE = (255, 0, 0), (0, 0, 255)


def _file(picture: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def _pixel(data: bytes, x: int = 0, y: int = 0):
    return decode(data, ImageLimits(), "image").getpixel((x, y))


# --- like the reference ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("height", "width", "budget", "expected"), GOLDEN.about["processor"]["target_sizes"])
def test_target_sizes_agree(height, width, budget, expected):
    size = target_size(height, width, PatchSettings(max_soft_tokens=budget))
    got = None if size is None else [size.height, size.width, size.height * size.width // 48**2]
    assert got == expected


def test_patches_and_positions_agree_to_the_bit():
    picture = Image.fromarray(GOLDEN.tensors["processor.image"].numpy())
    image = ImageProcessor(PatchSettings(max_soft_tokens=70))(_file(picture))
    np.testing.assert_array_equal(image.patches, GOLDEN.tensors["processor.patches_u8"].numpy())
    np.testing.assert_array_equal(image.positions, GOLDEN.tensors["processor.position_ids"].numpy())
    assert image.num_soft_tokens == GOLDEN.about["processor"]["resized_soft_tokens"]


@given(
    height=st.integers(1, 20000),
    width=st.integers(1, 20000),
    budget=st.sampled_from(SOFT_TOKEN_BUDGETS),
)
def test_a_target_is_whole_soft_tokens_within_the_budget(height, width, budget):
    size = target_size(height, width, PatchSettings(max_soft_tokens=budget))
    assert size is not None
    assert size.height % 48 == 0
    assert size.width % 48 == 0
    assert 1 <= size.height * size.width // 48**2 <= budget


# --- forms of pictures -------------------------------------------------------------------------------------------


def test_exif_rotation_turns_the_picture():
    picture = Image.new("RGB", (96, 48), BLUE)
    picture.paste(RED, (0, 0, 48, 48))  # red on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it rotated by 90 degrees clockwise
    upright = decode(_file(picture, "JPEG", exif=exif, quality=100), ImageLimits(), "image")
    assert upright.size == (48, 96)
    top, bottom = upright.getpixel((24, 10)), upright.getpixel((24, 85))
    assert top[0] > 200 > bottom[0]


def test_transparency_lies_on_white():
    assert _pixel(_file(Image.new("RGBA", (8, 8), (255, 0, 0, 0)))) == (255, 255, 255)
    assert _pixel(_file(Image.new("RGBA", (8, 8), (255, 0, 0, 255)))) == RED
    assert _pixel(_file(Image.new("LA", (8, 8), (0, 0)))) == (255, 255, 255)


def test_a_transparent_palette_colour_lies_on_white():
    picture = Image.new("P", (8, 8), 0)
    picture.putpalette([255, 0, 0, 0, 0, 255])
    assert _pixel(_file(picture, transparency=0)) == (255, 255, 255)
    assert _pixel(_file(picture)) == RED


def test_cmyk_becomes_rgb():
    pixel = _pixel(_file(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=100))
    assert pixel[0] > 200
    assert max(pixel[1:]) < 60


def test_16_bit_grey_keeps_its_levels():
    wide = np.full((8, 8), 128 * 256 + 7, dtype=np.uint16)
    assert _pixel(_file(Image.fromarray(wide))) == (128, 128, 128)


def test_black_and_white_and_grey_become_rgb():
    assert _pixel(_file(Image.new("1", (8, 8), 1))) == (255, 255, 255)
    assert _pixel(_file(Image.new("L", (8, 8), 77))) == (77, 77, 77)


def test_the_first_frame_of_an_animation_counts():
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, BLUE)]
    pixel = _pixel(_file(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert pixel == RED


# --- limits ------------------------------------------------------------------------------------------------------


def _png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds next to no data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(8000, 5001), (12000, 9000), (60000, 60000), (1 << 30, 1)])
def test_a_bomb_is_refused_by_its_header(width, height):
    data = _png_header(width, height)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with pytest.raises(InvalidRequest, match="pixels") as caught:
        decode(data, ImageLimits(), "request.messages[0].content[1]")
    assert time.perf_counter() - started < 0.1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes
    assert caught.value.code == ErrorCode.BAD_IMAGE
    assert caught.value.field == "request.messages[0].content[1]"


def test_one_pixel_below_the_limit_is_decoded():
    data = _file(Image.new("L", (10, 10)))
    assert decode(data, ImageLimits(max_pixels=100), "image").size == (10, 10)
    with pytest.raises(InvalidRequest, match="10 x 10 pixels, at most 99"):
        decode(data, ImageLimits(max_pixels=99), "image")


def test_a_large_file_is_refused_unread():
    with pytest.raises(InvalidRequest, match="101 bytes, at most 100"):
        decode(bytes(101), ImageLimits(max_bytes=100), "image")


def test_other_formats_are_refused():
    with pytest.raises(InvalidRequest, match="not readable as PNG, JPEG"):
        decode(_file(Image.new("RGB", (8, 8)), "TIFF"), ImageLimits(), "image")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_cut_off_file_is_refused(kind):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = _file(Image.fromarray(noise), kind)
    with pytest.raises(InvalidRequest) as caught:
        decode(data[: len(data) // 2], ImageLimits(), "image")
    assert caught.value.code == ErrorCode.BAD_IMAGE


SMALL_FILES = [
    _file(Image.fromarray(np.arange(27 * 31 * 3, dtype=np.uint8).reshape(27, 31, 3)), kind)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")
]


@settings(max_examples=150, deadline=None)
@given(
    data=st.sampled_from(SMALL_FILES),
    edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=6),
    keep=st.floats(0.05, 1),
)
def test_damaged_files_give_patches_or_a_refusal(data, edits, keep):
    damaged = bytearray(data)
    for place, value in edits:
        damaged[int(place * (len(damaged) - 1))] = value
    _patches_or_refusal(bytes(damaged[: max(1, int(len(damaged) * keep))]))


@settings(deadline=None)
@given(
    data=st.binary(max_size=400), magic=st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"BM"])
)
def test_junk_gives_a_refusal(data, magic):
    _patches_or_refusal(magic + data)


def _patches_or_refusal(data: bytes) -> None:
    processor = ImageProcessor(PatchSettings(max_soft_tokens=70), ImageLimits(max_pixels=1_000_000))
    outcome: ImagePatches | str
    try:
        outcome = processor(data)
    except InvalidRequest as refusal:
        outcome = refusal.code
    if isinstance(outcome, ImagePatches):
        assert len(outcome.patches) == outcome.grid.height * outcome.grid.width == 9 * outcome.num_soft_tokens
    else:
        assert outcome == ErrorCode.BAD_IMAGE


def test_a_budget_that_no_model_knows_is_refused():
    with pytest.raises(ConfigError, match="max_soft_tokens: 100"):
        PatchSettings(max_soft_tokens=100)


# --- identity and memory -----------------------------------------------------------------------------------------


def test_identity_is_content_and_settings():
    red, blue = (_file(Image.new("RGB", (8, 8), colour)) for colour in (RED, BLUE))
    small, large = ImageProcessor(PatchSettings(max_soft_tokens=70)), ImageProcessor()
    assert small(red).digest == small(bytes(red)).digest
    assert len({small(red).digest, small(blue).digest, large(red).digest}) == 3


def test_a_known_image_is_not_cut_again():
    processor = ImageProcessor(PatchSettings(max_soft_tokens=70))
    data = _file(Image.new("RGB", (64, 64), RED))
    assert processor(data) is processor(data)


def test_the_cache_holds_the_newest_within_its_bytes():
    files = [_file(Image.new("RGB", (64, 64), (i, 0, 0))) for i in range(3)]
    size = ImageProcessor(PatchSettings(max_soft_tokens=70))(files[0]).patches.nbytes
    processor = ImageProcessor(PatchSettings(max_soft_tokens=70), max_cached_bytes=2 * size)
    first, second = processor(files[0]), processor(files[1])
    assert processor(files[0]) is first
    processor(files[2])  # pushes out the second, which was used longest ago
    assert processor(files[0]) is first
    assert processor(files[1]) is not second
