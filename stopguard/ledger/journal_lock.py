"""One journal, one writer: a lock that dies with its process, and what that process last said.

The lock is `flock` on a side file (`FILE-lock`), because the kernel lets go of it at kill -9 and a
second writer learns the pid of the first. The file is never removed: removing a lock file races with
whoever has just opened it.

The side file also holds since when the disk has been failing. It is written in place into a block
that exists already, so it can be written on a full disk, when the journal cannot: without it a
crash during an outage would claim that only the last flush interval is missing.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from pathlib import Path

import msgspec

from stopguard.errors import StorageError
from stopguard.ledger.journal_errors import JournalBusy, storage_error

__all__ = ["JournalLock", "LockNote", "lock_path", "read_note", "writer_of"]

_NOTE_BYTES = 256
# A reader that looks for a writer holds a shared lock for microseconds; a starting writer must not lose to it.
_TRIES = 3
_PAUSE_SECONDS = 0.01


class LockNote(msgspec.Struct, frozen=True):
    """What the last writer said of itself. Times are wall time."""

    pid: int
    failing_since: float | None = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(LockNote)


def lock_path(journal: Path) -> Path:
    """The side file of `journal`."""
    return journal.with_name(journal.name + "-lock")


class JournalLock:
    """Held from `__init__` to `release`; raises `JournalBusy` when another holds it.

    `previous` is what the writer before us left behind.
    """

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        try:
            self._descriptor = os.open(lock_path(journal), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise StorageError(f"{journal.parent} does not exist: make the folder first") from None
        except OSError as error:
            raise storage_error(error, journal) from error
        try:
            self._acquire()
            self.previous = _parse(os.pread(self._descriptor, _NOTE_BYTES, 0))
            self.note(None)
        except BaseException:
            os.close(self._descriptor)
            raise
        _held.add(self)

    def note(self, failing_since: float | None) -> None:
        """Leave word for the next writer. `OSError` is `StorageError` only when we start."""
        data = _encoder.encode(LockNote(os.getpid(), failing_since)).ljust(_NOTE_BYTES)
        try:
            os.pwrite(self._descriptor, data, 0)
        except OSError as error:
            raise storage_error(error, self.journal) from error

    def release(self) -> None:
        """Let go; further calls do nothing."""
        if self._descriptor >= 0:
            _held.discard(self)
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def _acquire(self) -> None:
        for attempt in range(_TRIES):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if attempt == _TRIES - 1:
                    note = _parse(os.pread(self._descriptor, _NOTE_BYTES, 0))
                    raise JournalBusy(self.journal, note.pid if note else 0) from None
                time.sleep(_PAUSE_SECONDS)
            except OSError as error:
                raise storage_error(error, self.journal) from error
            else:
                return


def read_note(journal: Path) -> LockNote | None:
    """What the last writer of `journal` left in the side file; None when there is none that can be read."""
    try:
        return _parse(lock_path(journal).read_bytes()[:_NOTE_BYTES])
    except OSError:
        return None


def writer_of(journal: Path) -> int | None:
    """The pid of the process that is writing `journal` now; None when nobody is."""
    try:
        descriptor = os.open(lock_path(journal), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        note = _parse(os.pread(descriptor, _NOTE_BYTES, 0))
        return note.pid if note else 0
    except OSError:
        return None
    else:
        return None
    finally:
        os.close(descriptor)


def _parse(data: bytes) -> LockNote | None:
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError:
        return None


_held: weakref.WeakSet[JournalLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    # A forked worker would otherwise keep its dead parent's journal locked.
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)
