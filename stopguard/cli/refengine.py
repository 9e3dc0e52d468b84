"""`stopguard refengine COMMAND`: run the reference engine as a server, or compare and study policies."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping

import click

__all__ = ["COMMANDS", "command"]

#: Each is a module `stopguard.cli.refengine_NAME` with a click command named `command`; its line of help.
COMMANDS: Mapping[str, str] = {
    "serve": "Serve the OpenAI API, with the manners and the stop behaviour of one engine.",
    "compare": "Print how the five policies stop, measured in runs.",
    "study": "Compare ways to preempt and victim policies, over seeded loads.",
}


class _Commands(click.Group):
    """Loads a command's module only when it is called; a command without a module is not there."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if importlib.util.find_spec(_module(name)) is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        found: click.Command = importlib.import_module(_module(cmd_name)).command
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])


def _module(name: str) -> str:
    return f"stopguard.cli.refengine_{name}"


@click.group(name="refengine", cls=_Commands)
def command() -> None:
    """Run, or compare, the deterministic reference engine."""
