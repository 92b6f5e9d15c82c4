import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # harness.py

from harness import Harness  # found by the path above

from gewell.embedded import EmbeddedServer, Persistence

_namespaces = itertools.count()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A real Valkey for all tests that do not disturb the server itself."""
    with EmbeddedServer(tmp_path_factory.mktemp("valkey"), persistence=Persistence.NONE) as running:
        yield running


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
