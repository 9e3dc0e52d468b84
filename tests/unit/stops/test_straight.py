"""The straight way must be the long way, only shorter."""

from __future__ import annotations

import pytest

from stopguard.ledger import Account, Book, Evidence, IllegalMovement, Overdraft
from stopguard.ledger.vouchers import Voucher
from stopguard.stops import Client, Controller, Engine, EngineProfile, Machine, Semantics, Source, StopCause, effects
from stopguard.stops.machine import Books, ClientEvent, EngineEvent
from stopguard.stops.straight import serve_whole
from stopguard.stops.tracked import Tracked

PROFILE = EngineProfile(name="engine")


def started(controller: Controller, *, profile: EngineProfile = PROFILE, events: int = 3) -> Tracked:
    tracked = controller.admit("sg-1", 1.0, model="m")
    controller.dispatch(tracked, 2.0, profile)
    controller.output_started(tracked, 3.0)
    tracked.events += events
    tracked.ledgers.bytes_received += 30
    tracked.ledgers.bytes_sent += 30
    return tracked


def the_long_way(controller: Controller, tracked: Tracked, at: float) -> list[effects.Effect]:
    return [*controller.engine_finished(tracked, at), *controller.client_served(tracked, at)]


def test_both_ways_end_in_the_same_books() -> None:
    books = []
    for way in (the_long_way, serve_whole):
        book = Book()
        controller = Controller(book)
        tracked = started(controller)
        done = way(controller, tracked, 4.0)
        assert [type(effect) for effect in done] == [effects.Settled]
        assert controller.tracked == {}
        assert controller.in_engine == {"engine": {}}
        assert len(controller.wheel) == 0
        book.verify()
        record = tracked.ledgers.record()
        moved = sorted((e.debit, e.credit, e.amount, e.state, e.evidence, e.at) for e in record.entries)
        books.append((repr(tracked.ledgers), repr(tracked.machine), repr(book), moved, book.totals()))
    assert books[0] == books[1]


@pytest.mark.parametrize(
    "profile",
    [PROFILE, EngineProfile(name="engine", probed=True, best_evidence=Evidence.PROBE)],
    ids=["plain", "probed"],
)
def test_a_request_that_is_not_straight_takes_the_long_way(profile: EngineProfile) -> None:
    outcomes = []
    for way in (the_long_way, serve_whole):
        controller = Controller(Book())
        tracked = controller.admit("sg-1", 1.0, model="m")
        controller.dispatch(tracked, 2.0, profile)  # no output was seen: it still waits, as far as the books know
        done = way(controller, tracked, 4.0)
        outcomes.append(([type(effect) for effect in done], repr(tracked.ledgers), repr(tracked.machine)))
    assert outcomes[0] == outcomes[1]


def test_a_stopped_request_is_never_served_straight() -> None:
    controller = Controller(Book())
    tracked = started(controller)
    cause = StopCause(semantics=Semantics.CANCEL, source=Source.API, reason="api", observed_at=3.5)
    controller.stop(tracked, 3.5, cause)
    before = repr(tracked.machine)
    with pytest.raises(Exception, match="impossible"):
        serve_whole(controller, tracked, 4.0)
    assert "STOP" not in before  # it was aborting, not stopped
    assert tracked.machine.client is Client.DISMISSED


def test_the_short_step_of_the_machine_is_in_the_tables() -> None:
    for client in Client:
        for engine in Engine:
            for books in Books:
                short, long = Machine(), Machine()
                for machine in (short, long):
                    machine.client, machine.engine, machine.books = client, engine, books
                if not short.end_normally():
                    assert (short.client, short.engine, short.books) == (client, engine, books)
                    continue
                long.on_engine(EngineEvent.FINISHED)
                long.on_client(ClientEvent.SERVED)
                assert repr(short) == repr(long)


class TestVouchers:
    def test_what_cannot_move_makes_no_voucher(self) -> None:
        with pytest.raises(IllegalMovement):
            Voucher((Account.QUEUE_WAITING, Account.KV_CLAIMED, Evidence.NONE))
        with pytest.raises(IllegalMovement):
            Voucher((Account.QUEUE_GONE, Account.QUEUE_WAITING, Evidence.NONE))

    def test_nothing_is_passed_on_within_one(self) -> None:
        with pytest.raises(IllegalMovement):
            Voucher(
                (Account.QUEUE_ARRIVALS, Account.QUEUE_WAITING, Evidence.NONE),
                (Account.QUEUE_WAITING, Account.QUEUE_RUNNING, Evidence.NONE),
            )

    def test_one_empty_account_stops_all_of_it(self) -> None:
        controller = Controller(Book())
        tracked = controller.admit("sg-1", 1.0, model="m")
        ledgers = tracked.ledgers
        before = (repr(ledgers), len(ledgers.entries), ledgers.totals[:])
        voucher = Voucher(
            (Account.QUEUE_ADMISSION, Account.QUEUE_GONE, Evidence.NONE),
            (Account.KV_CLAIMED, Account.KV_CLAIMABLE, Evidence.NONE),
        )
        with pytest.raises(Overdraft, match="a release happens once"):
            ledgers.post_all(voucher, 2.0)
        assert (repr(ledgers), len(ledgers.entries), ledgers.totals[:]) == before

    def test_what_is_reserved_does_not_leave_by_a_voucher(self) -> None:
        controller = Controller(Book())
        tracked = controller.admit("sg-1", 1.0, model="m")
        tracked.ledgers.pend(Account.QUEUE_ADMISSION, Account.QUEUE_GONE, 1, 1.0, 9.0)
        with pytest.raises(Overdraft):
            tracked.ledgers.post_all(Voucher((Account.QUEUE_ADMISSION, Account.QUEUE_GONE, Evidence.NONE)), 2.0)
