"""`stopguard run -- COMMAND…`: start an engine with whatever StopGuard needs set.

What an engine needs is said by its adapter (`launch_needs`): our plugin among those that are allowed to load, further
variables, arguments. With `--collector` the probe inside the engine reports there. What the user has set stays.

The command takes the place of this process: it gets every signal, owns the terminal, keeps the process id that a
supervisor knows, and its exit code is the exit code. Nothing of StopGuard stays behind that could die before it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

if TYPE_CHECKING:
    from stopguard.engines import LaunchNeeds

__all__ = ["Prepared", "command", "prepare", "recognise_command"]

COLLECTOR = "STOPGUARD_COLLECTOR"
TOKEN = "STOPGUARD_COLLECTOR_TOKEN"
_HIDDEN = "…"


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--engine", default="auto", show_default=True, metavar="KIND",
              help="Which engine the command starts; auto looks at its words.")  # fmt: skip
@click.option("--collector", envvar=COLLECTOR, show_envvar=True, metavar="ADDRESS",
              help="Where the probe inside the engine reports: the collector of `stopguard serve`.")  # fmt: skip
@click.option("--collector-token-file", type=click.Path(path_type=Path, dir_okay=False),
              help=f"The file with the collector's token; else {TOKEN} is passed on.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print what would be set and run, and do nothing.")
@click.argument("words", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    engine: str, collector: str | None, collector_token_file: Path | None, dry_run: bool, words: tuple[str, ...]
) -> None:
    """Start an engine with its plugin allowed and its probe connected.

    For example: stopguard run --collector /run/stopguard/probe.sock -- vllm serve my-model

    The engine's environment must have StopGuard installed (pip install stopguard): the plugin is in it.
    """
    from stopguard.engines.registry import AUTO, adapter_class
    from stopguard.errors import ConfigurationError

    kind = recognise_command(words) if engine == AUTO else engine
    if not kind:
        raise click.UsageError(f"no adapter knows the command {words[0]!r}: say which engine it is with --engine KIND")
    needs = needs_of(adapter_class(kind))
    token = ""
    if collector_token_file is not None:
        try:
            token = collector_token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--collector-token-file {collector_token_file} cannot be read: {error}") from None
    prepared = prepare(words, needs, os.environ, collector=collector or "", token=token)
    for line in prepared.lines(kind):
        click.echo(line, err=not dry_run)
    if dry_run:
        return
    program = shutil.which(prepared.words[0])
    if program is None:
        raise ConfigurationError(f"there is no program {prepared.words[0]!r} to run (PATH was searched)")
    os.execve(program, prepared.words, {**os.environ, **prepared.variables})


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A command that is ready: its words, the variables to set, and what to know."""

    words: tuple[str, ...]
    variables: dict[str, str]
    notes: tuple[str, ...] = ()

    def lines(self, kind: str) -> list[str]:
        """What is about to happen, for people; no token in it."""
        shown = {name: _HIDDEN if "TOKEN" in name else value for name, value in self.variables.items()}
        settings = [f"{name}={value}" for name, value in shown.items()]
        return [
            f"stopguard run: {kind}: {' '.join([*settings, *self.words])}",
            *(f"stopguard run: {note}" for note in self.notes),
        ]


def needs_of(adapter: object) -> LaunchNeeds:
    """What an adapter says that a launch of its engine needs."""
    from stopguard.engines import LaunchNeeds

    needs = getattr(adapter, "launch_needs", None)
    return needs if isinstance(needs, LaunchNeeds) else LaunchNeeds()


def recognise_command(words: Sequence[str]) -> str:
    """The kind of the engine that a command line starts: the adapter one of whose programs is a word of it.

    A word counts whole or by its last component (``/usr/bin/x``). Empty when none or more than one claims it.
    """
    from stopguard.engines.registry import adapters_of

    spoken = {word for each in words for word in (each, os.path.basename(each))}
    claims = []
    for name, point in adapters_of(None).items():
        try:
            adapter = point.load()
        except Exception:
            continue  # a broken package matters to those who name it
        if spoken & set(needs_of(adapter).programs):
            claims.append(name)
    return claims[0] if len(claims) == 1 else ""


def prepare(
    words: Sequence[str], needs: LaunchNeeds, environment: Mapping[str, str], *, collector: str = "", token: str = ""
) -> Prepared:
    """The command with what it needs; whatever the user has set in `environment` or in `words` stays as it is."""
    variables = {name: value for name, value in needs.environment.items() if name not in environment}
    notes = [needs.notes] if needs.notes else []
    listed = environment.get(needs.plugin_list_variable) if needs.plugin_list_variable else None
    if needs.plugin and listed is not None:
        # Without a list every plugin loads; a list that we are not on would keep ours out.
        plugins = [name.strip() for name in listed.split(",") if name.strip()]
        if needs.plugin not in plugins:
            variables[needs.plugin_list_variable] = ",".join([*plugins, needs.plugin])
    if collector:
        if needs.plugin:
            variables[COLLECTOR] = collector
        else:
            notes.append("this engine has no plugin: nothing inside it can report to the collector")
    if token and needs.plugin:
        variables[TOKEN] = token
    given = {word.partition("=")[0] for word in words}
    added = [argument for argument in needs.arguments if argument.partition("=")[0] not in given]
    return Prepared(words=(*words, *added), variables=variables, notes=tuple(notes))
