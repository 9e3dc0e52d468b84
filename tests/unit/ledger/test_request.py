"""One request's books: what each operation does, step by step, and that what is refused changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest

from stopguard.errors import LimitReached
from stopguard.ledger import (
    Account,
    EntryState,
    Evidence,
    IllegalMovement,
    InvalidAmount,
    Ledger,
    NotPending,
    Overdraft,
    RequestClosed,
    RequestLedgers,
    TimeWentBackwards,
)
from tests.unit.ledger.complete_state import end, opened, refused, running, state_of

A = Account


class TestTheBooksStepByStep:
    def test_a_normal_request(self) -> None:
        ledgers = opened()
        assert repr(ledgers) == "<r1 queue: empty | kv: empty | output: empty | link: empty | stream: empty>"
        ledgers.post(A.STREAM_CLIENTS, A.STREAM_CONNECTED, 1, 1.0)
        assert ledgers.describe(Ledger.STREAM) == "stream: connected 1 connections"
        ledgers.post(A.QUEUE_ARRIVALS, A.QUEUE_ADMISSION, 1, 1.0)
        assert ledgers.describe(Ledger.QUEUE) == "queue: admission 1 places"
        ledgers.post(A.QUEUE_ADMISSION, A.QUEUE_RUNNING, 1, 2.0)
        assert ledgers.describe(Ledger.QUEUE) == "queue: running 1 places"
        ledgers.post(A.KV_POOL, A.KV_HELD, 13, 2.0)
        ledgers.leave(A.KV_HELD, A.KV_FENCED, 2, 3.0)
        assert ledgers.describe(Ledger.KV) == "kv: held 11 blocks, fenced 2 blocks"
        ledgers.leave(A.KV_FENCED, A.KV_POOL, 2, 4.0)
        ledgers.leave(A.KV_HELD, A.KV_POOL, 11, 4.0)
        assert ledgers.describe(Ledger.KV) == "kv: empty"
        ledgers.tokens_computed = ledgers.tokens_delivered = 7
        assert ledgers.describe(Ledger.OUTPUT) == "output: empty"
        ledgers.fold(5.0)
        assert ledgers.describe(Ledger.OUTPUT) == "output: delivered 7 tokens"
        ledgers.post(A.QUEUE_RUNNING, A.QUEUE_GONE, 1, 5.0)
        before = ledgers.all_closed
        ledgers.post(A.STREAM_CONNECTED, A.STREAM_CLOSED, 1, 6.0)
        assert (before, ledgers.all_closed) == (False, True)
        assert repr(ledgers) == (
            "<r1 queue: gone 1 places | kv: empty | output: delivered 7 tokens | link: empty | "
            "stream: closed 1 connections>"
        )
        ledgers.verify()

    def test_an_obligation_resolved_in_parts(self) -> None:
        _, ledgers = running()
        due = ledgers.pend(A.KV_HELD, A.KV_POOL, 4, 3.0, 9.0)
        assert ledgers.describe(Ledger.KV) == "kv: held 4 blocks (4 due)"
        first = ledgers.resolve(due.sequence, 4.0, 1, Evidence.PROBE)
        assert (first.state, first.refers_to) == (EntryState.RESOLVED, due.sequence)
        assert ledgers.describe(Ledger.KV) == "kv: held 3 blocks (3 due)"
        ledgers.resolve(due.sequence, 5.0)
        assert ledgers.describe(Ledger.KV) == "kv: empty"
        assert list(ledgers.due()) == []
        assert not ledgers.reserved

    def test_a_voided_obligation_frees_its_amount(self) -> None:
        _, ledgers = running()
        due = ledgers.pend(A.KV_HELD, A.KV_POOL, 4, 3.0, 9.0)
        ledgers.void(due.sequence, 4.0, "it finished")
        assert ledgers.describe(Ledger.KV) == "kv: held 4 blocks"
        ledgers.post(A.KV_HELD, A.KV_POOL, 4, 5.0)
        assert ledgers.describe(Ledger.KV) == "kv: empty"

    def test_a_timeout_settles_nothing_and_late_is_recorded_as_late(self) -> None:
        _, ledgers = running()
        due = ledgers.pend(A.KV_HELD, A.KV_POOL, 4, 3.0, 9.0)
        assert ledgers.expire(8.999) == []
        (leak,) = ledgers.expire(9.0)
        assert leak.describe(10.0) == (
            "kv.held 4 blocks of r1 (e, m), open for 8.000 s since entry 2 (kv: pool → held 4 blocks)"
        )
        assert ledgers.describe(Ledger.KV) == "kv: held 4 blocks (4 OVERDUE)"
        assert ledgers.overdue
        assert ledgers.expire(10.0) == []  # once
        entry = ledgers.resolve(due.sequence, 11.0)
        assert entry.state is EntryState.LATE
        assert ledgers.describe(Ledger.KV) == "kv: empty"
        assert not ledgers.overdue

    def test_what_is_due_in_parts_leaks_as_one(self) -> None:
        """A request that takes block after block during its stop has one leak, and its amount says how much it is."""
        _, ledgers = running()
        for amount, due_at in ((1, 8.0), (2, 7.0)):
            ledgers.pend(A.KV_HELD, A.KV_POOL, amount, 3.0, due_at)
        ledgers.pend(A.QUEUE_RUNNING, A.QUEUE_GONE, 1, 3.0, 8.0)
        later = ledgers.pend(A.KV_HELD, A.KV_POOL, 1, 3.0, 20.0)
        leaks = ledgers.expire(9.0)
        assert [(leak.account, leak.amount, leak.due_at) for leak in leaks] == [
            (A.KV_HELD, 3, 7.0),
            (A.QUEUE_RUNNING, 1, 8.0),
        ]
        assert ledgers.leaks == leaks
        assert ledgers.describe(Ledger.KV) == "kv: held 4 blocks (1 OVERDUE, 2 OVERDUE, 1 due)"
        assert ledgers.expire(21.0) == [], "the rest is no leak of its own"
        assert later.sequence in [entry.refers_to for entry in ledgers.entries if entry.state is EntryState.EXPIRED]
        assert [(leak.account, leak.amount, leak.found_at) for leak in ledgers.leaks or ()] == [
            (A.KV_HELD, 4, 9.0),
            (A.QUEUE_RUNNING, 1, 9.0),
        ]
        assert len(leaks) == 2, "what was handed out does not change"
        ledgers.verify()

    def test_a_leak_is_opened_by_the_entry_that_last_filled_the_account_from_zero(self) -> None:
        _, ledgers = running()
        ledgers.leave(A.KV_HELD, A.KV_POOL, 4, 3.0)
        filled = ledgers.post(A.KV_POOL, A.KV_HELD, 2, 4.0)
        ledgers.post(A.KV_POOL, A.KV_HELD, 3, 5.0)
        ledgers.pend(A.KV_HELD, A.KV_POOL, 5, 6.0, 7.0)
        (leak,) = ledgers.expire(8.0)
        assert leak.opened_by is filled
        assert (leak.amount, leak.age_seconds(10.0)) == (5, 6.0)

    def test_leave_resolves_what_is_due_first_and_posts_the_rest(self) -> None:
        _, ledgers = running()
        one = ledgers.pend(A.KV_HELD, A.KV_POOL, 1, 3.0, 9.0)
        two = ledgers.pend(A.KV_HELD, A.KV_POOL, 2, 3.0, 9.0)
        made = ledgers.leave(A.KV_HELD, A.KV_FENCED, 4, 4.0, Evidence.PROBE)
        assert [(e.state.name, e.amount, e.refers_to) for e in made] == [
            ("RESOLVED", 1, one.sequence),
            ("RESOLVED", 2, two.sequence),
            ("POSTED", 1, -1),
        ]
        assert ledgers.describe(Ledger.KV) == "kv: fenced 4 blocks"

    def test_a_correction_is_a_new_entry(self) -> None:
        _, ledgers = running()
        wrong = ledgers.post(A.KV_POOL, A.KV_HELD, 9, 3.0)
        count = len(ledgers.entries)
        correction = ledgers.correct(wrong.sequence, 4.0, "counted twice")
        assert ledgers.describe(Ledger.KV) == "kv: held 4 blocks"
        assert ledgers.entries[wrong.sequence] is wrong
        assert (correction.state, correction.refers_to, len(ledgers.entries)) == (
            EntryState.CORRECTION,
            wrong.sequence,
            count + 1,
        )

    def test_a_correction_can_leave_a_final_account(self) -> None:
        _, ledgers = running()
        (entry,) = ledgers.leave(A.OUTPUT_IN_FLIGHT, A.OUTPUT_DISCARDED, 2, 3.0)
        ledgers.correct(entry.sequence, 4.0, "they were delivered")
        assert ledgers.describe(Ledger.OUTPUT) == "output: in_flight 3 tokens"

    def test_fold_makes_one_entry_a_kind_of_movement(self) -> None:
        _, ledgers = running()
        ledgers.tokens_computed, ledgers.tokens_delivered = 100, 103
        ledgers.bytes_received, ledgers.bytes_sent = 2048, 2000
        ledgers.blocks_taken, ledgers.blocks_returned = 5, 9
        before = len(ledgers.entries)
        ledgers.fold(3.0)
        assert len(ledgers.entries) - before == 6
        assert repr(ledgers) == (
            "<r1 queue: running 1 places | kv: empty | output: delivered 103 tokens | link: empty | "
            "stream: connected 1 connections, buffered 58 bytes, sent 2000 bytes>"
        )
        ledgers.fold(4.0)
        assert len(ledgers.entries) - before == 6

    def test_fold_resolves_what_is_due(self) -> None:
        _, ledgers = running()
        ledgers.pend(A.KV_HELD, A.KV_POOL, 4, 3.0, 9.0)
        ledgers.blocks_returned = 3
        ledgers.fold(4.0)
        assert ledgers.describe(Ledger.KV) == "kv: held 1 blocks (1 due)"

    def test_what_was_to_be_discarded_can_still_be_delivered_by_a_fold(self) -> None:
        """An engine that has finished may hand over its last tokens after their settlement fell due."""
        _, ledgers = running()
        ledgers.pend(A.OUTPUT_IN_FLIGHT, A.OUTPUT_DISCARDED, 3, 3.0, 9.0)
        ledgers.pend(A.STREAM_BUFFERED, A.STREAM_DROPPED, 10, 3.0, 9.0)
        ledgers.tokens_delivered, ledgers.bytes_sent = 2, 4
        ledgers.fold(4.0)
        assert ledgers.describe(Ledger.OUTPUT) == "output: in_flight 1 tokens, delivered 2 tokens (1 due)"
        assert ledgers.describe(Ledger.STREAM) == (
            "stream: connected 1 connections, buffered 6 bytes, sent 4 bytes (6 due)"
        )

    def test_giving_up_says_so_and_voids_what_was_due(self) -> None:
        _, ledgers = running()
        ledgers.pend(A.KV_HELD, A.KV_POOL, 2, 3.0, 4.0)
        ledgers.expire(5.0)
        ledgers.pend(A.KV_HELD, A.KV_POOL, 1, 5.0, 9.0)
        entry = ledgers.give_up(A.KV_HELD, 6.0, "unprovable")
        assert entry is not None
        assert str(entry) == "kv: held → blocks_written_off 4 blocks [written_off] unprovable"
        assert ledgers.describe(Ledger.KV) == "kv: blocks_written_off 4 blocks"
        assert ledgers.give_up(A.KV_HELD, 7.0, "again") is None

    def test_written_off_is_closed_and_never_settled(self) -> None:
        _, ledgers = running()
        ledgers.tokens_computed = 2
        ledgers.write_off(9.0, "nobody answers")
        assert (ledgers.all_closed, ledgers.written_off, ledgers.closed_at) == (True, True, 9.0)
        assert ledgers.describe(Ledger.OUTPUT) == "output: written_off 5 tokens"
        ledgers.verify()

    def test_marks_are_a_timeline_with_a_limit_that_says_so(self) -> None:
        """A note must never be the reason why a stop fails: the last one says that there are no more."""
        ledgers = opened(entry_limit=3)
        for number in range(10):
            ledgers.mark(1.0 + number, f"mark {number}")
        assert ledgers.marks == [(1.0, "mark 0"), (2.0, "mark 1"), (3.0, "no more marks: the limit of 3 is reached")]


POST: Callable[[RequestLedgers, object], object] = lambda r, x: r.post(A.KV_POOL, A.KV_HELD, x, 5.0)  # type: ignore[arg-type]  # noqa: E731
PEND: Callable[[RequestLedgers, object], object] = lambda r, x: r.pend(A.KV_HELD, A.KV_POOL, x, 5.0, 9.0)  # type: ignore[arg-type]  # noqa: E731
LEAVE: Callable[[RequestLedgers, object], object] = lambda r, x: r.leave(A.KV_HELD, A.KV_POOL, x, 5.0)  # type: ignore[arg-type]  # noqa: E731
RESOLVE: Callable[[RequestLedgers, object], object] = lambda r, x: r.resolve(5, 5.0, x)  # type: ignore[arg-type]  # noqa: E731


class TestWhatIsRefusedChangesNothing:
    @pytest.mark.parametrize("amount", [-1, 0, 1.0, 1.5, True, "4", math.nan], ids=repr)
    @pytest.mark.parametrize("call", [POST, PEND, LEAVE, RESOLVE], ids=["post", "pend", "leave", "resolve"])
    def test_an_amount_that_is_no_whole_number_above_zero(
        self, call: Callable[[RequestLedgers, object], object], amount: object
    ) -> None:
        _, ledgers = running()
        ledgers.pend(A.KV_HELD, A.KV_POOL, 2, 3.0, 9.0)
        with refused(ledgers, InvalidAmount, "whole number above zero"):
            call(ledgers, amount)

    @pytest.mark.parametrize("at", [1.5, -1.0, math.nan, -math.inf, math.inf])
    def test_time_that_goes_backwards_or_nowhere(self, at: float) -> None:
        _, ledgers = running()
        due = ledgers.pend(A.KV_HELD, A.KV_POOL, 2, 3.0, 3.5)
        ledgers.tokens_computed += 1
        calls: list[Callable[[], object]] = [
            lambda: ledgers.post(A.KV_POOL, A.KV_HELD, 1, at),
            lambda: ledgers.pend(A.KV_HELD, A.KV_POOL, 1, at, 99.0),
            lambda: ledgers.resolve(due.sequence, at),
            lambda: ledgers.void(due.sequence, at),
            lambda: ledgers.leave(A.KV_HELD, A.KV_POOL, 1, at),
            lambda: ledgers.correct(2, at, "x"),
            lambda: ledgers.fold(at),
            lambda: ledgers.give_up(A.KV_HELD, at, "x"),
            lambda: ledgers.write_off(at, "x"),
        ]
        for call in calls:
            with refused(ledgers, TimeWentBackwards, "two clocks were mixed"):
                call()

    @pytest.mark.parametrize("at", [math.nan, math.inf])
    def test_expiry_at_no_time(self, at: float) -> None:
        _, ledgers = running()
        ledgers.pend(A.KV_HELD, A.KV_POOL, 2, 3.0, 3.5)
        with refused(ledgers, TimeWentBackwards, "two clocks were mixed"):
            ledgers.expire(at)

    @pytest.mark.parametrize("due_at", [2.9, math.nan])
    def test_an_obligation_due_before_it_begins(self, due_at: float) -> None:
        _, ledgers = running()
        with refused(ledgers, TimeWentBackwards, "cannot be due earlier"):
            ledgers.pend(A.KV_HELD, A.KV_POOL, 1, 3.0, due_at)

    @pytest.mark.parametrize(
        ("debit", "credit"),
        [
            (A.KV_HELD, A.QUEUE_GONE),  # another ledger
            (A.KV_HELD, A.KV_SLOT_POOL),  # another unit
            (A.KV_HELD, A.KV_HELD),  # nowhere
            (A.OUTPUT_DELIVERED, A.OUTPUT_IN_FLIGHT),  # out of a final account
            (A.QUEUE_GONE, A.QUEUE_RUNNING),
            (7, 20),  # numbers of accounts are not accounts
            ("held", "pool"),
            (None, A.KV_POOL),
            (A.KV_HELD, 99),
        ],
    )
    def test_a_movement_between_unknown_or_unrelated_accounts(self, debit: Account, credit: Account) -> None:
        _, ledgers = running()
        for call in (
            lambda: ledgers.post(debit, credit, 1, 5.0),
            lambda: ledgers.pend(debit, credit, 1, 5.0, 9.0),
            lambda: ledgers.leave(debit, credit, 1, 5.0),
        ):
            with refused(ledgers, IllegalMovement, "nothing can move from"):
                call()

    def test_a_resolution_to_an_unrelated_account(self) -> None:
        _, ledgers = running()
        due = ledgers.pend(A.KV_HELD, A.KV_POOL, 2, 3.0, 9.0)
        with refused(ledgers, IllegalMovement, "nothing can move from"):
            ledgers.resolve(due.sequence, 4.0, credit=A.OUTPUT_STALE)

    def test_an_obligation_on_the_world_outside(self) -> None:
        """What the boundary owes could never be closed with the request: only open accounts can be due."""
        _, ledgers = running()
        with refused(ledgers, IllegalMovement, "nothing can be due from"):
            ledgers.pend(A.KV_POOL, A.KV_HELD, 2, 3.0, 9.0)

    def test_giving_up_what_is_not_open(self) -> None:
        _, ledgers = running()
        end(ledgers, 3.0)
        for account in (A.OUTPUT_DELIVERED, A.KV_POOL):
            with refused(ledgers, IllegalMovement, "nothing can be due from"):
                ledgers.give_up(account, 4.0, "x")

    def test_more_than_there_is(self) -> None:
        _, ledgers = running()
        with refused(ledgers, Overdraft, "5 blocks were to leave kv.held, which has 4 .* a release happens once"):
            ledgers.post(A.KV_HELD, A.KV_POOL, 5, 3.0)
        with refused(ledgers, Overdraft, "a release happens once"):
            ledgers.leave(A.KV_HELD, A.KV_POOL, 5, 3.0)

    def test_a_second_release(self) -> None:
        _, ledgers = running()
        ledgers.leave(A.KV_HELD, A.KV_POOL, 4, 3.0)
        for call in (
            lambda: ledgers.leave(A.KV_HELD, A.KV_POOL, 4, 3.0),
            lambda: ledgers.post(A.KV_HELD, A.KV_POOL, 1, 3.0),
        ):
            with refused(ledgers, Overdraft, "which has 0 .* a release happens once"):
                call()

    def test_what_is_reserved_is_not_free(self) -> None:
        _, ledgers = running()
        ledgers.pend(A.KV_HELD, A.KV_POOL, 3, 3.0, 9.0)
        with refused(ledgers, Overdraft, "which has 4 .3 of them reserved."):
            ledgers.post(A.KV_HELD, A.KV_POOL, 2, 3.0)
        with refused(ledgers, Overdraft, "3 of them reserved"):
            ledgers.pend(A.KV_HELD, A.KV_POOL, 2, 3.0, 9.0)
        with refused(ledgers, Overdraft, "3 of them reserved"):
            ledgers.correct(2, 3.0, "x")

    def test_more_than_is_due(self) -> None:
        _, ledgers = running()
        due = ledgers.pend(A.KV_HELD, A.KV_POOL, 2, 3.0, 9.0)
        with refused(ledgers, Overdraft, "3 blocks of held were to be resolved, only 2 are due"):
            ledgers.resolve(due.sequence, 4.0, 3)

    def test_resolving_twice(self) -> None:
        _, ledgers = running()
        due = ledgers.pend(A.KV_HELD, A.KV_POOL, 2, 3.0, 9.0)
        ledgers.resolve(due.sequence, 4.0)
        with refused(ledgers, NotPending, f"entry {due.sequence} is not pending"):
            ledgers.resolve(due.sequence, 4.0)
        with refused(ledgers, NotPending, "is not pending"):
            ledgers.void(due.sequence, 4.0)
        with refused(ledgers, NotPending, "entry 999 is not pending"):
            ledgers.resolve(999, 4.0)

    def test_correcting_what_moved_nothing(self) -> None:
        _, ledgers = running()
        due = ledgers.pend(A.KV_HELD, A.KV_POOL, 2, 3.0, 9.0)
        for sequence in (due.sequence, -1, 999):
            with refused(ledgers, NotPending, "moved nothing that could be corrected"):
                ledgers.correct(sequence, 4.0, "x")

    def test_correcting_twice(self) -> None:
        _, ledgers = running()
        wrong = ledgers.post(A.KV_POOL, A.KV_HELD, 2, 3.0)
        ledgers.correct(wrong.sequence, 4.0, "x")
        with refused(ledgers, NotPending, f"entry {wrong.sequence} was corrected already"):
            ledgers.correct(wrong.sequence, 4.0, "x")

    def test_a_counter_that_runs_ahead(self) -> None:
        for counter, account in (
            ("tokens_delivered", "in_flight"),
            ("bytes_sent", "buffered"),
            ("blocks_returned", "held"),
        ):
            _, ledgers = running()
            setattr(ledgers, counter, 11)
            with refused(ledgers, Overdraft, f"11 .* were to leave .*{account}"):
                ledgers.fold(3.0)

    def test_a_counter_that_goes_down(self) -> None:
        _, ledgers = running()
        ledgers.tokens_computed = 5
        ledgers.fold(3.0)
        ledgers.tokens_computed = 4
        with refused(ledgers, InvalidAmount, "a counter of the hot path went down"):
            ledgers.fold(3.0)

    def test_an_entry_for_a_closed_request(self) -> None:
        for written_off in (False, True):
            book, ledgers = running()
            due = ledgers.pend(A.KV_HELD, A.KV_POOL, 2, 3.0, 9.0)
            if written_off:
                book.write_off(ledgers, 4.0, "x")
            else:
                end(ledgers, 4.0)
                assert book.settle(ledgers, 4.0)
            ledgers.bytes_received += 1
            calls: list[Callable[[], object]] = [
                partial(ledgers.post, A.KV_POOL, A.KV_HELD, 1, 5.0),
                partial(ledgers.pend, A.KV_HELD, A.KV_POOL, 1, 5.0, 9.0),
                partial(ledgers.leave, A.KV_HELD, A.KV_POOL, 1, 5.0),
                partial(ledgers.correct, 2, 5.0, "x"),
                partial(ledgers.fold, 5.0),
                partial(ledgers.give_up, A.KV_HELD, 5.0, "x"),
                partial(ledgers.write_off, 5.0, "x"),
            ]
            for call in calls:
                word = "written off" if written_off else "settled"
                with refused(ledgers, RequestClosed, f"was {word} at 4.000000; its books are closed"):
                    call()
            with refused(ledgers, NotPending, "is not pending"):
                ledgers.resolve(due.sequence, 5.0)

    def test_books_that_are_opened_at_no_time(self) -> None:
        for at in (math.nan, math.inf):
            with pytest.raises(TimeWentBackwards, match="cannot be opened at"):
                RequestLedgers("r1", at, engine="e", model="m")

    def test_a_book_that_was_tampered_with(self) -> None:
        _, ledgers = running()
        ledgers.balances[A.KV_HELD] += 1
        with pytest.raises(IllegalMovement, match="do not follow from the entries"):
            ledgers.verify()


class TestTheLimitOnEntries:
    def filled(self, room: int) -> RequestLedgers:
        ledgers = opened(entry_limit=12)
        ledgers.post(A.KV_POOL, A.KV_HELD, 6, 1.0)
        for _ in range(3):
            ledgers.pend(A.KV_HELD, A.KV_POOL, 2, 1.0, 5.0)
        while len(ledgers.entries) < 12 - room:
            ledgers.post(A.QUEUE_ARRIVALS, A.QUEUE_WAITING, 1, 1.0)
        return ledgers

    def test_more_entries_are_refused(self) -> None:
        ledgers = self.filled(0)
        ledgers.bytes_received = 1
        for call in (
            lambda: ledgers.post(A.KV_POOL, A.KV_HELD, 1, 2.0),
            lambda: ledgers.pend(A.QUEUE_WAITING, A.QUEUE_GONE, 1, 2.0, 9.0),
            lambda: ledgers.correct(0, 2.0, "x") if not ledgers.reserved else ledgers.resolve(1, 2.0),
            lambda: ledgers.leave(A.KV_HELD, A.KV_POOL, 6, 2.0),
            lambda: ledgers.fold(2.0),
        ):
            with refused(ledgers, LimitReached, r"entries a request reached \(12\): r1 moves without end"):
                call()

    def test_a_release_in_parts_happens_whole_or_not_at_all(self) -> None:
        for room in (1, 2):
            ledgers = self.filled(room)
            with refused(ledgers, LimitReached, "entries a request reached"):
                ledgers.leave(A.KV_HELD, A.KV_POOL, 6, 2.0)
        ledgers = self.filled(3)
        ledgers.leave(A.KV_HELD, A.KV_POOL, 6, 2.0)
        assert ledgers.describe(Ledger.KV) == "kv: empty"

    def test_the_end_of_a_request_is_never_refused(self) -> None:
        """A limit that kept full books from being closed would make the leak that it is there to prevent."""
        ledgers = self.filled(0)
        assert [leak.amount for leak in ledgers.expire(6.0)] == [6]
        ledgers.bytes_received = 7
        ledgers.write_off(7.0, "x")
        assert repr(ledgers) == (
            "<r1 queue: written_off 8 places | kv: blocks_written_off 6 blocks | output: empty | link: empty | "
            "stream: bytes_written_off 7 bytes>"
        )
        ledgers.verify()


def test_questions() -> None:
    _, ledgers = running()
    assert ledgers.open_amounts() == {
        A.QUEUE_RUNNING: 1,
        A.KV_HELD: 4,
        A.OUTPUT_IN_FLIGHT: 3,
        A.STREAM_CONNECTED: 1,
        A.STREAM_BUFFERED: 10,
    }
    assert [ledger.label for ledger in Ledger if ledgers.ledger_closed(ledger)] == ["link"]
    before = state_of(ledgers)
    repr(ledgers)
    ledgers.record()
    ledgers.verify()
    assert state_of(ledgers) == before
    ledgers.pend(A.KV_HELD, A.KV_POOL, 2, 3.0, 9.0)
    assert [repr(obligation) for obligation in ledgers.due()] == ["<Obligation held 2 due at 9.0>"]
