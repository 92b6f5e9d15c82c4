"""Taking jobs: who an entry is (`look_up`), and the claim that fences every older epoch (`claim_jobs`). In batches.

A claim is: epoch + 1 under WATCH, a fence entry `<epoch>-0` in the job's stream, a look at what stands there, and the
restart entry. From the fence on, the server refuses every entry of an older epoch. A job's first claim is one
transaction; later ones need to see what stands before they say how much of it they keep.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gewell.protocol import (
    FENCE_SEQ,
    PROTOCOL_VERSION,
    RESTART_SEQ,
    TERMINAL_STATES,
    CancelKind,
    Chunk,
    EntryId,
    JobField,
    Keys,
    Lane,
    Restart,
    State,
    parse_entry,
)
from gewell_workers.job_text import add_tool_delta
from gewell_workers.resp import Client, Reply, ReplyError, is_fenced, pack, raise_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """An entry of a jobs stream that is pending with us.

    version     of the protocol, as the entry's `v` says; without one it is ours
    is_crash    it was pending with a worker that died, not new and not handed back
    is_trial    it comes out of probation: it may join the batch now
    """

    lane: Lane
    entry_id: str
    job_id: str
    body: bytes
    version: str = str(PROTOCOL_VERSION)
    is_crash: bool = False
    is_trial: bool = False

    @property
    def entry(self) -> str:
        """As the job hash keeps it: tells a redelivery from a duplicate."""
        return f"{self.lane}/{self.entry_id}"

    @property
    def enqueued_at_ms(self) -> int:
        return int(self.entry_id.partition("-")[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What Redis says of a job when one of its entries is taken."""

    entry: str
    digest: str
    state: State
    seed: int
    epoch: int
    crashes: int
    started_at_ms: int | None  # in the batch of a worker that has not finished it
    is_cancelled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What earlier epochs left in the stream."""

    ids: list[int] = field(default_factory=list)
    text: dict[str, str] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    epoch: int
    kept: Kept
    same_model: bool  # the fingerprint of the tokens that stand is ours


async def look_up(
    client: Client, keys: Keys, entries: Sequence[tuple[Taken, str, str | None, str | None, int | None]]
) -> list[Known]:
    """Register each (entry, digest, conversation, tenant, seed given) unless its id is known, and say what is known.

    Whoever registers an id first owns it; all others see that entry's name and are duplicates. The job hashes are left
    WATCHed, so that a claim made next on this connection holds only if nothing changed since.
    """
    commands: list[bytes] = []
    hashes = [keys.job(taken.job_id) for taken, *_ in entries]
    for taken, digest, _, _, seed in entries:
        job = keys.job(taken.job_id)
        drawn = secrets.randbits(63) if seed is None else seed
        commands.append(pack("HSETNX", job, JobField.ENTRY, taken.entry))
        commands.append(pack("HSETNX", job, JobField.DIGEST, digest))
        commands.append(pack("HSETNX", job, JobField.SEED, drawn))
    if hashes:
        commands.append(pack("WATCH", *hashes))  # after our own writes, which would break it too
    for taken, _, conversation_id, tenant, _ in entries:
        commands.append(pack("HMGET", keys.job(taken.job_id), *_LOOKED_UP))
        commands.append(pack("MGET", *_markers(keys, taken.job_id, conversation_id, tenant)))
    replies = [raise_error(reply) for reply in await client.batch(commands)]
    answers = replies[3 * len(entries) + 1 :]
    return [_known(entry[0], *answers[2 * idx : 2 * idx + 2]) for idx, entry in enumerate(entries)]


async def watch(client: Client, keys: Keys, taken: Sequence[Taken]) -> list[Known]:
    """Look again at registered jobs and WATCH them: another transaction on this connection has ended the watch."""
    hashes = [keys.job(one.job_id) for one in taken]
    commands = [pack("WATCH", *hashes)] if hashes else []
    commands += [pack("HMGET", name, *_LOOKED_UP) for name in hashes]
    replies = [raise_error(reply) for reply in await client.batch(commands)]
    return [_known(one, fields, ()) for one, fields in zip(taken, replies[1:], strict=True)]


_LOOKED_UP = (
    JobField.ENTRY,
    JobField.DIGEST,
    JobField.STATE,
    JobField.SEED,
    JobField.EPOCH,
    JobField.CRASHES,
    JobField.STARTED_AT_MS,
)


def _markers(keys: Keys, job_id: str, conversation_id: str | None, tenant: str | None) -> list[str]:
    markers = [keys.cancel_marker(CancelKind.ID, job_id)]
    if conversation_id is not None:
        markers.append(keys.cancel_marker(CancelKind.CONVERSATION, conversation_id))
    if tenant is not None:
        markers.append(keys.cancel_marker(CancelKind.TENANT, tenant))
    return markers


def _known(taken: Taken, fields: Sequence[bytes | None], markers: Sequence[bytes | None]) -> Known:
    entry, digest, state, seed, epoch, crashes, started = fields
    if entry is None or digest is None or seed is None:
        raise RuntimeError(f"job {taken.job_id}: hash without entry, digest or seed right after they were set")
    return Known(
        entry=entry.decode(),
        digest=digest.decode(),
        state=State(state.decode()) if state else State.QUEUED,
        seed=int(seed),
        epoch=int(epoch or 0),
        crashes=int(crashes or 0),
        started_at_ms=None if started is None else int(started),
        is_cancelled=_is_cancelled(taken.entry_id, [None if marker is None else marker.decode() for marker in markers]),
    )


def _is_cancelled(entry_id: str, markers: Sequence[str | None]) -> bool:
    """markers: that of the id first, then of conversation and tenant."""
    if markers and markers[0] is not None and covers_id(markers[0], entry_id):
        return True
    return any(marker is not None and covers_group(marker, entry_id) for marker in markers[1:])


def covers_group(cancel_id: str, entry_id: str) -> bool:
    """Whether a cancel of a conversation or tenant covers a job: its entry's time is before the cancel's.

    Two streams number their entries apart, so inside one millisecond nobody knows which came first. What is sent right
    after a cancel must live, so there the job wins; clients let a millisecond pass before they cancel.
    """
    return EntryId.parse(entry_id).epoch < EntryId.parse(cancel_id).epoch


def covers_id(cancel_id: str, entry_id: str) -> bool:
    """Whether a cancel of a job covers its entry; inside one millisecond the cancel wins: an id is used once."""
    return EntryId.parse(entry_id).epoch <= EntryId.parse(cancel_id).epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An entry to claim, and what was known of its job when its hash was watched."""

    taken: Taken
    known: Known
    is_crash: bool  # counts as a crash: it was in the batch of a worker that died

    @property
    def epoch(self) -> int:
        return self.known.epoch + 1

    @property
    def is_claimable(self) -> bool:
        """Not over, and not another entry's job: it may have become so between two looks at it."""
        return self.known.state not in TERMINAL_STATES and self.known.entry == self.taken.entry


async def claim_jobs(
    client: Client, keys: Keys, wanted: Sequence[Wanted], *, worker_id: str, fingerprint: str, now_ms: int
) -> list[Claim | None]:
    """Claim jobs whose hashes are watched. None: somebody else has it, or it is over."""
    everything, wanted = wanted, [one for one in wanted if one.is_claimable]
    if not wanted:
        await client.call("UNWATCH")
        return [None] * len(everything)
    commands = [_claim_commands(keys, one, worker_id, fingerprint, now_ms) for one in wanted]
    replies = await client.batch([pack("MULTI"), *(command for part in commands for command in part), pack("EXEC")])
    for reply in replies[:-1]:
        raise_error(reply)  # refused while queueing (out of memory, read-only): nothing was written
    executed = raise_error(replies[-1])
    claims: dict[str, Claim | None] = {}
    if executed is None:
        for one in wanted:  # a watched job changed, so none was claimed: look at each again, alone
            (known,) = await watch(client, keys, [one.taken])
            (claims[one.taken.entry],) = await claim_jobs(
                client,
                keys,
                [replace(one, known=known)],
                worker_id=worker_id,
                fingerprint=fingerprint,
                now_ms=now_ms,
            )
    else:
        for one, part in zip(wanted, commands, strict=True):
            answers, executed = executed[: len(part)], executed[len(part) :]
            claims[one.taken.entry] = await _finish_claim(client, keys, one, answers, fingerprint)
    return [claims.get(one.taken.entry) for one in everything]


def _claim_commands(keys: Keys, one: Wanted, worker_id: str, fingerprint: str, now_ms: int) -> list[bytes]:
    """Always the fence at index 2 and what stands at index 3; the restart too if this is the first claim."""
    job, out = keys.job(one.taken.job_id), keys.out(one.taken.job_id)
    values = [JobField.STATE, State.RUNNING, JobField.WORKER, worker_id, JobField.CLAIMED_AT_MS, str(now_ms)]
    commands = [
        pack("HSET", job, JobField.EPOCH, one.epoch, JobField.CRASHES, one.known.crashes + int(one.is_crash), *values),
        pack("HDEL", job, JobField.STARTED_AT_MS),
        pack("XADD", out, str(EntryId(one.epoch, FENCE_SEQ)), "fence", "1"),
        pack("XRANGE", out, "-", "+"),
    ]
    if one.epoch == 1:
        commands.append(_restart(out, 1, 0))
        commands.append(pack("HSET", job, JobField.FINGERPRINT, fingerprint))
    else:
        commands.append(pack("PERSIST", out))
        commands.append(pack("HGET", job, JobField.FINGERPRINT))
    return commands


def _restart(out: str, epoch: int, keep: int) -> bytes:
    entry_id = str(EntryId(epoch, RESTART_SEQ))
    return pack("XADD", out, "NOMKSTREAM", entry_id, "restart", Restart(keep=keep).to_json())


async def _finish_claim(
    client: Client, keys: Keys, one: Wanted, answers: Sequence[Reply], fingerprint: str
) -> Claim | None:
    """From the transaction's answers; a later epoch says here how much it keeps."""
    job_id, epoch = one.taken.job_id, one.epoch
    fence, standing, restart, old_fingerprint = answers[2], raise_error(answers[3]), answers[4], answers[5]
    if isinstance(fence, ReplyError):
        if not is_fenced(fence):
            raise fence
        repaired = await _repair_epoch(client, keys, job_id, epoch)
        if repaired is None:
            return None
        epoch, standing = repaired, await client.call("XRANGE", keys.out(job_id), "-", "+")
        old_fingerprint = await client.call("HGET", keys.job(job_id), JobField.FINGERPRINT)
    elif epoch == 1:
        raise_error(restart)
        return Claim(epoch=1, kept=Kept(), same_model=True)
    kept = fold(standing)
    same_model = not kept.ids or raise_error(old_fingerprint) == fingerprint.encode()
    commands = [_restart(keys.out(job_id), epoch, len(kept.ids))]
    if same_model:
        commands.append(pack("HSET", keys.job(job_id), JobField.FINGERPRINT, fingerprint))
    answer = (await client.batch(commands))[0]
    if isinstance(answer, ReplyError) and not is_fenced(answer):
        raise answer
    if not isinstance(answer, bytes):
        return None  # fenced already by somebody newer
    return Claim(epoch=epoch, kept=kept, same_model=same_model)


async def _repair_epoch(client: Client, keys: Keys, job_id: str, epoch: int) -> int | None:
    """The stream holds a newer epoch than ours. None: a newer claim, ours is over.

    Else the hash had been lost and began again at 1: go on above what the stream holds.
    """
    job, out = keys.job(job_id), keys.out(job_id)
    replies = await client.batch(
        [pack("WATCH", job), pack("HGET", job, JobField.EPOCH), pack("XREVRANGE", out, "+", "-", "COUNT", 1)]
    )
    _, current, top = [raise_error(reply) for reply in replies]
    if current is None or int(current) != epoch or not top:
        await client.call("UNWATCH")
        return None
    newer = EntryId.parse(top[0][0]).epoch + 1
    fence = pack("XADD", out, str(EntryId(newer, FENCE_SEQ)), "fence", "1")
    replies = await client.batch([pack("MULTI"), pack("HSET", job, JobField.EPOCH, newer), fence, pack("EXEC")])
    return None if raise_error(replies[-1]) is None else newer


def fold(entries: Reply) -> Kept:
    """What a stream's entries add up to. A restart that keeps less than stands begins anew."""
    kept = Kept()
    for _, flat in entries:
        entry = parse_entry(dict(zip(flat[::2], flat[1::2], strict=True)))
        if isinstance(entry, Restart) and entry.keep < len(kept.ids):
            kept = Kept()
        elif isinstance(entry, Chunk):
            _add(kept, entry)
    return kept


def _add(kept: Kept, chunk: Chunk) -> None:
    kept.ids.extend(chunk.ids)
    kept.logprobs.extend(chunk.logprobs or ())
    if chunk.tool is None:
        channel = chunk.channel.value
        kept.text[channel] = kept.text.get(channel, "") + chunk.text
        return
    add_tool_delta(kept.tools, chunk.tool)
