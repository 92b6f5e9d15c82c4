"""Options and small helpers that the commands of producers share."""

import sys
from typing import Annotated, Any

import typer

from gewell.errors import InvalidRequest
from gewell_producers.client import Client
from gewell_producers.settings import default_namespace, default_url

Redis = Annotated[
    str | None,
    typer.Option(
        "--redis", help="Where the queue is. Default: GEWELL_REDIS, else the server of a running `gewell up`."
    ),
]
Namespace = Annotated[
    str | None, typer.Option("--ns", help="Prefix of all keys. Default: GEWELL_NAMESPACE, else gewell.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def connect(redis: str | None, ns: str | None, *, advice: str = "") -> Client:
    """A client for these options. It says on standard error when no worker is alive, with this advice behind it."""

    def tell(line: str) -> None:
        lead = "\n" if sys.stderr.isatty() else ""  # a half line of the answer may stand there
        print(f"{lead}gewell: {line}{advice}", file=sys.stderr, flush=True)

    return Client(redis or default_url(), namespace=ns or default_namespace(), tell=tell)


def parse_pairs(pairs: list[str], option: str) -> dict[str, Any]:
    """`name=value` pairs; a value is JSON where it parses as JSON, else text."""
    import orjson

    parsed: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidRequest("invalid_request", f"{option} {pair!r}: expected name=value", option)
        try:
            parsed[name] = orjson.loads(value)
        except orjson.JSONDecodeError:
            parsed[name] = value
    return parsed
