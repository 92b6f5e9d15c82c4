"""The chaos suite in its short form; `make chaos` runs the long one."""

import argparse

import pytest
from chaos import make_parser, run

pytestmark = pytest.mark.redis


@pytest.mark.timeout(110)
@pytest.mark.parametrize("persistence", ["always", "everysec"])
def test_all_promises_hold_under_random_faults(persistence: str):
    args: argparse.Namespace = make_parser().parse_args(
        ["--jobs", "300", "--faults", "25", "--seed", "11", "--rate", "60", "--persistence", persistence]
    )
    assert run(args) == []
