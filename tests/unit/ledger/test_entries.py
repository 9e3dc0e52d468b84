from __future__ import annotations

import pytest

from stopguard.ledger import Account, Entry, EntryState, Evidence


def test_an_entry_cannot_be_changed() -> None:
    entry = Entry(0, 1.0, Account.KV_POOL, Account.KV_HELD, 4)
    with pytest.raises(AttributeError):
        entry.amount = 5  # type: ignore[misc]


def test_only_a_movement_moves() -> None:
    assert {state for state in EntryState if not state.moves} == {
        EntryState.PENDING,
        EntryState.VOIDED,
        EntryState.EXPIRED,
    }


def test_grades_of_evidence_are_in_order() -> None:
    assert [grade.label for grade in sorted(Evidence)] == [
        *("none", "sent", "accepted", "stream_closed", "gauge", "probe"),
    ]


def test_reads_as_one_line() -> None:
    posted = Entry(0, 1.0, Account.KV_POOL, Account.KV_HELD, 4)
    assert str(posted) == "kv: pool → held 4 blocks"
    late = Entry(
        7, 9.0, Account.LINK_AWAITING, Account.LINK_ACKNOWLEDGED, 1, EntryState.LATE, Evidence.PROBE, "engine-a", 3
    )
    assert str(late) == "link: awaiting → acknowledged 1 notices [late] (probe) engine-a"


def test_states_are_numbered_as_journals_on_disk_have_them() -> None:
    assert [state.name for state in sorted(EntryState)] == [
        *("POSTED", "PENDING", "RESOLVED", "VOIDED", "EXPIRED", "LATE", "CORRECTION", "WRITTEN_OFF"),
    ]
