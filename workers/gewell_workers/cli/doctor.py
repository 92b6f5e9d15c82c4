"""`gewell doctor`."""

from typing import Annotated

import typer
from redis.exceptions import RedisError

from gewell.errors import QueueError
from gewell.protocol import DEFAULT_NAMESPACE, Keys
from gewell_workers.cli.connect import connect
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
    client = connect(redis)
    worst = Verdict.OK
    try:
        for finding in examine(client, Keys(ns)):
            remedy = f"  -> {finding.remedy}" if finding.remedy else ""
            typer.echo(f"{finding.verdict:<4}  {finding.name:<14} {finding.text}{remedy}")
            if finding.verdict is Verdict.FAIL:
                worst = Verdict.FAIL
    except RedisError as error:
        raise QueueError(f"the server went away: {error}") from error
    if worst is Verdict.FAIL:
        raise typer.Exit(1)
