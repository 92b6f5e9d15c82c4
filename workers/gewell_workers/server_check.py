"""What the server is and what it promises: looked at once at start, and written into `info` for clients."""

import logging

from gewell.engine.api import EngineInfo
from gewell.errors import QueueError
from gewell.protocol import ENGINE_FEATURES, PROTOCOL_VERSION, InfoField, Keys
from gewell_workers.promise import MIN_REDIS, PROMISES
from gewell_workers.resp import Argument, Client, ReplyError, describe, pack, raise_error

log = logging.getLogger(__name__)


async def check_server(client: Client, url: str) -> str:
    """Refuse a server that is too old; say which promise holds. Returns it: always | everysec | none | unknown."""
    version = await server_version(client)
    if version < MIN_REDIS:
        raise QueueError(f"{describe(url)}: server version {version[0]}.{version[1]} is older than 6.2")
    promise = await read_promise(client)
    (log.info if promise in ("always", "everysec") else log.warning)("%s: %s", describe(url), PROMISES[promise])
    policy = (await read_config(client, "maxmemory-policy")).get("maxmemory-policy", "noeviction")
    if policy != "noeviction":
        log.warning("maxmemory-policy is %s: a full server throws jobs away; set noeviction", policy)
    return promise


async def server_version(client: Client) -> tuple[int, int]:
    text = (await client.call("INFO", "server")).decode(errors="replace")
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == "redis_version":  # Valkey says this too, for compatibility: 7.2 and up
            major, minor = value.split(".")[:2]
            return int(major), int(minor)
    raise QueueError("the server does not tell its version")


async def read_promise(client: Client) -> str:
    found = await read_config(client, "appendonly") | await read_config(client, "appendfsync")
    if not found:
        return "unknown"
    if found.get("appendonly") != "yes":
        return "none"
    return "always" if found.get("appendfsync") == "always" else "everysec"


async def read_config(client: Client, name: str) -> dict[str, str]:
    """Empty when the server does not let us ask."""
    try:
        flat = await client.call("CONFIG", "GET", name)
    except ReplyError:
        return {}
    return {flat[i].decode(): flat[i + 1].decode() for i in range(0, len(flat), 2)}


async def publish_info(client: Client, keys: Keys, info: EngineInfo, max_queue_len: int, promise: str) -> None:
    """Write `info`. Again with every heartbeat, because a server may have been emptied."""
    fields: dict[InfoField, Argument] = {
        InfoField.PROTOCOL: PROTOCOL_VERSION,
        InfoField.MODEL: info.model,
        InfoField.FINGERPRINT: info.fingerprint,
        InfoField.MAX_CONTEXT: info.max_context,
        InfoField.MAX_PROMPT_TOKENS: info.max_prompt_tokens,
        InfoField.MAX_QUEUE_LEN: max_queue_len,
        InfoField.FEATURES: ",".join(ENGINE_FEATURES),
        InfoField.PROMISE: promise,
    }
    flat = [part for pair in fields.items() for part in pair]
    for reply in await client.batch([pack("HSET", keys.info, *flat)]):
        raise_error(reply)
