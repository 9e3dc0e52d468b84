"""`stopguard serve`: the gateway in front of your engines, its admin port, its journal, until a signal.

One process, three threads. The main one runs the relay and nothing else. The admin port has a thread and a loop
of its own, because it encodes JSON and walks over the books, and a relay that waits for that would miss the
millisecond in which a client leaves; the interpreter's switch interval is lowered, so that the relay waits
for the other threads half a millisecond when it wants to run. The journal's writer is the third.

Exit codes: 0 when every request's books were closed at the end; 1 when some were left open (the journal
has them); 2 when it could not start.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from stopguard.admin.live import LiveView
    from stopguard.admin.thread import AdminThread
    from stopguard.config import Configuration, Loaded
    from stopguard.engines import Identity
    from stopguard.gateway.fleet import Member
    from stopguard.gateway.server import Gateway
    from stopguard.ledger.journal import Journal
    from stopguard.telemetry.metrics import Telemetry

__all__ = ["command", "serve"]

SWITCH_SECONDS = 0.0005
"""How long another thread may keep the interpreter when the relay wants it (CPython's default is 5 ms)."""

EXIT_BOOKS_LEFT_OPEN = 1
EXIT_COULD_NOT_START = 2
JOURNAL_CLOSE_SECONDS = 5.0
RECOVERED_SHOWN = 5


#: The options that `stopguard watch` has too.
ADMIN_OPTION = click.option("--admin", metavar="HOST:PORT|off", help="The admin port.  [default: 127.0.0.1:9090]")
CONFIG_OPTION = click.option(
    *("--config", "file"),
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="STOPGUARD_CONFIG",
    show_envvar=True,
    help="A TOML file with the settings.",
)
JOURNAL_OPTION = click.option(
    "--journal", metavar="FILE|off", help="Keep what happened in FILE, for `stopguard explain`."
)
LOG_FORMAT_OPTION = click.option(
    "--log-format", type=click.Choice(["text", "json"]), help="Lines for people or for programs."
)
LOG_LEVEL_OPTION = click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))


@click.command()
@click.option(
    *("--engine", "engines"),
    multiple=True,
    metavar="[NAME:]KIND=URL",
    help="An engine, like openai=http://127.0.0.1:8000; the kind auto asks it what it is. May be given several times.",
)
@click.option("--listen", multiple=True, metavar="HOST:PORT", help="The data port.  [default: 127.0.0.1:8080]")
@click.option(
    "--probe", multiple=True, metavar="ADDRESS", help="Where probes inside engines report: a socket's path, or tcp://…"
)
@ADMIN_OPTION
@CONFIG_OPTION
@JOURNAL_OPTION
@click.option(
    *("--policy", "policies"),
    multiple=True,
    metavar="[ROUTE=]POLICY",
    help="When a client leaves: stop, drain or grace=SECONDS. May be given several times.",
)
@click.option("--half-close", type=click.Choice(["cancel", "allow"]), help="What a half-closed connection means.")
@click.option(
    "--preemption", type=click.Choice(["off", "queue", "preempt"]), help="Whether urgent requests go first, or at once."
)
@LOG_FORMAT_OPTION
@LOG_LEVEL_OPTION
@click.option("--check", is_flag=True, help="Say what is wrong with the configuration, and start nothing.")
@click.pass_context
def command(
    ctx: click.Context,
    engines: tuple[str, ...],
    listen: tuple[str, ...],
    probe: tuple[str, ...],
    admin: str | None,
    file: Path | None,
    journal: str | None,
    policies: tuple[str, ...],
    half_close: str | None,
    preemption: str | None,
    log_format: str | None,
    log_level: str | None,
    check: bool,
) -> None:
    """Run the gateway in front of your engines.

    Clients change nothing but their base URL. Every setting can stand in the file, in the environment
    (STOPGUARD_…) or here; docs/configuration.md lists them.
    """
    given: dict[str, Any] = {
        "engines": list(engines),
        "policies": list(policies),
        "listen.addresses": list(listen),
        "admin.listen": admin,
        "probe.listen": list(probe),
        "journal.path": journal,
        "liveness.half_close": half_close,
        "preemption.mode": preemption,
        "log.format": log_format,
        "log.level": log_level,
    }
    loaded = load_or_exit(ctx, file, given)
    if check:
        _check(loaded.configuration, os.environ, loaded.warnings)
        return
    ctx.exit(serve(loaded.configuration, os.environ, loaded.warnings))


def load_or_exit(ctx: click.Context, file: Path | None, given: Mapping[str, Any]) -> Loaded:
    """The configuration, with those of the flags in `given` that were set; what is wrong with it ends the command."""
    from stopguard.config import InvalidConfiguration, load

    flags = {key: value for key, value in given.items() if value}
    try:
        return load(file=file, environment=os.environ, flags=flags)
    except InvalidConfiguration as error:
        for problem in error.problems:
            click.echo(f"stopguard: {problem}", err=True)
        ctx.exit(EXIT_COULD_NOT_START)


def _check(configuration: Configuration, environment: Mapping[str, str], warnings: tuple[str, ...]) -> None:
    """Read everything that a start would read, and say what it would do."""
    from stopguard.cli import assembly

    assembly.gateway_settings(configuration, environment)
    pairs = assembly.engines(configuration, environment)
    assembly.admin_token(configuration)
    assembly.probe_settings(configuration)
    assembly.server_context("admin.tls", configuration.admin.tls)
    assembly.journal_folder(configuration)
    for warning in (*warnings, *assembly.cautions(configuration)):
        click.echo(f"warning: {warning}", err=True)
    listens = ", ".join(str(address) for address in configuration.listen.addresses)
    admin = configuration.admin.listen or "off"
    click.echo(f"the configuration is fine: {len(pairs)} engine(s), listen {listens}, admin {admin}")


def serve(
    configuration: Configuration,
    environment: Mapping[str, str],
    warnings: tuple[str, ...] = (),
    *,
    bystander: bool = False,
    ready: Callable[[Gateway, AdminThread | None], None] | None = None,
) -> int:
    """Serve until a signal; returns the exit code. `ready` is called once, in the relay's loop, when all listens.

    A `bystander` has no data port: its books are opened by what probes say.
    """
    import asyncio
    import gc

    import msgspec

    from stopguard.cli import assembly, logs
    from stopguard.cli.descriptors import raise_limit
    from stopguard.gateway.server import loop_factory

    logs.configure(configuration.log.format, configuration.log.level)
    settings = assembly.gateway_settings(configuration, environment)
    if bystander:
        settings = msgspec.structs.replace(settings, listeners=())
    configuration = _ask_unknown(configuration, environment)
    engines = assembly.engines(configuration, environment)
    token = assembly.admin_token(configuration)
    assembly.server_context("admin.tls", configuration.admin.tls)
    journal = assembly.open_journal(configuration)
    raise_limit()
    switch_seconds = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    # What was loaded until now stays for ever; the collector need not walk over it again while requests wait.
    gc.collect()
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            left_open = runner.run(
                _serve(
                    configuration,
                    settings,
                    engines,
                    journal,
                    token,
                    warnings,
                    environment,
                    ready=ready,
                    bystander=bystander,
                )
            )
    finally:
        gc.unfreeze()
        sys.setswitchinterval(switch_seconds)
        if journal is not None:
            journal.close(JOURNAL_CLOSE_SECONDS)
    return EXIT_BOOKS_LEFT_OPEN if left_open else 0


def _ask_unknown(configuration: Configuration, environment: Mapping[str, str]) -> Configuration:
    """Ask the engines of the kind `auto` what they are."""
    import asyncio
    import logging

    from stopguard.cli.identifying import identified, unknown_engines
    from stopguard.cli.logs import say

    if not unknown_engines(configuration):
        return configuration
    logger = logging.getLogger("stopguard")
    return asyncio.run(identified(configuration, environment, lambda line: say(logger, logging.INFO, "auto", line)))


async def _serve(
    configuration: Configuration,
    settings: Any,
    engines: Any,
    journal: Journal | None,
    token: str | None,
    warnings: tuple[str, ...],
    environment: Mapping[str, str],
    *,
    ready: Callable[[Gateway, AdminThread | None], None] | None,
    bystander: bool,
) -> int:
    import asyncio
    import logging

    from stopguard.admin.live import LiveView
    from stopguard.cli import assembly
    from stopguard.cli.logs import say
    from stopguard.cli.probes import listen_for_probes
    from stopguard.cli.recording import JournaledBook, journal_observer, log_observer
    from stopguard.cli.telemetry import observe
    from stopguard.gateway.server import Gateway
    from stopguard.ledger import Book

    logger = logging.getLogger("stopguard")
    limits = assembly.book_limits(configuration)
    book = Book(limits) if journal is None else JournaledBook(limits, journal)
    gateway = Gateway(engines, settings, book=book, stop_config=assembly.stop_config(configuration))
    gateway.observers.append(log_observer)
    if journal is not None:
        gateway.observers.append(journal_observer(journal))
    kinds = {name: entry.kind for name, entry in configuration.engines.items()}
    telemetry = observe(gateway, environment, kinds)
    gateway.fleet.on_identified = identity_sayer(kinds, logger)
    probing = listen_for_probes(gateway, assembly.probe_settings(configuration), kinds, telemetry, bystander=bystander)
    stopping = asyncio.Event()
    at_once = asyncio.Event()
    _handle_signals(asyncio.get_running_loop(), stopping, at_once, logger)
    await gateway.start()
    admin: AdminThread | None = None
    try:
        if probing is not None:
            await probing.start()
        view = LiveView(gateway, journal, asyncio.get_running_loop(), kinds=kinds)
        telemetry.reconciliations = view.reconciliations
        admin = _start_admin(configuration, view, token, telemetry)
        for warning in (*warnings, *assembly.cautions(configuration)):
            say(logger, logging.WARNING, "caution", warning)
        _announce(configuration, gateway, admin, journal, logger)
        if ready is not None:
            ready(gateway, admin)
        await stopping.wait()
        say(logger, logging.INFO, "draining", _draining_text(gateway), requests=len(gateway.registry))
        left_open = await _shut_down(gateway, at_once)
    finally:
        if probing is not None:
            await probing.close()
        if admin is not None:
            await asyncio.to_thread(admin.stop)
        if telemetry.tracer is not None:
            await asyncio.to_thread(telemetry.tracer.close)
    level = logging.WARNING if left_open else logging.INFO
    say(logger, level, "stopped", _stopped_text(left_open, journal), left_open=left_open)
    return left_open


def identity_sayer(kinds: Mapping[str, str], logger: Any) -> Callable[[Member, Identity], None]:
    """Says once what an engine is, whenever it has been asked."""
    import logging

    from stopguard.cli.logs import say

    def identified(member: Member, identity: Identity) -> None:
        name = member.engine.name
        kind = kinds.get(name, identity.kind)
        what = f"{kind} {identity.version}".rstrip()
        evidence = member.profile.best_evidence.label
        say(
            logger,
            logging.INFO,
            "identified",
            f"engine {name} is {what}; stops there are proved up to {evidence}",
            engine=name,
            kind=kind,
            version=identity.version,
            best_evidence=evidence,
        )

    return identified


def _start_admin(
    configuration: Configuration, view: LiveView, token: str | None, telemetry: Telemetry
) -> AdminThread | None:
    address = configuration.admin.listen
    if address is None:
        return None
    from stopguard.admin.app import create_app
    from stopguard.admin.thread import AdminThread

    app = create_app(view, token=token, metrics=telemetry.render)
    return AdminThread.start(app, address, tls=configuration.admin.tls, background=view.background)


async def _shut_down(gateway: Gateway, at_once: asyncio.Event) -> int:
    """Let requests end; on a second signal stop them now. Returns how many books were left open."""
    import asyncio

    draining = asyncio.create_task(gateway.shutdown())
    hurry = asyncio.create_task(at_once.wait())
    await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        return await gateway.shutdown(drain_seconds=0.001)
    hurry.cancel()
    return draining.result()


def _handle_signals(
    loop: asyncio.AbstractEventLoop, stopping: asyncio.Event, at_once: asyncio.Event, logger: Any
) -> None:
    import logging
    import signal

    from stopguard.cli.logs import say

    def received(number: signal.Signals) -> None:
        if stopping.is_set():
            say(logger, logging.WARNING, "signal", f"{number.name} again: stopping every request now")
            at_once.set()
        else:
            say(logger, logging.INFO, "signal", f"{number.name}: no new requests; once more stops the others at once")
            stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received, number)


# ---- what is said -----------------------------------------------------------------------------------------


def _announce(
    configuration: Configuration, gateway: Gateway, admin: AdminThread | None, journal: Journal | None, logger: Any
) -> None:
    """Say once that everything listens, and what the last run left behind."""
    import logging

    from stopguard import __version__
    from stopguard.cli.logs import say
    from stopguard.config import Address

    scheme = "https" if configuration.listen.tls else "http"
    listens = [f"{scheme}://{Address(*address)}" for address in gateway.addresses]
    admin_url = admin.url if admin is not None else "off"
    probes = [] if gateway.probing is None else gateway.probing.collector.addresses
    members = [(member.engine.name, configuration.engines[member.engine.name].kind) for member in gateway.fleet.members]
    if configuration.log.format == "json":
        say(
            logger,
            logging.INFO,
            "ready",
            f"stopguard {__version__} serves on {', '.join(listens)}",
            version=__version__,
            listen=listens,
            admin=admin_url,
            probes=probes,
            engines=[{"name": name, "kind": kind} for name, kind in members],
            journal=None if journal is None else str(journal.path),
            pid=os.getpid(),
        )
    else:
        rows = [("data", ", ".join(listens) or "none: traffic goes to the engines itself"), ("admin", admin_url)]
        rows += [("probes", address) for address in probes]
        rows += [("engine", f"{name} ({kind}) at {_url(gateway, name)}") for name, kind in members]
        rows.append(("journal", "off" if journal is None else f"{journal.path} ({configuration.journal.policy})"))
        _print_banner(f"stopguard {__version__} is ready", rows)
    if journal is not None and (journal.recovered or journal.unclean_run is not None):
        _report_recovered(journal, logger)


def _print_banner(title: str, rows: list[tuple[str, str]]) -> None:
    if not sys.stdout.isatty():
        click.echo("\n".join([title, *(f"{name:<8}{text}" for name, text in rows)]))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(title, style="bold green"))
    for name, text in rows:
        console.print(Text.assemble((f"  {name:<8}", "dim"), text), soft_wrap=True)


def _report_recovered(journal: Journal, logger: Any) -> None:
    """The last run ended without closing its books: which ones, and how much of it may be missing."""
    import logging

    from stopguard.cli.logs import say

    ids = [book.request_id for book in journal.recovered]
    window = journal.unclean_run.blind_window() if journal.unclean_run is not None else ""
    shown = ", ".join(ids[:RECOVERED_SHOWN]) + (", …" if len(ids) > RECOVERED_SHOWN else "")
    what = f"{len(ids)} request(s) open ({shown})" if ids else "no request open"
    text = f"the last run ended without closing its journal and left {what}"
    if ids:
        text += ": see stopguard explain --open"
    say(
        logger,
        logging.WARNING,
        "recovered",
        f"{text}; {window}" if window else text,
        left_open=len(ids),
        requests=ids[:100],
    )


def _url(gateway: Gateway, name: str) -> str:
    member = gateway.fleet.named(name)
    return member.engine.base_url if member is not None else ""


def _draining_text(gateway: Gateway) -> str:
    count = len(gateway.registry)
    if not count:
        return "no requests are under way"
    return f"{count} request(s) may end within {gateway.timeouts.drain_seconds:g} s, then they are stopped"


def _stopped_text(left_open: int, journal: Journal | None) -> str:
    if not left_open:
        return "stopped; all books are closed"
    where = f"; stopguard explain --open --journal {journal.path} shows them" if journal is not None else ""
    return f"stopped with the books of {left_open} request(s) open{where}"
