"""`stopguard watch`: books, metrics and the admin port for engines whose traffic goes to them directly.

Everything but the data port of `stopguard serve`. The probes inside the engines open the books and close them; what
only a proxy can see (the client's connection, its stream, when it left) is not in them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from stopguard.cli.serve import (
    ADMIN_OPTION,
    CONFIG_OPTION,
    JOURNAL_OPTION,
    LOG_FORMAT_OPTION,
    LOG_LEVEL_OPTION,
    load_or_exit,
    serve,
)

__all__ = ["command"]


@click.command()
@click.option(
    *("--engine", "engines"),
    multiple=True,
    metavar="[NAME:]KIND=URL",
    help="An engine, like openai=http://127.0.0.1:8000; it is asked for its models and gauges only.",
)
@click.option(
    "--probe", multiple=True, metavar="ADDRESS", help="Where the probes report: a socket's path, or tcp://HOST:PORT."
)
@ADMIN_OPTION
@CONFIG_OPTION
@JOURNAL_OPTION
@LOG_FORMAT_OPTION
@LOG_LEVEL_OPTION
@click.pass_context
def command(
    ctx: click.Context,
    engines: tuple[str, ...],
    probe: tuple[str, ...],
    admin: str | None,
    file: Path | None,
    journal: str | None,
    log_format: str | None,
    log_level: str | None,
) -> None:
    """Keep the books of engines whose traffic does not pass the gateway.

    Each engine needs StopGuard's probe (see docs/probe.md), with the same STOPGUARD_COLLECTOR_TOKEN as here.
    """
    given: dict[str, Any] = {
        "engines": list(engines),
        "probe.listen": list(probe),
        "admin.listen": admin,
        "journal.path": journal,
        "log.format": log_format,
        "log.level": log_level,
    }
    loaded = load_or_exit(ctx, file, given)
    if not loaded.configuration.probe.listen:
        raise click.UsageError("say where the probes report: --probe /run/stopguard/probe.sock, or probe.listen")
    ctx.exit(serve(loaded.configuration, os.environ, loaded.warnings, bystander=True))
