"""The lease: a heartbeat key while the engine makes progress, and the taking over of what dead workers held."""

import logging
import time
from collections.abc import Collection, Sequence

from gewell.engine.api import EngineStats
from gewell.protocol import GROUP, HANDBACK_CONSUMER, Keys, Lane, WorkerField
from gewell_workers.claim import Taken
from gewell_workers.lanes import entries_of
from gewell_workers.resp import Argument, Client, ReplyError, pack, raise_error

log = logging.getLogger(__name__)

_HANDBACK_IDLE_MS = 600_000  # a handed-back entry counts as idle for long: anybody may take it at once
_FORGET_CONSUMER_MS = 86_400_000  # a consumer without entries and without heartbeat for a day is removed
_SCAN = 256  # pending entries looked at a round


class Lease:
    """One worker's heartbeat and its eyes on the others. Uses a connection of its own."""

    def __init__(self, client: Client, keys: Keys, worker_id: str, *, lease_s: float, min_idle_ms: int) -> None:
        self._client = client
        self._keys = keys
        self._worker_id = worker_id
        self._lease_s = lease_s
        self._min_idle_ms = min_idle_ms

    async def beat(self, fields: dict[WorkerField, Argument]) -> None:
        key = self._keys.worker(self._worker_id)
        flat = [part for pair in fields.items() for part in pair]
        beat = [pack("HSET", key, *flat), pack("PEXPIRE", key, int(self._lease_s * 1e3))]
        for reply in await self._client.batch([pack("MULTI"), *beat, pack("EXEC")]):
            raise_error(reply)

    async def end(self) -> None:
        """The worker leaves: no heartbeat, and no consumer where nothing is pending with it."""
        await self._client.call("DEL", self._keys.worker(self._worker_id))
        for lane in Lane:
            if not await self._pending(lane, self._worker_id, 1):
                # Safe only for ourselves: nobody else reads under this name, and we have stopped.
                await self._client.batch([pack("XGROUP", "DELCONSUMER", self._keys.jobs(lane), GROUP, self._worker_id)])

    async def take_over(self, room: int) -> list[Taken]:
        """Entries of dead workers and handed-back ones, now pending with us. The loser of a race gets none of them."""
        if time.monotonic() - self._client.up_since_s < self._lease_s:
            return []  # a server that was stalled or down has let every heartbeat expire: give them time to beat
        taken: list[Taken] = []
        for lane in Lane:
            for consumer in await self._dead_consumers(lane):
                if len(taken) < room:
                    taken += await self._claim(lane, consumer, room - len(taken))
        return taken

    async def own_pending(self, known: Collection[str]) -> list[Taken]:
        """Entries pending with us that nobody here is busy with: their delivery was lost with a connection."""
        taken = []
        for lane in Lane:
            ids = [i for i in await self._pending(lane, self._worker_id, 10_000) if f"{lane}/{i}" not in known]
            for start in range(0, len(ids), _SCAN):
                jobs = self._keys.jobs(lane)
                part = [pack("XRANGE", jobs, entry_id, entry_id) for entry_id in ids[start : start + _SCAN]]
                replies = [raise_error(reply) for reply in await self._client.batch(part)]
                taken += [one for reply in replies for one in entries_of(lane, reply)]
                gone = [i for i, reply in zip(ids[start : start + _SCAN], replies, strict=True) if not reply]
                if gone:  # deleted while pending: nothing is left to do for them
                    await self._client.call("XACK", jobs, GROUP, *gone)
        return taken

    async def hand_back(self) -> int:
        """Give everything pending with us to the hand-back consumer. Returns how many entries."""
        num = 0
        for lane in Lane:
            while ids := await self._pending(lane, self._worker_id, _SCAN):
                jobs = self._keys.jobs(lane)
                claim = ("XCLAIM", jobs, GROUP, HANDBACK_CONSUMER, 0)
                await self._client.call(*claim, *ids, "IDLE", _HANDBACK_IDLE_MS, "JUSTID")
                num += len(ids)
        return num

    async def _dead_consumers(self, lane: Lane) -> list[str]:
        """Consumers with pending entries and no heartbeat."""
        jobs = self._keys.jobs(lane)
        try:
            rows = await self._client.call("XINFO", "CONSUMERS", jobs, GROUP)
        except ReplyError as error:
            if str(error).startswith(("NOGROUP", "ERR no such key")):
                return []  # the reader makes the group again
            raise
        consumers = [dict(zip(row[::2], row[1::2], strict=True)) for row in rows]
        others = [row for row in consumers if row[b"name"].decode() != self._worker_id]
        names = [row[b"name"].decode() for row in others]
        beats = await self._client.batch([pack("EXISTS", self._keys.heartbeat_of(name)) for name in names])
        dead = []
        for row, name, is_alive in zip(others, names, beats, strict=True):
            if raise_error(is_alive):
                continue
            if row[b"pending"]:
                dead.append(name)
            elif row[b"idle"] > _FORGET_CONSUMER_MS:
                await self._client.call("XGROUP", "DELCONSUMER", jobs, GROUP, name)
        return dead

    async def _claim(self, lane: Lane, consumer: str, room: int) -> list[Taken]:
        is_crash = consumer != HANDBACK_CONSUMER
        ids = await self._pending(lane, consumer, min(room, _SCAN))
        if not ids:
            return []
        claim = ("XCLAIM", self._keys.jobs(lane), GROUP, self._worker_id, self._min_idle_ms)
        taken = entries_of(lane, await self._client.call(*claim, *ids), is_crash=is_crash)
        if taken:
            log.warning("took %d jobs of lane %s over from %s", len(taken), lane, consumer)
        return taken

    async def _pending(self, lane: Lane, consumer: str, count: int) -> Sequence[str]:
        try:
            rows = await self._client.call("XPENDING", self._keys.jobs(lane), GROUP, "-", "+", count, consumer)
        except ReplyError as error:
            if str(error).startswith("NOGROUP"):
                return []
            raise
        return [row[0].decode() for row in rows]


def engine_fields(stats: EngineStats) -> dict[WorkerField, Argument]:
    """The engine's part of a heartbeat."""
    return {
        WorkerField.NUM_RUNNING: stats.num_running,
        WorkerField.NUM_WAITING: stats.num_waiting,
        WorkerField.MEAN_DECODE_ROWS: round(stats.decode_rows_sum / max(1, stats.num_decode_steps), 3),
        WorkerField.PROMPT_TOKENS: stats.prompt_tokens,
        WorkerField.CACHED_TOKENS: stats.cached_tokens,
        WorkerField.COMPUTED_TOKENS: stats.computed_tokens,
        WorkerField.GENERATED_TOKENS: stats.generated_tokens,
        WorkerField.NUM_PREEMPTIONS: stats.num_preemptions,
        WorkerField.NUM_PAGES: stats.num_pages,
        WorkerField.NUM_FREE_PAGES: stats.num_free_pages,
        WorkerField.NUM_CHECKPOINTS: stats.num_checkpoints,
    }
