"""The five ledgers of one request: posting, obligations, and what is still open.

Theory
------
`RequestLedgers` is the only place where balances change, and `_record` and `post_all` the only functions
that change them, so that conservation (the sum over the accounts of a unit is zero) holds by
construction and is checked again by `verify`. Everything is synchronous and pure: time is an
argument, and nothing here knows a clock, a socket or an engine.

Movements that happen once a token or once a packet do not make entries: they bump one of the six
counters in the hot path, and `fold` turns what they counted into one entry a transition.

An *obligation* is a pending entry: the amount still sits where it was, reserved, until it is
resolved (perhaps in parts), voided or expired. An expired obligation is a leak and stays open: a
timeout settles nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from stopguard.errors import LimitReached
from stopguard.ledger.accounts import (
    ACCOUNT_COUNT,
    ACCOUNTS,
    CLOSING_ACCOUNTS,
    LEGAL_MOVEMENT,
    OPEN_ACCOUNT_COUNT,
    Account,
    Ledger,
    Role,
    written_off_of,
)
from stopguard.ledger.entries import Entry, EntryState, Evidence
from stopguard.ledger.errors import (
    IllegalMovement,
    InvalidAmount,
    NotPending,
    Overdraft,
    RequestClosed,
    TimeWentBackwards,
)
from stopguard.ledger.leaks import Leak, found
from stopguard.ledger.obligations import Obligation
from stopguard.ledger.record import Mark, RequestRecord, StopSummary
from stopguard.ledger.vouchers import Voucher
from stopguard.ledger.wording import describe

__all__ = ["RequestLedgers"]

_NO_BALANCES = [0] * ACCOUNT_COUNT
_NONE = Evidence.NONE
_POSTED = EntryState.POSTED
_PENDING = EntryState.PENDING
_KV_HELD = Account.KV_HELD
_KV_POOL = Account.KV_POOL
_MODEL = Account.OUTPUT_MODEL
_IN_FLIGHT = Account.OUTPUT_IN_FLIGHT
_DELIVERED = Account.OUTPUT_DELIVERED
_ENGINE_BYTES = Account.STREAM_ENGINE
_BUFFERED = Account.STREAM_BUFFERED
_SENT = Account.STREAM_SENT
_ENDLESS = math.inf
#: What ends a request is bounded by what was opened before, so it is never refused for the number of entries.
_ALWAYS_ROOM = frozenset({EntryState.VOIDED, EntryState.EXPIRED, EntryState.WRITTEN_OFF})
_NEVER_NEGATIVE = tuple(int(account) for account in ACCOUNTS if account.role is not Role.BOUNDARY)
_FOLD_ENTRIES = 6
_CLOSING_ENTRIES = 128


class RequestLedgers:
    """One request's books.

    The six counters (`tokens_computed`, `tokens_delivered`, `bytes_received`, `bytes_sent`,
    `blocks_taken`, `blocks_returned`) only grow; callers in the hot path add to them directly and
    call `fold` at the next transition. `totals` is the book's own list of balances for this engine
    and model, changed together with the request's in `_record`.
    """

    __slots__ = (
        "_folded",
        "balances",
        "blocks_returned",
        "blocks_taken",
        "bytes_received",
        "bytes_sent",
        "closed_at",
        "engine",
        "entries",
        "entry_limit",
        "labels",
        "last_at",
        "leaks",
        "marks",
        "model",
        "obligations",
        "opened_at",
        "request_id",
        "reserved",
        "stop",
        "tokens_computed",
        "tokens_delivered",
        "tokens_recomputed",
        "totals",
        "written_off",
    )

    def __init__(
        self,
        request_id: str,
        at: float,
        *,
        engine: str,
        model: str,
        totals: list[int] | None = None,
        entry_limit: int = 4096,
    ) -> None:
        if not abs(at) < _ENDLESS:
            raise TimeWentBackwards(f"{request_id}: books cannot be opened at {at}")
        self.request_id = request_id
        self.engine = engine
        self.model = model
        self.opened_at = at
        self.last_at = at
        self.closed_at: float | None = None
        self.written_off = False
        self.balances = _NO_BALANCES[:]
        self.totals = _NO_BALANCES[:] if totals is None else totals
        self.entry_limit = entry_limit
        self.entries: list[Entry] = []
        self.marks: list[Mark] = []
        # Made on first use: a request that ends normally has none of these.
        self.reserved: dict[Account, int] | None = None
        self.obligations: dict[int, Obligation] | None = None
        self.leaks: list[Leak] | None = None
        self.labels: dict[str, str] | None = None
        self.stop: StopSummary | None = None
        self.tokens_computed = 0
        self.tokens_delivered = 0
        self.tokens_recomputed = 0
        self.bytes_received = 0
        self.bytes_sent = 0
        self.blocks_taken = 0
        self.blocks_returned = 0
        self._folded = (0, 0, 0, 0, 0, 0)

    # ---- posting ---------------------------------------------------------------------------

    def post(
        self,
        debit: Account,
        credit: Account,
        amount: int,
        at: float,
        evidence: Evidence = _NONE,
        note: str = "",
        occurred_at: float | None = None,
    ) -> Entry:
        """Move `amount` from `debit` to `credit`, now and for good."""
        self._check(debit, credit, amount, at)
        return self._record(debit, credit, amount, at, _POSTED, evidence, note, -1, None, occurred_at)

    def post_all(self, voucher: Voucher, at: float) -> None:
        """Move one unit along each leg of `voucher`: all of them, or (with an error) none."""
        if self.closed_at is not None or not at >= self.last_at:
            self.check_open(1, at)
        balances, entries = self.balances, self.entries
        for account in voucher.sources:
            if balances[account] < 1 or self.reserved:
                self._check_source(account)
        sequence = len(entries)
        if sequence + len(voucher.legs) > self.entry_limit:
            raise self._moves_without_end()
        totals = self.totals
        for debit, credit, evidence in voucher.legs:
            entries.append(Entry(sequence, at, debit, credit, 1, _POSTED, evidence))
            balances[debit] -= 1
            balances[credit] += 1
            totals[debit] -= 1
            totals[credit] += 1
            sequence += 1
        self.last_at = at

    def pend(
        self,
        debit: Account,
        credit: Account,
        amount: int,
        at: float,
        due_at: float,
        evidence: Evidence = _NONE,
        note: str = "",
    ) -> Entry:
        """Note that `amount` must move from `debit` to `credit` before `due_at`, and reserve it."""
        self._check(debit, credit, amount, at)
        self._check_can_be_due(debit)
        if not due_at >= at:
            raise TimeWentBackwards(f"{self.request_id}: an obligation of {at:.6f} cannot be due earlier, at {due_at}")
        entry = self._record(debit, credit, amount, at, _PENDING, evidence, note, -1, due_at, None)
        if self.obligations is None or self.reserved is None:
            self.obligations, self.reserved = {}, {}
        self.obligations[entry.sequence] = Obligation(entry)
        self.reserved[debit] = self.reserved.get(debit, 0) + amount
        return entry

    def resolve(
        self,
        sequence: int,
        at: float,
        amount: int | None = None,
        evidence: Evidence = _NONE,
        note: str = "",
        occurred_at: float | None = None,
        credit: Account | None = None,
    ) -> Entry:
        """What was due came: move `amount` (all that is left, unless given) of obligation `sequence`.

        After the deadline the entry says LATE. `credit` overrides where it goes (a token that was
        to be discarded may turn out to be stale).
        """
        obligation = self._obligation(sequence)
        pending = obligation.entry
        moved = obligation.remaining if amount is None else amount
        target = pending.credit if credit is None else credit
        if type(moved) is int and moved > obligation.remaining:
            raise Overdraft(
                f"{self.request_id}: {moved} {pending.debit.unit} of {pending.debit.label} were to be resolved, "
                f"only {obligation.remaining} are due"
            )
        self._check_shape(pending.debit, target, moved, at)
        state = EntryState.LATE if obligation.expired else EntryState.RESOLVED
        entry = self._record(pending.debit, target, moved, at, state, evidence, note, sequence, None, occurred_at)
        self._reduce(obligation, moved)
        return entry

    def void(self, sequence: int, at: float, note: str = "") -> Entry:
        """Obligation `sequence` is no longer due; its amount stays where it is and is free to move."""
        obligation = self._obligation(sequence)
        pending, amount = obligation.entry, obligation.remaining
        self._check_shape(pending.debit, pending.credit, amount, at)
        entry = self._record(
            pending.debit, pending.credit, amount, at, EntryState.VOIDED, _NONE, note, sequence, None, None
        )
        self._reduce(obligation, amount)
        return entry

    def leave(
        self,
        debit: Account,
        credit: Account,
        amount: int,
        at: float,
        evidence: Evidence = _NONE,
        note: str = "",
        occurred_at: float | None = None,
    ) -> list[Entry]:
        """`amount` has left `debit`: obligations on it are resolved first, the rest is posted.

        This is how a release is booked, whether or not somebody was waiting for it. More than is in
        the account raises `Overdraft` (a release happens once) and changes nothing.
        """
        if not self.obligations:
            return [self.post(debit, credit, amount, at, evidence, note, occurred_at)]
        self._check_shape(debit, credit, amount, at)
        if debit < OPEN_ACCOUNT_COUNT and self.balances[debit] < amount:
            raise self._overdraft(debit, amount)
        parts, rest = [], amount
        for sequence, obligation in self.obligations.items():
            if obligation.entry.debit is debit and rest:
                parts.append((sequence, min(rest, obligation.remaining)))
                rest -= parts[-1][1]
        if len(self.entries) + len(parts) + (rest > 0) > self.entry_limit:
            raise self._moves_without_end()
        entries = [self.resolve(s, at, part, evidence, note, occurred_at, credit) for s, part in parts]
        if rest:
            entries.append(self.post(debit, credit, rest, at, evidence, note, occurred_at))
        return entries

    def correct(self, sequence: int, at: float, note: str) -> Entry:
        """Take back the posting `sequence` by the opposite movement; the old entry stays in the book."""
        if not 0 <= sequence < len(self.entries) or not self.entries[sequence].state.moves:
            raise NotPending(f"{self.request_id}: entry {sequence} moved nothing that could be corrected")
        wrong = self.entries[sequence]
        self.check_open(wrong.amount, at)
        if any(e.refers_to == sequence and e.state is EntryState.CORRECTION for e in self.entries[sequence:]):
            raise NotPending(f"{self.request_id}: entry {sequence} was corrected already")
        free = self.balances[wrong.credit] - (self.reserved or {}).get(wrong.credit, 0)
        if wrong.credit.role is not Role.BOUNDARY and free < wrong.amount:
            raise self._overdraft(wrong.credit, wrong.amount)
        return self._record(
            wrong.credit, wrong.debit, wrong.amount, at, EntryState.CORRECTION, _NONE, note, sequence, None, None
        )

    def fold(self, at: float) -> None:
        """Turn what the hot-path counters have counted since the last fold into entries.

        At most one entry a kind of movement: tokens computed and delivered, bytes received and
        sent, blocks taken and returned. A counter that ran ahead of what can have happened (more
        delivered than computed) raises `Overdraft` and leaves the fold marks where they were.
        """
        now = (
            self.tokens_computed,
            self.tokens_delivered,
            self.bytes_received,
            self.bytes_sent,
            self.blocks_taken,
            self.blocks_returned,
        )
        before = self._folded
        if now == before:
            return
        self.check_open(1, at)
        self._check_fold(now)
        if now[0] > before[0]:
            self._record(_MODEL, _IN_FLIGHT, now[0] - before[0], at, _POSTED, _NONE, "", -1, None, None)
        if now[1] > before[1]:
            self._fold_out(_IN_FLIGHT, _DELIVERED, now[1] - before[1], at, _NONE)
        if now[2] > before[2]:
            self._record(_ENGINE_BYTES, _BUFFERED, now[2] - before[2], at, _POSTED, _NONE, "", -1, None, None)
        if now[3] > before[3]:
            self._fold_out(_BUFFERED, _SENT, now[3] - before[3], at, _NONE)
        if now[4] > before[4]:
            self._record(_KV_POOL, _KV_HELD, now[4] - before[4], at, _POSTED, Evidence.PROBE, "", -1, None, None)
        if now[5] > before[5]:
            self._fold_out(_KV_HELD, _KV_POOL, now[5] - before[5], at, Evidence.PROBE)
        self._folded = now

    def _fold_out(self, debit: Account, credit: Account, amount: int, at: float, evidence: Evidence) -> None:
        if self.obligations:
            self.leave(debit, credit, amount, at, evidence)
        else:
            self._record(debit, credit, amount, at, _POSTED, evidence, "", -1, None, None)

    # ---- deadlines -------------------------------------------------------------------------

    def expire(self, at: float) -> list[Leak]:
        """What is not here at its deadline is a leak, one an account, and stays open. Returns the leaks that are new.

        More of an account that has leaked already makes that leak of this request larger.
        """
        late: dict[Account, list[Entry]] = {}
        self.check_open(1, at)
        for sequence, obligation in (self.obligations or {}).items():
            pending = obligation.entry
            if obligation.expired or pending.due_at is None or pending.due_at > at:
                continue
            debit, credit, left = pending.debit, pending.credit, obligation.remaining
            expired = self._record(
                debit, credit, left, at, EntryState.EXPIRED, _NONE, pending.note, sequence, None, None
            )
            obligation.expired = True
            late.setdefault(debit, []).append(expired)
        if not late:
            return []
        whose = (self.request_id, self.engine, self.model)
        self.leaks, new = found(whose, self.entries, self.leaks or [], late)
        return new

    def give_up(self, account: Account, at: float, reason: str) -> Entry | None:
        """Stop waiting for what is in one open account: it is written off, by an entry that says so."""
        self.check_open(1, at)
        self._check_can_be_due(account)
        for sequence, obligation in list((self.obligations or {}).items()):
            if obligation.entry.debit is account:
                if obligation.expired:
                    self._reduce(obligation, obligation.remaining)
                else:
                    self.void(sequence, at, "given up")
        amount = self.balances[account]
        if not amount:
            return None
        target = written_off_of(account)
        return self._record(account, target, amount, at, EntryState.WRITTEN_OFF, _NONE, reason, -1, None, None)

    def write_off(self, at: float, reason: str) -> None:
        """Give up on everything still open, and close the books. The request is never `settled`."""
        self.check_open(1, at)
        limit, self.entry_limit = self.entry_limit, len(self.entries) + _FOLD_ENTRIES + len(self.obligations or ())
        try:
            self.fold(at)
        finally:
            self.entry_limit = limit
        for account in ACCOUNTS[:OPEN_ACCOUNT_COUNT]:
            self.give_up(account, at, reason)
        self.written_off = True
        self.closed_at = at

    # ---- questions -------------------------------------------------------------------------
    @property
    def all_closed(self) -> bool:
        """Whether all five ledgers are closed (after a `fold`)."""
        return not any(self.balances[:OPEN_ACCOUNT_COUNT])

    @property
    def overdue(self) -> bool:
        """Whether something was due and has not come."""
        return self.obligations is not None and any(o.expired for o in self.obligations.values())

    @property
    def nearly_full(self) -> bool:
        """Whether only the room is left that a stop and its release need: time to stop the request."""
        return len(self.entries) >= self.entry_limit - min(_CLOSING_ENTRIES, self.entry_limit // 2)

    @property
    def tokens_in_flight(self) -> int:
        """Computed and neither delivered nor dropped, with what the counters have and no fold has booked yet."""
        computed, delivered = self._folded[0], self._folded[1]
        return self.balances[_IN_FLIGHT] + (self.tokens_computed - computed) - (self.tokens_delivered - delivered)

    @property
    def blocks_held(self) -> int:
        """Held and behind no fence, with what the counters have and no fold has booked yet."""
        return self.balances[_KV_HELD] + self.blocks_taken - self._folded[4] - self.blocks_returned + self._folded[5]

    def ledger_closed(self, ledger: Ledger) -> bool:
        """Whether nothing is open in `ledger`."""
        return not any(self.balances[CLOSING_ACCOUNTS[ledger]])

    def open_amounts(self) -> dict[Account, int]:
        """Every open account that is not zero, with its balance."""
        return {ACCOUNTS[number]: amount for number, amount in enumerate(self.balances[:OPEN_ACCOUNT_COUNT]) if amount}

    def due(self) -> Iterable[Obligation]:
        """The obligations that are pending or overdue."""
        return list((self.obligations or {}).values())

    def mark(self, at: float, text: str) -> None:
        """Note a moment in the timeline that moves nothing. At the limit the last mark says so."""
        # Never refused: a stop must not fail because of a note.
        if len(self.marks) < self.entry_limit:
            full = len(self.marks) == self.entry_limit - 1
            self.marks.append((at, f"no more marks: the limit of {self.entry_limit} is reached" if full else text))

    def record(self) -> RequestRecord:
        """Everything about the request as one value that a journal can keep."""
        return RequestRecord(
            request_id=self.request_id,
            engine=self.engine,
            model=self.model,
            opened_at=self.opened_at,
            closed_at=self.closed_at,
            written_off=self.written_off,
            tokens_computed=self.tokens_computed,
            tokens_delivered=self.tokens_delivered,
            tokens_recomputed=self.tokens_recomputed,
            stop=self.stop,
            entries=list(self.entries),
            marks=list(self.marks),
            leaks=list(self.leaks or ()),
            labels=dict(self.labels or {}),
        )

    def verify(self) -> None:
        """Derive every balance again from the entries and compare (a pair assertion, for tests and audits)."""
        derived = _NO_BALANCES[:]
        for entry in self.entries:
            if entry.state.moves:
                derived[entry.debit] -= entry.amount
                derived[entry.credit] += entry.amount
        if derived != self.balances:
            raise IllegalMovement(f"{self.request_id}: the balances do not follow from the entries")
        if min(map(derived.__getitem__, _NEVER_NEGATIVE)) < 0:
            raise Overdraft(f"{self.request_id}: an account went below zero")

    def describe(self, ledger: Ledger) -> str:
        """One line for one ledger, made for people and for tests: ``kv: held 13 blocks, fenced 2 blocks``."""
        return describe(self.balances, self.due(), ledger)

    def __repr__(self) -> str:
        return f"<{self.request_id} " + " | ".join(self.describe(ledger) for ledger in Ledger) + ">"

    # ---- the one place where balances change -------------------------------------------------

    def _record(
        self,
        debit: Account,
        credit: Account,
        amount: int,
        at: float,
        state: EntryState,
        evidence: Evidence,
        note: str,
        refers_to: int,
        due_at: float | None,
        occurred_at: float | None,
    ) -> Entry:
        entries = self.entries
        sequence = len(entries)
        if sequence >= self.entry_limit and state not in _ALWAYS_ROOM:
            raise self._moves_without_end()
        entry = Entry(sequence, at, debit, credit, amount, state, evidence, note, refers_to, due_at, occurred_at)
        if state is _POSTED or state.moves:
            balances, totals = self.balances, self.totals
            balances[debit] -= amount
            balances[credit] += amount
            totals[debit] -= amount
            totals[credit] += amount
        entries.append(entry)
        self.last_at = at
        return entry

    def _check(self, debit: Account, credit: Account, amount: int, at: float) -> None:
        # Written out, not composed of the helpers below: this runs ten times a request.
        if self.closed_at is not None or type(amount) is not int or amount <= 0 or not self.last_at <= at < _ENDLESS:
            self.check_open(amount, at)
        if (
            type(debit) is not Account
            or type(credit) is not Account
            or not LEGAL_MOVEMENT[debit * ACCOUNT_COUNT + credit]
        ):
            raise self._illegal(debit, credit)
        if debit < OPEN_ACCOUNT_COUNT:
            free = self.balances[debit]
            if self.reserved:
                free -= self.reserved.get(debit, 0)
            if free < amount:
                raise self._overdraft(debit, amount)

    def check_open(self, amount: object, at: float) -> None:
        """Raise what an entry of `amount` at `at` would raise before its accounts are looked at."""
        if self.closed_at is not None:
            word = "written off" if self.written_off else "settled"
            raise RequestClosed(f"{self.request_id} was {word} at {self.closed_at:.6f}; its books are closed")
        if type(amount) is not int or amount <= 0:
            raise InvalidAmount(f"{self.request_id}: an amount is a whole number above zero, not {amount!r}")
        if not self.last_at <= at < _ENDLESS:
            raise TimeWentBackwards(
                f"{self.request_id}: an entry of {at} cannot follow one of {self.last_at}: two clocks were mixed"
            )

    def _check_shape(self, debit: Account, credit: Account, amount: object, at: float) -> None:
        self.check_open(amount, at)
        accounts = type(debit) is Account and type(credit) is Account
        if not accounts or not LEGAL_MOVEMENT[debit * ACCOUNT_COUNT + credit]:
            raise self._illegal(debit, credit)

    def _check_fold(self, now: tuple[int, int, int, int, int, int]) -> None:
        before, balances = self._folded, self.balances
        computed, delivered = now[0] - before[0], now[1] - before[1]
        received, sent = now[2] - before[2], now[3] - before[3]
        taken, returned = now[4] - before[4], now[5] - before[5]
        if computed < 0 or delivered < 0 or received < 0 or sent < 0 or taken < 0 or returned < 0:
            raise InvalidAmount(f"{self.request_id}: a counter of the hot path went down: {before} → {now}")
        # What is reserved may leave, too: a fold resolves the obligations that it meets.
        if delivered > balances[_IN_FLIGHT] + computed:
            raise self._overdraft(_IN_FLIGHT, delivered)
        if sent > balances[_BUFFERED] + received:
            raise self._overdraft(_BUFFERED, sent)
        if returned > balances[_KV_HELD] + taken:
            raise self._overdraft(_KV_HELD, returned)
        if len(self.entries) + _FOLD_ENTRIES + len(self.obligations or ()) > self.entry_limit:
            raise self._moves_without_end()

    def _check_can_be_due(self, debit: Account) -> None:
        if debit >= OPEN_ACCOUNT_COUNT:
            raise IllegalMovement(f"{self.request_id}: nothing can be due from {debit.ledger.label}.{debit.label}")

    def _check_source(self, account: Account) -> None:
        if self.balances[account] - (self.reserved or {}).get(account, 0) < 1:
            raise self._overdraft(account, 1)

    def _obligation(self, sequence: int) -> Obligation:
        obligation = (self.obligations or {}).get(sequence)
        if obligation is None:
            raise NotPending(f"{self.request_id}: entry {sequence} is not pending")
        return obligation

    def _reduce(self, obligation: Obligation, amount: int) -> None:
        assert self.obligations is not None
        assert self.reserved is not None
        debit = obligation.entry.debit
        obligation.remaining -= amount
        self.reserved[debit] -= amount
        assert obligation.remaining >= 0
        assert self.reserved[debit] >= 0
        if not obligation.remaining:
            del self.obligations[obligation.entry.sequence]
        if not self.reserved[debit]:
            del self.reserved[debit]

    def _moves_without_end(self) -> LimitReached:
        return LimitReached("entries a request", self.entry_limit, f"{self.request_id} moves without end")

    def _illegal(self, debit: object, credit: object) -> IllegalMovement:
        return IllegalMovement(f"{self.request_id}: nothing can move from {debit!r} to {credit!r}")

    def _overdraft(self, debit: Account, amount: int) -> Overdraft:
        reserved = (self.reserved or {}).get(debit, 0)
        return Overdraft(
            f"{self.request_id}: {amount} {debit.unit} were to leave {debit.ledger.label}.{debit.label}, which has "
            f"{self.balances[debit]} ({reserved} of them reserved): a release happens once"
        )
