"""The `dead` stream: jobs given up, with body and reason, until somebody looks. `gewell dead` shows them."""

from collections.abc import Sequence

from gewell.protocol import GROUP, ErrorCode, Keys
from gewell_workers.claim import Taken
from gewell_workers.messages import EndJob
from gewell_workers.resp import Argument, Client, pack, raise_error


async def bury_nameless(client: Client, keys: Keys, entries: Sequence[Taken]) -> None:
    """Entries without a usable id cannot be answered: nobody could read the answer."""
    for taken in entries:
        jobs = keys.jobs(taken.lane)
        fields: list[Argument] = ["lane", taken.lane, "entry", taken.entry_id, "id", "", "body", taken.body]
        commands = [
            pack("MULTI"),
            pack("XADD", keys.dead, "*", *fields, "reason", "the entry has no usable id"),
            pack("XACK", jobs, GROUP, taken.entry_id),
            pack("XDEL", jobs, taken.entry_id),
            pack("EXEC"),
        ]
        for reply in await client.batch(commands):
            raise_error(reply)


async def bury(client: Client, keys: Keys, ends: Sequence[tuple[Taken, EndJob]]) -> None:
    """Keep the bodies of jobs that killed workers; their final record is written as for any other job."""
    for taken, end in ends:
        if end.code == ErrorCode.CRASHED:
            fields: list[Argument] = ["lane", taken.lane, "entry", taken.entry_id, "id", taken.job_id]
            await client.call("XADD", keys.dead, "*", *fields, "body", taken.body, "reason", end.message)
