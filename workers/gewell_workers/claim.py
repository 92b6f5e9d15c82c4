"""Taking jobs: who an entry is (`look_up`), and the claim that fences every older epoch (`claim_jobs`). In batches.

A claim is: epoch + 1 under WATCH, a fence entry `<epoch>-0` in the job's stream, a look at what stands there, and the
restart entry. From the fence on, the server refuses every entry of an older epoch.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gewell.protocol import (
    FENCE_SEQ,
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
from gewell_workers.resp import Client, Reply, ReplyError, pack, raise_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """An entry of a jobs stream that is pending with us.

    is_crash    it was pending with a worker that died, not new and not handed back
    """

    lane: Lane
    entry_id: str
    job_id: str
    body: bytes
    is_crash: bool = False

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
    crashes: int
    was_started: bool
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

    Whoever registers an id first owns it; all others see that entry's name and are duplicates.
    """
    commands: list[bytes] = []
    for taken, digest, conversation_id, tenant, seed in entries:
        job = keys.job(taken.job_id)
        drawn = secrets.randbits(63) if seed is None else seed
        commands.append(pack("HSETNX", job, JobField.ENTRY, taken.entry))
        commands.append(pack("HSETNX", job, JobField.DIGEST, digest))
        commands.append(pack("HSETNX", job, JobField.SEED, drawn))
        commands.append(pack("HMGET", job, *_LOOKED_UP))
        commands.append(pack("MGET", *_markers(keys, taken.job_id, conversation_id, tenant)))
    replies = [raise_error(reply) for reply in await client.batch(commands)]
    known = []
    for idx, (taken, *_) in enumerate(entries):
        fields, markers = replies[5 * idx + 3], replies[5 * idx + 4]
        known.append(_known(taken, fields, markers))
    return known


_LOOKED_UP = (
    JobField.ENTRY,
    JobField.DIGEST,
    JobField.STATE,
    JobField.SEED,
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
    entry, digest, state, seed, crashes, started = fields
    if entry is None or digest is None or seed is None:
        raise RuntimeError(f"job {taken.job_id}: hash without entry, digest or seed right after they were set")
    return Known(
        entry=entry.decode(),
        digest=digest.decode(),
        state=State(state.decode()) if state else State.QUEUED,
        seed=int(seed),
        crashes=int(crashes or 0),
        was_started=started is not None,
        is_cancelled=_is_cancelled(taken.entry_id, [None if marker is None else marker.decode() for marker in markers]),
    )


def _is_cancelled(entry_id: str, markers: Sequence[str | None]) -> bool:
    """markers: that of the id first, then of conversation and tenant."""
    own, *groups = markers
    if own is not None and covers_id(own, entry_id):
        return True
    return any(marker is not None and covers_group(marker, entry_id) for marker in groups)


def covers_group(cancel_id: str, entry_id: str) -> bool:
    """Whether a cancel of a conversation or tenant covers a job: its entry's time is before the cancel's.

    Two streams number their entries apart, so inside one millisecond nobody knows which came first. What is sent right
    after a cancel must live, so there the job wins; clients let a millisecond pass before they cancel.
    """
    return EntryId.parse(entry_id).epoch < EntryId.parse(cancel_id).epoch


def covers_id(cancel_id: str, entry_id: str) -> bool:
    """Whether a cancel of a job covers its entry; inside one millisecond the cancel wins: an id is used once."""
    return EntryId.parse(entry_id).epoch <= EntryId.parse(cancel_id).epoch


async def claim_jobs(
    client: Client, keys: Keys, jobs: Sequence[tuple[Taken, bool]], *, worker_id: str, fingerprint: str, now_ms: int
) -> list[Claim | None]:
    """Claim each (entry, counts as a crash). None: somebody else has it, or it is over."""
    epochs = await _raise_epochs(client, keys, jobs, worker_id=worker_id, now_ms=now_ms)
    mine = [(taken, epoch) for (taken, _), epoch in zip(jobs, epochs, strict=True) if epoch is not None]
    commands: list[bytes] = []
    for taken, epoch in mine:
        out = keys.out(taken.job_id)
        commands.append(pack("XADD", out, str(EntryId(epoch, FENCE_SEQ)), "fence", "1"))
        commands.append(pack("PERSIST", out))
        commands.append(pack("XRANGE", out, "-", "+"))
        commands.append(pack("HGET", keys.job(taken.job_id), JobField.FINGERPRINT))
    replies = await client.batch(commands)
    claims: dict[str, Claim] = {}
    restarts: list[bytes] = []
    for idx, (taken, epoch) in enumerate(mine):
        fence, _, entries, old_fingerprint = replies[4 * idx : 4 * idx + 4]
        if isinstance(fence, ReplyError):
            if "equal or smaller" not in str(fence):
                raise fence
            repaired = await _repair_epoch(client, keys, taken.job_id, epoch)
            if repaired is None:
                continue
            epoch, entries = repaired, await client.call("XRANGE", keys.out(taken.job_id), "-", "+")
        kept = fold(raise_error(entries))
        same = not kept.ids or raise_error(old_fingerprint) == fingerprint.encode()
        claims[taken.job_id] = Claim(epoch=epoch, kept=kept, same_model=same)
        restart = Restart(keep=len(kept.ids)).to_json()
        out, job = keys.out(taken.job_id), keys.job(taken.job_id)
        restarts.append(pack("XADD", out, "NOMKSTREAM", str(EntryId(epoch, RESTART_SEQ)), "restart", restart))
        restarts.append(pack("HSET", job, JobField.FINGERPRINT, fingerprint) if same else pack("EXISTS", job))
    answers = await client.batch(restarts)
    for (job_id, _), answer in zip(list(claims.items()), answers[::2], strict=True):
        if isinstance(answer, ReplyError) and "equal or smaller" not in str(answer):
            raise answer
        if not isinstance(answer, bytes):  # fenced already by somebody newer
            del claims[job_id]
    return [claims.get(taken.job_id) for taken, _ in jobs]


async def _raise_epochs(
    client: Client, keys: Keys, jobs: Sequence[tuple[Taken, bool]], *, worker_id: str, now_ms: int
) -> list[int | None]:
    """epoch + 1 and state running, unless the job is over. In one transaction; job by job if that is refused."""
    job_keys = [keys.job(taken.job_id) for taken, _ in jobs]
    look = [pack("WATCH", *job_keys)] if job_keys else []
    look += [pack("HGET", key, JobField.STATE) for key in job_keys]
    _, *states = [raise_error(reply) for reply in await client.batch(look)] or [None]
    commands: list[bytes] = []
    live: list[int] = []
    for idx, (key, state) in enumerate(zip(job_keys, states, strict=True)):
        if state is None or state.decode() not in TERMINAL_STATES:
            live.append(idx)
            commands.append(pack("HINCRBY", key, JobField.EPOCH, 1))
            commands.append(pack("HINCRBY", key, JobField.CRASHES, 1 if jobs[idx][1] else 0))
            values = (JobField.STATE, State.RUNNING, JobField.WORKER, worker_id, JobField.CLAIMED_AT_MS, now_ms)
            commands.append(pack("HSET", key, *values))
            commands.append(pack("HDEL", key, JobField.STARTED_AT_MS))
    epochs: list[int | None] = [None] * len(jobs)
    if not live:
        await client.call("UNWATCH")
        return epochs
    replies = await client.batch([pack("MULTI"), *commands, pack("EXEC")])
    for reply in replies[:-1]:
        raise_error(reply)
    executed = raise_error(replies[-1])
    if executed is None:
        if len(jobs) == 1:
            return await _raise_epochs(client, keys, jobs, worker_id=worker_id, now_ms=now_ms)
        for idx, job in enumerate(jobs):
            epochs[idx] = (await _raise_epochs(client, keys, [job], worker_id=worker_id, now_ms=now_ms))[0]
        return epochs
    for position, idx in enumerate(live):
        epochs[idx] = int(raise_error(executed[4 * position]))
    return epochs


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
    while len(kept.tools) <= chunk.tool.index:
        kept.tools.append({"id": None, "name": None, "arguments": ""})
    call = kept.tools[chunk.tool.index]
    call["id"] = chunk.tool.id or call["id"]
    call["name"] = chunk.tool.name or call["name"]
    call["arguments"] += chunk.tool.arguments_delta
