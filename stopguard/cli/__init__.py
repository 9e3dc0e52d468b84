"""The command line: `stopguard COMMAND`, one module a command, loaded when it is called.

A command is a module of this package that exposes a click command (or group) named `command`; it appears in
`stopguard --help` as soon as the module exists. Its line of help is written in `COMMANDS` here, so that the
help needs none of the modules.

Exit codes: what the command decides (0 is success); a `StopGuardError`'s own `exit_code`; 2 for wrong usage and
for what the operating system refuses; 70 for a bug of ours; 130 for Ctrl-C. An error is one line on stderr that
starts with `stopguard: `. A traceback appears only when the environment says `STOPGUARD_DEBUG=1`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any, NoReturn

import click

from stopguard import __version__
from stopguard.errors import BookkeepingError, StopGuardError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["COMMANDS", "LazyGroup", "main"]

COMMANDS: Mapping[str, str] = {
    "serve": "Run the gateway in front of your engines.",
    "watch": "Keep the books of engines whose traffic does not pass the gateway.",
    "run": "Start an engine with all that StopGuard needs in it.",
    "audit": "Prove or refute that an engine's stops work.",
    "top": "Watch engines and stops in progress, live.",
    "explain": "Print one request's timeline over the five ledgers.",
    "demo": "See a storm of stops and its settled book, in under a minute.",
    "refengine": "Run, or compare, the deterministic reference engine.",
}
"""Every command there may be, in the order of the help, with its line of help."""

_EXTRA_OF_PACKAGE: Mapping[str, str] = {"opentelemetry": "otel", "redis": "redis", "textual": "tui"}

EXIT_USAGE = 2
EXIT_BUG = 70
EXIT_INTERRUPTED = 130


class LazyGroup(click.Group):
    """A click group whose commands are modules of a package, imported when they are called.

    `package` is the package's import name; `summaries` maps each command to its line of help. A command without a
    module is not listed and is unknown.
    """

    def __init__(self, *args: Any, package: str, summaries: Mapping[str, str], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.package = package
        self.summaries = dict(summaries)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in self.summaries if self._exists(name)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.summaries or not self._exists(cmd_name):
            return None
        try:
            module = importlib.import_module(f"{self.package}.{cmd_name}")
        except ModuleNotFoundError as error:
            raise _missing_package(cmd_name, error) from error
        command = module.command
        if not isinstance(command, click.Command):
            raise BookkeepingError(f"{module.__name__}.command is a {type(command).__name__}, not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from `summaries`; click's own would import every module for it."""
        rows = [(name, self.summaries[name]) for name in self.list_commands(ctx)]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; turn every failure into one line on stderr and an exit code."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click's own ways out, which it prints itself
        except KeyboardInterrupt:
            _leave(ctx, "interrupted", EXIT_INTERRUPTED)
        except Exception as error:
            if os.environ.get("STOPGUARD_DEBUG") == "1":
                raise
            _leave(ctx, *_explain(error))

    def _exists(self, name: str) -> bool:
        return importlib.util.find_spec(f"{self.package}.{name}") is not None


def _missing_package(command: str, error: ModuleNotFoundError) -> Exception:
    """Return what to raise when `command`'s module could not be imported."""
    package = (error.name or "").partition(".")[0]
    if package in {"", "stopguard"}:
        return error  # a broken installation, not a missing extra
    extra = _EXTRA_OF_PACKAGE.get(package)
    what = f"'stopguard[{extra}]'" if extra else package
    return click.ClickException(f"'{command}' needs the package {package}, which is not installed: pip install {what}")


def _explain(error: BaseException) -> tuple[str, int]:
    """Return the line that tells a user about `error`, and the exit code."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]  # a task group wraps even a single error
    if isinstance(error, StopGuardError):
        return str(error), error.exit_code
    if isinstance(error, OSError) and error.strerror:
        place = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{place}", EXIT_USAGE
    text = f"internal error, please report it: {type(error).__name__}: {error}"
    return f"{text} (STOPGUARD_DEBUG=1 shows where)", EXIT_BUG


def _leave(ctx: click.Context, line: str, exit_code: int) -> NoReturn:
    click.echo("stopguard: " + " ".join(line.split()), err=True)
    ctx.exit(exit_code)


@click.group(
    cls=LazyGroup,
    package=__name__,
    summaries=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="stopguard")
def main() -> None:
    """Make every stop of an LLM request fast, acknowledged and accounted for."""
