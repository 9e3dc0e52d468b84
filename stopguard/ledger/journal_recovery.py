"""After a crash: which books the dead run left open, and how much of its story cannot be there.

Opening a journal moves the books that its last run left open into `requests`, as `abandoned`, in one
transaction. They are never settled by that (rule 9): their process is gone, its connections closed
with it (rule 12), and what the engine did afterwards nobody saw.
"""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime

import msgspec

from stopguard.ledger.journal_batch import ABANDONED
from stopguard.ledger.journal_lock import LockNote

__all__ = ["RecoveredBook", "RunInfo", "clock_time", "read_runs", "recover"]

_RUNS_READ_MAX = 1000
_DEAD_RUNS_KEPT = 100


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One process that wrote the journal. Times are wall time; `closed_at` is None unless it closed cleanly."""

    run: int
    run_id: str
    pid: int
    version: str
    policy: str
    flush_seconds: float
    wall_anchor: float
    monotonic_anchor: float
    started_at: float
    last_flush_at: float
    closed_at: float | None
    failing_since: float | None
    written: int
    dropped: int

    def wall(self, at: float) -> float:
        """Wall time of `at` on this run's monotonic clock."""
        return self.wall_anchor + (at - self.monotonic_anchor)

    def blind_window(self) -> str:
        """What of a run that was not closed cleanly may be missing; empty for one that was."""
        if self.closed_at is not None:
            return ""
        if self.failing_since is not None:
            return (
                f"entries after {clock_time(self.failing_since)} may be missing: "
                "the disk had been failing since then when the process died"
            )
        return (
            f"entries after {clock_time(self.last_flush_at)}, up to the flush interval of "
            f"{self.flush_seconds:g} s, may be missing"
        )


class RecoveredBook(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was open when its run died. `written_at` is how far its books on the disk go, in wall time."""

    request_id: str
    run: int
    kind: str
    written_at: float


_RUN_COLUMNS = ", ".join(RunInfo.__struct_fields__)


def clock_time(wall: float) -> str:
    """``14:03:07.250`` in the local time zone."""
    return datetime.fromtimestamp(wall, tz=UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]


def read_runs(connection: sqlite3.Connection, limit: int = _RUNS_READ_MAX) -> list[RunInfo]:
    """The runs, newest first."""
    rows = connection.execute(f"SELECT {_RUN_COLUMNS} FROM runs ORDER BY run DESC LIMIT ?", (limit,)).fetchall()
    return [RunInfo(**dict(zip(RunInfo.__struct_fields__, row, strict=True))) for row in rows]


def recover(connection: sqlite3.Connection, previous: LockNote | None) -> tuple[list[RecoveredBook], RunInfo | None]:
    """Mark what earlier runs left open as abandoned.

    Returns those books, and the last run if it was not closed cleanly. `previous` is what that run
    left in the lock's file. Raises `sqlite3.Error`, and then has changed nothing.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        found = connection.execute(
            "SELECT request_id, run, kind, written_at FROM open_books ORDER BY number"
        ).fetchall()
        connection.execute(
            "INSERT INTO requests (run, request_id, state, kind, leaks, written_at, body) "
            "SELECT run, request_id, ?, kind, leaks, written_at, body FROM open_books ORDER BY number",
            (ABANDONED,),
        )
        connection.execute("DELETE FROM open_books")
        if previous is not None and previous.failing_since is not None:
            connection.execute(
                "UPDATE runs SET failing_since = ? WHERE run = (SELECT max(run) FROM runs) AND pid = ? "
                "AND closed_at IS NULL",
                (previous.failing_since, previous.pid),
            )
        last = read_runs(connection, 1)
        _forget_runs(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    books = [RecoveredBook(request_id=row[0], run=row[1], kind=row[2], written_at=row[3]) for row in found]
    return books, last[0] if last and last[0].closed_at is None else None


def _forget_runs(connection: sqlite3.Connection) -> None:
    """Runs that no row speaks of any more; rows are in the order of runs, so the first ones tell.

    The last run stays, and so do those that died lately: their rows say what is missing.
    """
    newest = connection.execute("SELECT max(run) FROM runs").fetchone()[0]
    if newest is None:
        return
    oldest = connection.execute(
        "SELECT min(run) FROM (SELECT run FROM (SELECT run FROM requests ORDER BY number LIMIT 1) "
        "UNION ALL SELECT run FROM (SELECT run FROM leaks ORDER BY number LIMIT 1) UNION ALL SELECT ?)",
        (newest,),
    ).fetchone()[0]
    connection.execute(
        "DELETE FROM runs WHERE run < ? AND (run < ? OR written = 0) AND (closed_at IS NOT NULL OR run < ?)",
        (newest, oldest, newest - _DEAD_RUNS_KEPT),
    )
