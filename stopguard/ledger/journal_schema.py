"""The journal's file: its tables, its version, how it is opened, and how old ones are brought up.

Anybody may open the file with `sqlite3`. The tables:

* `runs`        one row a process that wrote: pid, version, policy, what its monotonic clock was
                worth in wall time, its last flush, and whether it closed cleanly;
* `requests`    closed books, in the order of writing: state, kind (why they are kept: `cancel`,
                `preempt`, `finish`, `fail`, `leak`, or empty for a normal finish), and the whole
                record as `body`;
* `open_books`  books that were open at the last flush; emptied into `requests` as `abandoned` by
                the next run;
* `leaks`       one row a leak, as it was found;
* `sums`        normal finishes by engine, model and minute.

A `body` is a CRC-32 (4 bytes, big endian) and MessagePack: SQLite notices a damaged page only where
the damage breaks the tree, and a flipped bit in an amount must not become a fact.

The version is `PRAGMA user_version`. `STEPS[n]` takes a file from version n to n + 1 in one
transaction with the new version number; a newer file is refused, never guessed at.
"""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from stopguard.errors import StorageError
from stopguard.ledger.journal_errors import JournalCorrupt, JournalMissing, JournalTooNew, storage_error

__all__ = [
    "APPLICATION_ID",
    "PAGE_BYTES",
    "STEPS",
    "VERSION",
    "connect_for_reading",
    "connect_for_writing",
    "migrate",
    "seal",
    "unseal",
]

#: "SGJ1", in the file's header, so that `file` and we can tell a journal from another database.
APPLICATION_ID = 0x53474A31
PAGE_BYTES = 4096

STEPS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE runs (
            run INTEGER PRIMARY KEY,
            run_id TEXT NOT NULL,
            pid INTEGER NOT NULL,
            version TEXT NOT NULL,
            policy TEXT NOT NULL,
            flush_seconds REAL NOT NULL,
            wall_anchor REAL NOT NULL,
            monotonic_anchor REAL NOT NULL,
            started_at REAL NOT NULL,
            last_flush_at REAL NOT NULL,
            closed_at REAL,
            failing_since REAL,
            written INTEGER NOT NULL DEFAULT 0,
            dropped INTEGER NOT NULL DEFAULT 0
        )""",
        """CREATE TABLE requests (
            number INTEGER PRIMARY KEY,
            run INTEGER NOT NULL,
            request_id TEXT NOT NULL,
            state INTEGER NOT NULL,
            kind TEXT NOT NULL,
            leaks INTEGER NOT NULL,
            written_at REAL NOT NULL,
            body BLOB NOT NULL
        )""",
        "CREATE INDEX requests_by_id ON requests (request_id)",
        "CREATE INDEX requests_stopped ON requests (number) WHERE kind <> ''",
        "CREATE INDEX requests_abandoned ON requests (number) WHERE state = 2",
        # No index by id: at most as many rows as requests are open, and a row lives for seconds.
        """CREATE TABLE open_books (
            number INTEGER PRIMARY KEY,
            run INTEGER NOT NULL,
            request_id TEXT NOT NULL,
            kind TEXT NOT NULL,
            leaks INTEGER NOT NULL,
            written_at REAL NOT NULL,
            body BLOB NOT NULL
        )""",
        """CREATE TABLE leaks (
            number INTEGER PRIMARY KEY,
            run INTEGER NOT NULL,
            request_id TEXT NOT NULL,
            ledger TEXT NOT NULL,
            written_at REAL NOT NULL,
            body BLOB NOT NULL
        )""",
        """CREATE TABLE sums (
            minute INTEGER NOT NULL,
            engine TEXT NOT NULL,
            model TEXT NOT NULL,
            requests INTEGER NOT NULL,
            tokens_computed INTEGER NOT NULL,
            tokens_delivered INTEGER NOT NULL,
            tokens_recomputed INTEGER NOT NULL,
            open_seconds REAL NOT NULL,
            PRIMARY KEY (minute, engine, model)
        ) WITHOUT ROWID""",
    ),
)
VERSION = len(STEPS)


def seal(data: bytes) -> bytes:
    """`data` with its checksum in front: what a `body` column holds."""
    return zlib.crc32(data).to_bytes(4, "big") + data


def unseal(body: bytes, path: Path | str, what: str) -> bytes:
    """The data in a `body`; `JournalCorrupt`, which names `what`, when it is not what was written."""
    data = body[4:]
    if len(body) < 4 or zlib.crc32(data) != int.from_bytes(body[:4], "big"):
        raise JournalCorrupt(path, f"the record of {what} does not match its checksum")
    return data


def connect_for_writing(path: Path, *, check: bool = True) -> sqlite3.Connection:
    """The journal at `path`, made if there is none, checked, and at the newest schema.

    `check` reads the whole file (`PRAGMA quick_check`, about a second a GiB from a warm cache). Raises
    `JournalCorrupt`, `JournalFull`, `JournalTooNew`, `JournalBusy` or another `StorageError`, and
    then leaves no connection open. The connection may be used from one other thread.
    """
    try:
        # Ours before SQLite makes it: the journal names tenants, so only its owner reads it. (-wal and -shm follow.)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
    except (sqlite3.Error, OSError) as error:
        raise storage_error(error, path) from error
    try:
        _identify(connection, path)
        # Only an empty file takes auto_vacuum and page_size, and only before its first table.
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL").fetchone()
        # A commit survives the death of the process without fsync; only a power cut may take the last ones.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA cache_size = -4096")
        connection.execute("PRAGMA journal_size_limit = 4194304")
        connection.execute("PRAGMA temp_store = MEMORY")
        if check:
            _check(connection, path)
        migrate(connection)
    except sqlite3.Error as error:
        connection.close()
        raise storage_error(error, path) from error
    except BaseException:
        connection.close()
        raise
    return connection


def connect_for_reading(path: Path) -> sqlite3.Connection:
    """The journal at `path`, which must exist, for reading only, while a writer may be at work."""
    if not path.is_file():
        raise JournalMissing(path)
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0, isolation_level=None)
    except sqlite3.Error as error:
        raise storage_error(error, path) from error
    try:
        version = _identify(connection, path)
        if version == 0:
            raise StorageError(f"{path} is empty: nothing has been written to it yet")
        if version < VERSION:
            raise StorageError(
                f"{path} was written by an older StopGuard (schema {version}); the next start of `stopguard serve` "
                f"on it brings it to {VERSION}"
            )
    except sqlite3.Error as error:
        connection.close()
        raise storage_error(error, path) from error
    except BaseException:
        connection.close()
        raise
    return connection


def migrate(connection: sqlite3.Connection, steps: Sequence[Sequence[str]] = STEPS) -> int:
    """Bring the file to version `len(steps)`, one transaction a step; return the version it had."""
    before = _pragma(connection, "user_version")
    for version in range(before, len(steps)):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in steps[version]:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {version + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    return before


def _identify(connection: sqlite3.Connection, path: Path) -> int:
    """The schema version, 0 for an empty file; raises when the file is not for us."""
    version = _pragma(connection, "user_version")
    application = _pragma(connection, "application_id")
    if application == APPLICATION_ID:
        if version > VERSION:
            raise JournalTooNew(path, version, VERSION)
        return version
    with closing(connection.execute("SELECT count(*) FROM sqlite_master")) as cursor:
        tables: int = cursor.fetchone()[0]
    if application or version or tables:
        raise JournalCorrupt(path, "it is a database, but not a journal of StopGuard")
    return 0


def _check(connection: sqlite3.Connection, path: Path) -> None:
    with closing(connection.execute("PRAGMA quick_check(1)")) as cursor:
        finding = cursor.fetchone()[0]
    if finding != "ok":
        raise JournalCorrupt(path, " ".join(str(finding).split()))


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    with closing(connection.execute(f"PRAGMA {name}")) as cursor:
        value: int = cursor.fetchone()[0]
    return value
