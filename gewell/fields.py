"""Reading a JSON object that somebody else wrote: each field is checked as it is taken, and what is left is known.

A wrong value raises InvalidRequest that names the field by its dotted path, the value and the limit.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from gewell.errors import InvalidRequest
from gewell.protocol import ErrorCode, check_id


class Fields:
    """One JSON object being read. A getter checks type and limits and marks the field as known; null is "not given"."""

    def __init__(self, data: Mapping[str, Any], path: str) -> None:
        self._data = data
        self._path = path
        self._known: set[str] = set()
        self._nested_unknown: list[str] = []

    def any(self, name: str) -> Any:
        self._known.add(name)
        return self._data.get(name)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.any(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            refuse(self._path + name, value, "true or false")
        return value

    def number(self, name: str, low: float, high: float, *, open_low: bool = False) -> float | None:
        value = self.any(name)
        return None if value is None else check_number(self._path + name, value, low, high, open_low=open_low)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.any(name)
        if value is None:
            return None
        return check_integer(self._path + name, value, low, high)

    def integers(self, name: str, low: int, high: int, *, max_items: int) -> tuple[int, ...]:
        value = self.any(name)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > max_items:
            refuse(self._path + name, value, f"a list of at most {max_items} whole numbers")
        return tuple(check_integer(f"{self._path}{name}[{i}]", item, low, high) for i, item in enumerate(value))

    def text(self, name: str, *, max_chars: int = 1_024) -> str | None:
        value = self.any(name)
        if value is None:
            return None
        if not isinstance(value, str) or len(value) > max_chars:
            refuse(self._path + name, value, f"a text of at most {max_chars} characters")
        return value

    def identifier(self, name: str) -> str | None:
        value = self.any(name)
        return None if value is None else check_id(value, self._path + name)

    def choice(self, name: str, choices: tuple[str, ...]) -> str | None:
        value = self.any(name)
        if value is None:
            return None
        if not isinstance(value, str) or value not in choices:
            refuse(self._path + name, value, f"one of {', '.join(choices)}")
        return value

    def mapping(self, name: str, *, required: bool = False) -> dict[str, Any]:
        value = self.any(name)
        if value is None and not required:
            return {}
        if not isinstance(value, dict):
            refuse(self._path + name, value, "an object")
        return value

    def note_unknown(self, nested: "Fields") -> None:
        self._nested_unknown.extend(nested.unknown())

    def unknown(self) -> list[str]:
        return [self._path + name[:80] for name in self._data if name not in self._known] + self._nested_unknown


def check_number(path: str, value: Any, low: float, high: float, *, open_low: bool) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (open_low and value == low):
        limit = f"a number above {low}, at most {high}" if open_low else f"a number from {low} to {high}"
        refuse(path, value, limit)
    return float(value)


def check_integer(path: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 16.0 is what some languages send for 16
    if not is_int(value) or not low <= value <= high:
        refuse(path, value, f"a whole number from {low} to {high}")
    return int(value)


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """The value as a message shows it: at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def refuse(path: str, value: Any, limit: str) -> NoReturn:
    raise InvalidRequest(ErrorCode.INVALID_REQUEST, f"{path}: {shown(value)} is not {limit}", path)
