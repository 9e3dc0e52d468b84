"""The command line itself: lazy loading, and one clear line for every failure."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner, Result

from stopguard import __version__
from stopguard.cli import COMMANDS, LazyGroup, main
from stopguard.errors import BookkeepingError, ClientError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SUMMARIES = {
    "wave": "Wave.",
    "raise_error": "Raise what the argument names.",
    "needs": "Need a package.",
    "odd": "Expose something else.",
    "absent": "Has no module.",
}

MODULES = {
    "wave": """
import click

@click.command()
@click.option("--code", default=0)
@click.pass_context
def command(ctx, code):
    click.echo("hello")
    ctx.exit(code)
""",
    "raise_error": """
import click
from tests.unit import test_cli

@click.command()
@click.argument("name")
def command(name):
    raise test_cli.ERRORS[name]
""",
    "needs": "import textual_that_nobody_has",
    "odd": "command = 3",
}

ERRORS: dict[str, BaseException] = {
    "client": ClientError("no such\nrequest: sg-1"),
    "bookkeeping": BookkeepingError("released twice"),
    "grouped": ExceptionGroup("tasks", [ExceptionGroup("inner", [ConfigurationError("bad port")])]),
    "os": FileNotFoundError(2, "No such file or directory", "stopguard.toml"),
    "bug": KeyError("x"),
    "interrupt": KeyboardInterrupt(),
    "usage": click.UsageError("not like that"),
}


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LazyGroup]:
    """A group over a package of real modules, written for the test."""
    package = tmp_path / "sample_commands"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name, source in MODULES.items():
        (package / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("STOPGUARD_DEBUG", raising=False)
    yield LazyGroup("sample", package="sample_commands", summaries=SUMMARIES)
    for name in [name for name in sys.modules if name.startswith("sample_commands")]:
        del sys.modules[name]


def run(group: click.Command, *arguments: str) -> Result:
    """Run `group` as the shell would, in this process."""
    return CliRunner().invoke(group, list(arguments), prog_name="stopguard")


def test_help_lists_what_exists_and_imports_none_of_it(group: LazyGroup) -> None:
    result = run(group, "--help")
    assert result.exit_code == 0
    assert "wave" in result.stdout
    assert "Wave." in result.stdout
    assert "absent" not in result.stdout
    assert "sample_commands.wave" not in sys.modules


def test_a_command_is_imported_when_it_is_called(group: LazyGroup) -> None:
    result = run(group, "wave", "--code", "3")
    assert result.stdout == "hello\n"
    assert result.exit_code == 3
    assert "sample_commands.needs" not in sys.modules


def test_a_command_without_a_module_is_unknown(group: LazyGroup) -> None:
    result = run(group, "absent")
    assert result.exit_code == 2
    assert "No such command 'absent'" in result.stderr


@pytest.mark.parametrize(
    ("name", "line", "exit_code"),
    [
        ("client", "stopguard: no such request: sg-1\n", 2),
        ("bookkeeping", "stopguard: released twice\n", 70),
        ("grouped", "stopguard: bad port\n", 2),
        ("os", "stopguard: No such file or directory: stopguard.toml\n", 2),
        (
            "bug",
            "stopguard: internal error, please report it: KeyError: 'x' (STOPGUARD_DEBUG=1 shows where)\n",
            70,
        ),
        ("interrupt", "stopguard: interrupted\n", 130),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(group: LazyGroup, name: str, line: str, exit_code: int) -> None:
    result = run(group, "raise_error", name)
    assert (result.stdout, result.stderr, result.exit_code) == ("", line, exit_code)


def test_clicks_own_errors_stay_clicks_own(group: LazyGroup) -> None:
    result = run(group, "raise_error", "usage")
    assert result.exit_code == 2
    assert "not like that" in result.stderr
    assert "stopguard: " not in result.stderr


def test_debug_lets_the_traceback_through(group: LazyGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOPGUARD_DEBUG", "1")
    assert isinstance(run(group, "raise_error", "bug").exception, KeyError)


def test_a_missing_package_is_named(group: LazyGroup) -> None:
    result = run(group, "needs")
    assert result.exit_code == 1
    assert "needs the package textual_that_nobody_has" in result.stderr


def test_a_module_without_a_click_command_is_our_bug(group: LazyGroup) -> None:
    result = run(group, "odd")
    assert result.exit_code == 70
    assert "sample_commands.odd.command is a int" in result.stderr


def test_version() -> None:
    assert run(main, "--version").stdout == f"stopguard, version {__version__}\n"


def test_every_command_that_exists_loads_and_has_help() -> None:
    with click.Context(main) as ctx:
        names = main.list_commands(ctx)
        assert set(names) <= set(COMMANDS)
        for name in names:
            command = main.get_command(ctx, name)
            assert command is not None, name
            assert command.help, f"`stopguard {name}` has no help text"


def test_the_help_needs_no_framework() -> None:
    """`stopguard --help` answers at once: it loads neither a web framework nor a command."""
    heavy = ["fastapi", "httpx", "pydantic", "uvicorn", "rich", "stopguard.ledger", "stopguard.gateway"]
    script = (
        "import sys; from stopguard.cli import main; main(['--help'], standalone_mode=False); "
        f"sys.exit(' '.join(name for name in {heavy} if name in sys.modules) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.stderr.strip() == ""
    assert result.returncode == 0


def test_an_interrupt_inside_asyncio_is_an_interrupt(group: LazyGroup) -> None:
    async def interrupted() -> None:
        raise KeyboardInterrupt

    @click.command()
    def command() -> None:
        asyncio.run(interrupted())

    group.add_command(command, "wait")
    group.summaries["wait"] = "Wait."
    group.get_command = lambda ctx, cmd_name: command  # type: ignore[method-assign]
    assert run(group, "wait").exit_code == 130
