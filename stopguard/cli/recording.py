"""What a served request leaves behind: its books in the journal, and one line in the log when something went wrong.

The journal has to hear of a request when its books open, which is no effect of the controller's; hence a book
that tells it. Everything else hangs at the gateway's observers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from stopguard.ledger import Book, BookLimits, RequestLedgers
from stopguard.ledger.journal import Journal
from stopguard.stops import Effect, effects

__all__ = ["JournaledBook", "journal_observer", "log_observer"]

logger = logging.getLogger("stopguard.stops")


class JournaledBook(Book):
    """A book whose journal knows of every request from the beginning, so that a crash cannot hide one."""

    def __init__(self, limits: BookLimits, journal: Journal) -> None:
        super().__init__(limits)
        self._opened_in = journal.opened

    def open(self, request_id: str, at: float, *, engine: str, model: str) -> RequestLedgers:
        request = super().open(request_id, at, engine=engine, model=model)
        self._opened_in(request)
        return request


def journal_observer(journal: Journal) -> Callable[[Effect, float], None]:
    """Puts stops, leaks and ends into the journal. Four appends to a queue at most; never waits."""

    def observe(effect: Effect, _at: float) -> None:
        if isinstance(effect, effects.Settled):
            journal.settled(effect.tracked.ledgers)
        elif isinstance(effect, effects.StopBegan):
            journal.progressed(effect.tracked.ledgers)
        elif isinstance(effect, effects.Leaked):
            journal.leaked(effect.leak)

    return observe


def log_observer(effect: Effect, at: float) -> None:
    """One line for each leak and each stop without proof; with `debug`, one for every stop. Ids only, no content."""
    if isinstance(effect, effects.Settled):
        ledgers = effect.tracked.ledgers
        stop = ledgers.stop
        if stop is None:
            return
        level = logging.INFO if stop.outcome in ("failed",) or ledgers.leaks else logging.DEBUG
        if logger.isEnabledFor(level):
            logger.log(
                level,
                "%s %s: %s by %s is %s (%s)",
                ledgers.request_id,
                "written off" if ledgers.written_off else "settled",
                stop.semantics,
                stop.source,
                stop.outcome,
                stop.evidence.label,
                extra={
                    "event": "stop_ended",
                    "fields": {
                        "request": ledgers.request_id,
                        "engine": ledgers.engine,
                        "semantics": stop.semantics,
                        "source": stop.source,
                        "reason": stop.reason,
                        "outcome": stop.outcome,
                        "evidence": stop.evidence.label,
                        "settle_seconds": None if stop.settled_at is None else stop.settled_at - stop.observed_at,
                    },
                },
            )
    elif isinstance(effect, effects.Leaked):
        leak = effect.leak
        logger.warning(
            "leak: %s",
            leak.describe(at),
            extra={
                "event": "leak",
                "fields": {
                    "request": leak.request_id,
                    "engine": leak.engine,
                    "ledger": leak.ledger.label,
                    "account": leak.account.label,
                    "amount": leak.amount,
                    "unit": str(leak.account.unit),
                },
            },
        )
