"""Look at jobs that were given up, and send them again."""

import json
from datetime import UTC, datetime
from typing import Annotated, Any

import redis
import typer

from gewell.errors import QueueError
from gewell.protocol import DEFAULT_NAMESPACE, TERMINAL_STATES, JobField, Keys, Lane, check_id, job_entry
from gewell_workers.cli.connect import connect

app = typer.Typer(no_args_is_help=True, help="Look at jobs that were given up, and send them again.")

RedisUrl = Annotated[
    str | None, typer.Option("--redis", envvar="GEWELL_REDIS", help="Server; default: that of `gewell up`.")
]
Namespace = Annotated[str, typer.Option(envvar="GEWELL_NAMESPACE", help="Prefix of all keys.")]
Entry = Annotated[str, typer.Argument(metavar="ENTRY", help="Entry id, as `gewell dead list` shows it.")]


@app.command("list")
def list_dead(
    count: Annotated[int, typer.Option(help="The newest so many.")] = 50,
    redis_url: RedisUrl = None,
    ns: Namespace = DEFAULT_NAMESPACE,
) -> None:
    """Entry, time, lane, job and reason of what was given up, newest first. No prompt text."""
    client, keys = connect(redis_url), Keys(ns)
    for entry_id, fields in client.xrevrange(keys.dead, count=count):
        when = datetime.fromtimestamp(int(entry_id.partition(b"-")[0]) / 1e3, UTC).strftime("%Y-%m-%d %H:%M:%S")
        row = [entry_id, fields.get(b"lane"), fields.get(b"id") or b"(no id)", fields.get(b"reason")]
        entry, lane, job_id, reason = [(part or b"").decode(errors="replace") for part in row]
        typer.echo(f"{entry:<20} {when}  {lane:<6} {job_id:<24} {reason} ({len(fields.get(b'body', b''))} bytes)")
    typer.echo(f"{client.xlen(keys.dead)} in all", err=True)


@app.command()
def show(
    entry: Entry,
    redis_url: RedisUrl = None,
    ns: Namespace = DEFAULT_NAMESPACE,
) -> None:
    """One entry with its whole body."""
    fields = _get(connect(redis_url), Keys(ns), entry)
    for name in ("lane", "entry", "id", "reason"):
        typer.echo(f"{name}: {fields.get(name.encode(), b'').decode(errors='replace')}")
    body = fields.get(b"body", b"")
    try:
        typer.echo(json.dumps(json.loads(body), indent=2, ensure_ascii=False))
    except ValueError:
        typer.echo(body.decode(errors="replace"))


@app.command()
def redrive(
    entries: Annotated[list[str] | None, typer.Argument(metavar="ENTRY...", help="Entry ids.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All entries.")] = False,
    job_id: Annotated[str | None, typer.Option("--id", help="A new id; needed where the entry had none.")] = None,
    redis_url: RedisUrl = None,
    ns: Namespace = DEFAULT_NAMESPACE,
) -> None:
    """Put entries back into their lane as new jobs: under the old id (its record is forgotten) or under --id."""
    client, keys = connect(redis_url), Keys(ns)
    if everything == bool(entries):
        raise typer.BadParameter("name entries, or --all")
    if job_id is not None and (everything or len(entries or ()) != 1):
        raise typer.BadParameter("--id goes with one entry")
    names = entries or [entry_id.decode() for entry_id, _ in client.xrange(keys.dead)]
    for name in names:
        typer.echo(f"{name}: sent again as {_redrive(client, keys, name, job_id)}")


@app.command()
def drop(
    entries: Annotated[list[str], typer.Argument(metavar="ENTRY...", help="Entry ids.")],
    redis_url: RedisUrl = None,
    ns: Namespace = DEFAULT_NAMESPACE,
) -> None:
    """Forget entries for good."""
    client, keys = connect(redis_url), Keys(ns)
    typer.echo(f"{client.xdel(keys.dead, *entries)} dropped")


def _get(client: Any, keys: Keys, entry: str) -> dict[bytes, bytes]:
    found = client.xrange(keys.dead, entry, entry)
    if not found:
        raise QueueError(f"{entry} is not in {keys.dead}")
    fields: dict[bytes, bytes] = found[0][1]
    return fields


def _redrive(client: Any, keys: Keys, entry: str, new_id: str | None) -> str:
    """One transaction: the job's old traces go, its entry comes, the dead one goes. Raises QueueError if it runs."""
    fields = _get(client, keys, entry)
    job_id = check_id(new_id or fields.get(b"id", b"").decode(errors="replace"), "id")
    lane = Lane(fields[b"lane"].decode())
    with client.pipeline() as pipeline:
        while True:
            try:
                pipeline.watch(keys.job(job_id))
                state = pipeline.hget(keys.job(job_id), JobField.STATE)
                if state is not None and state.decode() not in TERMINAL_STATES:
                    raise QueueError(f"job {job_id} is {state.decode()}: not sent again")
                pipeline.multi()
                pipeline.delete(keys.job(job_id), keys.res(job_id), keys.out(job_id))
                pipeline.xadd(keys.jobs(lane), job_entry(job_id, fields[b"body"]))
                pipeline.xdel(keys.dead, entry)
                pipeline.execute()
                return job_id
            except redis.WatchError:
                continue
