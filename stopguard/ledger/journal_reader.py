"""Reading a journal, also while it is being written, and after its writer was killed.

The reader opens the file read-only, keeps no transaction open between calls (a reader that does
makes the writer's log grow), and reads a bounded number of rows a call.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from stopguard.ledger.journal_batch import ABANDONED, SETTLED, WRITTEN_OFF
from stopguard.ledger.journal_errors import AmbiguousId, JournalCorrupt, NotInJournal, storage_error
from stopguard.ledger.journal_lock import read_note, writer_of
from stopguard.ledger.journal_recovery import RunInfo, read_runs
from stopguard.ledger.journal_schema import connect_for_reading, unseal
from stopguard.ledger.leaks import Leak
from stopguard.ledger.record import RequestRecord, decode_record

__all__ = ["JournalReader", "StoredLeak", "StoredRequest", "SumRow"]

ROWS_MAX = 10_000
_STATES = {SETTLED: "settled", WRITTEN_OFF: "written_off", ABANDONED: "abandoned"}
_decode_leak = msgspec.msgpack.Decoder(Leak).decode
_CLOSED_COLUMNS = "run, request_id, state, kind, written_at, body"
_OPEN_COLUMNS = "run, request_id, -1, kind, written_at, body"


class StoredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the journal has it.

    `state` is settled, written_off, open (its writer lives) or abandoned (it was open when its run
    ended). `kind` is why it is kept for certain, empty for a normal finish. `written_at` is the wall
    time up to which its entries are here; for closed books that is when they closed.
    """

    record: RequestRecord
    run: RunInfo
    state: str
    kind: str
    written_at: float


class StoredLeak(msgspec.Struct, frozen=True, kw_only=True):
    """A leak as it was found; `found_at` in wall time, all times in `leak` on the clock of `run`."""

    leak: Leak
    run: RunInfo
    found_at: float


class SumRow(msgspec.Struct, frozen=True, kw_only=True):
    """Normal finishes of one engine and model in one minute (`minute` × 60 is wall time)."""

    minute: int
    engine: str
    model: str
    requests: int
    tokens_computed: int
    tokens_delivered: int
    tokens_recomputed: int
    open_seconds: float


class JournalReader:
    """Questions to the journal at `path`; close it or use it in a `with`.

    Opening raises `JournalMissing`, `JournalTooNew`, `JournalCorrupt` or another `StorageError`;
    every question may raise the last two.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._connection = connect_for_reading(self.path)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- requests ---------------------------------------------------------------------------------

    def find(self, request_id: str) -> StoredRequest:
        """The request with this id, or with the only id that begins like this; the newest if it was kept twice.

        Raises `NotInJournal` or `AmbiguousId`.
        """
        # Above every id that begins with the prefix; LIKE and GLOB would give some characters a meaning.
        above = request_id + "\U0010ffff"
        ids = sorted(
            {
                row[0]
                for table in ("requests", "open_books")
                for row in self._rows(
                    f"SELECT DISTINCT request_id FROM {table} WHERE request_id >= ? AND request_id < ? LIMIT 6",
                    (request_id, above),
                )
            }
        )
        if request_id in ids:
            ids = [request_id]
        if not ids:
            raise NotInJournal(self._nothing(request_id))
        if len(ids) > 1:
            shown = ", ".join(ids[:4]) + (", …" if len(ids) > 4 else "")
            raise AmbiguousId(f"several requests begin with {request_id}: {shown}; give more of the id")
        rows = self._rows(
            f"SELECT {_OPEN_COLUMNS} FROM open_books WHERE request_id = ? LIMIT 1", (ids[0],)
        ) or self._rows(
            f"SELECT {_CLOSED_COLUMNS} FROM requests WHERE request_id = ? ORDER BY number DESC LIMIT 1", (ids[0],)
        )
        if not rows:  # settled and deleted between the two questions
            raise NotInJournal(self._nothing(request_id))
        return self._stored(rows)[0]

    def recent(self, limit: int = 20, *, stops: bool = False) -> list[StoredRequest]:
        """The requests kept last, newest first: all, or only those kept for certain (stops, failures, leaks)."""
        where = "WHERE kind <> ''" if stops else ""
        return self._stored(
            self._rows(
                f"SELECT {_CLOSED_COLUMNS} FROM requests {where} ORDER BY number DESC LIMIT ?", (min(limit, ROWS_MAX),)
            )
        )

    def open_books(self, limit: int = ROWS_MAX) -> list[StoredRequest]:
        """The books that are open, oldest first; of a dead writer, the ones that it left open."""
        return self._stored(
            self._rows(f"SELECT {_OPEN_COLUMNS} FROM open_books ORDER BY number LIMIT ?", (min(limit, ROWS_MAX),))
        )

    def abandoned(self, limit: int = 20) -> list[StoredRequest]:
        """The books that earlier runs left open, newest first."""
        return self._stored(
            self._rows(
                f"SELECT {_CLOSED_COLUMNS} FROM requests WHERE state = {ABANDONED} ORDER BY number DESC LIMIT ?",
                (min(limit, ROWS_MAX),),
            )
        )

    # ---- the rest ---------------------------------------------------------------------------------

    def leaks(self, limit: int = 20) -> list[StoredLeak]:
        """The leaks found last, newest first."""
        rows = self._rows(
            "SELECT run, request_id, written_at, body FROM leaks ORDER BY number DESC LIMIT ?", (min(limit, ROWS_MAX),)
        )
        runs = self._runs_by_number()
        return [
            StoredLeak(
                leak=self._decoded(_decode_leak, body, f"a leak of {request_id}"),
                run=self._run(runs, run),
                found_at=found_at,
            )
            for run, request_id, found_at, body in rows
        ]

    def sums(self, limit: int = ROWS_MAX) -> list[SumRow]:
        """The sums of normal finishes, newest minute first."""
        names = SumRow.__struct_fields__
        rows = self._rows(
            f"SELECT {', '.join(names)} FROM sums ORDER BY minute DESC, engine, model LIMIT ?", (min(limit, ROWS_MAX),)
        )
        return [SumRow(**dict(zip(names, row, strict=True))) for row in rows]

    def runs(self) -> list[RunInfo]:
        """The processes that wrote here, newest first.

        A last run that died while the disk failed has that from the lock's file, for its row could not say so.
        """
        try:
            runs = read_runs(self._connection)
        except sqlite3.Error as error:
            raise storage_error(error, self.path) from error
        if runs and runs[0].closed_at is None:
            note = read_note(self.path)
            if note is not None and note.pid == runs[0].pid and note.failing_since is not None:
                runs[0] = msgspec.structs.replace(runs[0], failing_since=note.failing_since)
        return runs

    def writer_pid(self) -> int | None:
        """The process that is writing now; None when there is none."""
        return writer_of(self.path)

    def blind_window(self) -> str:
        """What may be missing from the newest run, in words; empty when its writer lives or closed cleanly."""
        runs = self.runs()
        return runs[0].blind_window() if runs and self.writer_pid() is None else ""

    # ---- private ------------------------------------------------------------------------------------

    def _rows(self, statement: str, parameters: tuple[Any, ...]) -> list[Any]:
        try:
            return self._connection.execute(statement, parameters).fetchall()
        except sqlite3.Error as error:
            raise storage_error(error, self.path) from error

    def _stored(self, rows: list[Any]) -> list[StoredRequest]:
        if not rows:
            return []
        runs = self._runs_by_number()
        open_state = "abandoned" if self.writer_pid() is None else "open"
        return [
            StoredRequest(
                record=self._decoded(decode_record, body, request_id),
                run=self._run(runs, run),
                state=_STATES.get(state, open_state),
                kind=kind,
                written_at=written_at,
            )
            for run, request_id, state, kind, written_at, body in rows
        ]

    def _decoded(self, decode: Any, body: bytes, what: str) -> Any:
        try:
            return decode(unseal(body, self.path, what))
        except msgspec.DecodeError as error:
            raise JournalCorrupt(self.path, f"the record of {what} cannot be read: {error}") from error

    def _runs_by_number(self) -> dict[int, RunInfo]:
        return {run.run: run for run in self.runs()}

    def _run(self, runs: dict[int, RunInfo], number: int) -> RunInfo:
        try:
            return runs[number]
        except KeyError:
            raise JournalCorrupt(self.path, f"run {number} is missing") from None

    def _nothing(self, request_id: str) -> str:
        runs = self.runs()
        policy = runs[0].policy if runs else "all"
        why = "" if policy == "all" else f" (it keeps stops, failures and leaks; of normal finishes: {_kept(policy)})"
        return f"no request in {self.path} begins with {request_id}{why}"


def _kept(policy: str) -> str:
    return "only sums" if policy == "stops" else f"a share of {policy}"
