"""The writer: one thread that turns what was handed over into rows, four times a second, whatever the disk does.

Theory
------
The hot thread appends (operation, object) to a deque and does nothing else; appends and `popleft` are
atomic, so there is no lock on its way. The writer drains the deque, keeps a map of the books that
are open, and writes what is new in one transaction: closed books as rows, open books once and again
when they have moved. A request that opens and settles between two flushes never touches the table of
open books.

Reading the books of an open request from here is safe because entries and marks are only appended
and an entry is a whole movement: a copy of the list is a state the request was in, or a prefix of
one, and is conserved either way. Closed books never change. (`RequestLedgers.record` copies; the
encoder runs in C without letting another thread in.)

A failing disk is never raised into the caller. The batch stays, bounded, and is tried again with
growing pauses; `failing` says why, and the lock's note says since when, for whoever finds the file
after a crash. A file that was moved away or removed is begun anew, so moving a damaged journal away
is all that it takes to mend it.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from stopguard.errors import StorageError
from stopguard.ledger.journal_batch import Batch, kind_of
from stopguard.ledger.journal_errors import JournalBusy, storage_error
from stopguard.ledger.journal_lock import JournalLock
from stopguard.ledger.journal_retention import Retention
from stopguard.ledger.journal_schema import connect_for_writing
from stopguard.ledger.leaks import Leak
from stopguard.ledger.request import RequestLedgers

__all__ = ["LEAKED", "OPENED", "PROGRESSED", "SETTLED", "JournalWriter", "Operation", "RunStart"]

OPENED, PROGRESSED, SETTLED, LEAKED = range(4)
Operation = tuple[int, RequestLedgers] | tuple[int, Leak]

_RETRY_SECONDS_MAX = 5.0
_HEARTBEAT_SECONDS = 5.0
# Encoding a record takes some ten microseconds with the interpreter's lock held. After a chunk the thread
# really sleeps: merely yielding would take the lock back before the event loop wakes up to ask for it.
_CHUNK = 32
_YIELD_SECONDS = 50e-6


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a run says of itself in its row."""

    run_id: str
    pid: int
    version: str
    policy: str
    flush_seconds: float
    wall_anchor: float
    monotonic_anchor: float


class _OpenBook:
    """A request that is open, and how much of it is on the disk (`number` 0: nothing)."""

    __slots__ = ("closed_flushes", "entries", "marks", "moved", "number", "request")

    def __init__(self, request: RequestLedgers) -> None:
        self.request = request
        self.number = 0
        self.entries = 0
        self.marks = 0
        self.moved = False
        self.closed_flushes = 0


class JournalWriter:
    """Everything on the far side of the queue. Made and started by `Journal`, which is its only user.

    All attributes but `settles_refused` and `leaks_refused`, which the facade counts, are written by the
    writer thread alone; the facade reads single values of them.
    """

    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection,
        lock: JournalLock,
        start: RunStart,
        queue: deque[Operation],
        batch: Batch,
        *,
        wall_clock: Callable[[], float],
        monotonic_clock: Callable[[], float],
    ) -> None:
        self.path = path
        self.start_of_run = start
        self.batch = batch
        self.limits = batch.limits
        self.open: dict[str, _OpenBook] = {}
        self.run = 0
        self.written = 0
        self.leaks_written = 0
        self.flushes = 0
        self.adopted = 0
        self.file_bytes = 0
        self.last_flush_at: float | None = None
        self.failing: StorageError | None = None
        self.failing_since: float | None = None
        self.settles_refused = 0
        self.leaks_refused = 0
        self._connection: sqlite3.Connection | None = connection
        self._inode = _inode_of(path)
        self._lock = lock
        self._queue = queue
        self._retention = Retention(self.limits)
        self._wall = wall_clock
        self._monotonic = monotonic_clock
        self._next_number = 1
        self._retry_at = 0.0
        self._retry_seconds = start.flush_seconds
        self._heartbeat_at = 0.0
        self._settles_refused_seen = 0
        self._sweeps = 0
        self._condition = threading.Condition()
        self._wake = threading.Event()
        self._asked = 0
        self._answered = 0
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="stopguard-journal", daemon=True)
        self._begin_run(connection)

    # ---- from the other side ------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Flush now rather than at the next interval."""
        self._wake.set()

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until what was queued before this call is on the disk; False when it could not be, in that time."""
        with self._condition:
            self._asked += 1
            ticket = self._asked
        self._wake.set()
        with self._condition:
            answered = self._condition.wait_for(lambda: self._answered >= ticket, timeout_seconds)
        return answered and self.failing is None

    def close(self, timeout_seconds: float) -> bool:
        """Write the rest, mark the run as closed and let the file go; False when time ran out or the disk failed."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive() and self.failing is None

    # ---- the thread -----------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._closing:
            self._wake.wait(self.start_of_run.flush_seconds)
            self._wake.clear()
            self._turn()
        self._turn(last=True)

    def _turn(self, *, last: bool = False) -> None:
        with self._condition:
            ticket = self._asked
        try:
            self._flush(forced=last or ticket > self._answered, last=last)
        except Exception as error:
            # The thread must outlive its own bugs, and say so.
            self.batch.drop_everything("bug in the journal")
            self._fail(StorageError(f"{self.path}: bug in the journal: {type(error).__name__}: {error}"))
        finally:
            if last:
                self._leave()
            with self._condition:
                self._answered = ticket
                self._condition.notify_all()

    def _flush(self, *, forced: bool, last: bool = False) -> None:
        # Taken before the draining: everything handed over until then will be on the disk.
        now, flushed_through = self._monotonic(), self._wall()
        self._drain()
        self._adopt_forgotten()
        moved = self._moved_books()
        idle = not (self.batch or moved) and self.failing is None
        if idle and not last and now < self._heartbeat_at:
            self.last_flush_at = flushed_through
            return
        if not forced and now < self._retry_at:
            return
        try:
            written = self._write(moved, flushed_through, last=last)
        except StorageError as error:
            self._fail(error)
            return
        for book, number, entries, marks in written:
            book.number, book.entries, book.marks = number, entries, marks
        self.written += len(self.batch.normal) + len(self.batch.kept)
        self.leaks_written += len(self.batch.leaks)
        self.batch.clear()
        self.flushes += 1
        self.last_flush_at = flushed_through
        self._heartbeat_at = now + _HEARTBEAT_SECONDS
        self._succeed()

    def _drain(self) -> None:
        queue, books = self._queue, self.open
        to_wall = self.start_of_run.wall_anchor - self.start_of_run.monotonic_anchor
        encoded = 0
        for _ in range(len(queue)):
            operation, subject = queue.popleft()
            if isinstance(subject, Leak):
                self.batch.add_leak(subject, subject.found_at + to_wall)
                continue
            if operation == SETTLED:
                book = books.pop(subject.request_id, None)
                if book is not None and book.number:
                    self.batch.closed_books.append(book.number)
                self._close_book(subject)
                encoded += 1
                if encoded % _CHUNK == 0:
                    time.sleep(_YIELD_SECONDS)
                continue
            book = books.get(subject.request_id)
            if book is not None:
                book.moved = True
            elif subject.closed_at is None:  # else it is over already, and its settling comes next
                if len(books) < self.limits.open_books:
                    books[subject.request_id] = _OpenBook(subject)
                else:
                    self.batch.dropped["open book not noted"] += 1

    def _close_book(self, request: RequestLedgers) -> None:
        start = self.start_of_run
        closed_at = request.last_at if request.closed_at is None else request.closed_at
        self.batch.add_request(request, closed_at - start.monotonic_anchor + start.wall_anchor)

    def _adopt_forgotten(self) -> None:
        """Books that we know, that are closed, and whose settling found the queue full: they are not lost."""
        if self.settles_refused != self._settles_refused_seen:
            self._settles_refused_seen = self.settles_refused
            self._sweeps = 3
        if not self._sweeps:
            return
        self._sweeps -= 1
        for book in [book for book in self.open.values() if book.request.closed_at is not None]:
            # Closed at one flush and still here at the next: its settling is not merely on its way.
            book.closed_flushes += 1
            if book.closed_flushes > 1:
                del self.open[book.request.request_id]
                if book.number:
                    self.batch.closed_books.append(book.number)
                self._close_book(book.request)
                self.adopted += 1

    def _moved_books(self) -> list[_OpenBook]:
        return [
            book
            for book in self.open.values()
            if (book.moved or len(book.request.entries) != book.entries or len(book.request.marks) != book.marks)
            and book.request.closed_at is None
        ]

    # ---- one transaction ------------------------------------------------------------------------

    def _write(
        self, moved: list[_OpenBook], flushed_through: float, *, last: bool
    ) -> list[tuple[_OpenBook, int, int, int]]:
        """Everything that waits, or nothing. Returns what is now known of the open books on the disk."""
        connection = self._connection
        if connection is None or _inode_of(self.path) != self._inode:
            connection = self._begin_file()
            moved = self._moved_books()
        self._limit_log(connection)
        rows, written = self._open_rows(moved, flushed_through)
        batch = self.batch
        try:
            connection.execute("BEGIN IMMEDIATE")
            self._retention.apply(connection, flushed_through, len(batch))
            if batch.normal or batch.kept:
                connection.executemany(
                    "INSERT INTO requests (run, request_id, state, kind, leaks, written_at, body) "
                    f"VALUES ({self.run}, ?, ?, ?, ?, ?, ?)",
                    batch.normal + batch.kept,
                )
            if batch.leaks:
                connection.executemany(
                    f"INSERT INTO leaks (run, request_id, ledger, written_at, body) VALUES ({self.run}, ?, ?, ?, ?)",
                    batch.leaks,
                )
            if batch.sums:
                connection.executemany(_ADD_TO_SUMS, [(*key, *row) for key, row in batch.sums.items()])
            if rows:
                connection.executemany("INSERT OR REPLACE INTO open_books VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            if batch.closed_books:
                connection.executemany(
                    "DELETE FROM open_books WHERE number = ?", [(number,) for number in batch.closed_books]
                )
            connection.execute(
                "UPDATE runs SET last_flush_at = ?, closed_at = ?, written = written + ?, dropped = ? WHERE run = ?",
                (
                    flushed_through,
                    flushed_through if last else None,
                    len(batch) + len(rows),
                    batch.dropped.total() + self.settles_refused + self.leaks_refused - self.adopted,
                    self.run,
                ),
            )
            connection.execute("COMMIT")
        except BaseException as error:
            _roll_back(connection)
            for book in moved:
                book.moved = True
            if isinstance(error, sqlite3.Error):
                raise storage_error(error, self.path) from error
            raise
        self.file_bytes = _size_of(self.path)
        return written

    def _open_rows(
        self, moved: list[_OpenBook], flushed_through: float
    ) -> tuple[list[tuple[object, ...]], list[tuple[_OpenBook, int, int, int]]]:
        rows: list[tuple[object, ...]] = []
        written = []
        for count, book in enumerate(moved, start=1):
            request = book.request
            # The lengths before the copy: what is appended meanwhile is seen as moved at the next flush.
            entries, marks, book.moved = len(request.entries), len(request.marks), False
            body = self.batch.body_of(request)
            number = book.number
            if body is not None:
                if not number:
                    number, self._next_number = self._next_number, self._next_number + 1
                kind, leaks = kind_of(request), len(request.leaks or ())
                rows.append((number, self.run, request.request_id, kind, leaks, flushed_through, body))
            written.append((book, number, entries, marks))
            if count % _CHUNK == 0:
                time.sleep(_YIELD_SECONDS)
        return rows, written

    # ---- the file -----------------------------------------------------------------------------

    def _begin_run(self, connection: sqlite3.Connection) -> None:
        start = self.start_of_run
        try:
            cursor = connection.execute(
                "INSERT INTO runs (run_id, pid, version, policy, flush_seconds, wall_anchor, monotonic_anchor, "
                "started_at, last_flush_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(start.run_id, start.pid, start.version, start.policy, start.flush_seconds),
                    *(start.wall_anchor, start.monotonic_anchor, start.wall_anchor, self._wall()),
                ),
            )
        except sqlite3.Error as error:
            raise storage_error(error, self.path) from error
        assert cursor.lastrowid is not None
        self.run = cursor.lastrowid
        self.file_bytes = _size_of(self.path)

    def _begin_file(self) -> sqlite3.Connection:
        """A connection to a new file: the old one is gone from its path."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        connection = connect_for_writing(self.path)
        try:
            self._begin_run(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        self._inode = _inode_of(self.path)
        self._next_number = 1
        self.batch.closed_books.clear()
        for book in self.open.values():
            book.number, book.moved = 0, True
        return connection

    def _limit_log(self, connection: sqlite3.Connection) -> None:
        log = self.path.with_name(self.path.name + "-wal")
        if _bytes_of(log) <= self.limits.wal_bytes:
            return
        try:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            raise storage_error(error, self.path) from error
        if _bytes_of(log) > self.limits.wal_bytes:
            raise JournalBusy(self.path, 0, "a reader has held on to an old state for too long; writing waits for it")

    def _fail(self, error: StorageError) -> None:
        if self.failing is None:
            self.failing_since = self.last_flush_at or self.start_of_run.wall_anchor
            self._note(self.failing_since)
        self.failing = error
        self._retry_at = self._monotonic() + self._retry_seconds
        self._retry_seconds = min(self._retry_seconds * 2, _RETRY_SECONDS_MAX)

    def _succeed(self) -> None:
        if self.failing is not None:
            self._note(None)
        self.failing, self.failing_since = None, None
        self._retry_at, self._retry_seconds = 0.0, self.start_of_run.flush_seconds

    def _note(self, failing_since: float | None) -> None:
        try:
            self._lock.note(failing_since)
        except StorageError as error:
            self.failing = error

    def _leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except sqlite3.Error as error:
                self.failing = self.failing or storage_error(error, self.path)
        self._lock.release()


_ADD_TO_SUMS = """
    INSERT INTO sums VALUES (?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (minute, engine, model) DO UPDATE SET
        requests = requests + excluded.requests,
        tokens_computed = tokens_computed + excluded.tokens_computed,
        tokens_delivered = tokens_delivered + excluded.tokens_delivered,
        tokens_recomputed = tokens_recomputed + excluded.tokens_recomputed,
        open_seconds = open_seconds + excluded.open_seconds
"""


def _roll_back(connection: sqlite3.Connection) -> None:
    # A full disk has often rolled back already, and a broken one may not be able to.
    if connection.in_transaction:
        try:
            connection.execute("ROLLBACK")
        except sqlite3.Error:
            return


def _inode_of(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0)
    return (status.st_dev, status.st_ino)


def _bytes_of(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _size_of(path: Path) -> int:
    return _bytes_of(path) + _bytes_of(path.with_name(path.name + "-wal"))
