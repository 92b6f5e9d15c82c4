"""Who may call, and how much at once: API keys with a tenant and a quota each."""

import hmac
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from gewell.errors import ConfigError
from gewell.protocol import is_valid_id
from gewell_producers.gateway.problems import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    tenant: str
    max_in_flight: int | None = None  # requests at a time; None: no limit


ANYBODY = Caller(tenant="default")


@dataclass(slots=True)
class Access:
    """keys    API key -> caller; empty: everybody is welcome"""

    keys: Mapping[str, Caller] = field(default_factory=dict)
    _in_flight: Counter[str] = field(default_factory=Counter)

    @classmethod
    def from_file(cls, path: Path) -> "Access":
        """A JSON object: {"<api key>": {"tenant": "<name>", "max_in_flight": 64}}."""
        try:
            data = orjson.loads(path.read_bytes())
        except (OSError, orjson.JSONDecodeError) as error:
            raise ConfigError("api-keys", str(path), f"expected a readable JSON file ({error})") from error
        if not isinstance(data, dict) or not data:
            raise ConfigError("api-keys", str(path), "expected a JSON object of keys")
        return cls({key: _caller(key, facts) for key, facts in data.items()})

    def caller(self, authorization: str | None) -> Caller:
        """Who sent this header. Raises Problem 401."""
        if not self.keys:
            return ANYBODY
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() == "bearer":
            for key, caller in self.keys.items():  # each in constant time: timing tells no part of a key
                if hmac.compare_digest(key.encode(), given.strip().encode()):
                    return caller
        raise Problem(status=401, message="no such API key", code="invalid_api_key")

    @contextmanager
    def admit(self, caller: Caller) -> Iterator[None]:
        """Hold one of the caller's places. Raises Problem 429 when all are taken."""
        limit = caller.max_in_flight
        if limit is not None and self._in_flight[caller.tenant] >= limit:
            message = f"{limit} requests of this key are running, which is its limit"
            raise Problem(status=429, message=message, code="quota", retryable=True)
        self._in_flight[caller.tenant] += 1
        try:
            yield
        finally:
            self._in_flight[caller.tenant] -= 1


def _caller(key: str, facts: object) -> Caller:
    name = f"api-keys[{key[:4]}...]"
    if not isinstance(facts, dict) or not is_valid_id(facts.get("tenant")):
        raise ConfigError(name, facts, 'expected {"tenant": name} with 1 to 128 of A-Z a-z 0-9 . _ : -')
    limit = facts.get("max_in_flight")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ConfigError(f"{name}.max_in_flight", limit, "a whole number from 1")
    return Caller(tenant=facts["tenant"], max_in_flight=limit)
