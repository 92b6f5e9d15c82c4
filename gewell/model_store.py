"""Where model folders live on this machine. No torch.

A model is a folder below the models directory, named after the model, with a `config.json` (or only a `tokenizer.json`,
when it is a tokenizer). A folder is moved there in one step when it is whole, so whatever has a name there is usable.
Names that start with a dot are work in progress. A few small models come with the package itself.
"""

import os
from pathlib import Path

from gewell.errors import CheckpointError, ConfigError

SHIPPED_DIR = Path(__file__).parent / "shipped"


def models_dir() -> Path:
    """`$GEWELL_MODELS_DIR`, else `gewell/models` below the user's data directory (`$XDG_DATA_HOME`)."""
    override = os.environ.get("GEWELL_MODELS_DIR")
    if override:
        return Path(override).expanduser()
    return _xdg("XDG_DATA_HOME", ".local/share") / "gewell" / "models"


def downloads_dir() -> Path:
    """Where unfinished downloads wait to be resumed (`$XDG_CACHE_HOME`)."""
    return _xdg("XDG_CACHE_HOME", ".cache") / "gewell" / "downloads"


def model_path(name: str) -> Path:
    """Folder of a model: a path to one, or the name of a stored model or of one that comes with the package.

    Raises CheckpointError when there is none.
    """
    for folder in (Path(name).expanduser(), models_dir() / name, SHIPPED_DIR / name):
        if _is_model(folder):
            return folder
    stored = ", ".join(list_models()) or "none"
    raise CheckpointError(
        f"model {name!r}: neither a folder with a config.json or tokenizer.json nor stored in {models_dir()} "
        f"(stored: {stored})"
    )


def list_models() -> list[str]:
    """Names of the stored models and of those that come with the package, sorted."""
    folders = [folder for folder in (models_dir(), SHIPPED_DIR) if folder.is_dir()]
    entries = [entry for folder in folders for entry in folder.iterdir()]
    return sorted({entry.name for entry in entries if not entry.name.startswith(".") and _is_model(entry)})


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / "tokenizer.json").is_file()


def _xdg(variable: str, default: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        return Path.home() / default
    if not Path(value).is_absolute():
        raise ConfigError(variable, value, "must be an absolute path")
    return Path(value)
