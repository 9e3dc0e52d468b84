"""What the admin app may know of a running StopGuard, as a protocol: the gateway's real one, or a test's.

Everything but `stop`, `reclass` and `relay_answers` only reads, may be called from another thread than the relay's, and
returns at once. A list that comes from here is a copy, made in one step of the interpreter; the objects in it
go on living, so a number read from one may be an event newer than its neighbour's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from stopguard.gateway.probing import ProbeFacts
from stopguard.ledger import BookStatistics, Difference, Leak, Reconciliation, RequestLedgers
from stopguard.ledger.accounts import Account
from stopguard.ledger.journal import JournalStatistics
from stopguard.ledger.journal_reader import StoredRequest
from stopguard.ledger.journal_recovery import RecoveredBook
from stopguard.stops import Anomalies, Tracked

__all__ = ["ClassTaken", "EngineFacts", "LifeSigns", "StopTaken", "StopWanted", "View"]


class LifeSigns(msgspec.Struct, frozen=True, kw_only=True):
    """Whether clients can be served now. `reasons` say why not, in words; `started_at` is in book seconds."""

    version: str
    started_at: float
    draining: bool
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One engine now. `in_engine` and `stopping` are counted from the books, `blocks_used` and `blocks_total` are its
    own gauges, where it has some.
    """

    name: str
    base_url: str
    healthy: bool
    models: tuple[str, ...]
    in_engine: int
    stopping: int
    unconfirmed: int
    waiting_for_connection: int
    open_connections: int
    idle_connections: int
    failures: int
    ejections: int
    doors: tuple[str, ...]
    best_evidence: str
    probed: bool
    kind: str = ""
    version: str = ""
    gauge_unit: str = "none"
    blocks_used: int | None = None
    blocks_total: int | None = None
    probes: tuple[ProbeFacts, ...] = ()


class StopWanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests to stop: exactly one of the five selectors is set. `reason` and `actor` are for the record."""

    ids: tuple[str, ...] = ()
    group: str = ""
    model: str = ""
    engine: str = ""
    everything: bool = False
    reason: str = "admin"
    actor: str = "admin"


class StopTaken(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the wish for one id: `stopping`, `already` (it had ended, or was being stopped) or `unknown`."""

    request_id: str
    result: Literal["stopping", "already", "unknown"]


class ClassTaken(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a wish for another class: its name now, and whether it was another one before."""

    request_id: str
    priority_class: str
    changed: bool


class View(Protocol):
    """A running StopGuard, as the admin app sees it. Times are seconds on the books' monotonic clock."""

    def now(self) -> float:
        """The books' clock."""
        ...

    def wall(self, at: float) -> float:
        """Wall time, in seconds since 1970, of `at`."""
        ...

    def signs(self) -> LifeSigns:
        """Whether it serves."""
        ...

    async def relay_answers(self, timeout_seconds: float) -> bool:
        """Whether the relay's own loop turns: a health endpoint that answers from elsewhere proves nothing."""
        ...

    def open_requests(self) -> Sequence[Tracked]:
        """Every request whose books are open, oldest first."""
        ...

    def closed_requests(self) -> Sequence[RequestLedgers]:
        """Requests that closed lately, oldest first."""
        ...

    def find_open(self, request_id: str) -> Tracked | None: ...

    def find_closed(self, request_id: str) -> RequestLedgers | None: ...

    async def find_stored(self, request_id: str) -> StoredRequest | None:
        """The request in the journal, by its id or the only beginning of one; `None` without a journal.

        Raises `NotInJournal`, `AmbiguousId` or a `StorageError`.
        """
        ...

    def group_of(self, tracked: Tracked) -> str:
        """The label that the client gave with `X-StopGuard-Group`, or nothing."""
        ...

    def leaks(self) -> Sequence[Leak]:
        """The leaks found lately, oldest first."""
        ...

    def engines(self) -> Sequence[EngineFacts]: ...

    def statistics(self) -> BookStatistics: ...

    def totals(self) -> dict[tuple[str, str], dict[Account, int]]:
        """Every account that is not zero, by engine and model."""
        ...

    def anomalies(self) -> Anomalies: ...

    def reconciliations(self) -> dict[str, Reconciliation]:
        """The newest comparison with each engine's gauges, where there was one."""
        ...

    def persistent(self, engine: str) -> Sequence[Difference]:
        """The differences with this engine that lasted over several comparisons."""
        ...

    def journal(self) -> JournalStatistics | None: ...

    def recovered(self) -> Sequence[RecoveredBook]:
        """The books that the last run left open."""
        ...

    async def stop(self, wanted: StopWanted) -> Sequence[StopTaken]:
        """Stop the requests that are wanted, on the relay's loop, a few at a time."""
        ...

    async def reclass(self, request_id: str, name: str) -> ClassTaken | None:
        """Give a live request the class `name`, on the relay's loop; `None` when no live one is called so.

        Raises `ClientError`: no such class, no classes at all, or changed too often.
        """
        ...
