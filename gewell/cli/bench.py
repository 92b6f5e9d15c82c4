"""Measure this machine: `gewell bench NAME`.

A benchmark is an entry point in the group "gewell.benches", brought by the package that it measures.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer

from gewell.cli.main import CommandGroup

BENCHES_GROUP = "gewell.benches"


class BenchGroup(CommandGroup):
    """The registered benchmarks, loaded when called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.entries: Mapping[str, EntryPoint] = {entry.name: entry for entry in entry_points(group=BENCHES_GROUP)}


app = typer.Typer(cls=BenchGroup, add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Measure this machine; every figure comes with how it was taken."""
