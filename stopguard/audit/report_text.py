"""The report for people: a table of scenarios × ledgers, then each finding in a sentence, then the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from stopguard.audit.plan import Load, Plan, total_load
from stopguard.audit.scenario import Scenario
from stopguard.audit.verdict import LEDGERS, STEPS, AuditReport, Cell, Outcome, ScenarioReport

__all__ = ["print_plan", "print_report", "progress_line", "verdict_line"]

STYLES = {
    Outcome.PASS: "green",
    Outcome.LEAK: "bold red",
    Outcome.SLOW: "bold yellow",
    Outcome.UNPROVEN: "yellow",
    Outcome.SKIPPED: "dim",
}


def print_plan(console: Console, plan: Plan, scenarios: Sequence[Scenario], where: str) -> None:
    """What the audit will put on the engine, before it does."""
    table = Table(box=box.SIMPLE, title=f"What an audit of {where} would do", title_justify="left")
    table.add_column("scenario")
    table.add_column("requests", justify="right")
    table.add_column("at once", justify="right")
    table.add_column("what it stages", overflow="fold")
    for scenario in scenarios:
        load = scenario.load(plan)
        table.add_row(scenario.name, str(load.requests), str(load.at_once), scenario.stages)
    console.print(table)
    console.print(load_line(plan, [scenario.load(plan) for scenario in scenarios]))


def load_line(plan: Plan, loads: Sequence[Load]) -> str:
    """The whole load in one sentence."""
    total = total_load(loads)
    return (
        f"At most {min(total.requests + 10, plan.requests_max)} requests, {total.at_once} at once, {total.long} "
        f"of them long (up to {plan.tokens_max} tokens), in {plan.seconds_max / 60:.0f} minutes at the most."
    )


def progress_line(number: int, count: int, report: ScenarioReport) -> str:
    """One finished scenario, for a log."""
    if report.skipped:
        return f"[{number}/{count}] {report.name}: SKIPPED ({report.skipped})"
    findings = ", ".join(f"{cell.ledger} {cell.text}" for cell in report.accusations)
    return f"[{number}/{count}] {report.name}: {findings or report.outcome.name} in {report.seconds:.1f} s"


def print_report(console: Console, report: AuditReport) -> None:
    """The whole report."""
    target = report.target
    through = f" through {target.via}" if target.via else ""
    what = ", ".join(
        filter(None, (f"{target.engine} {target.version}".strip(), target.model and f"model {target.model}"))
    )
    console.print(
        f"[bold]Audit of {target.url}{through}[/]: {what}; watched by {target.observed_by} "
        f"(best evidence: {target.best_evidence.label})"
    )
    console.print(_table(report))
    _print_findings(console, report)
    _print_steps(console, report)
    if report.broken_off:
        console.print(f"[bold]Broken off:[/] {report.broken_off}")
    console.print(verdict_line(report))


def _table(report: AuditReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("scenario", no_wrap=True)
    for ledger in LEDGERS:
        table.add_column(ledger, justify="center", no_wrap=True)
    table.add_column("stops", justify="right")
    table.add_column("p50 / p99 ms", justify="right", no_wrap=True)
    for scenario in report.scenarios:
        if scenario.skipped:
            table.add_row(scenario.name, *[Text("·", style="dim")] * len(LEDGERS), "", "", style="dim")
            continue
        settle = scenario.steps.get("settle") or scenario.steps.get("stop")
        span = f"{settle.p50_ms:.0f} / {settle.p99_ms:.0f}" if settle else ""
        marks = [_mark(scenario.cell(ledger)) for ledger in LEDGERS]
        table.add_row(scenario.name, *marks, str(scenario.stops or ""), span)
    return table


def _mark(cell: Cell | None) -> Text:
    if cell is None:
        return Text("·", style="dim")
    word = {Outcome.PASS: "ok", Outcome.UNPROVEN: "?"}.get(cell.outcome, cell.outcome.name)
    return Text(word, style=STYLES[cell.outcome])


def _print_findings(console: Console, report: AuditReport) -> None:
    for name, cell in report.accusations():
        console.print(
            f"[{STYLES[cell.outcome]}]{cell.ledger} {cell.text}[/] in {name}: {escape(cell.detail)} "
            f"(evidence: {cell.evidence.label})"
        )
    unproven: dict[str, list[str]] = {}
    for scenario in report.scenarios:
        for cell in scenario.cells:
            if cell.outcome is Outcome.UNPROVEN and not cell.detail.startswith("not judged"):
                unproven.setdefault(f"{cell.ledger}: {cell.detail}", []).append(scenario.name)
    for sentence, names in unproven.items():
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        console.print(f"[yellow]UNPROVEN[/] {escape(sentence)} ({shown})")
    skipped: dict[str, list[str]] = {}
    for scenario in report.scenarios:
        if scenario.skipped and scenario.skipped != report.broken_off:
            skipped.setdefault(scenario.skipped, []).append(scenario.name)
    for reason, names in skipped.items():
        console.print(f"[dim]SKIPPED {', '.join(names)}: {escape(reason)}[/]")
    for scenario in report.scenarios:
        for note in scenario.notes:
            console.print(f"[dim]note on {scenario.name}: {escape(note)}[/]")


def _print_steps(console: Console, report: AuditReport) -> None:
    table = Table(box=box.SIMPLE, title="The four steps of a stop, ms after the client stopped", title_justify="left")
    table.add_column("scenario", no_wrap=True)
    for step in STEPS:
        table.add_column(f"{step} p50 / p99", justify="right", no_wrap=True)
    table.add_column("tokens wasted", justify="right")
    rows = 0
    for scenario in report.scenarios:
        if scenario.steps:
            rows += 1
            cells = [scenario.steps.get(step) for step in STEPS]
            shown = [f"{cell.p50_ms:.1f} / {cell.p99_ms:.1f}" if cell else "" for cell in cells]
            wasted = "" if scenario.tokens_wasted is None else str(scenario.tokens_wasted)
            table.add_row(scenario.name, *shown, wasted)
    if rows:
        console.print(table)


def verdict_line(report: AuditReport) -> str:
    """The verdict in one line."""
    if not report.scenarios and report.broken_off:
        return f"not audited: {report.broken_off}"
    counts = dict.fromkeys(Outcome, 0)
    for scenario in report.scenarios:
        counts[scenario.outcome] += 1
    parts = ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count)
    ledgers = ", ".join(ledger for ledger in LEDGERS if ledger in report.accused_ledgers())
    blamed = f"; blamed: {ledgers}" if ledgers else ""
    return (
        f"{report.outcome.name}: {len(report.scenarios)} scenarios ({parts}){blamed}; "
        f"{report.requests_sent} requests in {report.seconds:.0f} s"
    )
