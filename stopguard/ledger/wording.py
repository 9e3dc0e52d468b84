"""One line for one ledger: what tests assert on and people read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stopguard.ledger.accounts import Account, Ledger, Role
from stopguard.ledger.obligations import Obligation

__all__ = ["describe"]


def describe(balances: Sequence[int], obligations: Iterable[Obligation], ledger: Ledger) -> str:
    """The accounts of `ledger` that hold something, and what of it is due: ``kv: held 3 blocks (3 OVERDUE)``."""
    parts = []
    for account in Account:
        amount = balances[account]
        if account.ledger is ledger and amount and account.role is not Role.BOUNDARY:
            parts.append(f"{account.label} {amount} {account.unit}")
    text = ", ".join(parts) if parts else "empty"
    due = [obligation for obligation in obligations if obligation.entry.debit.ledger is ledger]
    if due:
        text += " (" + ", ".join(f"{o.remaining} {'OVERDUE' if o.expired else 'due'}" for o in due) + ")"
    return f"{ledger.label}: {text}"
