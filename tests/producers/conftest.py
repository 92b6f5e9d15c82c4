"""One real server for these tests; each test has a namespace of its own in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from gewell_producers.client import Client
from gewell_producers.connection import Patience

from gewell.embedded import EmbeddedServer, Persistence
from gewell.protocol import Keys
from tests.producers.fake_worker import FakeWorker

IMPATIENT = Patience(connect_s=0.5, reconnect_s=10, no_worker_s=0.2, queue_full_s=0.3)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path_factory.mktemp("valkey"), persistence=Persistence.NONE) as running:
        yield running


@pytest.fixture
def ns(request: pytest.FixtureRequest) -> str:
    return "t" + str(abs(hash(request.node.nodeid)))


@pytest.fixture
def keys(ns: str) -> Keys:
    return Keys(ns)


@pytest.fixture
def raw(server: EmbeddedServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as connection:
        yield connection


@pytest.fixture
def client(server: EmbeddedServer, ns: str) -> Iterator[Client]:
    with Client(server.url, namespace=ns) as made:
        yield made


@pytest.fixture
def impatient(server: EmbeddedServer, ns: str) -> Iterator[Client]:
    with Client(server.url, namespace=ns, patience=IMPATIENT) as made:
        yield made


@pytest.fixture
def worker(server: EmbeddedServer, ns: str) -> Iterator[FakeWorker]:
    with FakeWorker(server.url, ns) as made:
        yield made


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"
