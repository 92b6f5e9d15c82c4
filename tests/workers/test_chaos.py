"""The chaos suite in its short form; `make chaos` runs the long one."""

import shutil

import pytest
from chaos import make_parser, run

pytestmark = [pytest.mark.redis, pytest.mark.timeout(170)]

SHORT = ["--jobs", "240", "--faults", "20", "--seed", "11"]


@pytest.mark.parametrize("persistence", ["always", "everysec"])
def test_all_promises_hold_under_random_faults(persistence: str):
    assert run(make_parser().parse_args([*SHORT, "--persistence", persistence])) == []


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server on this machine")
def test_all_promises_hold_on_redis_too():
    binary = shutil.which("redis-server")
    assert binary is not None
    assert run(make_parser().parse_args([*SHORT, "--persistence", "always", "--binary", binary])) == []
