"""Passwords of the server stay out of what is printed: it ends up in logs and bug reports."""

import pytest
from gewell_producers.client import Client
from gewell_workers.config import WorkerConfig

from gewell.cli.main import run
from gewell.errors import ConfigError
from gewell.redis_url import check_url, shown_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://worker:barley@queue:6380/2", "redis://queue:6380/2"),
        ("rediss://:barley@queue", "rediss://queue:6379"),
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("unix:///run/queue.sock", "unix:///run/queue.sock"),
    ],
)
def test_an_address_is_shown_without_user_and_password(url, shown):
    assert check_url(url) == url
    assert shown_url(url) == shown


@pytest.mark.parametrize("take", [check_url, lambda url: WorkerConfig(redis_url=url), Client])
@pytest.mark.parametrize("url", ["http://worker:barley@queue:6380", "redis://worker:barley@queue:port"])
def test_a_wrong_address_is_refused_without_its_password(take, url):
    with pytest.raises(ConfigError) as refusal:
        take(url)
    assert refusal.value.field == "redis"
    assert "queue" in str(refusal.value)
    assert "barley" not in str(refusal.value)


@pytest.mark.parametrize("place", ["queue/jobs", "queue/1/2", "queue/-1", "queue/0x1", "queue?db=jobs"])
def test_a_database_that_is_no_number_is_not_taken_for_the_first(place):
    with pytest.raises(ConfigError, match="queue"):
        check_url(f"redis://{place}")


@pytest.mark.parametrize("place", ["queue", "queue/", "queue/3", "queue/3/", "queue?db=3"])
def test_a_database_is_a_number_or_left_out(place):
    assert check_url(f"rediss://{place}") == f"rediss://{place}"


@pytest.mark.parametrize("command", [["dead", "list"], ["doctor"]])
@pytest.mark.parametrize("url", ["redis://worker:barley@127.0.0.1:1/0", "redis://worker:barley@127.0.0.1:port"])
def test_a_command_without_a_server_is_one_line_without_a_password(command, url, capsys):
    assert run([*command, "--redis", url]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "127.0.0.1" in line
    assert "barley" not in line
