"""From the books to the answers of the admin API. Pure functions; every list is bounded by its caller or here.

The state of a request is derived from its balances and its stop, so that it cannot differ from what the
ledgers say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Literal, cast

from stopguard.admin.models import (
    AccountDue,
    AnomalyLine,
    BooksPage,
    DifferenceLine,
    EngineLine,
    JournalLine,
    LeakLine,
    LedgerName,
    LedgerState,
    ProbeLine,
    RecoveredLine,
    RequestDetail,
    RequestLine,
    Semantics,
    State,
    StopLine,
    StopStepLine,
    TimelineLine,
    TotalsLine,
    Verdict,
)
from stopguard.admin.view import EngineFacts, View
from stopguard.gateway.probing import ProbeFacts
from stopguard.ledger import (
    Account,
    Difference,
    Entry,
    EntryState,
    Leak,
    Ledger,
    Reconciliation,
    RequestLedgers,
    RequestRecord,
    StopSummary,
)
from stopguard.ledger.accounts import CLOSING_ACCOUNTS, Role
from stopguard.ledger.timeline import stop_steps, timeline, verdict
from stopguard.stops import Tracked

__all__ = [
    "TIMELINE_MAX",
    "books_page",
    "detail",
    "engine_line",
    "is_stop",
    "leak_line",
    "line",
    "line_of_record",
    "state_of",
]

TIMELINE_MAX = 1000
_ANOMALIES_MAX = 100
_RECOVERED_MAX = 100
_IN_QUEUE = CLOSING_ACCOUNTS[Ledger.QUEUE]
_QUEUE = [account for account in Account if account.ledger is Ledger.QUEUE and account.role is Role.OPEN]


def moment(wall: float) -> datetime:
    """Wall time as a date with a zone."""
    return datetime.fromtimestamp(wall, tz=UTC)


def is_stop(stop: StopSummary | None) -> bool:
    """Whether this is a stop in the everyday sense: not the model's own end."""
    return stop is not None and stop.semantics != "finish"


def state_of(ledgers: RequestLedgers) -> State:
    """Where a request stands, in one word."""
    if ledgers.closed_at is not None:
        return "written_off" if ledgers.written_off else "settled"
    if ledgers.overdue:
        return "overdue"
    stop = ledgers.stop
    if stop is not None and stop.semantics != "preempt":
        return "stopping"
    balances = ledgers.balances
    if balances[Account.QUEUE_ADMISSION]:
        return "queued"
    if balances[Account.QUEUE_PREEMPTED] or balances[Account.QUEUE_PAUSED]:
        return "preempted"
    if not any(balances[_IN_QUEUE]):
        return "settling"
    return "running" if balances[Account.STREAM_CONNECTED] else "draining"


def line(view: View, request: Tracked | RequestLedgers) -> RequestLine:
    """One request of a list."""
    tracked = request if isinstance(request, Tracked) else None
    ledgers = request.ledgers if isinstance(request, Tracked) else request
    balances = ledgers.balances
    # What passed since the last transition is counted by the relay and not yet in the books.
    unbooked = 0
    if tracked is not None and not tracked.probed and not tracked.muted:
        unbooked = max(0, tracked.events - tracked.folded_events)
    end = view.now() if ledgers.closed_at is None else ledgers.closed_at
    overdue = {one.entry.debit.ledger for one in ledgers.due() if one.expired}
    return RequestLine(
        id=ledgers.request_id,
        state=state_of(ledgers),
        engine=ledgers.engine,
        model=ledgers.model,
        group=view.group_of(tracked) if tracked is not None else (ledgers.labels or {}).get("group", ""),
        place=next((account.label for account in _QUEUE if balances[account]), "gone"),
        open=[ledger.label for ledger in Ledger if any(balances[CLOSING_ACCOUNTS[ledger]])],
        overdue=[ledger.label for ledger in sorted(overdue)],
        opened=moment(view.wall(ledgers.opened_at)),
        age_seconds=_seconds(end - ledgers.opened_at),
        tokens_computed=ledgers.tokens_computed + unbooked,
        tokens_delivered=ledgers.tokens_delivered + unbooked,
        bytes_sent=ledgers.bytes_sent,
        stop=None if ledgers.stop is None else _stop_line(ledgers.stop, view.wall(0.0), end),
    )


def line_of_record(record: RequestRecord, wall_zero: float, *, now: float, abandoned: bool) -> RequestLine:
    """The same of a request that only the journal has. `wall_zero` is wall time at 0 of its run's clock."""
    balances = record.balances()
    end = now if record.closed_at is None else record.closed_at
    stop = record.stop
    if record.closed_at is not None:
        state: State = "written_off" if record.written_off else "settled"
    elif record.leaks:
        state = "overdue"
    else:
        state = "stopping" if is_stop(stop) else "running"
    open_ledgers = {account.ledger for account in balances if account.role is Role.OPEN}
    return RequestLine(
        id=record.request_id,
        state=state,
        engine=record.engine,
        model=record.model,
        group=record.labels.get("group", ""),
        place=next((account.label for account in _QUEUE if balances.get(account)), "gone"),
        open=[ledger.label for ledger in sorted(open_ledgers)],
        overdue=sorted({leak.ledger.label for leak in record.leaks if balances.get(leak.account)}),
        opened=moment(wall_zero + record.opened_at),
        # Of a run that died nobody knows how long its requests went on.
        age_seconds=0.0 if abandoned and record.closed_at is None else _seconds(end - record.opened_at),
        tokens_computed=record.tokens_computed,
        tokens_delivered=record.tokens_delivered,
        bytes_sent=balances.get(Account.STREAM_SENT, 0),
        stop=None if stop is None else _stop_line(stop, wall_zero, end),
    )


def detail(
    request: RequestLine,
    record: RequestRecord,
    source: Literal["open", "recent", "journal"],
    *,
    wall_zero: float,
    now: float,
    abandoned: bool = False,
    rows_max: int = TIMELINE_MAX,
) -> RequestDetail:
    """Everything about one request, from its record."""
    rows = timeline(record)
    ending = verdict(record, abandoned=abandoned)
    return RequestDetail(
        request=request,
        source=source,
        ledgers=_ledger_states(record, now),
        steps=[
            StopStepLine(name=step.name, after_seconds=step.after_seconds, took_seconds=step.took_seconds)
            for step in (stop_steps(record.stop) if record.stop is not None else [])
        ],
        timeline=[
            TimelineLine(
                time=moment(wall_zero + row.at),
                since_open_seconds=_seconds(row.since_open_seconds),
                ledger=row.ledger,
                what=row.what,
                kind=row.kind,
                amount=row.amount,
                unit=row.unit,
                evidence=row.evidence,
                note=row.note,
            )
            for row in rows[max(0, len(rows) - rows_max) :]
        ],
        timeline_total=len(rows),
        leaks=[
            leak_line(leak, wall_zero=wall_zero, now=now, still_open=bool(record.balances().get(leak.account)))
            for leak in record.leaks
        ],
        verdict=Verdict(word=ending.word, text=ending.text, good=ending.good),
        labels=record.labels,
    )


def leak_line(leak: Leak, *, wall_zero: float, now: float, still_open: bool) -> LeakLine:
    """One leak. Of one that has closed only how overdue it was when it was found is known here."""
    return LeakLine(
        id=leak.request_id,
        engine=leak.engine,
        model=leak.model,
        ledger=leak.ledger.label,
        account=leak.account.label,
        amount=leak.amount,
        unit=str(leak.account.unit),
        found=moment(wall_zero + leak.found_at),
        overdue_seconds=_seconds((now if still_open else leak.found_at) - leak.due_at),
        open=still_open,
        opened_by=f"entry {leak.opened_by.sequence}: {leak.opened_by}",
    )


def engine_line(
    facts: EngineFacts, comparison: Reconciliation | None, lasting: Sequence[Difference], now: float
) -> EngineLine:
    """One engine, with the newest comparison of the books with its gauges."""
    return EngineLine(
        name=facts.name,
        base_url=facts.base_url,
        kind=facts.kind,
        version=facts.version,
        healthy=facts.healthy,
        models=list(facts.models),
        in_engine=facts.in_engine,
        stopping=facts.stopping,
        unconfirmed=facts.unconfirmed,
        waiting_for_connection=facts.waiting_for_connection,
        open_connections=facts.open_connections,
        idle_connections=facts.idle_connections,
        failures=facts.failures,
        ejections=facts.ejections,
        doors=list(facts.doors),
        best_evidence=facts.best_evidence,
        probed=facts.probed,
        gauge_unit=facts.gauge_unit,
        compared_seconds_ago=None if comparison is None else _seconds(now - comparison.at),
        differences=_differences(comparison, lasting),
        probes=[_probe_line(probe, now) for probe in facts.probes],
    )


def _probe_line(probe: ProbeFacts, now: float) -> ProbeLine:
    return ProbeLine(
        kind=probe.kind,
        version=probe.version,
        role=probe.role,
        rank=probe.rank,
        host=probe.host,
        process=probe.process,
        connected_seconds=_seconds(now - probe.connected_at),
        frames=probe.frames,
        gaps=probe.gaps,
        frames_missed=probe.frames_missed,
        frames_dropped=probe.frames_dropped,
        in_gap=probe.in_gap,
        lag_seconds=probe.lag_seconds,
        clock_offset_seconds=probe.clock_offset_seconds,
        clock_error_seconds=probe.clock_error_seconds,
        commands=list(probe.commands),
        hooks_attached=list(probe.hooks_attached),
        hooks_missing=list(probe.hooks_missing),
    )


def books_page(view: View) -> BooksPage:
    """Counts, balances and what does not fit."""
    counts, anomalies, journal = view.statistics(), view.anomalies(), view.journal()
    errors = list(anomalies.book_errors)[-_ANOMALIES_MAX:]
    recovered = view.recovered()
    return BooksPage(
        started=moment(view.wall(view.signs().started_at)),
        open_requests=counts.open_requests,
        overdue_requests=counts.overdue_requests,
        opened=counts.opened,
        settled=counts.settled,
        written_off=counts.written_off,
        leaks_found=counts.leaks_found,
        closed_late=counts.closed_late,
        open_ledgers={ledger.label: count for ledger, count in counts.open_ledgers.items()},
        totals=[
            TotalsLine(engine=engine, model=model, balances=_named(balances.items()))
            for (engine, model), balances in sorted(view.totals().items())
            if balances
        ],
        book_errors=anomalies.book_error_count,
        anomalies=[AnomalyLine(time=moment(view.wall(one.at)), id=one.request_id, text=one.text) for one in errors],
        late_events=dict(anomalies.late_events),
        differences={
            engine: _differences(comparison, view.persistent(engine))
            for engine, comparison in view.reconciliations().items()
        },
        journal=None
        if journal is None
        else JournalLine(
            queued=journal.queued,
            backlog=journal.backlog,
            written=journal.written,
            open_books=journal.open_books,
            dropped=journal.dropped,
            failing=journal.failing,
            file_bytes=journal.file_bytes,
        ),
        recovered=[
            RecoveredLine(id=book.request_id, kind=book.kind, written=moment(book.written_at))
            for book in recovered[:_RECOVERED_MAX]
        ],
        recovered_total=len(recovered),
    )


# ---- private --------------------------------------------------------------------------------------------------


def _stop_line(stop: StopSummary, wall_zero: float, end: float) -> StopLine:
    until = end if stop.settled_at is None else stop.settled_at
    return StopLine(
        semantics=cast("Semantics", stop.semantics),
        source=stop.source,
        reason=stop.reason,
        actor=stop.actor,
        outcome=stop.outcome,
        evidence=stop.evidence.label,
        attempts=stop.attempts,
        observed=moment(wall_zero + stop.observed_at),
        age_seconds=_seconds(until - stop.observed_at),
        detection_seconds=None if stop.occurred_at is None else _seconds(stop.observed_at - stop.occurred_at),
        retry=stop.retry,
    )


def _ledger_states(record: RequestRecord, now: float) -> list[LedgerState]:
    balances = record.balances()
    due = _obligations(record.entries)
    states = []
    for ledger in Ledger:
        waited_for = [
            AccountDue(
                account=entry.debit.label,
                amount=amount,
                unit=str(entry.debit.unit),
                due_in_seconds=None if entry.due_at is None else _seconds(entry.due_at - now),
                overdue=expired,
            )
            for entry, amount, expired in due
            if entry.debit.ledger is ledger
        ]
        states.append(
            LedgerState(
                name=cast("LedgerName", ledger.label),
                closed=not any(account.ledger is ledger and account.role is Role.OPEN for account in balances),
                overdue=any(one.overdue for one in waited_for),
                balances={
                    account.label: amount
                    for account, amount in balances.items()
                    if account.ledger is ledger and account.role is not Role.BOUNDARY
                },
                due=waited_for,
            )
        )
    return states


def _obligations(entries: Iterable[Entry]) -> list[tuple[Entry, int, bool]]:
    """What is still due, derived from the entries: (the pending entry, what is left of it, whether overdue)."""
    left: dict[int, list[int]] = {}
    pending: dict[int, Entry] = {}
    for entry in entries:
        if entry.state is EntryState.PENDING:
            pending[entry.sequence] = entry
            left[entry.sequence] = [entry.amount, 0]
        elif entry.refers_to in left:
            if entry.state is EntryState.EXPIRED:
                left[entry.refers_to][1] = 1
            elif entry.state in (EntryState.RESOLVED, EntryState.LATE, EntryState.VOIDED):
                left[entry.refers_to][0] -= entry.amount
        elif entry.state is EntryState.WRITTEN_OFF:
            for sequence, one in pending.items():
                if one.debit is entry.debit:
                    left[sequence][0] = 0
    return [(pending[sequence], amount, bool(expired)) for sequence, (amount, expired) in left.items() if amount > 0]


def _differences(comparison: Reconciliation | None, lasting: Sequence[Difference]) -> list[DifferenceLine]:
    if comparison is None:
        return []
    stays = {(one.ledger, one.unit) for one in lasting}
    return [
        DifferenceLine(
            ledger=one.ledger.label,
            unit=one.unit,
            expected=one.expected,
            reported=one.reported,
            orphans=one.orphans,
            phantoms=one.phantoms,
            persistent=(one.ledger, one.unit) in stays,
        )
        for one in comparison.differences
    ]


def _named(balances: Iterable[tuple[Account, int]]) -> dict[str, int]:
    return {f"{account.ledger.label}.{account.label}": amount for account, amount in balances if amount}


def _seconds(value: float) -> float:
    return round(value, 6)
