"""The passive audit: judge a gateway from its books, running or past, and put no load on anything.

From a journal every stop is judged that it keeps: its leaks, its four steps against the limit, and the grade
of evidence that it ended with. From a running gateway's admin API come the same books as they are now, and the
comparison with the engines' own gauges. One scenario is one engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from stopguard.audit.errors import CredentialsRefused, TargetUnreachable
from stopguard.audit.verdict import (
    AuditReport,
    Cell,
    Outcome,
    ScenarioReport,
    StepTimes,
    TargetLine,
    percentile,
)
from stopguard.ledger import Evidence, Ledger, StopSummary
from stopguard.ledger.journal_reader import JournalReader, StoredLeak, StoredRequest

__all__ = ["audit_gateway", "audit_journal"]

_ROWS_MAX: Final = 10_000
_SECONDS: Final = 10.0
_LEDGERS: Final = tuple(ledger.label for ledger in Ledger)
#: Step -> its moment in a stop's summary; all are measured from when the stop was observed.
_MOMENTS: Final = {"notify": "notified_at", "stop": "acked_at", "release": "released_at", "settle": "settled_at"}
_LEDGER_OF_STEP: Final = {"notify": "link", "stop": "queue", "release": "kv", "settle": "stream"}


class _Books:
    """What one engine's requests add up to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.leaks: dict[str, list[Cell]] = defaultdict(list)
        self.doubts: dict[str, Cell] = {}
        self.spans: dict[str, list[float]] = defaultdict(list)
        self.evidence: list[Evidence] = []
        self.notes: list[str] = []
        self.stops = 0
        self.wasted = 0

    def leak(self, ledger: str, amount: int, unit: str, age_seconds: float, detail: str) -> None:
        self.leaks[ledger].append(
            Cell(
                ledger=ledger,
                outcome=Outcome.LEAK,
                evidence=Evidence.PROBE,
                amount=amount,
                unit=unit,
                age_seconds=age_seconds,
                detail=detail,
            )
        )

    def doubt(self, ledger: str, evidence: Evidence, detail: str) -> None:
        self.doubts.setdefault(ledger, Cell(ledger=ledger, outcome=Outcome.UNPROVEN, evidence=evidence, detail=detail))

    def report(self, deadline_seconds: float) -> ScenarioReport:
        steps = {
            step: StepTimes(count=len(spans), p50_ms=percentile(spans, 0.5) * 1e3, p99_ms=percentile(spans, 0.99) * 1e3)
            for step, spans in self.spans.items()
            if spans
        }
        return ScenarioReport(
            name=self.name,
            title=f"the books of {self.name}",
            cells=tuple(self._cell(ledger, deadline_seconds) for ledger in _LEDGERS),
            stops=self.stops,
            steps=steps,
            tokens_wasted=self.wasted,
            notes=tuple(self.notes),
        )

    def _cell(self, ledger: str, deadline_seconds: float) -> Cell:
        leaks = self.leaks.get(ledger)
        if leaks:
            unit = leaks[0].unit
            same = [leak for leak in leaks if leak.unit == unit]
            detail = same[0].detail if len(same) == 1 else f"{len(same)} leaks; the oldest: {same[-1].detail}"
            return Cell(
                ledger=ledger,
                outcome=Outcome.LEAK,
                evidence=same[0].evidence,
                amount=sum(leak.amount for leak in same),
                unit=unit,
                age_seconds=max(leak.age_seconds for leak in same),
                detail=detail,
            )
        for step, judged in _LEDGER_OF_STEP.items():
            slowest = max(self.spans.get(step, ()), default=0.0)
            if judged == ledger and slowest > deadline_seconds:
                return Cell(
                    ledger=ledger,
                    outcome=Outcome.SLOW,
                    evidence=max(self.evidence, default=Evidence.NONE),
                    measured_seconds=slowest,
                    limit_seconds=deadline_seconds,
                    detail=f"{step} took {slowest:.2f} s",
                )
        if ledger in self.doubts:
            return self.doubts[ledger]
        if not self.stops:
            return Cell(ledger=ledger, outcome=Outcome.UNPROVEN, detail="the books hold no stop to judge")
        return Cell(ledger=ledger, outcome=Outcome.PASS, evidence=min(self.evidence, default=Evidence.NONE))


# A journal ------------------------------------------------------------------------------------------


def audit_journal(path: Path, deadline_seconds: float) -> AuditReport:
    """Judge what the journal at `path` keeps, also while it is written. Raises a `StorageError` of the journal."""
    with JournalReader(path) as reader:
        stops = reader.recent(_ROWS_MAX, stops=True)
        leaks = reader.leaks(_ROWS_MAX)
        open_books = reader.open_books()
        blind = reader.blind_window()
        alive = reader.writer_pid() is not None
    books: dict[str, _Books] = {}

    def of(engine: str) -> _Books:
        return books.setdefault(engine, _Books(engine or "(no engine)"))

    for stored in stops:
        _add_stop(of(stored.record.engine), stored)
    for leak in leaks:
        _add_leak(of(leak.leak.engine), leak)
    for stored in open_books:
        if stored.state == "abandoned":
            of(stored.record.engine).doubt(
                "queue", Evidence.NONE, f"{stored.record.request_id} was open when the gateway ended"
            )
    reports = [one.report(deadline_seconds) for _, one in sorted(books.items())]
    return AuditReport(
        target=TargetLine(
            url=str(path),
            engine="the books of a gateway",
            observed_by=f"the journal, {'which is being written' if alive else 'whose writer has ended'}",
            best_evidence=Evidence.PROBE,
        ),
        scenarios=tuple(_or_nothing(reports, blind)),
        deadline_seconds=deadline_seconds,
    )


def _or_nothing(reports: Sequence[ScenarioReport], blind: str) -> Iterable[ScenarioReport]:
    if not reports:
        yield ScenarioReport(name="books", title="the books", skipped="there is no stop and no leak in these books")
    yield from reports
    if blind:
        cell = Cell(ledger="counters", outcome=Outcome.UNPROVEN, detail=blind)
        yield ScenarioReport(name="end of the journal", title="the end of the journal", cells=(cell,))


def _add_stop(books: _Books, stored: StoredRequest) -> None:
    record, stop = stored.record, stored.record.stop
    if stop is None:
        return
    books.stops += 1
    books.evidence.append(stop.evidence)
    _add_steps(books, stop)
    balances = {account.label: amount for account, amount in record.balances().items()}
    books.wasted += balances.get("stale", 0) + balances.get("discarded", 0)
    if stop.outcome == "unconfirmed" or record.written_off:
        books.doubt(
            "link", stop.evidence, f"the stop of {record.request_id} was never confirmed (best: {stop.evidence.label})"
        )
        books.doubt("kv", stop.evidence, f"nothing proves what {record.request_id} gave back")


def _add_steps(books: _Books, stop: StopSummary) -> None:
    for step, field in _MOMENTS.items():
        moment = getattr(stop, field)
        if moment is not None:
            books.spans[step].append(max(0.0, moment - stop.observed_at))


def _add_leak(books: _Books, stored: StoredLeak) -> None:
    leak = stored.leak
    books.leak(
        leak.ledger.label,
        leak.amount,
        str(leak.account.unit),
        leak.age_seconds(leak.found_at),
        leak.describe(leak.found_at),
    )


# A gateway ------------------------------------------------------------------------------------------


def audit_gateway(
    url: str, deadline_seconds: float, token: str = "", transport: httpx.BaseTransport | None = None
) -> AuditReport:
    """Judge a running gateway from its admin API. Raises `TargetUnreachable` or `CredentialsRefused`."""
    base = url.rstrip("/")
    if urlsplit(base).scheme not in {"http", "https"}:
        raise TargetUnreachable(f"{url!r} is not the address of an admin API (write it like http://127.0.0.1:9090)")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(base_url=base, headers=headers, timeout=_SECONDS, trust_env=False, transport=transport) as client:
        pages = {name: _page(client, name) for name in ("books", "leaks", "engines", "stops")}
    books = {engine["name"]: _Books(engine["name"]) for engine in pages["engines"]["engines"]}
    for engine in pages["engines"]["engines"]:
        _add_engine(books[engine["name"]], engine, bool(pages["books"]["opened"]))
    for row in pages["leaks"]["leaks"]:
        one = books.setdefault(row["engine"], _Books(row["engine"]))
        late = "" if row["open"] else " (it closed late)"
        one.leak(
            row["ledger"], row["amount"], row["unit"], row["overdue_seconds"], f"{row['account']} of {row['id']}{late}"
        )
    for row in pages["stops"]["ended"]:
        if row.get("stop") and row["engine"] in books:
            one = books[row["engine"]]
            one.stops += 1
            one.evidence.append(Evidence[row["stop"]["evidence"].upper()])
            one.spans["settle"].append(row["stop"]["age_seconds"])
    reports = [one.report(deadline_seconds) for _, one in sorted(books.items())]
    reports.append(_whole(pages["books"]))
    return AuditReport(
        target=TargetLine(
            url=base, engine="a gateway", observed_by="the gateway's own books", best_evidence=Evidence.PROBE
        ),
        scenarios=tuple(reports),
        deadline_seconds=deadline_seconds,
    )


def _page(client: httpx.Client, name: str) -> dict[str, Any]:
    try:
        response = client.get(f"/{name}")
    except httpx.HTTPError as error:
        raise TargetUnreachable(f"no admin API answers at {client.base_url}: {error}") from error
    try:
        page = response.json() if response.status_code == 200 else None
    except ValueError:
        page = None
    if response.status_code in {401, 403}:
        raise CredentialsRefused(f"the admin API refuses these credentials (HTTP {response.status_code}): give --key")
    if not isinstance(page, dict):
        raise TargetUnreachable(f"{client.base_url} is no StopGuard admin API (/{name} answers {response.status_code})")
    return page


def _add_engine(books: _Books, engine: dict[str, Any], used: bool) -> None:
    best = Evidence[engine["best_evidence"].upper()]
    books.evidence.append(best)
    if used and best < Evidence.GAUGE:
        for ledger in ("link", "kv", "queue"):
            books.doubt(ledger, best, f"the best evidence to be had from this engine is {best.label}")
    if engine["unconfirmed"]:
        books.doubt("link", best, f"{engine['unconfirmed']} stops were not confirmed by their deadline")
    for row in engine["differences"]:
        if row["persistent"] and (row["orphans"] or row["phantoms"]):
            side = f"{row['orphans']} that no request owns" if row["orphans"] else f"{row['phantoms']} that it lacks"
            amount = row["orphans"] or row["phantoms"]
            books.leak(
                row["ledger"], amount, row["unit"], 0.0, f"the engine's gauges and the books differ lastingly: {side}"
            )


def _whole(books: dict[str, Any]) -> ScenarioReport:
    """The book of all requests."""
    cells = []
    if books["book_errors"]:
        cells.append(
            Cell(
                ledger="counters",
                outcome=Outcome.LEAK,
                evidence=Evidence.PROBE,
                amount=books["book_errors"],
                unit="book errors",
                detail="events that the books could not hold: report it",
            )
        )
    else:
        cells.append(Cell(ledger="counters", outcome=Outcome.PASS, evidence=Evidence.PROBE))
    notes = (
        f"{books['opened']} requests, {books['settled']} settled, {books['written_off']} written off, "
        f"{books['open_requests']} open ({books['overdue_requests']} overdue), {books['closed_late']} closed late",
    )
    return ScenarioReport(name="the whole book", title="the whole book", cells=tuple(cells), notes=notes)
