"""`gewell gateway`: the OpenAI-compatible HTTP surface in front of the queue."""

from pathlib import Path
from typing import Annotated

import typer

from gewell.model_store import model_path
from gewell_producers.cli.options import Namespace, Redis
from gewell_producers.settings import default_namespace, default_url


def gateway(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    api_keys: Annotated[
        Path | None, typer.Option(help='JSON file of keys: {"<key>": {"tenant": "a", "max_in_flight": 64}}.')
    ] = None,
    served_name: Annotated[
        list[str] | None, typer.Option(help="A further model name to accept; may be repeated.")
    ] = None,
    any_model: Annotated[bool, typer.Option(help="Accept every model name.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Folder or stored name of the model, for /tokenize; default: the served name.")
    ] = None,
    redis: Redis = None,
    ns: Namespace = None,
) -> None:
    """Serve OpenAI's API: chat and text completions, models, health, metrics.

    A program written for OpenAI's API works with its base URL set to http://HOST:PORT/v1.
    """
    import uvicorn

    from gewell_producers.gateway.access import Access
    from gewell_producers.gateway.app import GatewaySettings, create_app

    settings = GatewaySettings(
        url=redis or default_url(),
        namespace=ns or default_namespace(),
        access=Access() if api_keys is None else Access.from_file(api_keys),
        served_names=tuple(served_name or ()),
        any_model=any_model,
        model_folder=None if model is None else model_path(model),
    )
    print(f"gewell: base URL http://{host}:{port}/v1", flush=True)
    uvicorn.run(create_app(settings), host=host, port=port, log_level="warning", access_log=False)
