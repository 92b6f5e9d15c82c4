"""`gewell doctor`."""

from typing import Annotated

import redis as redis_py
import typer

from gewell.embedded import default_url
from gewell.errors import QueueError
from gewell.protocol import DEFAULT_NAMESPACE, Keys
from gewell_workers.doctor import Verdict, examine


def doctor(
    redis: Annotated[
        str | None, typer.Option(envvar="GEWELL_REDIS", help="Server; default: that of `gewell up`.")
    ] = None,
    ns: Annotated[str, typer.Option(envvar="GEWELL_NAMESPACE", help="Prefix of all keys.")] = DEFAULT_NAMESPACE,
) -> None:
    """Look at the server, the workers and the queue, and say what is wrong; exit 1 if something fails.

    Changes nothing.
    """
    url = redis or default_url()
    client = redis_py.Redis.from_url(url, socket_timeout=5)
    worst = Verdict.OK
    try:
        for finding in examine(client, Keys(ns)):
            remedy = f"  -> {finding.remedy}" if finding.remedy else ""
            typer.echo(f"{finding.verdict:<4}  {finding.name:<14} {finding.text}{remedy}")
            if finding.verdict is Verdict.FAIL:
                worst = Verdict.FAIL
    except redis_py.RedisError as error:
        raise QueueError(f"no usable server at {url}: {error}") from error
    if worst is Verdict.FAIL:
        raise typer.Exit(1)
