"""How operators' commands find the server."""

from typing import Any

import redis

from gewell.embedded import default_url
from gewell.errors import QueueError
from gewell.redis_url import check_url, shown_url


def connect(url: str | None) -> Any:
    """A client of the named server, or of the usual one, that has answered a ping. Raises ConfigError or QueueError."""
    address = check_url(url or default_url())
    client = redis.Redis.from_url(address, socket_timeout=5)
    try:
        client.ping()
    except redis.RedisError as error:
        raise QueueError(f"no usable server at {shown_url(address)}: {error}") from error
    return client
