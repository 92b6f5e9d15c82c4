"""`gewell up` as a user starts it: server and worker from nothing, and clear words when something is missing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from fault_proxy import FaultProxy
from harness import wait_for

from gewell.embedded import EmbeddedServer, find_running
from gewell.protocol import FinalRecord, Keys, job_entry

pytestmark = pytest.mark.redis

BODY = '{"kind":"completion","request":{"prompt":"hi","max_tokens":3}}'


class Up:
    def __init__(self, folder: Path, *args: str, **scripted: str) -> None:
        self.log_path = folder / f"up-{len(list(folder.glob('up-*')))}.log"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GEWELL_")}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gewell_workers", *args],
                env=environment
                | {"GEWELL_DATA_DIR": str(folder), "GEWELL_MODELS_DIR": str(folder / "models")}
                | scripted,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_until_ready(self) -> None:
        wait_for(lambda: "stop with Ctrl-C" in self.log or self.process.poll() is not None)
        assert self.process.poll() is None, self.log


def run_job(url: str, job_id: str) -> FinalRecord:
    with redis.Redis.from_url(url) as client:
        client.xadd(Keys().jobs("normal"), job_entry(job_id, BODY))
        return FinalRecord.from_json(wait_for(lambda: client.get(Keys().res(job_id))))


def test_up_alone_serves_jobs_and_keeps_them_for_the_next_up(tmp_path: Path):
    first = Up(tmp_path, "--model", "scripted")
    first.wait_until_ready()
    running = find_running(tmp_path / "queue")
    assert running is not None
    assert "XADD gewell:jobs:normal" in first.log
    record = run_job(running.url, "a")
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(20) == 0
    assert find_running(tmp_path / "queue") is None  # the server went with it
    second = Up(tmp_path, "--model", "scripted")
    second.wait_until_ready()
    running = find_running(tmp_path / "queue")
    assert running is not None
    with redis.Redis.from_url(running.url) as client:
        assert FinalRecord.from_json(client.get(Keys().res("a"))) == record
    second.process.terminate()
    assert second.process.wait(20) == 0


def test_server_left_by_a_killed_up_is_used_again(tmp_path: Path):
    first = Up(tmp_path, "--model", "scripted")
    first.wait_until_ready()
    first.process.kill()
    first.process.wait()
    left = find_running(tmp_path / "queue")
    assert left is not None
    second = Up(tmp_path, "--model", "scripted")
    second.wait_until_ready()
    assert "using the server that runs already" in second.log
    assert run_job(left.url, "a").text
    second.process.terminate()
    assert second.process.wait(20) == 0
    wait_for(lambda: has_ended(left.pid))  # it had no other user


def test_server_ends_with_the_last_up_that_uses_it(tmp_path: Path):
    first = Up(tmp_path, "--model", "scripted")
    first.wait_until_ready()
    second = Up(tmp_path, "--model", "scripted")
    second.wait_until_ready()
    first.process.terminate()
    assert first.process.wait(20) == 0
    running = find_running(tmp_path / "queue")
    assert running is not None
    assert run_job(running.url, "a").text
    second.process.terminate()
    assert second.process.wait(20) == 0
    wait_for(lambda: has_ended(running.pid))


def test_ups_started_together_use_one_server(tmp_path: Path):
    both = [Up(tmp_path, "--model", "scripted") for _ in range(2)]
    for up in both:
        up.wait_until_ready()
    assert sum("using the server that runs already" in up.log for up in both) == 1
    for up in both:
        up.process.terminate()
    assert [up.process.wait(20) for up in both] == [0, 0]
    assert find_running(tmp_path / "queue") is None


def test_second_ctrl_c_takes_the_server_along(tmp_path: Path):
    up = Up(tmp_path, "--model", "scripted", GEWELL_SCRIPTED_STEP_S="0.05")
    up.wait_until_ready()
    running = find_running(tmp_path / "queue")
    assert running is not None
    with redis.Redis.from_url(running.url) as client:
        client.xadd(Keys().jobs("normal"), job_entry("a", BODY.replace("3", "5000")))
        wait_for(lambda: client.exists(Keys().out("a")))
    up.process.send_signal(signal.SIGINT)
    wait_for(lambda: "draining" in up.log)
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(10) == 130
    wait_for(lambda: has_ended(running.pid))


def test_an_engine_that_hangs_takes_the_server_along(tmp_path: Path):
    up = Up(tmp_path, "--model", "scripted", "--stall-s", "0.5", "--lease-s", "0.6", GEWELL_SCRIPTED_TRAPS="1")
    up.wait_until_ready()
    running = find_running(tmp_path / "queue")
    assert running is not None
    with redis.Redis.from_url(running.url) as client:
        client.xadd(Keys().jobs("normal"), job_entry("a", BODY.replace("hi", "!!hang")))
    assert up.process.wait(20) == 71
    wait_for(lambda: has_ended(running.pid))


def has_ended(pid: int) -> bool:
    """Or is a child whose parent, the killed `up`, will not ask for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_no_server_and_no_waiting_is_exit_code_69_with_one_line(tmp_path: Path):
    up = Up(tmp_path, "--model", "scripted", "--redis", "redis://127.0.0.1:1/0", "--no-wait")
    assert up.process.wait(20) == 69
    assert "no connection to 127.0.0.1:1" in up.log
    assert "server ready" not in up.log
    assert "Traceback" not in up.log


def test_wrong_password_is_one_clear_line_that_does_not_show_it(tmp_path: Path):
    with EmbeddedServer(tmp_path / "s", extra_args=("--requirepass", "sesame")) as server:
        url = f"redis://:open-barley@127.0.0.1:{server.port}/0"
        line = fails(tmp_path, "--model", "scripted", "--redis", url)
    assert "WRONGPASS" in line
    assert str(server.port) in line
    assert "barley" not in line


def test_server_that_comes_later_is_waited_for(tmp_path: Path):
    with EmbeddedServer(tmp_path / "s") as server:
        port = server.port
    up = Up(tmp_path, "--model", "scripted", "--redis", f"redis://127.0.0.1:{port}/0")
    wait_for(lambda: "trying again" in up.log)
    with EmbeddedServer(tmp_path / "s", port=port) as server:
        up.wait_until_ready()
        assert up.log.count("trying again") == 1  # said once, not in a loop
        assert run_job(server.url, "a").text
        up.process.terminate()
        assert up.process.wait(20) == 0


def fails(tmp_path: Path, *args: str) -> str:
    """The one line that a start with these arguments ends in."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GEWELL_")}
    environment |= {"GEWELL_DATA_DIR": str(tmp_path), "GEWELL_MODELS_DIR": str(tmp_path / "models")}
    gewell = Path(sys.executable).with_name("gewell")
    ran = subprocess.run([gewell, "up", *args], env=environment, capture_output=True, timeout=30)
    assert ran.returncode == 2
    lines = ran.stderr.decode().strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[1]", "config.json"),
        ('{"a":', "config.json"),
        ('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}', "llama"),
    ],
)
def test_folder_that_holds_no_model_of_ours_is_one_clear_line(tmp_path: Path, config: str, message: str):
    (tmp_path / "config.json").write_text(config)
    assert message in fails(tmp_path, "--model", str(tmp_path))
    assert find_running(tmp_path / "queue") is None


def test_server_lost_between_connecting_and_the_first_look_is_waited_for(tmp_path: Path):
    with EmbeddedServer(tmp_path / "s") as server:
        proxy = FaultProxy(server.port, b"INFO", lambda: None, recover=True)
        try:
            up = Up(tmp_path, "--model", "scripted", "--redis", proxy.url)
            up.wait_until_ready()
            assert proxy.has_fired.is_set()
            assert "Traceback" not in up.log
            up.process.terminate()
            assert up.process.wait(20) == 0
        finally:
            proxy.close()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "no-such-model"), "no-such-model"),
        (("--model", "scripted", "--redis", "nonsense"), "nonsense"),
        (("--model", "scripted", "--ns", "a:b"), "a:b"),
        (("--model", "scripted", "--lease-s", "0"), "lease_s"),
        (("--model", "scripted", "--rows", "0"), "rows: 0"),
        (("--model", "scripted", "--max-context", "1"), "max_context: 1"),
        (("--model", "scripted", "--kv-gib", "nan"), "kv_gib: nan"),
        (("--model", "scripted", "--kv-gib", "-1"), "kv_gib: -1"),
        (("--model", "scripted", "--device", "tpu"), "device: 'tpu'"),
    ],
)
def test_unusable_settings_are_one_clear_line(tmp_path: Path, args: tuple[str, ...], message: str):
    assert message in fails(tmp_path, *args)
