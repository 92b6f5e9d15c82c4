"""Reading one job's stream: every chunk once and in order, whatever the reader missed. No I/O: clients feed it.

The contract gives two views of a stream, the `out` stream itself and the messages of `ev`. A message is taken when it
is the next entry; on anything else the caller reads the stream from `range_start` and hands the rows in. Positions
count tokens of the job's answer, so that what a new epoch writes again is told from what is new.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from gewell.protocol import (
    Channel,
    Chunk,
    End,
    Entry,
    EntryId,
    FinalRecord,
    Restart,
    ToolDelta,
    parse_entry,
    parse_message,
)
from gewell_producers.errors import StreamDiverged, StreamExpired, UnknownJob

UNKNOWN_GRACE_S = 5.0
BEYOND_SEQ = 2**62  # entry of a chunk that was made from the result: behind every entry that the stream had

Delivery = tuple[EntryId, Chunk]  # a chunk and the entry it came with
Row = tuple[bytes | str, Mapping[Any, Any]]
_TextKey = tuple[Channel, int]  # a channel; tool calls apart, each by its index


def _text_key(chunk: Chunk) -> _TextKey:
    return (chunk.channel, -1 if chunk.tool is None else chunk.tool.index)


def _payload(fields: Mapping[Any, Any]) -> bytes:
    """The value of an entry's one field, which is what a message about it carries."""
    value = next(iter(fields.values()))
    return value if isinstance(value, bytes) else str(value).encode()


class StreamReader:
    """The state of one follower. Feed it with `rows`, `message` or `record`; each returns the chunks that are new.

    after   deliver nothing up to and including this entry: a reader that was cut resumes behind what it has seen
    """

    def __init__(self, job_id: str, *, after: EntryId | None = None) -> None:
        self.job_id = job_id
        self.last: EntryId | None = None  # newest entry taken
        self._last_payload = b""  # its content: after a loss of memory the server may give out the same id again
        self.end: End | None = None
        self.final: FinalRecord | None = None  # when the result had to stand in for the stream
        self._unknown_since_s: float | None = None
        self._after = after
        self._position = 0  # tokens of the answer before the next chunk of the stream
        self._ids = array("i")  # delivered tokens
        self._text: dict[_TextKey, int] = {}  # characters before the next chunk
        self._shown: dict[_TextKey, int] = {}  # delivered characters
        self._marks: list[tuple[int, dict[_TextKey, int]]] = []  # text lengths at the end of each chunk that had text

    @property
    def range_start(self) -> str:
        """Inclusive start of the next XRANGE. Its first row must be `last`: otherwise the stream was replaced."""
        return "-" if self.last is None else str(self.last)

    def message(self, raw: bytes | str) -> Sequence[Delivery] | None:
        """Take a published message. None: entries are missing before it, read the range."""
        head, _, payload = (raw if isinstance(raw, bytes) else raw.encode()).partition(b" ")
        entry_id = EntryId.parse(head)
        if self.end is not None or (self.last is not None and entry_id <= self.last):
            return ()
        if self.last is None or not entry_id.is_next_after(self.last):
            return None
        return self._take(entry_id, parse_message(raw)[1], payload)

    def rows(self, rows: Sequence[Row]) -> Sequence[Delivery]:
        """Take the rows of an XRANGE from `range_start`. Check `was_replaced` first."""
        new: list[Delivery] = []
        for raw_id, fields in rows:
            entry_id = EntryId.parse(raw_id)
            if self.end is None and (self.last is None or entry_id > self.last):
                new.extend(self._take(entry_id, parse_entry(fields), _payload(fields)))
        return new

    def was_replaced(self, rows: Sequence[Row]) -> bool:
        """Whether the stream at hand is another one than was read so far: its entry `last` is gone."""
        if self.last is None or not rows:
            return False
        raw_id, fields = rows[0]
        return EntryId.parse(raw_id) != self.last or _payload(fields) != self._last_payload

    def rewind(self) -> None:
        """Read the stream from its beginning again. What has been delivered is recognised by its tokens."""
        self.last = None
        self._seek(0)

    def record(self, record: FinalRecord) -> Sequence[Delivery]:
        """The stream is gone, the result stands: deliver what is missing of it and end.

        Raises StreamExpired for a reader that resumed behind an entry: what it had seen can no longer be told.
        """
        entry_id = EntryId(record.epoch, BEYOND_SEQ)
        if self._after is not None and self.last is None and self._after < entry_id:
            raise StreamExpired(self.job_id)
        self._seek(0)
        self.end = record.end()
        if self._after is not None and self.last is None:
            return ()
        new: list[Chunk] = []
        if record.reasoning:
            new.extend(self._deliver(Chunk(text=record.reasoning, channel=Channel.REASONING)))
        for index, call in enumerate(record.tool_calls):
            tool = ToolDelta(index=index, id=call.get("id"), name=call.get("name"), arguments_delta=call["arguments"])
            new.extend(self._deliver(Chunk(channel=Channel.TOOL, tool=tool)))
        new.extend(self._deliver(Chunk(ids=record.token_ids, text=record.text, logprobs=record.logprobs)))
        return [(entry_id, chunk) for chunk in new if chunk.ids or chunk.text or chunk.tool]

    def nothing_there(self, result: bytes | None, num_traces: int, num_queued: int, now_s: float) -> Sequence[Delivery]:
        """The stream has no rows. What else stands at the moment decides: deliver from the result, wait, give up.

        num_traces  how many of the job's hash and stream exist
        num_queued  jobs in all lanes: while there are any, this one may be among them
        Raises UnknownJob when there has been no trace for a while: a follower may come before the job it follows.
        """
        if result is not None:
            self.final = FinalRecord.from_json(result)
            return self.record(self.final)
        if num_traces:
            self._unknown_since_s = None
            if self.last is not None:
                self.rewind()
        elif not num_queued:
            if self._unknown_since_s is None:
                self._unknown_since_s = now_s
            if now_s - self._unknown_since_s >= UNKNOWN_GRACE_S:
                raise UnknownJob(self.job_id)
        return ()

    def _take(self, entry_id: EntryId, entry: Entry, payload: bytes) -> Sequence[Delivery]:
        self.last = entry_id
        self._last_payload = payload
        if isinstance(entry, Chunk):
            chunks = self._deliver(entry)
            is_seen = self._after is not None and entry_id <= self._after
            return () if is_seen else [(entry_id, chunk) for chunk in chunks]
        if isinstance(entry, Restart):
            self._seek(entry.keep)
        elif isinstance(entry, End):
            self.end = entry
        return ()

    def _seek(self, position: int) -> None:
        """Go on after `position` tokens of the answer; text continues where it stood when they were out."""
        if position == self._position:
            return
        self._position = position
        while self._marks and self._marks[-1][0] > position:
            self._marks.pop()
        self._text = dict(self._marks[-1][1]) if self._marks else {}

    def _deliver(self, chunk: Chunk) -> Sequence[Chunk]:
        """Cut off what an earlier epoch has delivered already, and count the rest as delivered."""
        key = _text_key(chunk)
        text = chunk.text if chunk.tool is None else chunk.tool.arguments_delta
        text_start, shown = self._text.get(key, 0), self._shown.get(key)
        known_ids = self._check_known(chunk.ids)
        known_text = min(max((shown or 0) - text_start, 0), len(text))
        self._position += len(chunk.ids)
        self._ids.extend(chunk.ids[known_ids:])
        if text or chunk.tool is not None:
            self._text[key] = text_start + len(text)
            self._shown[key] = max(shown or 0, text_start + len(text))
            self._marks.append((self._position, dict(self._text)))
        repeats_head = chunk.tool is not None and chunk.tool.id is not None and shown is not None
        if not known_ids and not known_text and not repeats_head:
            return (chunk,)
        return self._remainder(chunk, known_ids, text[known_text:])

    def _check_known(self, ids: Sequence[int]) -> int:
        """How many of `ids` were delivered before. Raises StreamDiverged when they are other tokens."""
        num_known = min(max(len(self._ids) - self._position, 0), len(ids))
        for i in range(num_known):
            if self._ids[self._position + i] != ids[i]:
                raise StreamDiverged(self.job_id, self._position + i)
        return num_known

    def _remainder(self, chunk: Chunk, known_ids: int, text: str) -> Sequence[Chunk]:
        ids = chunk.ids[known_ids:]
        if not ids and not text:
            return ()
        tool = chunk.tool
        if tool is not None:  # its id and name were delivered with the first piece
            tool = ToolDelta(index=tool.index, arguments_delta=text)
        logprobs = None if chunk.logprobs is None else chunk.logprobs[known_ids:]
        shown_text = "" if chunk.tool is not None else text
        return (Chunk(ids=ids, text=shown_text, channel=chunk.channel, tool=tool, logprobs=logprobs),)
