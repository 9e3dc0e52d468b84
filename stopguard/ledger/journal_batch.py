"""What is waiting for the disk: which books are kept, as which rows, and what goes first when there is no room.

Pure: a `Batch` belongs to the writer thread, knows no file and no clock. It is filled while the disk
is away and emptied by one transaction, so whatever it holds is bounded (rule 11) and what it has to
let go is counted by reason.
"""

from __future__ import annotations

import zlib
from collections import Counter

import msgspec

from stopguard.errors import ConfigurationError
from stopguard.ledger.accounts import Account
from stopguard.ledger.journal_schema import seal
from stopguard.ledger.leaks import Leak
from stopguard.ledger.record import encode_record
from stopguard.ledger.request import RequestLedgers

__all__ = [
    "ABANDONED",
    "SETTLED",
    "WRITTEN_OFF",
    "Batch",
    "JournalLimits",
    "JournalPolicy",
    "encode_leak",
    "kind_of",
]

#: Values of `requests.state`.
SETTLED, WRITTEN_OFF, ABANDONED = 0, 1, 2

_PREEMPTED = Account.QUEUE_PREEMPTED
_NOT_NORMAL = frozenset({"raced_finish", "unconfirmed", "failed"})
#: SQLite adds 64-bit integers and falls over to floats without a word; no real sum comes near.
_SUM_MAX = 1 << 52

# Without the run, which is that of the file they go to: it may be begun anew while they wait.
RequestRow = tuple[str, int, str, int, float, bytes]
LeakRow = tuple[str, str, float, bytes]

encode_leak = msgspec.msgpack.Encoder().encode


class JournalLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a journal. A row is deleted when it is older than `age_seconds` or the file over `file_bytes`.

    `queued` is how many things may wait for the writer thread, `backlog_bytes` how much it may hold
    while the disk fails, `wal_bytes` how far a slow reader may make the write-ahead log grow before
    writing waits for it.
    """

    queued: int = 20_000
    backlog_bytes: int = 16 * 1024 * 1024
    open_books: int = 100_000
    record_bytes: int = 1024 * 1024
    sums: int = 10_000
    age_seconds: float = 7 * 86_400.0
    file_bytes: int = 512 * 1024 * 1024
    wal_bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"journal: {name} must be above zero")


class JournalPolicy(msgspec.Struct, frozen=True):
    """Which normal finishes are kept whole. Stops, failures, leaks and what was written off always are.

    `rate` is the share of normal finishes: 1 for `all`, 0 for `stops`. Which ones is decided by the id
    alone, so that two journals of one request, or a run and its replay, agree.
    """

    rate: float

    @classmethod
    def parse(cls, value: str | float) -> JournalPolicy:
        """From the configuration: ``"all"``, ``"stops"``, or a rate from 0 to 1. `ConfigurationError` otherwise."""
        if value == "all":
            return cls(1.0)
        if value == "stops":
            return cls(0.0)
        try:
            rate = float(value)
        except ValueError:
            rate = -1.0
        if not 0.0 <= rate <= 1.0:
            raise ConfigurationError(f'journal must be "all", "stops" or a rate from 0 to 1, not {value!r}')
        return cls(rate)

    def __str__(self) -> str:
        return {1.0: "all", 0.0: "stops"}.get(self.rate, repr(self.rate))

    def samples(self, request_id: str) -> bool:
        """Whether the normal finish of `request_id` is kept whole."""
        if self.rate >= 1.0:
            return True
        if self.rate <= 0.0:
            return False
        return zlib.crc32(request_id.encode("utf-8", "surrogatepass")) < self.rate * 4294967296.0


def kind_of(request: RequestLedgers) -> str:
    """Why the books are kept for certain: `cancel`, `preempt`, `finish`, `fail`, `leak`; empty for a normal finish.

    A request that was preempted and then finished counts as `preempt`. `finish` means a stop that
    came too late or went wrong around an end of the model's own.
    """
    stop = request.stop
    if stop is not None and (stop.semantics != "finish" or stop.outcome in _NOT_NORMAL):
        return stop.semantics
    for entry in request.entries:
        if entry.credit is _PREEMPTED:
            return "preempt"
    return "leak" if request.leaks or request.written_off else ""


class Batch:
    """Rows that wait for the next transaction.

    `normal` and `kept` are rows of `requests`; when `backlog_bytes` is reached, normal finishes go
    first and then the oldest of the rest. `dropped` counts what was let go, by reason.
    """

    def __init__(self, policy: JournalPolicy, limits: JournalLimits) -> None:
        self.policy = policy
        self.limits = limits
        self.normal: list[RequestRow] = []
        self.kept: list[RequestRow] = []
        self.leaks: list[LeakRow] = []
        self.sums: dict[tuple[int, str, str], list[float]] = {}
        self.closed_books: list[int] = []
        self.row_bytes = 0
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.normal) + len(self.kept) + len(self.leaks)

    def __bool__(self) -> bool:
        return bool(len(self) or self.sums or self.closed_books)

    def add_request(self, request: RequestLedgers, closed_at_wall: float) -> None:
        """Closed books, which never change any more."""
        kind = kind_of(request)
        if not kind:
            self._add_to_sums(request, closed_at_wall)
            if not self.policy.samples(request.request_id):
                return
        body = self.body_of(request)
        if body is None:
            return
        state = WRITTEN_OFF if request.written_off else SETTLED
        leaks = len(request.leaks or ())
        rows = self.kept if kind else self.normal
        rows.append((request.request_id, state, kind, leaks, closed_at_wall, body))
        self._grew(len(body))

    def add_leak(self, leak: Leak, found_at_wall: float) -> None:
        """A leak, on the day it is found; the record of its request has it again."""
        try:
            body = seal(encode_leak(leak))
        except (UnicodeEncodeError, OverflowError):
            self.dropped["cannot be encoded"] += 1
            return
        if len(body) > self.limits.record_bytes:
            self.dropped["record too large"] += 1
            return
        self.leaks.append((leak.request_id, leak.ledger.label, found_at_wall, body))
        self._grew(len(body))

    def body_of(self, request: RequestLedgers) -> bytes | None:
        """The `body` column of a request, open or closed; None (and counted) when there can be none."""
        try:
            body = seal(encode_record(request.record()))
        except (UnicodeEncodeError, OverflowError):
            # A label with half a character, an amount over 64 bits: one such record must not stop the others.
            self.dropped["cannot be encoded"] += 1
            return None
        if len(body) > self.limits.record_bytes:
            self.dropped["record too large"] += 1
            return None
        return body

    def drop_everything(self, reason: str) -> None:
        """Give up on the whole batch."""
        self.dropped[reason] += len(self)
        sums = sum(int(row[0]) for row in self.sums.values())
        if sums:
            self.dropped[f"{reason} (in sums)"] += sums
        self.clear()

    def clear(self) -> None:
        """Everything is on the disk."""
        self.normal.clear()
        self.kept.clear()
        self.leaks.clear()
        self.sums.clear()
        self.closed_books.clear()
        self.row_bytes = 0

    def _add_to_sums(self, request: RequestLedgers, closed_at_wall: float) -> None:
        key = (int(closed_at_wall // 60), request.engine, request.model)
        row = self.sums.get(key)
        if row is None:
            if len(self.sums) >= self.limits.sums:
                self.dropped["too many sums"] += 1
                return
            row = self.sums[key] = [0, 0, 0, 0, 0.0]
        if request.tokens_computed > _SUM_MAX or request.tokens_recomputed > _SUM_MAX:
            self.dropped["cannot be encoded"] += 1
            return
        row[0] += 1
        row[1] += request.tokens_computed
        row[2] += request.tokens_delivered
        row[3] += request.tokens_recomputed
        row[4] += (request.last_at if request.closed_at is None else request.closed_at) - request.opened_at

    def _grew(self, size: int) -> None:
        self.row_bytes += size
        if self.row_bytes <= self.limits.backlog_bytes:
            return
        # A half at a time, so that a full backlog costs a list copy once in many rows, not every row.
        goal = self.limits.backlog_bytes // 2
        for rows in (self.normal, self.kept, self.leaks):
            gone = 0
            while gone < len(rows) and self.row_bytes > goal:
                self.row_bytes -= len(rows[gone][-1])
                gone += 1
            del rows[:gone]
            if gone:
                self.dropped["backlog full"] += gone
            goal = self.limits.backlog_bytes
