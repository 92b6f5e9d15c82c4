"""The `dead` stream: jobs given up, with body and reason, until somebody looks. `gewell dead` shows them."""

from collections.abc import Sequence

from gewell.job import read_envelope
from gewell.protocol import (
    GROUP,
    OUT_TTL_S,
    RESULT_TTL_S,
    ErrorCode,
    ErrorInfo,
    FinalRecord,
    JobField,
    Keys,
    State,
)
from gewell_workers.claim import Taken
from gewell_workers.finish import inbox_commands
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


async def bury_broken(client: Client, keys: Keys, taken: Taken) -> None:
    """A job that cannot be taken in, whoever tries: its record says so, and what stands of it gets a lifetime."""
    message = "taking the job in failed; the worker's log has it"
    record = FinalRecord(
        id=taken.job_id,
        state=State.ERROR,
        finish_reason="error",
        error=ErrorInfo(code=ErrorCode.INTERNAL, message=message, retryable=True),
    )
    fields: list[Argument] = ["lane", taken.lane, "entry", taken.entry_id, "id", taken.job_id, "body", taken.body]
    job, jobs, ttl_ms = keys.job(taken.job_id), keys.jobs(taken.lane), int(RESULT_TTL_S * 1e3)
    reply_to = read_envelope(taken.body).reply_to
    commands = [
        pack("MULTI"),
        pack("XADD", keys.dead, "*", *fields, "reason", message),
        pack("SET", keys.res(taken.job_id), record.to_json(), "NX", "PX", ttl_ms),
        pack("HSET", job, JobField.STATE, State.ERROR),
        pack("PEXPIRE", job, ttl_ms),
        pack("PEXPIRE", keys.out(taken.job_id), int(OUT_TTL_S * 1e3)),
        *(inbox_commands(keys, reply_to, record.to_json(), taken.job_id, State.ERROR) if reply_to else []),
        pack("XACK", jobs, GROUP, taken.entry_id),
        pack("XDEL", jobs, taken.entry_id),
        pack("EXEC"),
    ]
    replies = await client.batch(commands)
    for reply in replies[:-1]:
        raise_error(reply)
