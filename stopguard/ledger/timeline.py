"""One request's story in the order in which it was booked, over all five ledgers. Pure: a record in, rows out.

The rows are what `stopguard explain` prints; the words are those of the books. Times are those of the
record (seconds on its run's monotonic clock); every row also says how long after the opening it was.
"""

from __future__ import annotations

import msgspec

from stopguard.ledger.accounts import Account, Ledger, Role
from stopguard.ledger.entries import Entry, EntryState, Evidence
from stopguard.ledger.record import RequestRecord, StopSummary

__all__ = [
    "StopStep",
    "TimelineRow",
    "Verdict",
    "counted",
    "describe_open",
    "duration",
    "open_ledgers",
    "stop_steps",
    "timeline",
    "verdict",
]

_EPSILON_SECONDS = 5e-7


class TimelineRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line: an entry, or a mark, which moves nothing and has neither ledger nor sequence.

    `kind` is ``mark`` or the state of the entry in lower case. `amount` is in `unit`. `late_seconds`
    is how much earlier it happened than it was booked, where the engine said when.
    """

    at: float
    since_open_seconds: float
    ledger: str
    what: str
    kind: str
    amount: int | None = None
    unit: str = ""
    evidence: str = ""
    note: str = ""
    sequence: int | None = None
    late_seconds: float | None = None


class StopStep(msgspec.Struct, frozen=True, kw_only=True):
    """One of the steps of a stop. `after_seconds` counts from the stop's observation, `took_seconds` from the step
    before it that has happened; all three are None when it has not happened.
    """

    name: str
    at: float | None
    after_seconds: float | None
    took_seconds: float | None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended, in one word and one sentence. `good` is False for a leak, a write-off, or no evidence."""

    word: str
    text: str
    good: bool


def timeline(record: RequestRecord) -> list[TimelineRow]:
    """Entries and marks by time; where the times are equal a mark, which says why, stands before the entries."""
    rows = [
        TimelineRow(at=at, since_open_seconds=at - record.opened_at, ledger="", what=text, kind="mark")
        for at, text in record.marks
    ]
    rows += [_entry_row(record, entry) for entry in record.entries]
    return sorted(rows, key=lambda row: row.at)


def stop_steps(stop: StopSummary) -> list[StopStep]:
    """The four steps, notify, in-flight output, release, settle, with the engine's ack where it belongs in time."""
    steps = []
    latest = stop.observed_at
    for name, at in (
        ("notify", stop.notified_at),
        ("ack", stop.acked_at),
        ("in-flight output", stop.output_settled_at),
        ("release", stop.released_at),
        ("settle", stop.settled_at),
    ):
        if name == "ack" and at is None:
            continue
        steps.append(
            StopStep(
                name=name,
                at=at,
                after_seconds=None if at is None else at - stop.observed_at,
                # Output may settle before the notice is out: then the step took no time of its own.
                took_seconds=None if at is None else max(0.0, at - latest),
            )
        )
        if at is not None:
            latest = max(latest, at)
    return steps


def open_ledgers(record: RequestRecord) -> dict[Ledger, list[tuple[Account, int]]]:
    """What is still open, by ledger: the accounts that should be empty and their amounts."""
    found: dict[Ledger, list[tuple[Account, int]]] = {}
    for account, amount in record.balances().items():
        if account.role is Role.OPEN:
            found.setdefault(account.ledger, []).append((account, amount))
    return found


def verdict(record: RequestRecord, *, abandoned: bool = False) -> Verdict:
    """What became of the request. `abandoned` says that its process died while it was open."""
    open_text = describe_open(record)
    leaked = ", ".join(
        f"{leak.ledger.label}.{leak.account.label} {counted(leak.amount, leak.account.unit)}" for leak in record.leaks
    )
    if record.written_off:
        return Verdict(
            word="WRITTEN OFF", text=f"never settled; given up on: {leaked or _written_off(record)}", good=False
        )
    if record.closed_at is None:
        if abandoned:
            rest = (
                f"open at its last flush: {open_text}"
                if open_text
                else "all five ledgers were closed at its last flush"
            )
            return Verdict(word="ABANDONED", text=f"its process ended before it settled; {rest}", good=False)
        if record.leaks:
            return Verdict(word="LEAK", text=f"overdue and not come back: {leaked}", good=False)
        doing = f"{record.stop.semantics} in progress" if record.stop else "running"
        return Verdict(word="OPEN", text=f"{doing}; open: {open_text or 'nothing, about to settle'}", good=True)
    took = duration(record.closed_at - record.opened_at)
    if record.leaks:
        text = f"settled after {took}, but late: {leaked} came after its deadline"
        return Verdict(word="SETTLED LATE", text=text, good=False)
    if record.stop is None or record.stop.semantics == "finish":
        return Verdict(word="SETTLED", text=_finished(record, took), good=True)
    return _stopped(record, record.stop)


def describe_open(record: RequestRecord) -> str:
    """``kv (held 13 blocks), link (awaiting 1 notice)``; empty when all five ledgers are closed."""
    parts = []
    for ledger, accounts in open_ledgers(record).items():
        amounts = ", ".join(f"{account.label} {counted(amount, account.unit)}" for account, amount in accounts)
        parts.append(f"{ledger.label} ({amounts})")
    return ", ".join(parts)


def counted(amount: int, unit: str) -> str:
    """``1 block``, ``13 blocks``, ``4,096 bytes``. Every unit of the books is a regular plural."""
    return f"{amount:,} {unit.removesuffix('s') if amount == 1 else unit}"


def duration(seconds: float) -> str:
    """Three digits and a unit that fits: ``0 s``, ``12.3 ms``, ``4.56 s``, ``2 min 5 s``, ``3 h 2 min``."""
    size = abs(seconds)
    sign = "-" if seconds < 0 else ""
    if size < _EPSILON_SECONDS:
        return "0 s"
    for limit, factor, unit in ((0.9995e-3, 1e6, "µs"), (0.9995, 1e3, "ms"), (59.95, 1.0, "s")):
        if size < limit:
            value = size * factor
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{sign}{value:.{digits}f} {unit}"
    whole = round(size)
    if whole < 3600:
        return f"{sign}{whole // 60} min {whole % 60} s"
    return f"{sign}{whole // 3600} h {whole % 3600 // 60} min"


def _entry_row(record: RequestRecord, entry: Entry) -> TimelineRow:
    early = None if entry.occurred_at is None else entry.at - entry.occurred_at
    return TimelineRow(
        at=entry.at,
        since_open_seconds=entry.at - record.opened_at,
        ledger=entry.debit.ledger.label,
        what=_movement(entry),
        kind=entry.state.name.lower(),
        amount=entry.amount,
        unit=str(entry.debit.unit),
        evidence="" if entry.evidence is Evidence.NONE else entry.evidence.label,
        note=entry.note,
        sequence=entry.sequence,
        late_seconds=early,
    )


def _movement(entry: Entry) -> str:
    way = f"{entry.debit.label} → {entry.credit.label}"
    refers = f" #{entry.refers_to}" if entry.refers_to >= 0 else ""
    match entry.state:
        case EntryState.PENDING:
            due = "" if entry.due_at is None else f" within {duration(entry.due_at - entry.at)}"
            return f"{way}, due{due}"
        case EntryState.RESOLVED:
            return f"{way}, as due{refers}"
        case EntryState.VOIDED:
            return f"{way}, no longer due{refers}"
        case EntryState.EXPIRED:
            return f"{way}, OVERDUE{refers}"
        case EntryState.LATE:
            return f"{way}, LATE{refers}"
        case EntryState.CORRECTION:
            return f"{way}, corrects{refers}"
        case EntryState.WRITTEN_OFF:
            return f"{way}, given up"
        case _:
            return way


def _finished(record: RequestRecord, took: str) -> str:
    late = ""
    if record.stop is not None and record.stop.outcome == "raced_finish":
        late = "; a stop came after its end and changed nothing"
    delivered = counted(record.tokens_delivered, "tokens")
    return f"finished and settled in {took}, {delivered} delivered, all five ledgers closed{late}"


def _stopped(record: RequestRecord, stop: StopSummary) -> Verdict:
    balances = record.balances()
    wasted = balances.get(Account.OUTPUT_DISCARDED, 0) + balances.get(Account.OUTPUT_STALE, 0)
    settled_at = record.closed_at if stop.settled_at is None else stop.settled_at
    assert settled_at is not None
    after = duration(settled_at - stop.observed_at)
    evidence = "without evidence" if stop.evidence is Evidence.NONE else f"evidence: {stop.evidence.label}"
    waste = f"; {counted(wasted, 'tokens')} computed for nobody" if wasted else ""
    retry = f"; safe to retry: {stop.retry}" if stop.retry else ""
    ended = f"{stop.semantics} {stop.outcome.replace('_', ' ')} ({evidence})"
    text = f"{ended}, settled {after} after it was observed{waste}{retry}"
    good = stop.outcome not in {"unconfirmed", "failed"}
    return Verdict(word="SETTLED" if good else stop.outcome.upper(), text=text, good=good)


def _written_off(record: RequestRecord) -> str:
    return ", ".join(
        f"{entry.debit.ledger.label}.{entry.debit.label} {counted(entry.amount, entry.debit.unit)}"
        for entry in record.entries
        if entry.state is EntryState.WRITTEN_OFF
    )
