"""Clients that submit jobs and read results. `from gewell_producers import Client, Job`; names load on first use."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gewell_producers.async_client import AsyncClient as AsyncClient
    from gewell_producers.client import Client as Client
    from gewell_producers.job import Job as Job

_HOMES = {
    "AsyncClient": "gewell_producers.async_client",
    "Client": "gewell_producers.client",
    "Job": "gewell_producers.job",
}


def __getattr__(name: str) -> Any:
    # Lazy, because the command group looks into this package for its list of commands and must not load redis for that.
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(home), name)
