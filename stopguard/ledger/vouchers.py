"""Vouchers: movements that always happen together, checked once instead of each time.

"A request is dispatched" is two movements, of one place and of one claim, and it happens for every
request. That their accounts fit together does not depend on the request, so it is checked when the
voucher is made, at import; what does depend on it (closed books, time, an empty account) is checked
by `RequestLedgers.post_all`, all of it before anything is changed.
"""

from __future__ import annotations

from stopguard.ledger.accounts import ACCOUNT_COUNT, LEGAL_MOVEMENT, OPEN_ACCOUNT_COUNT, Account
from stopguard.ledger.entries import Evidence
from stopguard.ledger.errors import IllegalMovement

__all__ = ["Leg", "Voucher"]

#: One movement of 1 unit: from, to, and how we know.
Leg = tuple[Account, Account, Evidence]


class Voucher:
    """Movements of one unit each. `sources` are the open accounts that must hold what leaves them."""

    __slots__ = ("legs", "sources")

    def __init__(self, *legs: Leg) -> None:
        for debit, credit, _ in legs:
            if not LEGAL_MOVEMENT[debit * ACCOUNT_COUNT + credit]:
                raise IllegalMovement(f"a voucher cannot move from {debit!r} to {credit!r}")
        sources = tuple(debit for debit, _, _ in legs if debit < OPEN_ACCOUNT_COUNT)
        if len(set(sources)) != len(sources):
            raise IllegalMovement("a voucher takes from each account once")
        if set(sources) & {credit for _, credit, _ in legs}:
            raise IllegalMovement("a voucher does not pass things on: post them one after the other")
        self.legs: tuple[Leg, ...] = legs
        self.sources = sources

    def __repr__(self) -> str:
        return "<Voucher " + ", ".join(f"{debit.label} → {credit.label}" for debit, credit, _ in self.legs) + ">"
