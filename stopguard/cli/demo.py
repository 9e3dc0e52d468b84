"""`stopguard demo`: a seeded storm of stops and its settled book; then the same with a fault, and the leak found.

Everything runs in this process and on loopback: clients on raw sockets, the gateway, and behind it the
reference engine with the stop behaviour of the engine that `--policy` names. With `--virtual` there are no
sockets and no waiting: the same heart runs in virtual time, and the same seed gives the same storm to the letter.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.table import Table

    from stopguard.cli.demo_engine import EngineDemo
    from stopguard.cli.demo_rig import DemoRig
    from stopguard.ledger import Book, RequestRecord
    from stopguard.ledger.journal import Journal
    from stopguard.testing import Storm, StormReport

__all__ = ["command", "print_leaks", "print_steps", "print_timeline", "table"]

SCHEMA_VERSION = 1
DEFAULT_FAULT = "blocks-leaked-on-abort"
_REDRAW_EVERY = 200
_PLAIN_WIDTH = 120
_WORDS = ("outcome", "evidence")
_REQUESTS_REAL = 80
"""A real model on a CPU computes each of its tokens."""


@click.command()
@click.option("--seed", type=click.IntRange(0), default=7, show_default=True, help="The storm to run.")
@click.option("--requests", type=click.IntRange(1, 20_000), default=240, show_default=True, help="How many clients.")
@click.option("--policy", default="vllm", show_default=True, help="The engine whose way to stop is imitated.")
@click.option("--fault", default=DEFAULT_FAULT, show_default=True, help="What is broken in the second storm.")
@click.option("--journal", type=click.Path(path_type=Path, dir_okay=False), help="Keep the books here, for `explain`.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--engine", metavar="KIND", help="A real engine, installed and started here: vllm, sglang, llamacpp, …")
@click.option("--virtual", is_flag=True, help="In virtual time and without sockets: the storm replays exactly.")
@click.option("--trace", is_flag=True, help="With --virtual: print one line a transition instead of a progress bar.")
@click.pass_context
def command(
    ctx: click.Context,
    seed: int,
    requests: int,
    policy: str,
    fault: str,
    journal: Path | None,
    form: str,
    engine: str | None,
    virtual: bool,
    trace: bool,
) -> None:
    """Run a storm of stops on a healthy engine, then on a broken one, and show both books.

    Ends with 0 when the healthy storm settled whole and the fault of the second one was found, else with 1.

    With --engine a real engine is in the place of the built-in one: it is installed the first time, which takes
    minutes, and run on the CPU with a small random model. There is one storm then, and 0 means that it settled whole.
    """
    from rich.console import Console

    console = Console(stderr=form == "json", highlight=False)
    if not console.is_terminal:
        console = Console(stderr=form == "json", highlight=False, width=_PLAIN_WIDTH)
    if trace and not virtual:
        raise click.UsageError("--trace goes with --virtual: only virtual time has one order of things")
    if engine is not None:
        others = ("policy", "fault", "virtual", "trace")
        if any(ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in others):
            raise click.UsageError("--engine goes with none of --policy, --fault, --virtual and --trace")
        if ctx.get_parameter_source("requests") is not ParameterSource.COMMANDLINE:
            requests = _REQUESTS_REAL
        ctx.exit(_run_real(console, engine, seed, requests, journal, form))
    run = partial(_run_virtual, trace=trace) if virtual else _run_live
    healthy = run(console, seed, requests, policy, (), journal)
    if form == "text":
        _print_report(console, healthy, f"A healthy engine ({policy}'s way to stop)")
    broken = run(console, seed, requests, policy, (fault,), None)
    if form == "text":
        _print_report(console, broken, f"The same storm, with the fault [bold]{fault}[/]")
        _print_finding(console, broken, fault)
        if journal is not None and healthy.example is not None:
            console.print(
                f"\nRead any of it again:  [bold]stopguard explain {healthy.example.request_id} --journal {journal}[/]"
            )
    else:
        document = {
            "schema_version": SCHEMA_VERSION,
            "healthy": report_document(healthy),
            "faulty": report_document(broken),
        }
        click.echo(json.dumps(document, indent=2))
    ctx.exit(0 if healthy.clean and not broken.clean else 1)


def _run_real(console: Console, kind: str, seed: int, requests: int, journal: Path | None, form: str) -> int:
    """Run the storm against a real engine; returns the exit code."""
    try:
        from stopguard.cli.demo_engine import engine_document, print_engine_report, real_plan, run_engine_demo
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("stopguard"):
            raise
        raise click.ClickException(f"--engine needs the package {error.name}: pip install {error.name}") from None
    kept = _open_journal(journal, monotonic)
    try:
        with _Display(console, requests) as display:

            def show(demo: EngineDemo) -> None:
                if demo.gateway is not None:
                    display.show(monotonic() - demo.started_at, demo.settled, demo.gateway.book)

            demo = run_engine_demo(
                kind,
                real_plan(seed, requests),
                say=lambda line: console.print(line, style="dim", markup=False, soft_wrap=True),
                show=show,
                on_closed=kept.settled if kept is not None else None,
            )
    finally:
        if kept is not None:
            kept.close(timeout_seconds=10.0)
    if form == "json":
        click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **engine_document(demo)}, indent=2))
    else:
        print_engine_report(console, demo)
    return 0 if demo.clean else 1


def _run_live(
    console: Console, seed: int, requests: int, policy: str, faults: tuple[str, ...], journal: Path | None
) -> StormReport:
    """Run the storm over real sockets, through the gateway."""
    from stopguard.cli.demo_rig import DemoRig, run_rig
    from stopguard.testing import plan_storm

    kept = _open_journal(journal, monotonic)
    # Few long prompts at a time: on a small machine clients, gateway and engine share a core.
    plan = plan_storm(seed, requests, over_seconds=max(2.0, requests / 45))
    rig = DemoRig(plan, policy, faults, on_closed=kept.settled if kept is not None else None)
    try:
        with _Display(console, requests) as display:

            def show(rig: DemoRig) -> None:
                if rig.gateway is not None:
                    display.show(monotonic() - rig.started_at, rig.settled, rig.gateway.book)

            return run_rig(rig, show)
    finally:
        if kept is not None:
            kept.close(timeout_seconds=10.0)


def _run_virtual(
    console: Console,
    seed: int,
    requests: int,
    policy: str,
    faults: tuple[str, ...],
    journal: Path | None,
    *,
    trace: bool,
) -> StormReport:
    """Run the storm in virtual time."""
    from stopguard.testing import Storm, StormConfig, plan_storm

    config = StormConfig(policy=policy, faults=faults)
    storm = Storm(plan_storm(seed, requests), config, on_line=click.echo if trace else None)
    kept = _open_journal(journal, lambda: storm.clock.now)
    if kept is not None:
        storm.on_closed = kept.settled
    try:
        if trace:
            while storm.advance():
                pass
        else:
            _follow(console, storm, requests)
        return storm.finish()
    finally:
        if kept is not None:
            kept.close(timeout_seconds=10.0)


def _open_journal(path: Path | None, clock: Callable[[], float]) -> Journal | None:
    if path is None:
        return None
    from stopguard.ledger.journal import Journal

    return Journal.open(path, policy="all", monotonic_clock=clock)


def _follow(console: Console, storm: Storm, requests: int) -> None:
    with _Display(console, requests) as display:
        steps = 0
        while storm.advance():
            steps += 1
            if steps % _REDRAW_EVERY == 0:
                display.show(storm.clock.elapsed_seconds, storm.settled, storm.book)
        display.show(storm.clock.elapsed_seconds, storm.settled, storm.book)


class _Display:
    """A progress bar with the state of the book; where there is no terminal, a plain line for each tenth."""

    def __init__(self, console: Console, requests: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = console
        self._requests = requests
        self._shown = -1
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
        )
        self._progress = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task = self._progress.add_task("settled", total=requests, state="") if self._progress else None

    def __enter__(self) -> _Display:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, elapsed_seconds: float, settled: int, book: Book) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=settled, state=_open_line(book))
            return
        tenth = settled * 10 // self._requests
        if tenth > self._shown:
            self._shown = tenth
            self._console.print(
                f"{elapsed_seconds:7.2f} s  settled {settled}/{self._requests}  {_open_line(book)}", soft_wrap=True
            )


def _open_line(book: Book) -> str:
    counts = book.statistics()
    ledgers = " ".join(f"{ledger.label} {number}" for ledger, number in counts.open_ledgers.items())
    return f"open {counts.open_requests} ({ledgers})  leaks {counts.leaks_found}"


# ---- what is printed ----------------------------------------------------------------------------


def _print_report(console: Console, report: StormReport, title: str) -> None:
    console.print()
    console.rule(f"[bold]{title}[/]", align="left")
    console.print(
        f"{report.requests} requests closed in {report.elapsed_seconds:.1f} s, "
        f"{report.steps} steps, {report.preemptions} preemptions (seed {report.seed})\n"
    )
    console.print(_endings_table(report))
    print_steps(console, report)
    tokens = report.tokens
    console.print(
        f"Tokens: {tokens['delivered']} delivered, [bold]{report.tokens_wasted}[/] wasted "
        f"({tokens['discarded']} discarded, {tokens['stale']} stale), {report.tokens_recomputed} recomputed"
    )
    print_leaks(console, report, _engine_says(report), clean=report.clean)
    example = report.example if not report.leaks else None
    if example is not None:
        console.print("\nOne stop, over its five ledgers:")
        print_timeline(console, example)


def _endings_table(report: StormReport) -> Table:
    rows = table("stops by semantics", "outcome", "requests")
    for (semantics, outcome), number in sorted(report.endings.items()):
        good = outcome in ("confirmed", "raced_finish")
        rows.add_row(semantics, outcome if good else f"[red]{outcome}[/]", str(number))
    return rows


def print_steps(console: Console, report: StormReport) -> None:
    """How long each step of the stops took."""
    if not report.step_times:
        return
    rows = table("step (ms after the stop was observed)", "stops", "p50", "p99")
    for name, times in report.step_times.items():
        rows.add_row(name, str(times.count), f"{times.p50_ms:.1f}", f"{times.p99_ms:.1f}")
    console.print(rows)


def table(*columns: str) -> Table:
    """An empty table in the demo's look; the first column is of words, the others of numbers, unless named below."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number and column not in _WORDS else "left")
    return made


def _engine_says(report: StormReport) -> str:
    if report.snapshot is None:
        return "[red]is dead[/]"
    return "holds nothing" if report.engine_settled else "[red]still holds something[/]"


def print_leaks(console: Console, report: StormReport, engine: str, *, clean: bool, limit: int = 5) -> None:
    """What was left behind, and what else went wrong; `engine` is what the engine itself says."""
    if clean:
        console.print(f"Leaks: [bold green]none[/]. The book is settled; the engine {engine}.")
        return
    console.print(f"Leaks: [bold red]{len(report.leaks)}[/]. The engine {engine}.")
    for line in report.leak_lines[:limit]:
        console.print(f"  [red]LEAK[/] {line}")
    if len(report.leak_lines) > limit:
        console.print(f"  … and {len(report.leak_lines) - limit} more")
    for label, lines in (
        ("BOOK ERROR", report.book_errors),
        ("CROSS-TALK", report.crosstalk),
        ("CRASH", report.crashes),
        ("UNFINISHED", report.unfinished),
    ):
        for line in lines[:limit]:
            console.print(f"  [red]{label}[/] {line}")


def _print_finding(console: Console, report: StormReport, fault: str) -> None:
    console.print()
    if report.clean:
        console.print(f"[bold red]The fault {fault} was not found.[/]")
        return
    ledgers = ", ".join(f"{ledger.label} {number}" for ledger, number in sorted(report.leaks_by_ledger().items()))
    console.print(f"Found: [bold]{fault}[/]" + (f" (leaks by ledger: {ledgers})" if ledgers else ""))
    if report.leaky_example is not None:
        console.print("One of its requests:")
        print_timeline(console, report.leaky_example)


def print_timeline(console: Console, record: RequestRecord) -> None:
    """One request, row by row."""
    from stopguard.ledger.timeline import duration, timeline, verdict

    rows = table("after", "ledger", "what", "amount", "evidence")
    rows.columns[1].justify = rows.columns[2].justify = "left"
    for row in timeline(record):
        amount = f"{row.amount} {row.unit}" if row.amount is not None else ""
        rows.add_row(
            f"+{duration(row.since_open_seconds)}",
            row.ledger,
            row.what if row.ledger else f"[italic]{row.what}[/]",
            amount,
            row.evidence,
        )
    console.print(rows)
    console.print(f"{record.request_id}: {verdict(record).text}")


def steps_document(report: StormReport) -> dict[str, dict[str, float]]:
    """The steps of the stops as plain data: how many, and the percentiles in milliseconds."""
    return {
        name: {"stops": times.count, "p50": round(times.p50_ms, 3), "p99": round(times.p99_ms, 3)}
        for name, times in report.step_times.items()
    }


def report_document(report: StormReport) -> dict[str, Any]:
    """A report as plain data, for `--format json`."""
    return {
        "seed": report.seed,
        "policy": report.policy,
        "faults": list(report.faults),
        "clean": report.clean,
        "requests": report.requests,
        "elapsed_seconds": round(report.elapsed_seconds, 6),
        "endings": [
            {"semantics": semantics, "outcome": outcome, "requests": number}
            for (semantics, outcome), number in sorted(report.endings.items())
        ],
        "steps_ms": steps_document(report),
        "tokens": report.tokens,
        "tokens_wasted": report.tokens_wasted,
        "tokens_recomputed": report.tokens_recomputed,
        "preemptions": report.preemptions,
        "leaks": report.leak_lines,
        "book_errors": report.book_errors,
        "crosstalk": report.crosstalk,
        "crashes": report.crashes,
        "unfinished": report.unfinished,
        "engine_settled": report.engine_settled,
    }
