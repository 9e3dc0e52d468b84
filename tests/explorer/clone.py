"""A cheap copy of a whole controller, for walking a tree of events without starting over at each leaf.

`copy.deepcopy` costs milliseconds here, this some tens of microseconds. Every attribute is copied by a rule
written down below; one that has no rule stops the walk, so that a new field cannot be shared unnoticed.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import msgspec

from stopguard.ledger import Book, Obligation, RequestLedgers
from stopguard.stops import Anomalies, Controller, Machine, Timer, TimerWheel, Tracked

_SAME_LEDGERS = (
    *("request_id", "engine", "model", "opened_at", "last_at", "closed_at", "written_off", "entry_limit", "_folded"),
    *("tokens_computed", "tokens_delivered", "tokens_recomputed", "bytes_received", "bytes_sent"),
    *("blocks_taken", "blocks_returned"),
)
_COPIED_LEDGERS = ("balances", "entries", "marks")
_COPIED_OR_NONE_LEDGERS = ("reserved", "leaks", "labels")
_SPECIAL_LEDGERS = ("obligations", "stop", "totals")
_SAME_TRACKED = (
    *("request_id", "profile", "cause", "events", "folded_events", "last_activity_at", "muted", "output_started"),
    *(
        "discarding",
        "told",
        "attempts",
        "door_index",
        "tries_at_door",
        "preemptions",
        "settle_due",
        "cleared_at",
        "owner",
    ),
)
_COPIED_OR_NONE_TRACKED = ("part_places", "part_ids", "parts_over")
_SPECIAL_TRACKED = ("ledgers", "machine", "timers", "deadlines")
_CONTROLLER = {
    *("book", "config", "wheel", "tracked", "parts", "anomalies", "in_engine", "_timer_handlers"),
}
_BOOK = {
    *("limits", "_open", "_overdue", "_recent", "_recent_by_id", "_totals", "_leaks"),
    *("_opened", "_settled", "_written_off", "_leaks_found", "_closed_late"),
}
_WHEEL = {"_tick_seconds", "_slots", "_now_tick", "_at", "_limit", "_armed", "_numbers"}


def check_rules() -> None:
    """Every attribute that exists has a rule here."""
    ledgers = {*_SAME_LEDGERS, *_COPIED_LEDGERS, *_COPIED_OR_NONE_LEDGERS, *_SPECIAL_LEDGERS}
    tracked = {*_SAME_TRACKED, *_COPIED_OR_NONE_TRACKED, *_SPECIAL_TRACKED}
    controller = Controller(Book())
    assert ledgers == set(RequestLedgers.__slots__)
    assert tracked == set(Tracked.__slots__)
    assert set(vars(controller)) == _CONTROLLER
    assert set(vars(controller.book)) == _BOOK
    assert set(vars(controller.wheel)) == _WHEEL
    assert set(Machine.__slots__) == {"books", "client", "engine"}
    assert set(Obligation.__slots__) == {"entry", "expired", "remaining"}
    assert set(Timer.__slots__) == {"armed", "due_at", "number", "payload", "tick"}
    assert set(vars(controller.anomalies)) == {"book_errors", "book_error_count", "late_events"}


def small_wheel(controller: Controller, *, tick_seconds: float, slots: int) -> None:
    """Give a fresh controller a wheel with few slots (4096 dictionaries would be most of the cost of a copy)."""
    assert not controller.wheel
    controller.wheel = TimerWheel(0.0, tick_seconds=tick_seconds, slots=slots)


def clone(controller: Controller) -> Controller:
    """A copy that shares nothing that changes."""
    old_book = controller.book
    book = object.__new__(Book)
    totals = {key: row[:] for key, row in old_book._totals.items()}
    ledgers = {id(one): _clone_ledgers(one, totals) for one in old_book._open.values()}
    book.limits = old_book.limits
    book._open = {key: ledgers[id(one)] for key, one in old_book._open.items()}
    book._overdue = {key: ledgers[id(one)] for key, one in old_book._overdue.items()}
    book._recent = deque(old_book._recent, old_book._recent.maxlen)
    book._recent_by_id = dict(old_book._recent_by_id)
    book._totals = totals
    book._leaks = deque(old_book._leaks, old_book._leaks.maxlen)
    book._opened, book._settled, book._written_off = old_book._opened, old_book._settled, old_book._written_off
    book._leaks_found, book._closed_late = old_book._leaks_found, old_book._closed_late

    new = object.__new__(Controller)
    new.book = book
    new.config = controller.config
    everyone = {id(one): _clone_tracked(one, ledgers) for one in controller.tracked.values()}
    new.tracked = {key: everyone[id(one)] for key, one in controller.tracked.items()}
    new.parts = {key: everyone[id(one)] for key, one in controller.parts.items()}
    new.in_engine = {
        engine: {key: everyone[id(one)] for key, one in members.items()}
        for engine, members in controller.in_engine.items()
    }
    new.wheel = _clone_wheel(controller.wheel, everyone)
    anomalies = object.__new__(Anomalies)
    anomalies.book_errors = deque(controller.anomalies.book_errors, controller.anomalies.book_errors.maxlen)
    anomalies.book_error_count = controller.anomalies.book_error_count
    anomalies.late_events = Counter(controller.anomalies.late_events)
    new.anomalies = anomalies
    handlers: dict[Any, Any] = controller._timer_handlers
    new._timer_handlers = {kind: handler.__func__.__get__(new) for kind, handler in handlers.items()}
    return new


def _clone_ledgers(old: RequestLedgers, totals: dict[tuple[str, str], list[int]]) -> RequestLedgers:
    new = object.__new__(RequestLedgers)
    for name in _SAME_LEDGERS:
        setattr(new, name, getattr(old, name))
    for name in _COPIED_LEDGERS:
        setattr(new, name, getattr(old, name)[:])
    for name in _COPIED_OR_NONE_LEDGERS:
        value = getattr(old, name)
        setattr(new, name, value if value is None else value.copy())
    new.totals = totals[old.engine, old.model]
    new.stop = None if old.stop is None else msgspec.structs.replace(old.stop)
    if old.obligations is None:
        new.obligations = None
    else:
        new.obligations = {}
        for sequence, obligation in old.obligations.items():
            copy = new.obligations[sequence] = Obligation(obligation.entry)
            copy.remaining, copy.expired = obligation.remaining, obligation.expired
    return new


def _clone_tracked(old: Tracked, ledgers: dict[int, RequestLedgers]) -> Tracked:
    new = object.__new__(Tracked)
    for name in _SAME_TRACKED:
        setattr(new, name, getattr(old, name))
    for name in _COPIED_OR_NONE_TRACKED:
        value = getattr(old, name)
        setattr(new, name, value if value is None else value.copy())
    new.ledgers = ledgers[id(old.ledgers)]
    new.machine = Machine()
    new.machine.client, new.machine.engine, new.machine.books = (
        old.machine.client,
        old.machine.engine,
        old.machine.books,
    )
    # The timers themselves are put in with the wheel.
    new.timers = None if old.timers is None else dict(old.timers)
    new.deadlines = None if old.deadlines is None else dict(old.deadlines)
    return new


def _clone_wheel(old: TimerWheel[Any], everyone: dict[int, Tracked]) -> TimerWheel[Any]:
    new: TimerWheel[Any] = object.__new__(TimerWheel)
    new._tick_seconds, new._now_tick, new._at = old._tick_seconds, old._now_tick, old._at
    new._limit, new._armed, new._numbers = old._limit, old._armed, old._numbers
    new._slots = [{} for _ in old._slots]
    for index, bucket in enumerate(old._slots):
        for number, timer in bucket.items():
            before, kind = timer.payload
            after = everyone[id(before)]  # a timer of a request that is over would fail here
            copy = Timer((after, kind), timer.due_at, timer.tick, number)
            new._slots[index][number] = copy
            if before.timers is not None and before.timers.get(kind) is timer:
                assert after.timers is not None
                after.timers[kind] = copy
            else:
                assert before.deadlines is not None
                assert before.deadlines[kind][0] is timer
                assert after.deadlines is not None
                after.deadlines[kind] = (copy, before.deadlines[kind][1])
    return new
