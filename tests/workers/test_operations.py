"""What operators see and do: dead letters sent again, a doctor that finds what is planted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from gewell_workers.doctor import Verdict, examine
from harness import Harness, wait_for

from gewell.embedded import EmbeddedServer
from gewell.protocol import Keys, State

pytestmark = pytest.mark.redis
GEWELL = Path(sys.executable).with_name("gewell")


def gewell(harness: Harness, *args: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [GEWELL, *args, "--redis", harness.server.url, "--ns", harness.ns], capture_output=True, timeout=30
    )


def bury(harness: Harness, job_id: str, prompt: str) -> str:
    body = json.dumps({"kind": "completion", "request": {"prompt": prompt, "max_tokens": 3}})
    fields = {"lane": "low", "entry": "1-1", "id": job_id, "body": body, "reason": "3 workers died"}
    return harness.redis.xadd(harness.keys.dead, fields).decode()


def test_dead_letters_are_listed_without_prompts_shown_whole_and_sent_again(harness: Harness):
    entry, nameless = bury(harness, "a", "secret words"), bury(harness, "", "nobody's")
    listed = gewell(harness, "dead", "list").stdout.decode()
    assert entry in listed
    assert "3 workers died" in listed
    assert "secret words" not in listed
    assert "secret words" in gewell(harness, "dead", "show", entry).stdout.decode()
    # The record of the first life is in the way of the second, and must go.
    harness.redis.hset(harness.keys.job("a"), mapping={"state": "error", "entry": "low/1-1", "digest": "d"})
    harness.redis.set(harness.keys.res("a"), "{}")
    assert gewell(harness, "dead", "redrive", entry).returncode == 0
    assert gewell(harness, "dead", "redrive", nameless).returncode == 2  # it needs an id
    assert gewell(harness, "dead", "redrive", nameless, "--id", "b").returncode == 0
    assert harness.redis.xlen(harness.keys.dead) == 0
    harness.start_worker()
    wait_for(lambda: harness.redis.exists(harness.keys.res("a"), harness.keys.res("b")) == 2)
    assert harness.check_stream("a").state == State.DONE
    assert harness.check_stream("b").state == State.DONE


def test_running_job_is_not_sent_again(harness: Harness):
    entry = bury(harness, "a", "x")
    harness.redis.hset(harness.keys.job("a"), "state", "running")
    ran = gewell(harness, "dead", "redrive", entry)
    assert ran.returncode == 2
    assert b"is running" in ran.stderr
    assert harness.redis.xlen(harness.keys.dead) == 1
    assert gewell(harness, "dead", "drop", entry).returncode == 0
    assert harness.redis.xlen(harness.keys.dead) == 0


def verdicts(harness: Harness) -> dict[str, Verdict]:
    found: dict[str, Verdict] = {}
    for finding in examine(harness.redis, harness.keys):
        if found.get(finding.name) in (None, Verdict.OK):
            found[finding.name] = finding.verdict
    return found


def test_doctor_finds_nothing_wrong_with_a_healthy_queue(own_server: EmbeddedServer, tmp_path: Path):
    harness = Harness(own_server, "well", tmp_path)
    try:
        harness.start_worker()
        assert set(verdicts(harness).values()) == {Verdict.OK}
        assert gewell(harness, "doctor").returncode == 0
    finally:
        harness.close()


def test_doctor_finds_what_is_planted(own_server: EmbeddedServer, tmp_path: Path):
    harness = Harness(own_server, "ill", tmp_path)
    try:
        client: redis.Redis = harness.redis
        client.config_set("maxmemory-policy", "volatile-lru")
        client.config_set("appendonly", "no")
        client.xadd(harness.keys.jobs("low"), {"id": "a"})
        client.xgroup_create(harness.keys.jobs("high"), "gpu", "0", mkstream=True)
        client.xadd(harness.keys.jobs("high"), {"id": "b"})
        client.xreadgroup("gpu", "a foreign reader", {harness.keys.jobs("high"): ">"})
        bury(harness, "a", "x")
        client.config_set("maxmemory", int(client.info("memory")["used_memory"] * 1.2))  # little left, nothing evicted
        found = verdicts(harness)
        assert {name for name, verdict in found.items() if verdict is Verdict.FAIL} == {
            "persistence",
            "eviction",
            "workers",
            "lane low",
        }
        assert {name for name, verdict in found.items() if verdict is Verdict.WARN} >= {
            "memory",
            "lane high",
            "lane normal",
            "dead letters",
        }
        assert gewell(harness, "doctor").returncode == 1
    finally:
        harness.close()


def test_doctor_without_a_server_is_one_line():
    ran = subprocess.run([GEWELL, "doctor", "--redis", "redis://127.0.0.1:1"], capture_output=True, timeout=30)
    assert ran.returncode == 2
    assert ran.stderr.count(b"\n") == 1


def test_keys_of_workers_are_valid_whatever_the_host_is_called(monkeypatch: pytest.MonkeyPatch):
    from gewell_workers.config import new_worker_id

    monkeypatch.setattr("socket.gethostname", lambda: "büro rechner/1" + "x" * 300)
    Keys().worker(new_worker_id())
