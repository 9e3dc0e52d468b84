"""Random lives of requests in a book: conservation at every step, and what is illegal changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stopguard.errors import StopGuardError
from stopguard.ledger import Account, Book, BookLimits, Ledger, RequestLedgers, Role, Unit
from stopguard.ledger.accounts import boundary_of
from tests.unit.ledger.complete_state import state_of_book

accounts = st.sampled_from(list(Account))
open_accounts = st.sampled_from([account for account in Account if account.role is Role.OPEN])
amounts = st.one_of(st.integers(1, 6), st.integers(-2, 0))
COUNTERS = (
    *("tokens_computed", "tokens_delivered", "bytes_received", "bytes_sent", "blocks_taken", "blocks_returned"),
)


class BookMachine(RuleBasedStateMachine):
    """Several requests in one small book; every call may be refused, and then nothing may have changed."""

    def __init__(self) -> None:
        super().__init__()
        limits = BookLimits(open_requests=4, entries_per_request=20, engine_models=3, recent=3, overdue=2, leaks=5)
        self.book = Book(limits)
        self.at = 1.0
        self.names = 0
        self.closed: list[RequestLedgers] = []
        self.leaks = 0

    def attempt(self, call: Callable[[], Any]) -> Any:
        """The result of `call`; if it is refused, everything is as before."""
        before = state_of_book(self.book)
        try:
            return call()
        except StopGuardError:
            assert state_of_book(self.book) == before
            return None

    def one(self, data: st.DataObject) -> RequestLedgers:
        """Mostly an open request, sometimes one whose books are closed."""
        chosen: RequestLedgers = data.draw(st.sampled_from([*self.book, *self.closed[-2:]]), label="request")
        return chosen

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.at += seconds

    @rule(engine=st.sampled_from(["e1", "e2"]), model=st.sampled_from(["m1", "m2"]))
    def open(self, engine: str, model: str) -> None:
        self.names += 1
        self.attempt(lambda: self.book.open(f"r{self.names % 6}", self.at, engine=engine, model=model))

    @precondition(lambda self: bool(len(self.book) or self.closed))
    @rule(data=st.data(), debit=accounts, credit=accounts, amount=amounts)
    def post_anything(self, data: st.DataObject, debit: Account, credit: Account, amount: int) -> None:
        ledgers = self.one(data)
        self.attempt(lambda: ledgers.post(debit, credit, amount, self.at))

    @precondition(lambda self: len(self.book) > 0)
    @rule(data=st.data(), ledger=st.sampled_from(list(Ledger)), amount=amounts)
    def pend_between_any_two_of_a_ledger(self, data: st.DataObject, ledger: Ledger, amount: int) -> None:
        ledgers = data.draw(st.sampled_from(list(self.book)))
        debit = data.draw(st.sampled_from([account for account in Account if account.ledger is ledger]))
        credit = data.draw(st.sampled_from([account for account in Account if account.unit is debit.unit]))
        self.attempt(lambda: ledgers.pend(debit, credit, amount, self.at, self.at + 1.0))

    @precondition(lambda self: len(self.book) > 0)
    @rule(data=st.data())
    def release_everything(self, data: st.DataObject) -> None:
        ledgers = data.draw(st.sampled_from(list(self.book)))
        for account, amount in ledgers.open_amounts().items():
            self.attempt(partial(ledgers.leave, account, boundary_of(account), amount, self.at))

    @precondition(lambda self: bool(len(self.book) or self.closed))
    @rule(data=st.data(), account=open_accounts, amount=amounts)
    def take_in(self, data: st.DataObject, account: Account, amount: int) -> None:
        ledgers = self.one(data)
        self.attempt(lambda: ledgers.post(boundary_of(account), account, amount, self.at))

    @precondition(lambda self: bool(len(self.book) or self.closed))
    @rule(
        data=st.data(),
        account=open_accounts,
        amount=amounts,
        pend=st.booleans(),
        wait=st.sampled_from([-1.0, 0.0, 2.0]),
    )
    def move_on(self, data: st.DataObject, account: Account, amount: int, pend: bool, wait: float) -> None:
        ledgers = self.one(data)
        credit = data.draw(
            st.sampled_from([a for a in Account if a.unit is account.unit and a.ledger is account.ledger])
        )
        if pend:
            self.attempt(lambda: ledgers.pend(account, credit, amount, self.at, self.at + wait))
        else:
            self.attempt(lambda: ledgers.leave(account, credit, amount, self.at))

    @precondition(lambda self: bool(len(self.book) or self.closed))
    @rule(data=st.data(), amount=st.one_of(st.none(), amounts), void=st.booleans())
    def resolve_or_void(self, data: st.DataObject, amount: int | None, void: bool) -> None:
        ledgers = self.one(data)
        due = [obligation.entry.sequence for obligation in ledgers.due()]
        sequence = data.draw(st.sampled_from([*due, 0, 999]))
        if void:
            self.attempt(lambda: ledgers.void(sequence, self.at))
        else:
            self.attempt(lambda: ledgers.resolve(sequence, self.at, amount))

    @precondition(lambda self: bool(len(self.book) or self.closed))
    @rule(data=st.data(), sequence=st.integers(-1, 30))
    def correct(self, data: st.DataObject, sequence: int) -> None:
        ledgers = self.one(data)
        self.attempt(lambda: ledgers.correct(sequence, self.at, "wrong"))

    @precondition(lambda self: len(self.book) > 0)
    @rule(data=st.data(), counter=st.sampled_from(COUNTERS), amount=st.integers(0, 4))
    def count_and_fold(self, data: st.DataObject, counter: str, amount: int) -> None:
        ledgers = data.draw(st.sampled_from(list(self.book)))
        before = getattr(ledgers, counter)
        setattr(ledgers, counter, before + amount)
        entries = len(ledgers.entries)
        self.attempt(lambda: ledgers.fold(self.at))
        if amount and len(ledgers.entries) == entries:  # the relay never counts what has not come; take it back
            setattr(ledgers, counter, before)

    @precondition(lambda self: len(self.book) > 0)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        ledgers = data.draw(st.sampled_from(list(self.book)))
        before = dict(ledgers.open_amounts())
        leaks = self.attempt(lambda: self.book.expire(ledgers, self.at)) or []
        self.leaks += len(leaks)
        assert ledgers.open_amounts() == before  # a timeout settles nothing
        assert all(0 < leak.amount <= before[leak.account] for leak in leaks)

    @precondition(lambda self: bool(len(self.book) or self.closed))
    @rule(data=st.data(), account=accounts)
    def give_up(self, data: st.DataObject, account: Account) -> None:
        ledgers = self.one(data)
        self.attempt(lambda: ledgers.give_up(account, self.at, "given up"))

    @precondition(lambda self: bool(len(self.book) or self.closed))
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        ledgers = self.one(data)
        if self.attempt(lambda: self.book.settle(ledgers, self.at)):
            assert not ledgers.open_amounts()
            assert not ledgers.written_off
            self.closed.append(ledgers)

    @precondition(lambda self: bool(len(self.book) or self.closed))
    @rule(data=st.data())
    def write_off(self, data: st.DataObject) -> None:
        ledgers = self.one(data)
        was_open = self.book.find(ledgers.request_id) is ledgers and ledgers.closed_at is None
        self.attempt(lambda: self.book.write_off(ledgers, self.at, "nobody answers"))
        assert ledgers.closed_at is not None  # never refused to what is open
        assert not ledgers.open_amounts()
        if was_open:
            self.closed.append(ledgers)

    @precondition(lambda self: bool(len(self.book) or self.closed))
    @rule(data=st.data())
    def assign(self, data: st.DataObject) -> None:
        ledgers = self.one(data)
        engine = data.draw(st.sampled_from(["e1", "e2", "e3"]))
        self.attempt(lambda: self.book.assign(ledgers, engine=engine, model="m1"))

    @precondition(lambda self: len(self.book) > 0)
    @rule(data=st.data(), back=st.sampled_from([0.001, float("nan"), float("inf")]))
    def a_broken_clock(self, data: st.DataObject, back: float) -> None:
        ledgers = data.draw(st.sampled_from(list(self.book)))
        before = state_of_book(self.book)
        for call in (
            lambda: ledgers.post(Account.KV_POOL, Account.KV_HELD, 1, ledgers.last_at - back),
            lambda: self.book.write_off(ledgers, ledgers.last_at - back, "x"),
        ):
            try:
                call()
            except StopGuardError:
                assert state_of_book(self.book) == before
            else:
                raise AssertionError("accepted")

    @invariant()
    def every_unit_is_conserved(self) -> None:
        for ledgers in (*self.book, *self.closed):
            sums = dict.fromkeys(Unit, 0)
            for account in Account:
                sums[account.unit] += ledgers.balances[account]
            assert not any(sums.values()), repr(ledgers)

    @invariant()
    def nothing_that_is_owned_is_negative(self) -> None:
        for ledgers in (*self.book, *self.closed):
            assert all(ledgers.balances[account] >= 0 for account in Account if account.role is not Role.BOUNDARY)
            for account, amount in (ledgers.reserved or {}).items():
                assert 0 < amount <= ledgers.balances[account]
                assert amount == sum(o.remaining for o in ledgers.due() if o.entry.debit is account)

    @invariant()
    def the_books_verify_and_the_counts_agree(self) -> None:
        self.book.verify()
        statistics = self.book.statistics()
        assert statistics.open_requests == len(self.book)
        assert statistics.leaks_found == self.leaks
        assert statistics.settled + statistics.written_off == len(self.closed)
        overdue = {ledgers.request_id for ledgers in self.book if ledgers.overdue}
        assert overdue <= {ledgers.request_id for ledgers in self.book.overdue()}
        for account in Account:
            everyone = (*self.book, *self.closed)
            assert self.book.total(account) == sum(ledgers.balances[account] for ledgers in everyone)

    @invariant()
    def limits_hold(self) -> None:
        limits = self.book.limits
        assert len(self.book) <= limits.open_requests
        assert len(self.book.overdue()) <= limits.overdue
        assert len(self.book.recent()) <= limits.recent
        assert len(self.book.totals()) <= limits.engine_models


BookMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50)
TestBookModel = pytest.mark.slow(BookMachine.TestCase)
