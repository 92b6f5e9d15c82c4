"""The address of a queue: checked before it is used, shown without user and password."""

import re
from urllib.parse import urlsplit

from redis.connection import parse_url

from gewell.errors import ConfigError


def shown_url(url: str) -> str:
    """A usable URL without user and password, for messages and logs."""
    parts = urlsplit(url)
    place = parts.path if parts.hostname is None else f"{parts.hostname}:{parts.port or 6379}{parts.path}"
    return f"{parts.scheme}://{place}"


def check_url(url: str) -> str:
    """The URL, if it can be one of a server. Raises ConfigError, which does not show a password in it."""
    hidden = re.sub(r"//[^/]*@", "//...@", url)
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigError("redis", hidden, "expected redis://, rediss:// or unix://")
    try:
        parse_url(url)  # type: ignore[no-untyped-call]  # redis-py has no type there
        place = urlsplit(url)
    except ValueError as error:
        raise ConfigError("redis", hidden, str(error)) from None
    # redis-py takes any other path for database 0.
    if place.scheme != "unix" and re.fullmatch(r"/?|/\d+/?", place.path, re.ASCII) is None:
        raise ConfigError("redis", hidden, "expected the number of a database after the last /")
    return url
