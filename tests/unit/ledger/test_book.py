"""The book of all requests: opened once, closed once, with a limit on everything."""

from __future__ import annotations

import math

import pytest

from stopguard.errors import LimitReached
from stopguard.ledger import (
    Account,
    Book,
    BookLimits,
    DuplicateRequest,
    IllegalMovement,
    Ledger,
    Overdraft,
    RequestClosed,
    RequestLedgers,
    TimeWentBackwards,
    UnknownRequest,
)
from tests.unit.ledger.complete_state import end, refused, running

A = Account


def overdue(book: Book, request_id: str) -> RequestLedgers:
    """A request whose four blocks are overdue at second 5."""
    _, ledgers = running(book, request_id)
    ledgers.pend(A.KV_HELD, A.KV_POOL, 4, 3.0, 4.0)
    assert book.expire(ledgers, 5.0)
    return ledgers


class TestTheLifeOfARequest:
    def test_settled(self) -> None:
        book, ledgers = running()
        assert repr(book) == (
            "<Book open 1 (queue=1 kv=1 output=1 link=0 stream=1) overdue 0 settled 0 written off 0 leaks 0>"
        )
        assert not book.settle(ledgers, 3.0)
        end(ledgers, 4.0)
        assert repr(book) == (
            "<Book open 1 (queue=0 kv=0 output=0 link=0 stream=0) overdue 0 settled 0 written off 0 leaks 0>"
        )
        assert book.settle(ledgers, 5.0)
        assert repr(book) == (
            "<Book open 0 (queue=0 kv=0 output=0 link=0 stream=0) overdue 0 settled 1 written off 0 leaks 0>"
        )
        assert ledgers.closed_at == 5.0
        assert ("r1" in book, len(book), list(book), book.find("r1"), book.recent()) == (
            False,
            0,
            [],
            ledgers,
            [ledgers],
        )
        book.verify()

    def test_settling_folds_first(self) -> None:
        book, ledgers = running()
        end(ledgers, 3.0)
        ledgers.tokens_computed += 1
        assert not book.settle(ledgers, 4.0)
        assert ledgers.describe(Ledger.OUTPUT) == "output: in_flight 1 tokens, delivered 3 tokens"

    def test_overdue_then_closed_late(self) -> None:
        book = Book()
        ledgers = overdue(book, "r1")
        assert repr(book) == (
            "<Book open 1 (queue=1 kv=1 output=1 link=0 stream=1) overdue 1 settled 0 written off 0 leaks 1>"
        )
        assert book.overdue() == [ledgers]
        assert book.longest_overdue() is ledgers
        end(ledgers, 6.0)
        assert book.settle(ledgers, 6.0)
        assert (book.overdue(), book.longest_overdue(), book.statistics().closed_late) == ([], None, 1)
        assert [leak.amount for leak in book.leaks()] == [4]  # a leak stays a fact
        book.verify()

    def test_written_off_is_never_settled(self) -> None:
        book = Book()
        ledgers = overdue(book, "r1")
        book.write_off(ledgers, 9.0, "nobody answers")
        assert repr(book) == (
            "<Book open 0 (queue=0 kv=0 output=0 link=0 stream=0) overdue 0 settled 0 written off 1 leaks 1>"
        )
        assert book.statistics().closed_late == 0
        book.verify()

    def test_an_id_may_come_again_when_its_request_is_over(self) -> None:
        book, first = running()
        end(first, 3.0)
        book.settle(first, 3.0)
        _, second = running(book)
        assert book.find("r1") is second
        end(second, 3.0)
        book.settle(second, 3.0)
        assert book.find("r1") is second

    def test_its_balances_move_with_it_to_another_engine(self) -> None:
        book, ledgers = running()
        before = book.total(A.KV_HELD)
        book.assign(ledgers, engine="other", model="m2")
        assert book.totals() == {
            ("e", "m"): {},
            ("other", "m2"): {account: amount for account in Account if (amount := ledgers.balances[account])},
        }
        assert book.total(A.KV_HELD) == before == 4
        ledgers.leave(A.KV_HELD, A.KV_POOL, 1, 3.0)
        assert book.totals()["other", "m2"][A.KV_HELD] == 3
        book.verify()
        book.assign(ledgers, engine="other", model="m2")
        book.verify()


class TestTotals:
    def test_they_follow_every_movement_and_survive_the_requests(self) -> None:
        book, first = running()
        _, second = running(book, "r2")
        assert book.total(A.KV_HELD) == 8
        end(first, 3.0)
        book.settle(first, 3.0)
        assert (book.total(A.KV_HELD), book.total(A.OUTPUT_DELIVERED)) == (4, 3)
        book.write_off(second, 4.0, "x")
        assert (book.total(A.KV_HELD), book.total(A.KV_BLOCKS_WRITTEN_OFF)) == (0, 4)
        assert book.totals() == {
            ("e", "m"): {
                A.QUEUE_ARRIVALS: -2,
                A.KV_POOL: -4,
                A.OUTPUT_MODEL: -6,
                A.STREAM_CLIENTS: -2,
                A.STREAM_ENGINE: -20,
                A.QUEUE_GONE: 1,
                A.OUTPUT_DELIVERED: 3,
                A.STREAM_CLOSED: 1,
                A.STREAM_SENT: 10,
                A.QUEUE_WRITTEN_OFF: 1,
                A.KV_BLOCKS_WRITTEN_OFF: 4,
                A.OUTPUT_WRITTEN_OFF: 3,
                A.STREAM_CONNECTIONS_WRITTEN_OFF: 1,
                A.STREAM_BYTES_WRITTEN_OFF: 10,
            }
        }

    def test_a_difference_is_found(self) -> None:
        book, _ = running()
        book._totals["e", "m"][A.KV_HELD] += 1
        with pytest.raises(IllegalMovement, match="do not follow from the open requests"):
            book.verify()
        book, _ = running()
        book._settled += 1
        with pytest.raises(Overdraft, match="requests opened do not equal"):
            book.verify()


class TestWhatIsRefusedChangesNothing:
    def test_the_same_id_twice(self) -> None:
        book, _ = running()
        with refused(book, DuplicateRequest, "r1 is in the book already"):
            book.open("r1", 2.0, engine="e", model="m")

    def test_an_unknown_request(self) -> None:
        book, _ = running()
        _, stranger = running()
        with refused(book, UnknownRequest, "r9 is not in the book"):
            book.get("r9")
        for call in (
            lambda: book.settle(stranger, 3.0),
            lambda: book.expire(stranger, 3.0),
            lambda: book.write_off(stranger, 3.0, "x"),
            lambda: book.assign(stranger, engine="e2", model="m"),
        ):
            with refused(book, UnknownRequest, "r1 is not an open request of this book"):
                call()
        assert book.find("r9") is None

    def test_a_request_that_is_closed(self) -> None:
        book, ledgers = running()
        end(ledgers, 3.0)
        book.settle(ledgers, 3.0)
        with refused(book, UnknownRequest, "not an open request"):
            book.settle(ledgers, 4.0)
        with refused(book, UnknownRequest, "not an open request"):
            book.write_off(ledgers, 4.0, "x")
        with refused(book, RequestClosed, "was settled at 3.000000; its books are closed"):
            ledgers.post(A.KV_POOL, A.KV_HELD, 1, 4.0)

    @pytest.mark.parametrize("at", [1.0, math.nan, math.inf])
    def test_closing_before_the_last_entry_or_never(self, at: float) -> None:
        book, ledgers = running()
        end(ledgers, 3.0)
        with refused(book, TimeWentBackwards, "two clocks were mixed"):
            book.settle(ledgers, at)
        with refused(book, TimeWentBackwards, "two clocks were mixed"):
            book.write_off(ledgers, at, "x")

    @pytest.mark.parametrize("at", [math.nan, math.inf])
    def test_opening_at_no_time(self, at: float) -> None:
        book, _ = running()
        with refused(book, TimeWentBackwards, "cannot be opened at"):
            book.open("r2", at, engine="another", model="m")


class TestLimits:
    def test_open_requests(self) -> None:
        book, ledgers = running(Book(BookLimits(open_requests=1)))
        with refused(book, LimitReached, r"open requests reached \(1\): wait for some to end, or raise the limit"):
            book.open("r2", 2.0, engine="e", model="m")
        end(ledgers, 3.0)
        book.settle(ledgers, 3.0)
        book.open("r2", 4.0, engine="e", model="m")

    def test_engines_and_models(self) -> None:
        book, ledgers = running(Book(BookLimits(engine_models=1)))
        with refused(book, LimitReached, r"engines and models reached \(1\): model names must come from a closed set"):
            book.open("r2", 2.0, engine="e", model="a client's invention")
        with refused(book, LimitReached, "engines and models"):
            book.assign(ledgers, engine="e", model="another")

    def test_entries_of_one_request(self) -> None:
        book, ledgers = running(Book(BookLimits(entries_per_request=5)))
        with refused(book, LimitReached, r"entries a request reached \(5\): r1 moves without end"):
            ledgers.post(A.KV_POOL, A.KV_HELD, 1, 3.0)

    def test_overdue_requests(self) -> None:
        book = Book(BookLimits(overdue=1))
        first = overdue(book, "r1")
        assert book.overdue_full
        _, second = running(book, "r2")
        assert book.expire(second, 5.0) == []  # nothing of it is due: nothing to refuse
        second.pend(A.KV_HELD, A.KV_POOL, 4, 3.0, 4.0)
        with refused(book, LimitReached, r"overdue requests reached \(1\): write the oldest off"):
            book.expire(second, 5.0)
        first.pend(A.QUEUE_RUNNING, A.QUEUE_GONE, 1, 5.0, 6.0)
        assert len(book.expire(first, 7.0)) == 1  # it is among them already
        book.write_off(first, 8.0, "x")
        assert len(book.expire(second, 8.0)) == 1

    def test_what_is_remembered(self) -> None:
        book = Book(BookLimits(recent=2, leaks=2))
        for number in range(5):
            ledgers = overdue(book, f"r{number}")
            book.write_off(ledgers, 6.0, "x")
        assert [ledgers.request_id for ledgers in book.recent()] == ["r3", "r4"]
        assert [leak.request_id for leak in book.leaks()] == ["r3", "r4"]
        assert [book.find(f"r{number}") is not None for number in range(5)] == [False, False, False, True, True]
        assert book.statistics().leaks_found == 5

    def test_nothing_may_be_remembered(self) -> None:
        book, ledgers = running(Book(BookLimits(recent=0)))
        book.write_off(ledgers, 3.0, "x")
        assert (book.recent(), book.find("r1"), book._recent_by_id) == ([], None, {})
