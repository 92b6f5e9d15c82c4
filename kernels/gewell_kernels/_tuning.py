"""Tuning tables: tiles per shape as data, measured on one device. A device without one gets the defaults in code."""

import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch

_FOLDER = Path(__file__).parent / "tuning"


def tuned(op: str, device: torch.device, **shape: Any) -> dict[str, int] | None:
    """Tiles of the first entry of the device's table whose shape fields equal these; None when there is none."""
    if device.type != "cuda":
        return None
    for entry in _entries(op, torch.cuda.get_device_name(device)):
        if all(entry["shape"].get(name) == value for name, value in shape.items()):
            return dict(entry["tiles"])
    return None


@cache
def _entries(op: str, device_name: str) -> list[dict[str, Any]]:
    path = _FOLDER / f"{op},device={device_name.replace(' ', '_')}.json"
    if not path.is_file():
        return []
    try:
        entries = json.loads(path.read_text())["entries"]
        return [{"shape": dict(entry["shape"]), "tiles": dict(entry["tiles"])} for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        warnings.warn(f"{path.name} is no tuning table ({error!r}); using default tiles", stacklevel=2)
        return []
