"""Images of a job's messages: where they stand, where their bytes come from, and what the tower will read of them."""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gewell.errors import InvalidRequest
from gewell.protocol import BLOB_TTL_S, ErrorCode, Keys
from gewell.text.images import ImageLimits, ImagePatches, ImageProcessor
from gewell_workers.resp import Client, pack, raise_error

_DATA_URL = re.compile(r"data:(?:image/[\w.+-]+)?(?:;[\w-]+=[\w.+-]+)*;base64,", re.ASCII | re.IGNORECASE)
_BLOB_URL = "blob:"
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


class ImagePart(NamedTuple):
    """An image part of a message. Either `sha256` names an uploaded blob or `data` is base64 inside the job."""

    field: str
    sha256: str | None
    data: str | None


def image_parts(messages: Sequence[Mapping[str, Any]]) -> list[ImagePart]:
    """Image parts in order. Raises InvalidRequest for one whose bytes no worker would get, such as a web address."""
    return list(_parts(messages))


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[ImagePart]:
    for message_idx, message in enumerate(messages):
        content = message.get("content")
        for part_idx, part in enumerate(content if isinstance(content, list) else ()):
            field = f"request.messages[{message_idx}].content[{part_idx}]"
            if part["type"] == "image":
                yield _blob(part["image"], field)
            elif part["type"] == "image_url":
                url = part["image_url"]
                yield _from_url(url["url"] if isinstance(url, dict) else url, field)


def _from_url(url: str, field: str) -> ImagePart:
    if url.startswith(_BLOB_URL):
        return _blob(url[len(_BLOB_URL) :], field)
    head = _DATA_URL.match(url)
    if head is None:
        what = "only data: URLs in base64 and blob: URLs are read; nothing is fetched from the net"
        raise InvalidRequest(ErrorCode.UNSUPPORTED, f"{field}: {what}", field)
    return ImagePart(field, None, url[head.end() :])


def _blob(sha256: str, field: str) -> ImagePart:
    if _SHA256.fullmatch(sha256) is None:
        raise InvalidRequest(ErrorCode.BAD_IMAGE, f"{field}: not a lower-case sha256", field)
    return ImagePart(field, sha256, None)


async def fetch_blobs(client: Client, keys: Keys, parts: Sequence[ImagePart], limits: ImageLimits) -> dict[str, bytes]:
    """Bytes of all uploaded images by sha256; using one lets it live on. Those over the limit are not read.

    Raises LinkLost or ReplyError; InvalidRequest for an image that is not there or too large.
    """
    fields = {part.sha256: part.field for part in parts if part.sha256 is not None}
    names = [keys.blob(sha256) for sha256 in fields]
    sizes = (
        [raise_error(size) for size in await client.batch([pack("STRLEN", name) for name in names])] if names else []
    )
    for (sha256, field), size in zip(fields.items(), sizes, strict=True):
        if not size:
            raise InvalidRequest(ErrorCode.BAD_IMAGE, f"{field}: blob {sha256[:12]}... is not there", field)
        if int(size) > limits.max_bytes:
            raise InvalidRequest(ErrorCode.BAD_IMAGE, f"{field}: {size} bytes, at most {limits.max_bytes}", field)
    found: dict[str, bytes] = {}
    for (sha256, field), name in zip(fields.items(), names, strict=True):
        data, _ = await client.batch([pack("GET", name), pack("PEXPIRE", name, int(BLOB_TTL_S * 1000))])
        if not isinstance(raise_error(data), bytes):
            raise InvalidRequest(ErrorCode.BAD_IMAGE, f"{field}: blob {sha256[:12]}... is not there", field)
        found[sha256] = data
    return found


def process(parts: Sequence[ImagePart], blobs: Mapping[str, bytes], processor: ImageProcessor) -> list[ImagePatches]:
    """Patches of each part. Raises InvalidRequest that names the part."""
    limits = processor.limits
    if len(parts) > limits.max_images:
        field = "request.messages"
        raise InvalidRequest(
            ErrorCode.INVALID_REQUEST, f"{field}: {len(parts)} images, at most {limits.max_images}", field
        )
    return [processor(_bytes_of(part, blobs, limits), part.field) for part in parts]


def _bytes_of(part: ImagePart, blobs: Mapping[str, bytes], limits: ImageLimits) -> bytes:
    if part.sha256 is not None:
        return blobs[part.sha256]
    assert part.data is not None
    if len(part.data) * 3 // 4 > limits.max_bytes + 2:
        message = f"{part.field}: about {len(part.data) * 3 // 4} bytes, at most {limits.max_bytes}"
        raise InvalidRequest(ErrorCode.BAD_IMAGE, message, part.field)
    try:
        return base64.b64decode(part.data, validate=True)
    except (binascii.Error, ValueError) as e:
        raise InvalidRequest(ErrorCode.BAD_IMAGE, f"{part.field}: not base64", part.field) from e
