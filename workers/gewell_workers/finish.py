"""The end of jobs in Redis: one transaction writes record, stream end, inbox and acknowledgement, or nothing at all."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import orjson

from gewell.protocol import GROUP, INBOX_TTL_S, OUT_TTL_S, EntryId, FinalRecord, JobField, Keys, State, inbox_entry
from gewell_workers.job_stream import OutEntry
from gewell_workers.resp import Client, ReplyError, pack, raise_error

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Everything that one job's end writes.

    chunks   entries that the stream does not hold yet, in order
    reopen   makes the entries of a whole stream, for the case that the server has lost it
    """

    record: FinalRecord
    chunks: Sequence[OutEntry]
    reopen: Callable[[], Sequence[OutEntry]]
    end_id: EntryId
    lane: str
    entry_id: str
    reply_to: str | None
    result_ttl_s: float

    @property
    def job_id(self) -> str:
        return self.record.id


class Outcome(StrEnum):
    WRITTEN = "written"  # now, or by an earlier attempt whose answer was lost on the way
    FENCED = "fenced"  # another epoch has the job, or it is over
    LOST = "lost"  # the server has forgotten the job


class Finished(NamedTuple):
    """What became of a finish, and the entries it added to the stream, for followers."""

    outcome: Outcome
    entries: Sequence[OutEntry]


async def finish_jobs(client: Client, keys: Keys, finishes: Sequence[Finish], server_ms: int) -> list[Finished]:
    """Write the ends of several jobs; one outcome each. Raises LinkLost (try again) and ReplyError (OOM, READONLY).

    All are written in one transaction. If one job changed meanwhile the server refuses it whole, and each is tried
    alone.
    """
    done = await _attempt(client, keys, finishes, server_ms)
    if done is not None:
        return done
    if len(finishes) > 1:
        return [(await finish_jobs(client, keys, [finish], server_ms))[0] for finish in finishes]
    while done is None:  # the one job changed between our look and our write: look again
        done = await _attempt(client, keys, finishes, server_ms)
    return done


async def _attempt(client: Client, keys: Keys, finishes: Sequence[Finish], server_ms: int) -> list[Finished] | None:
    """None: a watched job changed and nothing was written."""
    job_keys = [keys.job(finish.job_id) for finish in finishes]
    # The streams too: one that is lost between this look and our write would begin with its last entries.
    look = [pack("WATCH", *job_keys, *(keys.out(finish.job_id) for finish in finishes))]
    for finish, key in zip(finishes, job_keys, strict=True):
        look.append(pack("HMGET", key, JobField.EPOCH, JobField.STATE, JobField.ALSO))
        look.append(pack("EXISTS", keys.out(finish.job_id)))
    _, *answers = [raise_error(reply) for reply in await client.batch(look)]
    commands: list[bytes] = []
    done = []
    for idx, finish in enumerate(finishes):
        (epoch, state, also), has_out = answers[2 * idx], answers[2 * idx + 1]
        outcome = _judge(finish, epoch, state)
        entries: Sequence[OutEntry] = ()
        if outcome is None:
            outcome = Outcome.WRITTEN
            entries = _entries(finish, has_out=bool(has_out))
            commands += _commands(keys, finish, entries, orjson.loads(also) if also else [], server_ms)
        done.append(Finished(outcome, entries))
    if not commands:
        await client.call("UNWATCH")
        return done
    replies = await client.batch([pack("MULTI"), *commands, pack("EXEC")])
    for reply in replies[:-1]:
        raise_error(reply)  # refused while queueing (out of memory, read-only): nothing was written
    executed = raise_error(replies[-1])
    if executed is None:
        return None
    for reply in executed:
        if isinstance(reply, ReplyError):
            log.error("a finish was written in part: %s", reply)
    return done


def _judge(finish: Finish, epoch: bytes | None, state: bytes | None) -> Outcome | None:
    """None: ours to write."""
    if epoch is None or state is None:
        return Outcome.LOST
    if int(epoch) != finish.record.epoch:
        return Outcome.FENCED
    # One epoch is one claim of one process, so an end under our epoch is our own whose answer was lost on the way.
    return None if state.decode() == State.RUNNING else Outcome.WRITTEN


def _entries(finish: Finish, *, has_out: bool) -> Sequence[OutEntry]:
    end = finish.record.end().to_json()
    if has_out:
        return [*finish.chunks, (finish.end_id, "end", end)]
    whole = finish.reopen()
    last_id = whole[-1][0]
    return [*whole, (EntryId(last_id.epoch, last_id.seq + 1), "end", end)]


def _commands(
    keys: Keys, finish: Finish, entries: Sequence[OutEntry], also: Sequence[str], server_ms: int
) -> list[bytes]:
    job_id, record = finish.job_id, finish.record
    record_json = record.to_json()
    out, job, ttl_ms = keys.out(job_id), keys.job(job_id), int(finish.result_ttl_s * 1e3)
    commands = [pack("SET", keys.res(job_id), record_json, "PX", ttl_ms)]
    commands += [pack("XADD", out, str(entry_id), name, payload) for entry_id, name, payload in entries]
    commands.append(pack("PEXPIRE", out, int(OUT_TTL_S * 1e3)))
    for name in dict.fromkeys([*([finish.reply_to] if finish.reply_to else []), *also]):
        commands += inbox_commands(keys, name, record_json, job_id, record.state)
    jobs = keys.jobs(finish.lane)
    commands += [pack("XACK", jobs, GROUP, finish.entry_id), pack("XDEL", jobs, finish.entry_id)]
    commands.append(pack("HSET", job, JobField.STATE, record.state, JobField.FINISHED_AT_MS, server_ms))
    commands += [pack("HDEL", job, JobField.ALSO), pack("PEXPIRE", job, ttl_ms)]
    return commands


def inbox_commands(keys: Keys, name: str, record_json: bytes, job_id: str, state: State | str) -> list[bytes]:
    """One entry in an inbox, and the inbox's lifetime anew."""
    inbox = keys.inbox(name)
    fields = [part for pair in inbox_entry(record_json, job_id, state).items() for part in pair]
    return [pack("XADD", inbox, "*", *fields), pack("PEXPIRE", inbox, int(INBOX_TTL_S * 1e3))]
