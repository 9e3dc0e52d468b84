from __future__ import annotations

from stopguard.ledger import Account, Evidence, Ledger, RequestLedgers
from stopguard.stops import Tracked, movements
from tests.unit.stops.scene import PROBED, STREAM

A = Account


def dispatched() -> RequestLedgers:
    ledgers = RequestLedgers("r1", 1.0, engine="e", model="m")
    movements.admit(ledgers, 1.0)
    movements.dispatch(ledgers, 2.0)
    return ledgers


def test_admit_and_dispatch() -> None:
    assert repr(dispatched()) == (
        "<r1 queue: waiting 1 places | kv: claimed 1 claims | output: empty | link: empty | "
        "stream: connected 1 connections>"
    )


def test_a_piece_of_output_is_delivered_to_who_listens_and_discarded_otherwise() -> None:
    tracked = Tracked(dispatched(), 1.0)
    tracked.profile = STREAM
    tracked.events = 3
    movements.fold(tracked, 3.0)
    assert tracked.ledgers.describe(Ledger.OUTPUT) == "output: delivered 3 tokens"
    tracked.discarding = True
    tracked.events = 5
    movements.fold(tracked, 4.0)
    movements.fold(tracked, 4.0)
    assert tracked.ledgers.describe(Ledger.OUTPUT) == "output: delivered 3 tokens, discarded 2 tokens"


def test_with_a_probe_only_the_scheduler_counts() -> None:
    tracked = Tracked(dispatched(), 1.0)
    tracked.profile = PROBED
    tracked.events = 3
    movements.fold(tracked, 3.0)
    assert tracked.ledgers.describe(Ledger.OUTPUT) == "output: empty"


def test_an_abort_is_a_notice_that_must_be_acknowledged() -> None:
    ledgers = dispatched()
    movements.note_abort(ledgers, 3.0, 9.0, "e")
    assert ledgers.describe(Ledger.LINK) == "link: awaiting 1 notices (1 due)"
    movements.resolve_notices(ledgers, 4.0, Evidence.PROBE)
    assert ledgers.describe(Ledger.LINK) == "link: acknowledged 1 notices"
    movements.resolve_notices(ledgers, 4.0, Evidence.PROBE)
    movements.note_abort(ledgers, 5.0, 9.0, "e")
    movements.resolve_notices(ledgers, 6.0, Evidence.PROBE, moot=True)
    assert ledgers.describe(Ledger.LINK) == "link: acknowledged 1 notices, moot 1 notices"


def test_what_is_expected_is_expected_once() -> None:
    ledgers = dispatched()
    ledgers.post(A.KV_POOL, A.KV_HELD, 4, 2.0)
    movements.expect_release(ledgers, 3.0, 9.0)
    movements.expect_release(ledgers, 3.0, 9.0)
    movements.expect_connection_end(ledgers, 3.0, 9.0)
    movements.expect_connection_end(ledgers, 3.0, 9.0)
    assert repr(ledgers) == (
        "<r1 queue: waiting 1 places (1 due) | kv: claimed 1 claims, held 4 blocks (1 due, 4 due) | output: empty | "
        "link: empty | stream: connected 1 connections (1 due)>"
    )
    ledgers.post(A.KV_POOL, A.KV_HELD, 2, 4.0)
    movements.expect_release(ledgers, 4.0, 9.0)
    assert ledgers.describe(Ledger.KV) == "kv: claimed 1 claims, held 6 blocks (1 due, 4 due, 2 due)"
    movements.release_engine_side(ledgers, 5.0, Evidence.PROBE)
    assert ledgers.describe(Ledger.KV) == "kv: empty"
    assert ledgers.describe(Ledger.QUEUE) == "queue: gone 1 places"


def test_shelving_keeps_the_place_and_gives_back_the_rest() -> None:
    ledgers = dispatched()
    ledgers.post(A.KV_POOL, A.KV_HELD, 4, 2.0)
    ledgers.post(A.KV_SLOT_POOL, A.KV_GRAMMAR, 1, 2.0)
    movements.shelve(ledgers, 3.0, Evidence.STREAM_CLOSED)
    assert ledgers.describe(Ledger.QUEUE) == "queue: preempted 1 places"
    assert ledgers.describe(Ledger.KV) == "kv: empty"
    movements.withdraw(ledgers, 4.0)
    assert ledgers.describe(Ledger.QUEUE) == "queue: gone 1 places"


def test_giving_up_says_so_on_every_account_of_the_engine() -> None:
    ledgers = dispatched()
    movements.note_abort(ledgers, 3.0, 9.0, "e")
    ledgers.post(A.KV_SLOT_POOL, A.KV_LORA, 1, 3.0)
    movements.give_up_engine_side(ledgers, 4.0, "unprovable")
    assert repr(ledgers) == (
        "<r1 queue: written_off 1 places | kv: claims_written_off 1 claims, slots_written_off 1 slots | "
        "output: empty | link: written_off 1 notices | stream: connected 1 connections>"
    )


def test_a_closed_connection_drops_what_was_buffered() -> None:
    ledgers = dispatched()
    ledgers.post(A.STREAM_ENGINE, A.STREAM_BUFFERED, 80, 2.0)
    movements.close_connection(ledgers, 3.0, "eof")
    movements.close_connection(ledgers, 3.0, "eof")
    assert ledgers.describe(Ledger.STREAM) == "stream: closed 1 connections, dropped 80 bytes"
