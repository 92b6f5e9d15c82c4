"""The server's clock, which all deadlines and stream ids follow."""

import time

from gewell_workers.resp import Client


class ServerClock:
    def __init__(self) -> None:
        self.offset_ms = 0.0  # server's time minus ours

    async def measure(self, client: Client) -> None:
        """Take the server's time; half the round trip is assumed to be the way back."""
        before_s = time.time()
        seconds, micros = await client.call("TIME")
        after_s = time.time()
        self.offset_ms = int(seconds) * 1e3 + int(micros) / 1e3 - (before_s + after_s) / 2 * 1e3

    def now_ms(self) -> int:
        return int(time.time() * 1e3 + self.offset_ms)
