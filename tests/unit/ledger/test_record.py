from __future__ import annotations

import msgspec
import pytest

from stopguard.ledger import Account, Evidence, StopSummary, decode_record, encode_record
from tests.unit.ledger.complete_state import running

A = Account


def test_a_story_survives_being_stored() -> None:
    book, ledgers = running()
    ledgers.labels = {"tenant": "blue"}
    ledgers.stop = StopSummary(semantics="cancel", source="client", reason="eof", observed_at=3.0)
    ledgers.stop.evidence = Evidence.PROBE
    ledgers.mark(3.0, "client left")
    ledgers.pend(A.KV_HELD, A.KV_POOL, 4, 3.0, 4.0)
    book.expire(ledgers, 5.0)
    book.write_off(ledgers, 6.0, "x")
    record = ledgers.record()
    again = decode_record(encode_record(record))
    assert again == record
    assert again.balances() == {account: n for account in Account if (n := ledgers.balances[account])}
    assert again.leaks[0].describe(5.0) == (ledgers.leaks or [])[0].describe(5.0)
    assert (again.closed_at, again.written_off, again.marks) == (6.0, True, [(3.0, "client left")])


def test_a_record_does_not_change_with_its_request() -> None:
    _, ledgers = running()
    record = ledgers.record()
    entries = len(record.entries)
    ledgers.post(A.KV_POOL, A.KV_HELD, 1, 3.0)
    ledgers.mark(3.0, "x")
    assert (len(record.entries), record.marks) == (entries, [])


@pytest.mark.parametrize("cut", [0, 1, 10, -1])
def test_what_is_no_record(cut: int) -> None:
    _, ledgers = running()
    data = encode_record(ledgers.record())[:cut]
    with pytest.raises(msgspec.DecodeError):
        decode_record(data)
    with pytest.raises(msgspec.ValidationError):
        decode_record(msgspec.msgpack.encode({"request_id": 7}))
