import itertools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakeredis import TcpFakeServer

sys.path.insert(0, str(Path(__file__).parent))  # harness.py

from harness import Harness  # found by the path above

from gewell.embedded import EmbeddedServer, Persistence

_namespaces = itertools.count()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A real Valkey for all tests that do not disturb the server itself."""
    with EmbeddedServer(tmp_path_factory.mktemp("valkey"), persistence=Persistence.NONE) as running:
        yield running


class FakeServer:
    """fakeredis behind a socket: no process, no files, enough for the commands of one connection at a time."""

    def __init__(self) -> None:
        self._server = TcpFakeServer(("127.0.0.1", 0), server_type="valkey")
        self.url = f"redis://127.0.0.1:{self._server.server_address[1]}/0"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


@pytest.fixture(params=["valkey", "fakeredis"])
def any_harness(request: pytest.FixtureRequest, server: EmbeddedServer, tmp_path: Path) -> Iterator[Harness]:
    """A namespace on the real server, and the same on fakeredis: two readings of what a command means."""
    fake = FakeServer() if request.param == "fakeredis" else None
    made = Harness(fake or server, f"t{next(_namespaces)}", tmp_path)
    yield made
    made.close()
    if fake is not None:
        fake.close()


@pytest.fixture
def harness(server: EmbeddedServer, tmp_path: Path) -> Iterator[Harness]:
    made = Harness(server, f"t{next(_namespaces)}", tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared(server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """A namespace with one running worker for a whole module; tests take ids of their own."""
    made = Harness(server, f"t{next(_namespaces)}", tmp_path_factory.mktemp("shared"))
    made.start_worker()
    yield made
    made.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server that the test may kill, stall and restart."""
    with EmbeddedServer(tmp_path / "valkey", persistence=Persistence.ALWAYS) as running:
        yield running
