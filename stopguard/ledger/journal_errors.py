"""What can go wrong between the books and the disk: one type an answer, one line a user can act on.

`storage_error` is the only place that turns SQLite's result codes into ours, so that a full disk or
a damaged page looks the same whether it is met at opening, in the writer thread or by a reader.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from stopguard.errors import ClientError, StorageError

__all__ = [
    "AmbiguousId",
    "JournalBusy",
    "JournalCorrupt",
    "JournalFull",
    "JournalMissing",
    "JournalTooNew",
    "NotInJournal",
    "storage_error",
]


class JournalCorrupt(StorageError):
    """The file is not a journal, or a page or a record in it is damaged."""

    def __init__(self, path: Path | str, detail: str) -> None:
        super().__init__(
            f"{path} is damaged ({detail}): move it away, a new one is started by itself; "
            f"`sqlite3 {path} .recover` saves what can still be read"
        )


class JournalFull(StorageError):
    """There is no room on the disk."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(
            f"{path}: the disk is full; free some space and writing goes on by itself (the books are unharmed)"
        )


class JournalBusy(StorageError):
    """Somebody else writes this file. `pid` is the process, 0 where it is not known."""

    def __init__(self, path: Path | str, pid: int, detail: str = "one journal has one writer") -> None:
        who = f"by process {pid}" if pid else "by another program"
        super().__init__(f"{path} is in use {who}: {detail}")
        self.pid = pid


class JournalTooNew(StorageError):
    """The file was written by a newer version, whose schema this one does not know."""

    def __init__(self, path: Path | str, found: int, known: int) -> None:
        super().__init__(
            f"{path} was written by a newer StopGuard (schema {found}, this one knows {known}): "
            "upgrade, or name another file"
        )


class JournalMissing(StorageError):
    """There is no journal at this path."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(f"there is no journal at {path}: name one with --journal or STOPGUARD_JOURNAL")


class NotInJournal(ClientError):
    """The journal holds nothing under this id."""

    exit_code = 1
    status_hint = 404


class AmbiguousId(ClientError):
    """Several ids begin like this."""

    exit_code = 1


def storage_error(error: sqlite3.Error | OSError, path: Path | str) -> StorageError:
    """Our error for what SQLite or the operating system said about `path`."""
    if isinstance(error, OSError):
        return JournalFull(path) if _disk_is_full(path) else StorageError(f"{path}: {error.strerror or error}")
    # The low byte is the primary result code (https://sqlite.org/rescode.html).
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return JournalFull(path)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return JournalCorrupt(path, str(error))
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return JournalBusy(path, 0, "something holds it locked")
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and _disk_is_full(path):
        return JournalFull(path)
    if code == sqlite3.SQLITE_CANTOPEN:
        return StorageError(f"{path} cannot be opened: look at the folder and its permissions")
    if code == sqlite3.SQLITE_READONLY:
        return StorageError(f"{path} cannot be written: look at its permissions and those of its folder")
    return StorageError(f"{path}: {error}")


def _disk_is_full(path: Path | str) -> bool:
    try:
        disk = os.statvfs(Path(path).parent)
    except OSError:
        return False
    # SQLite reports an index file (-shm) that cannot grow as an I/O error, not as a full disk.
    return disk.f_bavail * disk.f_frsize < 64 * 1024
