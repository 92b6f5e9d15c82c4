"""The embedded server: a second one on the same files, or one left behind, would corrupt or lose a queue."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from gewell.embedded import EmbeddedServer, Persistence, ServerAlreadyRunning, default_url, find_running, user_data_dir
from gewell.errors import ConfigError, QueueError

pytestmark = pytest.mark.redis


def call(url: str, *command: str) -> object:
    with redis.Redis.from_url(url) as client:
        return client.execute_command(*command)


def test_data_survives_a_clean_stop_and_a_kill(tmp_path: Path):
    server = EmbeddedServer(tmp_path, persistence=Persistence.ALWAYS).start()
    call(server.url, "SET", "a", "1")
    server.stop()
    assert not server.is_running()
    port = server.port
    server.start()
    assert server.port == port
    call(server.url, "SET", "b", "2")
    server.kill()
    with server:
        assert call(server.url, "MGET", "a", "b") == [b"1", b"2"]
        with redis.Redis.from_url(server.url) as client:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("bind") == {"bind": "127.0.0.1"}


def test_without_persistence_a_restart_begins_empty(tmp_path: Path):
    with EmbeddedServer(tmp_path, persistence=Persistence.NONE) as server:
        call(server.url, "SET", "a", "1")
    with server:
        assert call(server.url, "GET", "a") is None


def test_second_server_on_the_same_directory_is_refused_and_told_where(tmp_path: Path):
    with EmbeddedServer(tmp_path) as server:
        with pytest.raises(ServerAlreadyRunning) as caught:
            EmbeddedServer(tmp_path).start()
        assert caught.value.running is not None
        assert caught.value.running.url == server.url
        assert find_running(tmp_path) == caught.value.running
    assert find_running(tmp_path) is None


def test_server_of_a_killed_parent_is_found(tmp_path: Path):
    script = (
        "import sys, time, pathlib; from gewell.embedded import EmbeddedServer;"
        "EmbeddedServer(pathlib.Path(sys.argv[1])).start(); print('up', flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    parent.kill()
    parent.wait()
    parent.stdout.close()
    running = find_running(tmp_path)
    assert running is not None
    assert call(running.url, "PING")
    os.kill(running.pid, signal.SIGTERM)
    deadline = time.monotonic() + 5
    while find_running(tmp_path) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert find_running(tmp_path) is None


def test_unix_socket(tmp_path: Path):
    with EmbeddedServer(tmp_path / "d", unix_socket=tmp_path / "s") as server:
        assert server.url == f"unix://{tmp_path / 's'}"
        assert call(server.url, "PING")


def test_a_server_that_cannot_start_says_why(tmp_path: Path):
    with pytest.raises(QueueError, match="no-such-option"):
        EmbeddedServer(tmp_path / "a", extra_args=("--no-such-option", "1")).start()
    with pytest.raises(QueueError, match="does not start"):
        EmbeddedServer(tmp_path / "b", binary=tmp_path / "nothing").start()
    (tmp_path / "file").write_text("")
    with pytest.raises(QueueError, match="cannot be made"):
        EmbeddedServer(tmp_path / "file" / "c").start()


def test_taken_port_is_an_error(tmp_path: Path):
    with EmbeddedServer(tmp_path / "a") as first, pytest.raises(QueueError, match="in use"):
        EmbeddedServer(tmp_path / "b", port=first.port).start()


def test_unusable_settings_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="port"):
        EmbeddedServer(tmp_path, port=0)
    with pytest.raises(ConfigError, match="unix_socket"):
        EmbeddedServer(tmp_path, unix_socket=Path("/" + "x" * 120))


def test_default_url_prefers_what_is_said_then_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GEWELL_REDIS", raising=False)
    monkeypatch.setenv("GEWELL_DATA_DIR", str(tmp_path))
    assert user_data_dir() == tmp_path
    assert default_url() == "redis://127.0.0.1:6379/0"
    with EmbeddedServer(tmp_path / "queue") as server:
        assert default_url() == server.url
        monkeypatch.setenv("GEWELL_REDIS", "redis://elsewhere:1/0")
        assert default_url() == "redis://elsewhere:1/0"
