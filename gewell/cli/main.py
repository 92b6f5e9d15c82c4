"""The `gewell` command: a group that collects the commands which the packages bring.

A command is an entry point in the group "gewell.commands": `name = "package.module:thing"`, where `thing` is a function
or a `typer.Typer`. A Typer with one command of the entry's own name is that command; any other Typer is a group of
subcommands. Nothing is imported before it is needed: the list in `gewell --help` reads each command's first docstring
line from its source, so that it costs no import of torch and no missing extra can break it.
"""

import ast
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from gewell.errors import ConfigError, GewellError
from gewell.threads import wait_passively

COMMANDS_GROUP = "gewell.commands"
# Distributions whose import name differs from their own name; all others import under their name.
IMPORT_NAMES = {"pillow": "PIL", "pyyaml": "yaml"}
EXIT_REFUSED = 2  # the user's mistake or a missing server: one line on stderr
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells expect


class MissingExtra(GewellError):
    """A command needs an optional dependency that is not installed."""

    def __init__(self, command: str, module: str, extra: str) -> None:
        super().__init__(
            f"{command} needs {module}, which is not installed; run: pip install 'gewell[{extra}]' "
            f"(in a checkout: pip install '.[{extra}]')"
        )


def discover() -> dict[str, EntryPoint]:
    """Registered commands by name. Two packages that claim one name are an error, not a race."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=COMMANDS_GROUP):
        other = found.get(entry.name)
        if other is not None and other.value != entry.value:
            raise ConfigError("gewell.commands", entry.name, f"claimed by both {other.value} and {entry.value}")
        found[entry.name] = entry
    return found


def summary(entry: EntryPoint) -> str:
    """First docstring line of an entry's function (of its module, for a Typer), read from the source, unimported."""
    try:
        spec = importlib.util.find_spec(entry.module)
        if spec is None or spec.origin is None:
            return "(not installed)"
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (ImportError, OSError, SyntaxError):
        return "(cannot be read)"
    node: ast.AST = tree
    for item in tree.body:
        if isinstance(item, ast.FunctionDef) and item.name == entry.attr:
            node = item
    return (ast.get_docstring(node) or "").partition("\n")[0]  # type: ignore[arg-type]  # a Module or a FunctionDef


def extra_of(module: str) -> str | None:
    """Which extra of this distribution installs `module` (its top-level import name); None: none does."""
    try:
        requirements = requires("gewell") or []
    except PackageNotFoundError:
        return None
    for requirement in requirements:
        match = re.match(r"([A-Za-z0-9._-]+).*extra == ['\"]([a-z0-9-]+)['\"]", requirement)
        if match and IMPORT_NAMES.get(match[1].lower(), match[1].lower().replace("-", "_")) == module:
            return match[2]
    return None


def as_command(name: str, thing: object) -> Any:
    """The click command behind an entry's object, called `name`."""
    if isinstance(thing, typer.Typer):
        only = thing.registered_commands[0] if len(thing.registered_commands) == 1 else None
        own_name = only and (only.name or getattr(only.callback, "__name__", "").replace("_", "-"))
        collapse = own_name == name and not thing.registered_groups
        command: Any = typer.main.get_command(thing) if collapse else typer.main.get_group(thing)
    elif callable(thing):
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name)(thing)
        command = typer.main.get_command(app)
    else:
        raise ConfigError(f"gewell.commands.{name}", thing, "an entry is a function or a typer.Typer")
    command.name = name
    _make_plain(command)
    return command


def _make_plain(command: Any) -> None:
    """Plain help everywhere, in subcommands too: it stays readable in pipes and loads no rich."""
    command.rich_markup_mode = None
    for below in getattr(command, "commands", {}).values():
        _make_plain(below)


class CommandGroup(TyperGroup):
    """A click group over entry points. `entries` is filled by `build` and may be replaced by tests."""

    entries: Mapping[str, EntryPoint]

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.entries)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = self.entries.get(cmd_name)
        if entry is None:
            return None
        return as_command(cmd_name, entry.load())

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # pydantic's, of which typer makes use
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, summary(entry)) for name, entry in sorted(self.entries.items())]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gewell {version('gewell')}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Show the version."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks instead of one-line errors."),
) -> None:
    """Gewell: a single-GPU inference engine for Gemma 4 behind a Redis job queue."""


def build(entries: Mapping[str, EntryPoint]) -> CommandGroup:
    """The root command over these entries."""
    app = typer.Typer(
        cls=CommandGroup,
        add_completion=False,
        rich_markup_mode=None,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    group = typer.main.get_group(app)
    assert isinstance(group, CommandGroup)
    group.entries = entries
    return group


def _missing_extra(command: str, error: ModuleNotFoundError) -> MissingExtra | None:
    module = (error.name or "").partition(".")[0]
    extra = extra_of(module)
    return None if extra is None else MissingExtra(command, module, extra)


def run(arguments: Sequence[str], entries: Mapping[str, EntryPoint] | None = None) -> int:
    """Run one command line and return its exit code. Raises only what is a fault of this program, or with --debug."""
    options = list(arguments)
    command = next((word for word in options if not word.startswith("-")), "")
    before_command = options[: options.index(command)] if command else options
    debug = "--debug" in before_command
    try:
        group = build(discover() if entries is None else entries)
        try:
            group.main(options, prog_name="gewell", standalone_mode=True)
        except ModuleNotFoundError as error:
            missing = _missing_extra(command, error)
            if missing is None:
                raise
            raise missing from error
    except GewellError as error:
        if debug:
            raise
        print(f"gewell: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def main() -> None:
    """Entry point of the console script."""
    wait_passively()
    sys.exit(run(sys.argv[1:]))
