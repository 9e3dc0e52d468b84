from __future__ import annotations

import pytest

from stopguard.ledger.accounts import (
    ACCOUNT_COUNT,
    ACCOUNTS,
    CLOSING_ACCOUNTS,
    LEGAL_MOVEMENT,
    OPEN_ACCOUNT_COUNT,
    Account,
    Ledger,
    Role,
    Unit,
    boundary_of,
    written_off_of,
)


def test_numbers_are_what_journals_on_disk_say() -> None:
    """Renumbering would silently give old journals another meaning."""
    assert [account.value for account in Account] == list(range(43))
    by_number = {account.value: account for account in Account}
    assert [by_number[number] for number in (0, 7, 14, 17, 18, 26, 35, 42)] == [
        Account.QUEUE_ADMISSION,
        Account.KV_HELD,
        Account.OUTPUT_IN_FLIGHT,
        Account.STREAM_BUFFERED,
        Account.QUEUE_ARRIVALS,
        Account.QUEUE_GONE,
        Account.QUEUE_WRITTEN_OFF,
        Account.STREAM_BYTES_WRITTEN_OFF,
    ]


def test_the_open_accounts_come_first_and_each_ledger_is_one_slice() -> None:
    assert all((account < OPEN_ACCOUNT_COUNT) == (account.role is Role.OPEN) for account in Account)
    for ledger in Ledger:
        inside = ACCOUNTS[CLOSING_ACCOUNTS[ledger]]
        assert set(inside) == {a for a in Account if a.ledger is ledger and a.role is Role.OPEN}


@pytest.mark.parametrize("account", [account for account in Account if account.role is Role.OPEN], ids=str)
def test_every_open_account_comes_from_somewhere_and_can_be_given_up(account: Account) -> None:
    source, sink = boundary_of(account), written_off_of(account)
    assert (source.role, source.ledger, source.unit) == (Role.BOUNDARY, account.ledger, account.unit)
    assert (sink.role, sink.ledger, sink.unit) == (Role.FINAL, account.ledger, account.unit)
    assert LEGAL_MOVEMENT[source * ACCOUNT_COUNT + account]
    assert LEGAL_MOVEMENT[account * ACCOUNT_COUNT + sink]


def test_a_movement_stays_in_its_ledger_and_unit_and_never_leaves_a_final_account() -> None:
    for debit in Account:
        for credit in Account:
            legal = bool(LEGAL_MOVEMENT[debit * ACCOUNT_COUNT + credit])
            crosses = debit.ledger is not credit.ledger or debit.unit is not credit.unit
            assert legal == (not crosses and debit is not credit and debit.role is not Role.FINAL)


def test_labels_are_the_words_of_metrics_and_documents() -> None:
    assert [ledger.label for ledger in Ledger] == ["queue", "kv", "output", "link", "stream"]
    assert Account.OUTPUT_IN_FLIGHT.label == "in_flight"
    assert Account.KV_CLAIMS_WRITTEN_OFF.label == "claims_written_off"
    assert Account.STREAM_BUFFERED.unit is Unit.BYTES
