"""How deep JSON is nested. Parsers take more levels than writers and recursive readers do, so the door checks it."""

from typing import Any


def is_deeper_than(value: Any, limit: int) -> bool:
    """Whether more than `limit` lists and objects lie inside one another in parsed JSON. Does not recurse."""
    level = [value]
    for _ in range(limit + 1):
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return False
        level = [item for box in level for item in (box.values() if isinstance(box, dict) else box)]
    return True
