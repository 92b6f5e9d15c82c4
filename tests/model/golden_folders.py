"""Where the golden folders lie, and small helpers to break copies of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[1] / "fixtures"
TEXT_FOLDERS = ("gemma3-text", "gemma4-dense", "gemma4-moe", "gemma4-edge", "gemma4-vision")


def copy_of(name: str, target: Path) -> Path:
    """A checkpoint without its golden outputs, free to be changed."""
    shutil.copytree(FIXTURES / name, target, ignore=shutil.ignore_patterns("golden.*"))
    return target


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
