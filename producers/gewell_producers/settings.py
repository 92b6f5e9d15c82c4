"""The environment of a producer, read in this one place."""

import os

from gewell.embedded import default_url as default_url
from gewell.protocol import DEFAULT_NAMESPACE


def default_namespace() -> str:
    """GEWELL_NAMESPACE, else "gewell"."""
    return os.environ.get("GEWELL_NAMESPACE") or DEFAULT_NAMESPACE
