"""The book: the ledgers of every request that is open, what was settled lately, and the totals.

The book is the one owner of `RequestLedgers`. A request is opened once, closed once (settled, or
written off after it was reported as a leak), and then only remembered in a bounded list. All
gauges and counters that the outside sees are read from here.

Totals are kept for each (engine, model) and change in the same statement as the request's own
balance. `verify` derives them again from the requests: the two paths must agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from stopguard.errors import LimitReached
from stopguard.ledger.accounts import ACCOUNT_COUNT, ACCOUNTS, CLOSING_ACCOUNTS, OPEN_ACCOUNT_COUNT, Account, Ledger
from stopguard.ledger.errors import DuplicateRequest, IllegalMovement, Overdraft, UnknownRequest
from stopguard.ledger.leaks import Leak
from stopguard.ledger.limits import BookLimits, BookStatistics
from stopguard.ledger.request import RequestLedgers

__all__ = ["Book"]

_LEDGERS = tuple(zip(Ledger, CLOSING_ACCOUNTS, strict=True))


class Book:
    """All requests that are open, by id.

    Pure: no clock, no I/O. Raises `LimitReached`, `DuplicateRequest` or `UnknownRequest` and then
    has changed nothing.
    """

    def __init__(self, limits: BookLimits | None = None) -> None:
        self.limits = limits or BookLimits()
        self._open: dict[str, RequestLedgers] = {}
        self._overdue: dict[str, RequestLedgers] = {}
        self._recent: deque[RequestLedgers] = deque(maxlen=self.limits.recent)
        self._recent_by_id: dict[str, RequestLedgers] = {}
        self._totals: dict[tuple[str, str], list[int]] = {}
        self._leaks: deque[Leak] = deque(maxlen=self.limits.leaks)
        self._opened = 0
        self._settled = 0
        self._written_off = 0
        self._leaks_found = 0
        self._closed_late = 0

    # ---- the life of a request ----------------------------------------------------------------

    def open(self, request_id: str, at: float, *, engine: str, model: str) -> RequestLedgers:
        """Begin the books of a request. `engine` is the configured name, `model` one of a closed set."""
        if request_id in self._open:
            raise DuplicateRequest(f"{request_id} is in the book already")
        if len(self._open) >= self.limits.open_requests:
            raise LimitReached("open requests", self.limits.open_requests, "wait for some to end, or raise the limit")
        request = RequestLedgers(
            request_id, at, engine=engine, model=model, entry_limit=self.limits.entries_per_request
        )
        request.totals = self._totals_of(engine, model)
        self._open[request_id] = request
        self._opened += 1
        return request

    def assign(self, request: RequestLedgers, *, engine: str, model: str) -> None:
        """The request is served by `engine` as `model`: its balances move to these totals with it."""
        self._own(request)
        totals = self._totals_of(engine, model)
        if totals is not request.totals:
            previous = request.totals
            for entry in request.entries:  # two of them, when a request is dispatched for the first time
                if entry.state.moves:
                    previous[entry.debit] += entry.amount
                    previous[entry.credit] -= entry.amount
                    totals[entry.debit] -= entry.amount
                    totals[entry.credit] += entry.amount
            request.totals = totals
        request.engine, request.model = engine, model

    def settle(self, request: RequestLedgers, at: float) -> bool:
        """Close the books of a request whose five ledgers are closed; False (and only a fold) if one is open."""
        self._own(request)
        request.check_open(1, at)
        request.fold(at)
        if not request.all_closed:
            return False
        assert not request.obligations
        request.closed_at = at
        if self._overdue.pop(request.request_id, None) is not None:
            self._closed_late += 1
        self._settled += 1
        self._retire(request)
        return True

    def expire(self, request: RequestLedgers, at: float) -> list[Leak]:
        """Turn what is overdue into leaks. The request stays open until it settles or is written off."""
        self._own(request)
        if (
            len(self._overdue) >= self.limits.overdue
            and request.request_id not in self._overdue
            and any(not o.expired and (o.entry.due_at or 0.0) <= at for o in request.due())
        ):
            raise LimitReached(
                "overdue requests", self.limits.overdue, "write the oldest off: the engine leaks faster than it heals"
            )
        leaks = request.expire(at)
        if leaks:
            self._overdue[request.request_id] = request
            self._leaks.extend(leaks)
            self._leaks_found += len(leaks)
        return leaks

    def write_off(self, request: RequestLedgers, at: float, reason: str) -> None:
        """Give up on what a request still owes. Recorded as such; never counted as settled."""
        self._own(request)
        request.write_off(at, reason)
        self._overdue.pop(request.request_id, None)
        self._written_off += 1
        self._retire(request)

    # ---- questions ----------------------------------------------------------------------------

    def get(self, request_id: str) -> RequestLedgers:
        """The open request with this id; `UnknownRequest` if there is none."""
        try:
            return self._open[request_id]
        except KeyError:
            raise UnknownRequest(f"{request_id} is not in the book") from None

    def find(self, request_id: str) -> RequestLedgers | None:
        """The request with this id, open or lately closed."""
        return self._open.get(request_id) or self._recent_by_id.get(request_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[RequestLedgers]:
        return iter(list(self._open.values()))

    def overdue(self) -> list[RequestLedgers]:
        """The requests with something overdue, the longest overdue first."""
        return list(self._overdue.values())

    def longest_overdue(self) -> RequestLedgers | None:
        """The request that has been overdue for the longest time."""
        return next(iter(self._overdue.values()), None)

    @property
    def overdue_full(self) -> bool:
        """Whether a further overdue request would be refused."""
        return len(self._overdue) >= self.limits.overdue

    def recent(self) -> list[RequestLedgers]:
        """The requests closed lately, oldest first."""
        return list(self._recent)

    def leaks(self) -> list[Leak]:
        """The leaks found lately, oldest first, whether or not they have closed since."""
        return list(self._leaks)

    def totals(self) -> dict[tuple[str, str], dict[Account, int]]:
        """The balance of every account by (engine, model): what metrics read."""
        return {
            key: {ACCOUNTS[number]: amount for number, amount in enumerate(totals) if amount}
            for key, totals in self._totals.items()
        }

    def total(self, account: Account) -> int:
        """One account over all engines and models."""
        return sum(totals[account] for totals in self._totals.values())

    def statistics(self) -> BookStatistics:
        """Counts at this moment, the open ones derived from the requests."""
        open_ledgers = dict.fromkeys(Ledger, 0)
        # A copy, made in one step: whoever asks may be in another thread than whoever books.
        for request in list(self._open.values()):
            balances = request.balances
            for ledger, accounts in _LEDGERS:
                if any(balances[accounts]):
                    open_ledgers[ledger] += 1
        return BookStatistics(
            open_requests=len(self._open),
            overdue_requests=len(self._overdue),
            opened=self._opened,
            settled=self._settled,
            written_off=self._written_off,
            leaks_found=self._leaks_found,
            closed_late=self._closed_late,
            open_ledgers=open_ledgers,
        )

    def verify(self) -> None:
        """Check every request and derive the open totals from them; raises on the first difference."""
        derived = {key: [0] * OPEN_ACCOUNT_COUNT for key in self._totals}
        for request in self._open.values():
            request.verify()
            row = derived[request.engine, request.model]
            for number in range(OPEN_ACCOUNT_COUNT):
                row[number] += request.balances[number]
        for key, totals in self._totals.items():
            if totals[:OPEN_ACCOUNT_COUNT] != derived[key]:
                raise IllegalMovement(f"the totals of {key} do not follow from the open requests")
        if self._opened != len(self._open) + self._settled + self._written_off:
            raise Overdraft("requests opened do not equal open + settled + written off")

    def __repr__(self) -> str:
        counts = self.statistics()
        ledgers = " ".join(f"{ledger.label}={n}" for ledger, n in counts.open_ledgers.items())
        return (
            f"<Book open {counts.open_requests} ({ledgers}) overdue {counts.overdue_requests} "
            f"settled {counts.settled} written off {counts.written_off} leaks {counts.leaks_found}>"
        )

    # ---- private --------------------------------------------------------------------------------

    def _totals_of(self, engine: str, model: str) -> list[int]:
        totals = self._totals.get((engine, model))
        if totals is None:
            if len(self._totals) >= self.limits.engine_models:
                raise LimitReached(
                    "engines and models", self.limits.engine_models, "model names must come from a closed set"
                )
            totals = self._totals[engine, model] = [0] * ACCOUNT_COUNT
        return totals

    def _own(self, request: RequestLedgers) -> None:
        if self._open.get(request.request_id) is not request:
            raise UnknownRequest(f"{request.request_id} is not an open request of this book")

    def _retire(self, request: RequestLedgers) -> None:
        del self._open[request.request_id]
        recent = self._recent
        if recent.maxlen and len(recent) == recent.maxlen:
            oldest = recent[0]
            if self._recent_by_id.get(oldest.request_id) is oldest:
                del self._recent_by_id[oldest.request_id]
        recent.append(request)
        if recent.maxlen:
            self._recent_by_id[request.request_id] = request
