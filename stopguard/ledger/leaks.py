"""A leak: something that was due and did not come, with a name, a size and an age."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from stopguard.ledger.accounts import Account, Ledger
from stopguard.ledger.entries import Entry

__all__ = ["Leak", "found", "opened_by"]


class Leak(msgspec.Struct, frozen=True, gc=False):
    """An account of one request that was still open at its deadline: one leak, in however many parts it was due.

    `amount` is in the account's unit; `opened_by` is the entry that last filled the account from
    zero; times are seconds on the book's monotonic clock. A leak stays a fact even if what was due
    comes later: then the books hold an entry that says LATE.
    """

    request_id: str
    engine: str
    model: str
    ledger: Ledger
    account: Account
    amount: int
    due_at: float
    found_at: float
    opened_by: Entry
    note: str = ""

    def age_seconds(self, at: float) -> float:
        """How long the account has been open at `at`."""
        return at - self.opened_by.at

    def describe(self, at: float) -> str:
        """One line for people: what, how much, whose, how old, since what."""
        return (
            f"{self.ledger.label}.{self.account.label} {self.amount} {self.account.unit} of {self.request_id} "
            f"({self.engine}, {self.model}), open for {self.age_seconds(at):.3f} s since entry "
            f"{self.opened_by.sequence} ({self.opened_by})"
        )


def opened_by(entries: list[Entry], account: Account) -> Entry:
    """The entry that last took `account` from zero to something."""
    balance, found = 0, entries[0]
    for entry in entries:
        if not entry.state.moves:
            continue
        if entry.credit is account:
            if balance == 0:
                found = entry
            balance += entry.amount
        elif entry.debit is account:
            balance -= entry.amount
    return found


def found(
    whose: tuple[str, str, str], entries: list[Entry], known: list[Leak], late: Mapping[Account, list[Entry]]
) -> tuple[list[Leak], list[Leak]]:
    """All leaks of a request, with those that `late` adds, and the new ones among them.

    `whose` is request, engine and model; `late` has, by account, the entries that say EXPIRED, which refer to what was
    pending. A request that takes block after block during its stop owes each by itself, and leaks them together.
    """
    leaks, new = list(known), []
    for account, expired in late.items():
        amount = sum(entry.amount for entry in expired)
        place = next((place for place, leak in enumerate(leaks) if leak.account is account), None)
        if place is not None:
            leaks[place] = msgspec.structs.replace(leaks[place], amount=leaks[place].amount + amount)
            continue
        leak = Leak(
            *whose,
            ledger=account.ledger,
            account=account,
            amount=amount,
            due_at=min(entries[entry.refers_to].due_at or entry.at for entry in expired),
            found_at=expired[0].at,
            opened_by=opened_by(entries, account),
            note=expired[0].note,
        )
        leaks.append(leak)
        new.append(leak)
    return leaks, new
