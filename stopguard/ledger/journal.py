"""The journal: what the books said, kept on a disk, at the price of an append in the hot thread.

`Journal` is the near side: five calls that put something in a bounded queue and return. The far side
(`journal_writer`) is one thread that encodes, writes and deletes. Nothing that happens to the disk
is raised into the caller after `Journal.open`: `statistics()` says what is failing and what was lost.

    journal = Journal.open(Path("stopguard.journal"), policy="stops")
    request = book.open(...)
    journal.opened(request)
    ...
    if book.settle(request, at):
        journal.settled(request)
    journal.close(timeout_seconds=5.0)

All times in the books must be of the clock that is given as `monotonic_clock`.
"""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec

from stopguard import __version__
from stopguard.errors import ConfigurationError
from stopguard.ledger.journal_batch import Batch, JournalLimits, JournalPolicy
from stopguard.ledger.journal_errors import storage_error
from stopguard.ledger.journal_lock import JournalLock
from stopguard.ledger.journal_recovery import RecoveredBook, RunInfo, recover
from stopguard.ledger.journal_schema import connect_for_writing
from stopguard.ledger.journal_writer import LEAKED, OPENED, PROGRESSED, SETTLED, JournalWriter, Operation, RunStart
from stopguard.ledger.leaks import Leak
from stopguard.ledger.request import RequestLedgers

__all__ = ["Journal", "JournalLimits", "JournalPolicy", "JournalStatistics"]


class JournalStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The journal at one moment.

    `queued` waits for the writer thread, `backlog` for the disk. `written` counts requests kept whole
    since the start. `dropped` says what was lost, by reason. `last_flush_at` and `failing_since` are
    wall time; `failing` is the error in words, None when all is well. `file_bytes` includes the log.
    """

    queued: int
    backlog: int
    written: int
    leaks_written: int
    open_books: int
    flushes: int
    dropped: dict[str, int]
    last_flush_at: float | None
    failing: str | None
    failing_since: float | None
    file_bytes: int


class Journal:
    """The side of the journal that the event loop calls; use `Journal.open`.

    `recovered` lists the books that the last run left open, `unclean_run` that run if it did not
    close cleanly (its `blind_window()` says what may be missing). Calls from one thread only, but for
    `statistics`, which any thread may call.
    """

    def __init__(
        self,
        writer: JournalWriter,
        queue: deque[Operation],
        policy: JournalPolicy,
        recovered: list[RecoveredBook],
        unclean_run: RunInfo | None,
    ) -> None:
        self.path = writer.path
        self.policy = policy
        self.limits = writer.limits
        self.recovered = recovered
        self.unclean_run = unclean_run
        self._writer = writer
        self._queue = queue
        self._limit = writer.limits.queued
        self._wake_at = self._limit // 2
        self._hints_refused = 0
        self._refused_at_close = 0
        self._closed = False

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        policy: str | float = "stops",
        limits: JournalLimits | None = None,
        flush_seconds: float = 0.25,
        check: bool = True,
        wall_clock: Callable[[], float] = time.time,
        monotonic_clock: Callable[[], float] = time.monotonic,
    ) -> Journal:
        """Open or make the journal at `path` and start its writer.

        Raises `ConfigurationError`, `JournalBusy` (another process writes it), `JournalCorrupt`,
        `JournalFull`, `JournalTooNew` or another `StorageError`; then nothing was started. `check`
        reads the whole file first.
        """
        if not flush_seconds > 0:
            raise ConfigurationError(f"journal: the flush interval must be above zero, not {flush_seconds!r}")
        parsed, limits, path = JournalPolicy.parse(policy), limits or JournalLimits(), Path(path)
        lock = JournalLock(path)
        try:
            connection = connect_for_writing(path, check=check)
        except BaseException:
            lock.release()
            raise
        queue: deque[Operation] = deque()
        start = RunStart(
            run_id=uuid.uuid4().hex,
            pid=os.getpid(),
            version=__version__,
            policy=str(parsed),
            flush_seconds=flush_seconds,
            wall_anchor=wall_clock(),
            monotonic_anchor=monotonic_clock(),
        )
        try:
            recovered, unclean_run = recover(connection, lock.previous)
            writer = JournalWriter(
                path,
                connection,
                lock,
                start,
                queue,
                Batch(parsed, limits),
                wall_clock=wall_clock,
                monotonic_clock=monotonic_clock,
            )
            writer.start()
        except BaseException as error:
            connection.close()
            lock.release()
            if isinstance(error, sqlite3.Error):
                raise storage_error(error, path) from error
            raise
        return cls(writer, queue, parsed, recovered, unclean_run)

    # ---- the hot thread ---------------------------------------------------------------------------

    def opened(self, request: RequestLedgers) -> None:
        """The books of `request` are open; they are on the disk by the next flush, unless they close before it."""
        if not self._hand_over((OPENED, request)):
            self._hints_refused += 1

    def progressed(self, request: RequestLedgers) -> None:
        """Something about `request` changed: its stop, a label. (New entries and marks the writer finds itself.)"""
        if not self._hand_over((PROGRESSED, request)):
            self._hints_refused += 1

    def settled(self, request: RequestLedgers) -> None:
        """The books of `request` are closed: settled, or written off. Call it once."""
        if not self._hand_over((SETTLED, request)):
            self._writer.settles_refused += 1

    def leaked(self, leak: Leak) -> None:
        """A leak was found."""
        if not self._hand_over((LEAKED, leak)):
            self._writer.leaks_refused += 1

    def _hand_over(self, operation: Operation) -> bool:
        queue = self._queue
        if len(queue) >= self._limit:
            return False
        queue.append(operation)
        if len(queue) == self._wake_at:
            self._writer.wake()
        return True

    # ---- the others -------------------------------------------------------------------------------

    def flush(self, timeout_seconds: float = 5.0) -> bool:
        """Wait until all that was handed over is on the disk; False if it is not, and `statistics()` says why."""
        return not self._closed and self._writer.flush(timeout_seconds)

    def close(self, timeout_seconds: float = 5.0) -> bool:
        """Write the rest and let the file go; False if time ran out or the disk failed. Further calls do nothing.

        Books that are still open are found as abandoned by the next run.
        """
        if self._closed:
            return True
        self._closed = True
        self._limit = 0
        self._refused_at_close = self._writer.settles_refused + self._writer.leaks_refused
        return self._writer.close(timeout_seconds)

    def statistics(self) -> JournalStatistics:
        """The journal at this moment. Single values are exact, their sum may be a flush apart."""
        writer = self._writer
        dropped = dict(writer.batch.dropped)
        refused = writer.settles_refused + writer.leaks_refused
        late = refused - self._refused_at_close if self._closed else 0
        for reason, count in (
            ("queue full", refused - late - writer.adopted),
            ("handed over after close", late),
            ("open book not noted", self._hints_refused),
        ):
            if count:
                dropped[reason] = dropped.get(reason, 0) + count
        failing = writer.failing
        return JournalStatistics(
            queued=len(self._queue),
            backlog=len(writer.batch),
            written=writer.written,
            leaks_written=writer.leaks_written,
            open_books=len(writer.open),
            flushes=writer.flushes,
            dropped=dropped,
            last_flush_at=writer.last_flush_at,
            failing=None if failing is None else str(failing),
            failing_since=writer.failing_since,
            file_bytes=writer.file_bytes,
        )

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        counts = self.statistics()
        return (
            f"<Journal {self.path} {self.policy} queued {counts.queued} written {counts.written} "
            f"open {counts.open_books} dropped {sum(counts.dropped.values())} "
            f"{'ok' if counts.failing is None else 'FAILING'}>"
        )
