"""An obligation: an amount that must move before its deadline, and still sits where it was."""

from __future__ import annotations

from stopguard.ledger.entries import Entry

__all__ = ["Obligation"]


class Obligation:
    """An amount that is due: the pending entry, how much of it is left, and whether it is overdue."""

    __slots__ = ("entry", "expired", "remaining")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.remaining = entry.amount
        self.expired = False

    def __repr__(self) -> str:
        word = "overdue" if self.expired else "due"
        return f"<Obligation {self.entry.debit.label} {self.remaining} {word} at {self.entry.due_at}>"
