"""The limits of a book, and what it says of itself."""

from __future__ import annotations

import msgspec

from stopguard.ledger.accounts import Ledger

__all__ = ["BookLimits", "BookStatistics"]


class BookLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a book. `recent` is how many closed requests are remembered."""

    open_requests: int = 100_000
    entries_per_request: int = 4096
    engine_models: int = 256
    recent: int = 256
    overdue: int = 10_000
    leaks: int = 10_000


class BookStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts at one moment. `open_ledgers[ledger]` is how many requests have that ledger open."""

    open_requests: int
    overdue_requests: int
    opened: int
    settled: int
    written_off: int
    leaks_found: int
    closed_late: int
    open_ledgers: dict[Ledger, int]
