from __future__ import annotations

import pytest

from stopguard.ledger import (
    Account,
    Book,
    EngineGauges,
    Reconciler,
    Reconciliation,
    RequestLedgers,
    reconcile,
    reconcile_inside,
)

A = Account


def request(
    name: str, place: Account = A.QUEUE_RUNNING, *, held: int = 0, fenced: int = 0, lora: int = 0, claim: bool = False
) -> RequestLedgers:
    ledgers = Book().open(name, 1.0, engine="e", model="m")
    ledgers.post(A.QUEUE_ARRIVALS, place, 1, 1.0)
    for account, amount in ((A.KV_HELD, held), (A.KV_FENCED, fenced)):
        if amount:
            ledgers.post(A.KV_POOL, account, amount, 1.0)
    if lora:
        ledgers.post(A.KV_SLOT_POOL, A.KV_LORA, lora, 1.0)
    if claim:
        ledgers.post(A.KV_CLAIMABLE, A.KV_CLAIMED, 1, 1.0)
    return ledgers


def lines(result: Reconciliation) -> list[str]:
    """One short line a difference, for comparison by eye."""
    return [
        f"{d.ledger.label} {d.unit} ours {d.expected} theirs {d.reported} +{d.orphans}{list(d.orphan_ids) or ''} "
        f"-{d.phantoms}{list(d.phantom_ids) or ''}"
        for d in result.differences
    ]


def test_books_that_agree() -> None:
    requests = [request("a", held=3, fenced=1, lora=1), request("b", A.QUEUE_WAITING), request("c", A.QUEUE_ADMISSION)]
    gauges = EngineGauges(at=2.0, running=1, waiting=1, blocks_used=4, slots_used=1, request_ids=frozenset("ab"))
    result = reconcile(requests, gauges)
    assert result.agrees
    assert lines(result) == [
        "queue places ours 2 theirs 2 +0 -0",
        "kv blocks ours 4 theirs 4 +0 -0",
        "kv slots ours 1 theirs 1 +0 -0",
    ]


def test_orphans_and_phantoms() -> None:
    more = reconcile([request("a", held=3)], EngineGauges(at=2.0, running=2, waiting=1, blocks_used=7, slots_used=2))
    assert lines(more) == [
        "queue places ours 1 theirs 3 +2 -0",
        "kv blocks ours 3 theirs 7 +4 -0",
        "kv slots ours 0 theirs 2 +2 -0",
    ]
    fewer = reconcile([request("a", held=3)], EngineGauges(at=2.0, running=0, waiting=0, blocks_used=0))
    assert lines(fewer)[:2] == ["queue places ours 1 theirs 0 +0 -1", "kv blocks ours 3 theirs 0 +0 -3"]
    assert not more.agrees
    assert not fewer.agrees


def test_names_beat_numbers() -> None:
    """One orphan and one phantom are equal in the sums, and wrong."""
    gauges = EngineGauges(at=2.0, running=1, waiting=0, request_ids=frozenset({"stranger"}))
    result = reconcile([request("a")], gauges)
    assert lines(result)[0] == "queue places ours 1 theirs 1 +1['stranger'] -1['a']"
    assert not result.agrees


def test_names_without_numbers_are_enough() -> None:
    result = reconcile([request("a")], EngineGauges(at=2.0, request_ids=frozenset({"a", "stranger"})))
    assert lines(result)[0] == "queue places ours 1 theirs 2 +1['stranger'] -0"


@pytest.mark.parametrize(
    "gauges", [EngineGauges(at=2.0), EngineGauges(at=2.0, running=5), EngineGauges(at=2.0, waiting=5)]
)
def test_silence_is_never_zero(gauges: EngineGauges) -> None:
    result = reconcile([request("a", held=3)], gauges)
    assert result.agrees
    assert [d.reported for d in result.differences] == [None, None, None]


def test_claims_of_unknown_size_are_not_compared_block_by_block() -> None:
    gauges = EngineGauges(at=2.0, blocks_used=9)
    assert reconcile([request("a", claim=True)], gauges).agrees
    # With a probe every claim has its blocks, and the comparison is exact.
    assert lines(reconcile([request("a", claim=True, held=3)], gauges))[1] == "kv blocks ours 3 theirs 9 +6 -0"
    # Nobody claims anything and blocks are used all the same.
    assert lines(reconcile([request("a", A.QUEUE_ADMISSION)], gauges))[1] == "kv blocks ours 0 theirs 9 +9 -0"


def test_only_a_lasting_difference_is_persistent() -> None:
    reconciler = Reconciler(confirmations=3)
    good = reconcile([], EngineGauges(at=1.0, running=0, waiting=0))
    orphan = reconcile([], EngineGauges(at=2.0, running=1, waiting=0))
    phantom = reconcile([request("a")], EngineGauges(at=3.0, running=0, waiting=0))
    for comparison in (orphan, orphan):
        reconciler.add(comparison)
        assert reconciler.persistent() == []
    reconciler.add(orphan)
    assert [d.orphans for d in reconciler.persistent()] == [1]
    for comparison in (phantom, phantom):
        reconciler.add(comparison)
        assert reconciler.persistent() == []  # it changed sides: requests under way, not a leak
    reconciler.add(phantom)
    assert [d.phantoms for d in reconciler.persistent()] == [1]
    reconciler.add(good)
    assert reconciler.persistent() == []


def test_a_reconciler_that_looks_at_nothing() -> None:
    with pytest.raises(ValueError, match="at least once"):
        Reconciler(confirmations=0)


def test_inside_what_is_held_aside_may_be_counted_or_not() -> None:
    requests = [request("a", held=3), request("b", A.QUEUE_PAUSED), request("c", A.QUEUE_TRANSFERRING)]
    for waiting in (0, 1, 2):
        assert reconcile_inside(requests, EngineGauges(at=2.0, running=1, waiting=waiting, blocks_used=3)).agrees
    assert lines(reconcile_inside(requests, EngineGauges(at=2.0, running=1, waiting=3)))[0] == (
        "queue places ours 3 theirs 4 +1 -0"
    )
    assert lines(reconcile_inside(requests, EngineGauges(at=2.0, running=0, waiting=0)))[0] == (
        "queue places ours 1 theirs 0 +0 -1"
    )


def test_inside_several_may_hold_one_block() -> None:
    requests = [request("a", held=3), request("b", held=3)]
    assert reconcile_inside(requests, EngineGauges(at=2.0, blocks_used=4)).agrees, "a prefix that they share"
    more = reconcile_inside(requests, EngineGauges(at=2.0, blocks_used=8))
    assert lines(more)[1] == "kv blocks ours 6 theirs 8 +2 -0"
    none = reconcile_inside(requests, EngineGauges(at=2.0, blocks_used=0))
    assert lines(none)[1] == "kv blocks ours 6 theirs 0 +0 -6"


def test_inside_what_the_counters_have_is_held_as_well() -> None:
    one = request("a")
    one.blocks_taken += 5
    assert one.balances[A.KV_HELD] == 0
    assert reconcile_inside([one], EngineGauges(at=2.0, blocks_used=5)).agrees


def test_inside_names_are_worth_more_than_numbers() -> None:
    result = reconcile_inside([request("a")], EngineGauges(at=2.0, running=1, waiting=0), ("x",), ("a",))
    assert lines(result)[0] == "queue places ours 1 theirs 1 +1['x'] -1['a']"
