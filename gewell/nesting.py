"""Walks over parsed JSON that do not recurse: parsers take more levels than writers and recursive readers do."""

import math
from collections.abc import Iterable
from typing import Any


def is_deeper_than(value: Any, limit: int) -> bool:
    """Whether more than `limit` lists and objects lie inside one another."""
    level = [value]
    for _ in range(limit + 1):
        level = [item for item in level if isinstance(item, dict | list | tuple)]
        if not level:
            return False
        level = [item for box in level for item in _items(box)]
    return True


def find_not_finite(value: Any) -> tuple[str, float] | None:
    """A NaN or an infinity with its path, such as `.x[1]`, or None. `value` must not contain itself."""
    level = [value]
    while level:
        if any(isinstance(item, float) and not math.isfinite(item) for item in level):
            return _locate_not_finite(value)
        level = [item for box in level if isinstance(box, dict | list | tuple) for item in _items(box)]
    return None


def _items(box: Any) -> Iterable[Any]:
    return box.values() if isinstance(box, dict) else box


def _locate_not_finite(value: Any) -> tuple[str, float]:
    """Only called when there is one: writing paths is slow."""
    waiting = [("", value)]
    while True:
        path, item = waiting.pop()
        if isinstance(item, dict):
            waiting += [(f"{path}.{name}", inner) for name, inner in item.items()]
        elif isinstance(item, list | tuple):
            waiting += [(f"{path}[{idx}]", inner) for idx, inner in enumerate(item)]
        elif isinstance(item, float) and not math.isfinite(item):
            return path, item
