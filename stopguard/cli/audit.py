"""`stopguard audit`: prove that an engine's stops work, directly or through a gateway, or name what does not."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from stopguard.audit import AuditReport, Plan, Scenario, ScenarioReport

__all__ = ["command"]

_WIDTH = 140
FORMATS = ["text", "json", "junit", "github", "markdown", "html"]


@click.command()
@click.argument("urls", metavar="[URL]...", nargs=-1)
@click.option("--engine", default="auto", show_default=True, metavar="KIND",
              help="How to watch it: auto, ref, openai, or an installed adapter (vllm, sglang, …).")  # fmt: skip
@click.option("--via", "vias", multiple=True, metavar="URL",
              help="Send requests through this gateway and watch the engine; repeatable with --matrix.")  # fmt: skip
@click.option("--model", default="", metavar="NAME", help="The model to ask; without it, the first that is listed.")
@click.option("--key", envvar="STOPGUARD_AUDIT_KEY", default="", show_envvar=True, help="Sent as a bearer token.")
@click.option("--scenario", "scenarios", multiple=True, metavar="NAME", help="Only this one; may be repeated.")
@click.option("--storm", type=click.IntRange(0, 1000), default=40, show_default=True, help="Requests in the storm.")
@click.option("--deadline", type=click.FloatRange(0.05, 600), default=5.0, show_default=True,
              help="Seconds after which a stop is SLOW; half as much again, and what is open is a LEAK.")  # fmt: skip
@click.option("--observe", type=click.Choice(["probe", "metrics", "log"]), help="Use only this kind of evidence.")
@click.option("--fill", type=click.IntRange(2, 512), default=48, show_default=True,
              help="Requests at once that may be used to fill the engine's slots.")  # fmt: skip
@click.option("--shared", is_flag=True, help="Others use the engine: go on, and count only the audit's own requests.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Same seed, same requests.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--list", "listing", is_flag=True, help="List the scenarios.")
@click.option("--matrix", is_flag=True, help="One table over all targets.")
@click.option("--journal", type=click.Path(path_type=Path, dir_okay=False), help="Judge a gateway from its journal.")
@click.option("--gateway", metavar="ADMIN_URL", help="Judge a running gateway from its admin API.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the report here.")
@click.pass_context
def command(
    ctx: click.Context,
    urls: tuple[str, ...],
    engine: str,
    vias: tuple[str, ...],
    model: str,
    key: str,
    scenarios: tuple[str, ...],
    storm: int,
    deadline: float,
    observe: str | None,
    fill: int,
    shared: bool,
    seed: int,
    dry_run: bool,
    listing: bool,
    matrix: bool,
    journal: Path | None,
    gateway: str | None,
    form: str,
    output: Path | None,
) -> None:
    """Stage stops on an engine in every state of a request, watch all its ledgers, and give a verdict.

    URL is an OpenAI-compatible server; NAME=URL gives it a name in a matrix. It is put under load: --dry-run
    says how much. With --journal or --gateway nothing is sent; the books of a gateway are judged.

    Ends with 0 when everything passes, 1 when something leaks or is slow, 2 for wrong usage or an unreachable
    target, 3 when something could not be proved.
    """
    from stopguard.audit import AuditReport, Plan, chosen, exit_code
    from stopguard.audit.verdict import TargetLine
    from stopguard.errors import StopGuardError

    plan = Plan(scenarios=scenarios, storm=storm, deadline_seconds=deadline, shared=shared, seed=seed, fill_max=fill)
    selected = chosen(plan)
    passive = journal is not None or gateway is not None
    if passive + bool(urls) != 1 and not (listing or (dry_run and not urls)):
        raise click.UsageError("give the URL of an engine, or one of --journal and --gateway")
    if form in {"markdown", "html"} and not matrix:
        raise click.UsageError(f"--format {form} is for --matrix")
    if vias and len(urls) > 1:
        raise click.UsageError("--via goes with one URL: the engine behind the gateways")
    if len(vias) > 1 and not matrix:
        raise click.UsageError("several gateways go with --matrix")
    progress = _console(stderr=True)
    if listing:
        for one in selected:
            click.echo(f"{one.name:18} {one.stages}")
        return
    targets = _targets(urls, vias)
    if not passive:
        from stopguard.audit.report_text import load_line, print_plan

        if dry_run:
            print_plan(_console(), plan, selected, urls[0] if urls else "an engine")
            return
        progress.print(load_line(plan, [one.load(plan) for one in selected]), style="dim")
    reports: list[AuditReport] = []
    if passive:
        reports.append(_passive(journal, gateway, deadline, key))
    for _, url, via in targets:
        try:
            report = _active(
                progress, plan, selected, url, via, engine=engine, observe=observe or "", model=model, key=key
            )
        except StopGuardError as error:
            if len(targets) == 1:
                raise
            report = AuditReport(
                target=TargetLine(url=url, via=via), scenarios=(), broken_off=str(error), unreachable=True
            )
        reports.append(report)
    _write(reports, [name for name, _, _ in targets], form, output, matrix=matrix)
    for report in reports:
        if report.broken_off:
            click.echo(f"stopguard: {report.target.via or report.target.url}: {report.broken_off}", err=True)
    ctx.exit(exit_code(reports))


def _targets(urls: Sequence[str], vias: Sequence[str]) -> list[tuple[str, str, str]]:
    """(name, engine URL, gateway URL) of each audit; the engine itself comes first when gateways are compared."""
    named = [_named(url) for url in urls]
    if not vias:
        return [(name, url, "") for name, url in named]
    direct = [("direct", named[0][1], "")] if len(vias) > 1 else []
    return [*direct, *((name, named[0][1], via) for name, via in map(_named, vias))]


def _named(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    return (name, url) if equals and "/" not in name else ("", text)


def _passive(journal: Path | None, gateway: str | None, deadline: float, key: str) -> AuditReport:
    from stopguard.audit.passive import audit_gateway, audit_journal

    if journal is not None:
        return audit_journal(journal, deadline)
    assert gateway is not None
    return audit_gateway(gateway, deadline, key)


def _active(
    progress: Console,
    plan: Plan,
    selected: Sequence[Scenario],
    url: str,
    via: str,
    *,
    engine: str,
    observe: str,
    model: str,
    key: str,
) -> AuditReport:
    from stopguard.audit import Audit
    from stopguard.audit.client import SocketWorld

    async def run() -> AuditReport:
        world = SocketWorld(via or url, url, key=key)
        shown = _Shown(progress, len(selected), via or url)
        audit = Audit(world, plan, url=url, via=via, engine=engine, observe=observe, model=model, progress=shown)
        with shown:
            return await audit.run()

    return asyncio.run(run())


class _Shown:
    """Progress: a live line on a terminal, a line for each finished scenario elsewhere."""

    def __init__(self, console: Console, count: int, where: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = console
        self._bar = Progress(
            TextColumn(f"[bold]{where}[/]"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=count)

    def __enter__(self) -> _Shown:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, number: int, count: int, scenario: Scenario, report: ScenarioReport | None) -> None:
        from stopguard.audit.report_text import progress_line

        if report is None:
            self._bar.update(self._task, description=scenario.title)
            return
        self._bar.update(self._task, completed=number)
        if not self._console.is_terminal or report.accusations:
            self._console.print(progress_line(number, count, report), markup=False)


def _write(
    reports: Sequence[AuditReport], names: Sequence[str], form: str, output: Path | None, *, matrix: bool
) -> None:
    if form == "text":
        if output is None:
            _print(_console(), reports, names, matrix=matrix)
            return
        with output.open("w", encoding="utf-8") as file:
            from rich.console import Console

            _print(Console(file=file, width=_WIDTH, highlight=False), reports, names, matrix=matrix)
        return
    text = _rendered(reports, names, form)
    if output is None:
        click.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")


def _print(console: Console, reports: Sequence[AuditReport], names: Sequence[str], *, matrix: bool) -> None:
    from stopguard.audit.matrix import print_matrix
    from stopguard.audit.report_text import print_report

    if matrix:
        print_matrix(console, reports, names)
        return
    for report in reports:
        print_report(console, report)


def _rendered(reports: Sequence[AuditReport], names: Sequence[str], form: str) -> str:
    from stopguard.audit import matrix, report_files

    match form:
        case "json":
            return report_files.render_json(reports)
        case "junit":
            return report_files.render_junit(reports)
        case "github":
            return report_files.render_github(reports)
        case "markdown":
            return matrix.render_markdown(reports, names)
        case _:
            return matrix.render_html(reports, names)


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if stream.isatty():
        return Console(stderr=stderr, highlight=False)
    return Console(stderr=stderr, highlight=False, width=_WIDTH)
