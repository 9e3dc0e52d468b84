"""Retention: what is too old, or too much, is deleted a little at every flush.

Rows are written in the order of time, so the oldest are those with the lowest numbers, and no index
on time is needed. Freed pages are used again by the next rows; only what is left over goes back to
the file system, a bounded number of pages a flush.
"""

from __future__ import annotations

import sqlite3

from stopguard.ledger.journal_batch import JournalLimits
from stopguard.ledger.journal_schema import PAGE_BYTES

__all__ = ["Retention"]

_CHUNK_ROWS = 256
_ROWS_A_FLUSH = 4096
_PAGES_A_FLUSH = 256
_AGE_CHECK_SECONDS = 1.0


class Retention:
    """Deletes inside the writer's transaction, before the new rows, so that they find the room."""

    def __init__(self, limits: JournalLimits) -> None:
        self.limits = limits
        self.deleted = 0
        self._next_age_check_at = 0.0

    def apply(self, connection: sqlite3.Connection, now_wall: float, rows_coming: int) -> None:
        """Delete what `limits` does not allow; more when more is coming, so that it always keeps up."""
        allowed = max(_ROWS_A_FLUSH, 2 * rows_coming)
        # A wall clock may be set back: then the next check would never come.
        if now_wall >= self._next_age_check_at or now_wall < self._next_age_check_at - 60 * _AGE_CHECK_SECONDS:
            allowed = self._delete_old(connection, now_wall - self.limits.age_seconds, allowed)
            if allowed > 0:
                self._next_age_check_at = now_wall + _AGE_CHECK_SECONDS
        used = self._used_bytes(connection)
        while used > self.limits.file_bytes and allowed > 0:
            gone = self._delete_oldest(connection)
            if not gone:
                break
            allowed -= gone
            used = self._used_bytes(connection)
        self._give_back(connection)

    def _delete_old(self, connection: sqlite3.Connection, before: float, allowed: int) -> int:
        for table in ("requests", "leaks"):
            while allowed > 0:
                cursor = connection.execute(
                    f"DELETE FROM {table} WHERE number IN (SELECT number FROM {table} ORDER BY number LIMIT ?) "
                    "AND written_at < ?",
                    (_CHUNK_ROWS, before),
                )
                self.deleted += cursor.rowcount
                allowed -= cursor.rowcount
                if cursor.rowcount < _CHUNK_ROWS:
                    break
        if allowed > 0:
            cursor = connection.execute("DELETE FROM sums WHERE minute < ?", (int(before // 60),))
            self.deleted += cursor.rowcount
            allowed -= cursor.rowcount
        return allowed

    def _delete_oldest(self, connection: sqlite3.Connection) -> int:
        """One chunk of what is oldest: requests first, and sums, which are small, last."""
        for statement in (
            "DELETE FROM requests WHERE number IN (SELECT number FROM requests ORDER BY number LIMIT ?)",
            "DELETE FROM leaks WHERE number IN (SELECT number FROM leaks ORDER BY number LIMIT ?)",
            "DELETE FROM sums WHERE (minute, engine, model) IN "
            "(SELECT minute, engine, model FROM sums ORDER BY minute, engine, model LIMIT ?)",
        ):
            gone = connection.execute(statement, (_CHUNK_ROWS,)).rowcount
            if gone:
                self.deleted += gone
                return gone
        return 0

    def _used_bytes(self, connection: sqlite3.Connection) -> int:
        return (_pragma(connection, "page_count") - _pragma(connection, "freelist_count")) * PAGE_BYTES

    def _give_back(self, connection: sqlite3.Connection) -> None:
        # A cushion of free pages is kept: at the limit every flush frees what the next one needs.
        cushion = max(16, min(1024, self.limits.file_bytes // PAGE_BYTES // 8))
        surplus = _pragma(connection, "freelist_count") - cushion
        # A page a call: sqlite3 takes one step of a statement without columns, which is one page whatever N says.
        for _ in range(min(surplus, _PAGES_A_FLUSH)):
            connection.execute("PRAGMA incremental_vacuum(1)")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    value: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return value
