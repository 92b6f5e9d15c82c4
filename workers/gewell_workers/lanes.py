"""Reading the jobs streams: which lane how often, groups made again when they are gone."""

import logging
from collections.abc import Collection, Sequence

from gewell.protocol import GROUP, PROTOCOL_VERSION, Keys, Lane, is_valid_id
from gewell.scheduler.fairness import LANE_WEIGHTS
from gewell_workers.claim import Taken
from gewell_workers.resp import Client, Reply, ReplyError, pack, raise_error

log = logging.getLogger(__name__)

_BLOCK_MS = 500  # an idle read looks up so often whether it should stop


class LaneReader:
    """Reads new entries for one consumer.

    Shares of the lanes are 8:4:1 while all have work (smooth weighted round robin, so a lane of weight 1 is never
    starved by a window with room for one), and a lane without work leaves its share to the others.
    """

    def __init__(self, client: Client, keys: Keys, consumer: str) -> None:
        self._client = client
        self._keys = keys
        self._consumer = consumer
        self._credit = dict.fromkeys(Lane, 0)

    async def ensure_groups(self) -> None:
        commands = [pack("XGROUP", "CREATE", self._keys.jobs(lane), GROUP, "0", "MKSTREAM") for lane in Lane]
        for reply in await self._client.batch(commands):
            if isinstance(reply, ReplyError) and not str(reply).startswith("BUSYGROUP"):
                raise reply

    async def read(self, room: int, lanes: Collection[Lane]) -> list[Taken]:
        """Up to `room` entries of these lanes; waits a while if there are none. Makes lost groups again."""
        try:
            return await self._read_shares(room, lanes) or await self._read_any(lanes)
        except ReplyError as error:
            if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                raise
            log.warning("the consumer group is gone (the server lost its data?); made again")
            await self.ensure_groups()
            return []

    async def _read_shares(self, room: int, lanes: Collection[Lane]) -> list[Taken]:
        taken: list[Taken] = []
        open_lanes = set(lanes)
        while open_lanes and len(taken) < room:
            shares = self._shares(room - len(taken), open_lanes)
            replies = await self._client.batch([self._command(lane, count) for lane, count in shares.items()])
            for (lane, count), reply in zip(shares.items(), replies, strict=True):
                found = entries_of(lane, raise_error(reply)[0][1]) if raise_error(reply) else []
                taken += found
                if len(found) < count:
                    open_lanes.discard(lane)
        return taken

    async def _read_any(self, lanes: Collection[Lane]) -> list[Taken]:
        names = {self._keys.jobs(lane).encode(): lane for lane in lanes}
        if not names:
            return []
        head = ("XREADGROUP", "GROUP", GROUP, self._consumer, "COUNT", 1, "BLOCK", _BLOCK_MS)
        reply = await self._client.call(*head, "STREAMS", *names, *[">"] * len(names), timeout_s=None)
        return [taken for name, entries in reply or () for taken in entries_of(names[name], entries)]

    def _shares(self, room: int, lanes: Collection[Lane]) -> dict[Lane, int]:
        shares: dict[Lane, int] = {}
        total = sum(LANE_WEIGHTS[lane] for lane in lanes)
        for _ in range(room):
            for lane in lanes:
                self._credit[lane] += LANE_WEIGHTS[lane]
            best = max(lanes, key=lambda lane: (self._credit[lane], LANE_WEIGHTS[lane]))
            self._credit[best] -= total
            shares[best] = shares.get(best, 0) + 1
        return shares

    def _command(self, lane: Lane, count: int) -> bytes:
        head = ("XREADGROUP", "GROUP", GROUP, self._consumer, "COUNT", count)
        return pack(*head, "STREAMS", self._keys.jobs(lane), ">")


def entries_of(lane: Lane, entries: Reply, *, is_crash: bool = False) -> list[Taken]:
    """Entries as XREADGROUP, XRANGE or XCLAIM give them. One that was deleted meanwhile is left out."""
    return [_taken(lane, entry[0], entry[1], is_crash) for entry in entries if entry is not None and entry[1]]


def _taken(lane: Lane, entry_id: bytes, flat: Sequence[bytes], is_crash: bool) -> Taken:
    fields = dict(zip(flat[::2], flat[1::2], strict=False))
    job_id = fields.get(b"id", b"").decode("ascii", "replace")
    return Taken(
        lane=lane,
        entry_id=entry_id.decode(),
        job_id=job_id if is_valid_id(job_id) else "",
        body=fields.get(b"body", b""),
        version=fields.get(b"v", b"%d" % PROTOCOL_VERSION).decode("ascii", "replace"),
        is_crash=is_crash,
    )
