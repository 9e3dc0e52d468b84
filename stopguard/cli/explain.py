"""`stopguard explain`: one request's timeline over the five ledgers, from the journal.

It reads the file only, so it works while a gateway writes it and after one was killed. On a terminal it is
coloured; in a pipe it is plain text in wide lines, made for `grep`; `--format json` is for programs.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.table import Table

    from stopguard.ledger.journal_reader import JournalReader, StoredLeak, StoredRequest

__all__ = ["command"]

SCHEMA_VERSION = 1
PLAIN_WIDTH = 1000
"""In a pipe nothing is wrapped: one row of a table is one line for `grep` and `awk`."""

NARROW_WIDTH = 100
"""Below this the column of wall times gives its room to what happened; the header has the time of opening."""

LIST_LIMIT = 20

LEDGER_STYLES = {"queue": "cyan", "kv": "magenta", "output": "blue", "link": "yellow", "stream": "green"}


@click.command()
@click.argument("request_id", metavar="[ID]", required=False)
@click.option(
    "--journal",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="STOPGUARD_JOURNAL",
    default=Path("stopguard.journal"),
    show_default=True,
    show_envvar=True,
    help="The journal to read.",
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    *("--last", "last"),
    is_flag=False,
    flag_value=LIST_LIMIT,
    type=click.IntRange(1, 10_000),
    metavar="[N]",
    help=f"List the N requests kept last; with another list, how long it is (N is {LIST_LIMIT} unless given).",
)
@click.option("--stops", is_flag=True, help="List stops, failures and leaks only.")
@click.option("--leaks", is_flag=True, help="List the leaks found last.")
@click.option("--open", "open_books", is_flag=True, help="List the requests that are open, or were left open.")
@click.option("--resume", is_flag=True, help="List which requests can be cut and continued, and which never.")
def command(
    request_id: str | None,
    journal: Path,
    form: str,
    last: int | None,
    stops: bool,
    leaks: bool,
    open_books: bool,
    resume: bool,
) -> None:
    """Print one request's timeline over the five ledgers.

    ID is the X-StopGuard-Id of the request, or its beginning. Without an ID, list what is in the journal.
    """
    if resume:
        if request_id is not None or last or stops or leaks or open_books:
            raise click.UsageError("--resume goes alone: it is about requests in general")
        _explain_resume(form)
        return
    from stopguard.ledger.journal_reader import JournalReader

    lists = [name for name, given in (("--stops", stops), ("--leaks", leaks), ("--open", open_books)) if given]
    if len(lists) > 1 or (request_id is not None and (lists or last)):
        raise click.UsageError("give an ID or one list, not both" if request_id else f"give one of {', '.join(lists)}")
    limit = last or LIST_LIMIT
    with JournalReader(journal) as reader:
        if request_id is not None:
            found = reader.find(request_id)
            answer: Any = _request_document(found)
            show: Callable[[Console], None] = lambda console: _print_request(console, found)  # noqa: E731
        elif leaks:
            found_leaks = reader.leaks(limit)
            answer = {"leaks": [_leak_document(leak) for leak in found_leaks]}
            show = lambda console: _print_leaks(console, found_leaks)  # noqa: E731
        else:
            requests, note, title = _listed(reader, limit, stops=stops, open_books=open_books)
            answer = {"requests": [_line_document(request) for request in requests], "note": note}
            show = lambda console: _print_requests(console, requests, title, note)  # noqa: E731
    if form == "json":
        import json

        click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **answer}, indent=2))
    else:
        console = _console()
        with console.capture() as capture:
            show(console)
        _echo(capture.get(), plain=not console.is_terminal)


def _explain_resume(form: str) -> None:
    from stopguard.cli import explain_resume

    if form == "json":
        import json

        click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **explain_resume.document()}, indent=2))
        return
    console = _console()
    with console.capture() as capture:
        explain_resume.print_table(console, _table, _say)
    _echo(capture.get(), plain=not console.is_terminal)


def _listed(
    reader: JournalReader, limit: int, *, stops: bool, open_books: bool
) -> tuple[list[StoredRequest], str, str]:
    if not open_books:
        return reader.recent(limit, stops=stops), "", "stops, failures and leaks" if stops else "requests kept last"
    alive = reader.writer_pid() is not None
    requests = reader.open_books(limit)
    requests += reader.abandoned(limit - len(requests)) if len(requests) < limit else []
    window = reader.blind_window()
    return requests, "" if alive or not requests else window, "open requests"


# ---- text ------------------------------------------------------------------------------------------------


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)  # honours NO_COLOR, TERM=dumb and COLUMNS by itself
    if not console.is_terminal:
        console = Console(highlight=False, no_color=True, width=PLAIN_WIDTH)
    return console


def _echo(text: str, *, plain: bool) -> None:
    if plain:
        text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_IN_ASCII).encode(encoding, "replace").decode(encoding)
    click.echo(text, nl=False)


_IN_ASCII = str.maketrans({"→": "->", "µ": "u", "·": "-", "…": "..."})


def _table(console: Console, *columns: tuple[str, str]) -> Table:
    from rich import box
    from rich.table import Table

    result = Table(
        box=box.SIMPLE_HEAD if console.is_terminal else None,
        header_style="bold" if console.is_terminal else "",
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for name, justify in columns:
        result.add_column(name, justify="right" if justify == "right" else "left", no_wrap=justify != "wrap")
    return result


def _print_request(console: Console, found: StoredRequest) -> None:
    from rich.text import Text

    from stopguard.ledger.timeline import duration, verdict

    record, run = found.record, found.run
    ending = verdict(record, abandoned=found.state == "abandoned")
    opened = _local(run.wall(record.opened_at))
    closed = "" if record.closed_at is None else f", closed after {duration(record.closed_at - record.opened_at)}"
    _say(console, Text.assemble((record.request_id, "bold"), f"  {record.engine}, {record.model}"))
    _say(console, Text(f"opened {opened:%Y-%m-%d %H:%M:%S}.{opened.microsecond // 1000:03d}{closed}"))
    if record.labels:
        _say(console, Text("labels " + ", ".join(f"{name}={value}" for name, value in sorted(record.labels.items()))))
    console.print()
    _print_rows(console, found)
    if record.stop is not None and record.stop.semantics != "finish":
        _print_stop(console, found)
    for leak in record.leaks:
        overdue = duration(leak.found_at - leak.due_at)
        _say(console, Text(f"LEAK     {leak.describe(leak.found_at)}, found {overdue} after it was due"))
    style = "bold green" if ending.good else "bold red"
    _say(console, Text.assemble((f"{ending.word}: ", style), ending.text))
    for line in _cautions(found):
        _say(console, Text(line, style="yellow"))


def _print_rows(console: Console, found: StoredRequest) -> None:
    from rich.text import Text

    from stopguard.ledger.timeline import counted, duration, timeline

    narrow = console.width < NARROW_WIDTH
    columns = [("ms", "right"), ("ledger", ""), ("what", "wrap"), ("amount", "right"), ("evidence", "")]
    table = _table(console, *(columns if narrow else [("time", ""), *columns]))
    for row in timeline(found.record):
        moment = _local(found.run.wall(row.at))
        what = Text(row.what, style="italic" if row.kind == "mark" else "red" if row.kind in _BAD_KINDS else "")
        if row.note:
            what.append(f"  {row.note}", style="dim")
        if row.late_seconds is not None and abs(row.late_seconds) >= 1e-6:
            what.append(f"  happened {duration(row.late_seconds)} before", style="dim")
        cells: list[str | Text] = [
            f"+{row.since_open_seconds * 1000:.3f}",
            Text(row.ledger or "·", style=LEDGER_STYLES.get(row.ledger, "dim")),
            what,
            "" if row.amount is None else counted(row.amount, row.unit),
            row.evidence,
        ]
        clock = f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03d}"
        table.add_row(*(cells if narrow else [clock, *cells]))
    console.print(table)
    console.print()


_BAD_KINDS = {"expired", "late", "written_off", "correction"}


def _print_stop(console: Console, found: StoredRequest) -> None:
    from rich.text import Text

    from stopguard.ledger.timeline import duration, stop_steps

    stop = found.record.stop
    assert stop is not None
    observed = stop.observed_at - found.record.opened_at
    line = f"stop     {stop.semantics}: {stop.reason or 'no reason given'} (source {stop.source}"
    line += f", by {stop.actor})" if stop.actor else ")"
    line += f", observed at +{observed * 1000:.3f} ms"
    if stop.occurred_at is not None:
        line += f", {duration(stop.observed_at - stop.occurred_at)} after it happened"
    _say(console, Text(line))
    table = _table(console, ("step", ""), ("after the stop", "right"), ("took", "right"))
    for step in stop_steps(stop):
        missing = step.after_seconds is None or step.took_seconds is None
        after = "not yet" if found.state == "open" else "not seen"
        table.add_row(
            step.name,
            Text(after, style="dim") if missing else duration(step.after_seconds or 0.0),
            "" if missing else duration(step.took_seconds or 0.0),
        )
    console.print(table)
    attempts = f"{stop.attempts} attempt{'' if stop.attempts == 1 else 's'}"
    _say(console, Text(f"outcome  {stop.outcome.replace('_', ' ')} ({stop.evidence.label}) after {attempts}"))


def _cautions(found: StoredRequest) -> list[str]:
    """What is not known, said in words."""
    from stopguard.ledger.journal_recovery import clock_time

    lines = []
    if found.state == "abandoned":
        up_to = f"its books are here up to {clock_time(found.written_at)}"
        lines.append(f"{up_to}; process {found.run.pid} ended without closing them")
        window = found.run.blind_window()
        if window:
            lines.append(window)
    elif found.state == "open":
        lines.append(
            f"its books are here up to {clock_time(found.written_at)}; process {found.run.pid} is still writing"
        )
    return lines


def _print_requests(console: Console, requests: list[StoredRequest], title: str, note: str) -> None:
    from rich.text import Text

    from stopguard.ledger.timeline import duration, verdict

    if not requests:
        _say(console, Text(f"no {title}"))
        return
    narrow = console.width < 2 * NARROW_WIDTH
    columns = [("opened", ""), ("id", ""), ("kind", ""), ("took", "right"), ("", "")]
    table = _table(console, *(columns if narrow else [*columns, ("engine", ""), ("model", ""), ("verdict", "wrap")]))
    for found in requests:
        record = found.record
        ending = verdict(record, abandoned=found.state == "abandoned")
        table.add_row(
            f"{_local(found.run.wall(record.opened_at)):%m-%d %H:%M:%S}",
            record.request_id,
            found.kind or "normal",
            "" if record.closed_at is None else duration(record.closed_at - record.opened_at),
            Text(ending.word, style="green" if ending.good else "red"),
            *(() if narrow else (record.engine, record.model, ending.text)),
        )
    console.print(table)
    if note:
        _say(console, Text(note, style="yellow"))


def _print_leaks(console: Console, leaks: list[StoredLeak]) -> None:
    from rich.text import Text

    from stopguard.ledger.timeline import counted, duration

    if not leaks:
        _say(console, Text("no leaks"))
        return
    table = _table(
        *(console, ("found", ""), ("id", ""), ("engine", ""), ("account", ""), ("amount", "right")),
        *(("age", "right"), ("opened by", "wrap")),
    )
    for found in leaks:
        leak = found.leak
        table.add_row(
            f"{_local(found.found_at):%m-%d %H:%M:%S}",
            leak.request_id,
            leak.engine,
            Text(f"{leak.ledger.label}.{leak.account.label}", style="red"),
            counted(leak.amount, str(leak.account.unit)),
            duration(leak.age_seconds(leak.found_at)),
            f"entry {leak.opened_by.sequence}: {leak.opened_by}",
        )
    console.print(table)


def _say(console: Console, text: Any) -> None:
    """A line of prose: wrapped on a terminal, one line in a pipe."""
    console.print(text, soft_wrap=not console.is_terminal)


def _local(wall: float) -> datetime:
    return datetime.fromtimestamp(wall, tz=UTC).astimezone()


# ---- JSON ------------------------------------------------------------------------------------------------


def _request_document(found: StoredRequest) -> dict[str, Any]:
    import msgspec

    from stopguard.ledger.timeline import stop_steps, timeline

    record, run = found.record, found.run
    document = _line_document(found)
    document["labels"] = record.labels
    document["tokens"] = {
        "computed": record.tokens_computed,
        "delivered": record.tokens_delivered,
        "recomputed": record.tokens_recomputed,
    }
    document["balances"] = {f"{a.ledger.label}.{a.label}": amount for a, amount in record.balances().items()}
    document["timeline"] = [{"time": _iso(run.wall(row.at)), **msgspec.to_builtins(row)} for row in timeline(record)]
    document["stop"] = None
    if record.stop is not None:
        document["stop"] = msgspec.to_builtins(record.stop)
        document["stop"]["evidence"] = record.stop.evidence.label
        document["stop"]["steps"] = [msgspec.to_builtins(step) for step in stop_steps(record.stop)]
    document["leaks"] = [_leak_body(leak) for leak in record.leaks]
    document["run"] = msgspec.to_builtins(run)
    return {"request": document}


def _line_document(found: StoredRequest) -> dict[str, Any]:
    from stopguard.ledger.timeline import verdict

    record = found.record
    ending = verdict(record, abandoned=found.state == "abandoned")
    return {
        "request_id": record.request_id,
        "engine": record.engine,
        "model": record.model,
        "state": found.state,
        "kind": found.kind,
        "opened": _iso(found.run.wall(record.opened_at)),
        "closed": None if record.closed_at is None else _iso(found.run.wall(record.closed_at)),
        "open_seconds": None if record.closed_at is None else record.closed_at - record.opened_at,
        "verdict": {"word": ending.word, "text": ending.text, "good": ending.good},
        "cautions": _cautions(found),
    }


def _leak_document(found: StoredLeak) -> dict[str, Any]:
    return {**_leak_body(found.leak), "found": _iso(found.found_at)}


def _leak_body(leak: Any) -> dict[str, Any]:
    return {
        "request_id": leak.request_id,
        "engine": leak.engine,
        "model": leak.model,
        "ledger": leak.ledger.label,
        "account": leak.account.label,
        "amount": leak.amount,
        "unit": str(leak.account.unit),
        "age_seconds": leak.age_seconds(leak.found_at),
        "overdue_seconds": leak.found_at - leak.due_at,
        "opened_by": {"sequence": leak.opened_by.sequence, "text": str(leak.opened_by)},
        "note": leak.note,
    }


def _iso(wall: float) -> str:
    return _local(wall).isoformat(timespec="microseconds")
