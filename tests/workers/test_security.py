"""Who may do what: the shipped ACL file on a real server, and TLS."""

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from gewell_producers import Client, Job
from gewell_workers.doctor import Verdict, examine
from gewell_workers.resp import Client as Link
from gewell_workers.resp import LinkLost
from harness import Harness, wait_for

from gewell.embedded import EmbeddedServer
from gewell.protocol import Keys, State, job_entry

pytestmark = pytest.mark.redis

ACL = Path(__file__).parents[2] / "workers" / "deploy" / "users.acl"
TLS = Path(__file__).parent / "tls"
KEYS = Keys("gewell")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server with the shipped users; each one's password is its name."""
    text = ACL.read_text()
    for role in ("producer", "worker", "operator"):
        text = text.replace(f"@{role.upper()}_PASSWORD@", role)
    (tmp_path / "users.acl").write_text(text)
    with EmbeddedServer(tmp_path / "d", extra_args=("--aclfile", str(tmp_path / "users.acl"))) as server:
        yield server


def url_of(server: EmbeddedServer, role: str) -> str:
    return f"redis://{role}:{role}@127.0.0.1:{server.port}/0"


@pytest.fixture
def serving(guarded: EmbeddedServer, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """The same with a worker that logs in as `worker`."""
    harness = Harness(guarded, "gewell", tmp_path)
    try:
        harness.start_worker(url=url_of(guarded, "worker"), step_s=0.002)
        yield guarded
    finally:
        harness.abandon()


def test_worker_and_producer_get_along_with_what_they_are_given(serving: EmbeddedServer):
    with Client(url_of(serving, "producer")) as client:
        record = client.run(Job.completion("hi", max_tokens=20, seed=1), timeout_s=20)
        assert record.state == State.DONE
        job = Job.completion("hi", max_tokens=5_000)
        client.submit(job)
        with client.follow(job.id) as stream:
            next(iter(stream))
            client.cancel(job.id)
        record = wait_for(lambda: client.record(job.id))
        assert record.state == State.CANCELLED
        assert client.workers()
        assert client.queue_lengths()
        records = list(client.map([Job.completion("x", max_tokens=2) for _ in range(5)]))
        assert {one.state for one in records} == {State.DONE}


FORBIDDEN: dict[str, Callable[[Any], Any]] = {
    "read other people's jobs": lambda r: r.xrange(KEYS.jobs("normal")),
    "read them through the group": lambda r: r.xreadgroup("gpu", "me", {KEYS.jobs("normal"): ">"}),
    "delete jobs": lambda r: r.xdel(KEYS.jobs("normal"), "1-1"),
    "trim the queue": lambda r: r.xtrim(KEYS.jobs("normal"), maxlen=0),
    "drop a key": lambda r: r.delete(KEYS.res("a")),
    "forge a result": lambda r: r.set(KEYS.res("a"), "{}"),
    "forge a chunk": lambda r: r.xadd(KEYS.out("a"), {"d": "{}"}, id="9-9"),
    "forge an event": lambda r: r.publish(KEYS.ev("a"), "1-2 {}"),
    "change a job": lambda r: r.hset(KEYS.job("a"), "state", "done"),
    "command the workers": lambda r: r.xadd(KEYS.ctl, {"cmd": "drain"}),
    "write to another namespace": lambda r: r.xadd("other:jobs:normal", {"id": "a"}),
    "read another namespace": lambda r: r.get("other:res:a"),
    "list keys": lambda r: list(r.scan_iter("*")),
    "watch commands": lambda r: r.execute_command("MONITOR"),
    "configure": lambda r: r.config_get("*"),
    "flush": lambda r: r.flushall(),
    "end the server": lambda r: r.shutdown(),
    "run scripts": lambda r: r.eval("return 1", 0),
    "listen to foreign channels": lambda r: r.execute_command("SUBSCRIBE", "other:ev:a"),
}


@pytest.mark.parametrize("deed", FORBIDDEN)
def test_producer_cannot(guarded: EmbeddedServer, deed: str):
    with (
        redis.Redis.from_url(url_of(guarded, "producer")) as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        FORBIDDEN[deed](client)


def test_nobody_comes_in_without_a_name(guarded: EmbeddedServer):
    url = f"redis://127.0.0.1:{guarded.port}/0"
    with redis.Redis.from_url(url) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


def test_operator_sees_and_steers(serving: EmbeddedServer):
    with redis.Redis.from_url(url_of(serving, "operator")) as client:
        assert {finding.verdict for finding in examine(client, KEYS)} == {Verdict.OK}
        client.xadd(KEYS.ctl, {"cmd": "drain"})
        wait_for(lambda: not list(client.scan_iter(KEYS.workers_pattern)))


class TlsFront:
    """Ends TLS in front of a plain server, as a proxy or the server's own TLS port does."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(5)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(TLS / "server.crt", TLS / "server.key")
        server = await asyncio.start_server(self._pair, "127.0.0.1", 0, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        self._stop = asyncio.Event()
        self._started.set()
        await self._stop.wait()
        server.close()
        pairs = asyncio.all_tasks() - {asyncio.current_task()}
        for pair in pairs:
            pair.cancel()
        await asyncio.gather(*pairs, return_exceptions=True)

    async def _pair(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(1 << 16):
                    target.write(data)
                    await target.drain()
            except OSError:
                pass
            target.close()

        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(5)


def test_worker_speaks_tls_and_checks_the_certificate(server: EmbeddedServer, harness: Harness):
    front = TlsFront(server.port)
    try:
        base = f"rediss://localhost:{front.port}/0"
        harness.start_worker(url=f"{base}?ssl_ca_certs={TLS / 'server.crt'}")
        body = {"kind": "completion", "request": {"prompt": "hi", "max_tokens": 3}}
        harness.redis.xadd(harness.keys.jobs("normal"), job_entry("a", json.dumps(body)))
        assert harness.result("a").state == State.DONE

        async def connect() -> None:
            await Link(base, name="test").connect()

        with pytest.raises(LinkLost, match="certificate"):
            asyncio.run(connect())
    finally:
        front.close()


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
@pytest.mark.parametrize("patience", [0, 1])
def test_a_server_that_cuts_the_connection_is_named_with_a_reason(scheme: str, patience: int):
    """asyncio's errors for it have no text of their own."""

    async def connect() -> str:
        async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(patience)
            writer.close()

        async with await asyncio.start_server(cut, "127.0.0.1", 0) as server:
            url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(LinkLost) as caught:
                await Link(url, name="test").connect()
            return str(caught.value)

    line = asyncio.run(connect())
    assert line.startswith("no connection to 127.0.0.1:")
    assert not line.endswith(": ")
    assert ("TLS" in line) == (scheme == "rediss")


def test_a_server_that_waits_for_another_greeting_is_said_to_be_slow(server: EmbeddedServer):
    async def connect() -> None:
        await Link(f"rediss://127.0.0.1:{server.port}/0", name="test", timeout_s=0.3).connect()

    with pytest.raises(LinkLost, match=r"timed out .does it speak TLS"):
        asyncio.run(connect())
