"""Entries whose id is known already: answered from the first one's record, or refused."""

import orjson

from gewell.errors import InvalidRequest
from gewell.job import Envelope
from gewell.protocol import GROUP, TERMINAL_STATES, ErrorCode, ErrorInfo, FinalRecord, JobField, Keys, State
from gewell_workers.claim import Taken
from gewell_workers.finish import inbox_commands
from gewell_workers.resp import Client, pack, raise_error


async def answer_duplicate(client: Client, keys: Keys, taken: Taken, reply_to: str | None) -> None:
    """Same id, same digest: the record goes to this entry's own inbox, now or when it is there; the entry goes."""
    job = keys.job(taken.job_id)
    while True:
        look = [
            pack("WATCH", job),
            pack("HMGET", job, JobField.STATE, JobField.ALSO),
            pack("GET", keys.res(taken.job_id)),
        ]
        _, (state, also), record = [raise_error(reply) for reply in await client.batch(look)]
        commands = _remove(keys, taken)
        if reply_to is not None and state is not None and state.decode() in TERMINAL_STATES:
            if record is not None:
                commands += inbox_commands(keys, reply_to, record, taken.job_id, state.decode())
        elif reply_to is not None:
            waiting = [*(orjson.loads(also) if also else []), reply_to]
            commands.append(pack("HSET", job, JobField.ALSO, orjson.dumps(waiting)))
        if await _execute(client, commands):
            return


async def answer_conflict(client: Client, keys: Keys, taken: Taken, envelope: Envelope) -> None:
    """Same id, other digest: refused in this entry's own inbox. The first job and its record are not touched."""
    commands = _remove(keys, taken)
    if envelope.reply_to is not None:
        message = f"id: {taken.job_id} belongs to a job with another request"
        error = ErrorInfo.of(InvalidRequest(ErrorCode.ID_CONFLICT, message, "id"))
        record = FinalRecord(
            id=taken.job_id, state=State.ERROR, finish_reason="error", error=error, metadata=envelope.metadata
        )
        commands += inbox_commands(keys, envelope.reply_to, record.to_json(), taken.job_id, State.ERROR)
    await _execute(client, commands)


def _remove(keys: Keys, taken: Taken) -> list[bytes]:
    jobs = keys.jobs(taken.lane)
    return [pack("XACK", jobs, GROUP, taken.entry_id), pack("XDEL", jobs, taken.entry_id)]


async def _execute(client: Client, commands: list[bytes]) -> bool:
    """False: a watched key changed and nothing was done."""
    replies = await client.batch([pack("MULTI"), *commands, pack("EXEC")])
    for reply in replies[:-1]:
        raise_error(reply)
    return raise_error(replies[-1]) is not None
