#!/usr/bin/env python3
"""A producer in Python without our client: only the `redis` package.

python follow.py enqueue ID PROMPT    add a job
python follow.py follow ID            stream its answer, whatever is lost on the way
python follow.py result ID            print its final record (JSON)
GEWELL_REDIS and GEWELL_NAMESPACE say where.
"""

import json
import os
import sys
import time

import redis

URL = os.environ.get("GEWELL_REDIS", "redis://127.0.0.1:6379/0")
NS = os.environ.get("GEWELL_NAMESPACE", "gewell")
SILENCE_S = 1.0


def parse_id(text: str) -> tuple[int, int]:
    epoch, _, seq = text.partition("-")
    return int(epoch), int(seq)


class Follower:
    """Prints every piece of text once and in order."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.last = ""  # id of the newest entry taken
        self.at = 0  # characters before the next chunk; less than `shown` while a new epoch repeats what was shown
        self.shown = 0
        self.state = ""

    def run(self) -> str:
        while not self.state:
            try:
                with redis.Redis.from_url(URL, decode_responses=True) as link, link.pubsub() as channel:
                    self.listen(link, channel)
            except redis.ConnectionError:  # (5) a lost link: from the top
                time.sleep(0.2)
        return self.state

    def listen(self, link: redis.Redis, channel: redis.client.PubSub) -> None:
        channel.subscribe(f"{NS}:ev:{self.job_id}")  # (1)
        while (message := channel.get_message(timeout=10)) is None or message["type"] != "subscribe":
            pass  # confirmed: what comes now is announced, what came before is in the range
        self.read_range(link)
        while not self.state:
            message = channel.get_message(timeout=SILENCE_S)
            if message is None:
                self.read_range(link)  # (4)
            elif message["type"] == "message":
                entry, _, payload = message["data"].partition(" ")
                if self.last and parse_id(entry) <= parse_id(self.last):
                    continue
                epoch, seq = parse_id(self.last) if self.last else (0, 0)
                if self.last and parse_id(entry) == (epoch, seq + 1):
                    self.take(entry, "end" if "state" in json.loads(payload) else "d", payload)  # (3)
                else:
                    self.read_range(link)  # a gap, or another epoch

    def read_range(self, link: redis.Redis) -> None:
        """(2) Everything behind `last`, from the stream itself."""
        out = f"{NS}:out:{self.job_id}"
        rows = link.xrange(out, min=self.last or "-")
        if self.last and (not rows or rows[0][0] != self.last):  # another stream than was read so far
            self.last, self.at = "", 0
            rows = link.xrange(out)
        for entry, fields in rows:
            if entry != self.last:
                ((field, payload),) = fields.items()
                self.take(entry, field, payload)
        if not rows and (raw := link.get(f"{NS}:res:{self.job_id}")) is not None:  # (6) no stream: the record
            record = json.loads(raw)
            self.at = 0
            self.take("", "d", json.dumps({"t": record["text"], "ch": "content"}))
            self.state = record["state"]

    def take(self, entry: str, field: str, payload: str) -> None:
        self.last = entry
        data = json.loads(payload)
        if field == "d" and data["ch"] == "content":
            text = data["t"]
            print(text[max(self.shown - self.at, 0) :], end="", flush=True)
            self.at += len(text)
            self.shown = max(self.shown, self.at)
        elif field == "restart" and data["keep"] == 0:  # the stream was lost and is written again
            self.at = 0
        elif field == "end":
            self.state = data["state"]


def main(command: str, job_id: str, prompt: str = "") -> int:
    if command == "follow":
        state = Follower(job_id).run()
        print()
        return 0 if state == "done" else 1
    link = redis.Redis.from_url(URL, decode_responses=True)
    if command == "enqueue":
        body = {"kind": "completion", "request": {"prompt": prompt, "max_tokens": 64}}
        print(link.xadd(f"{NS}:jobs:normal", {"v": 1, "id": job_id, "body": json.dumps(body)}))
        return 0
    record = link.get(f"{NS}:res:{job_id}")
    print(record or "", end="\n" if record else "")
    return 0 if record else 1


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in ("enqueue", "follow", "result"):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
