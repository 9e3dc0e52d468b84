"""Entries: what happened, once and for ever.

An entry says that `amount` left `debit` for `credit` at a moment, and how we know. It is immutable;
a mistake is mended by another entry. Six kinds of entry follow the life of an obligation, as in a
two-phase transfer:

    PENDING ──▶ RESOLVED      what was due came (possibly in parts)
       │
       ├──────▶ VOIDED        it is no longer due (the request finished by itself, the hop died)
       │
       └──────▶ EXPIRED ────▶ LATE          it came after its deadline, and is recorded as late
                          └─▶ WRITTEN_OFF   somebody gave up on it, after it was reported as a leak

A PENDING, VOIDED or EXPIRED entry moves nothing: the amount still sits where it was, which is the
point. POSTED moves without ceremony, and CORRECTION takes back an earlier posting.
"""

from __future__ import annotations

import enum

import msgspec

from stopguard.ledger.accounts import Account

__all__ = ["Entry", "EntryState", "Evidence"]


class Evidence(enum.IntEnum):
    """How we know. A higher grade beats a lower one; no claim is made without one.

    `ACCEPTED` is only the API's word (vLLM counts the ids *given* to `/abort_requests`; llama.cpp
    answers 204 for an unknown id), so it is never an ack.
    """

    NONE = 0
    SENT = 1
    ACCEPTED = 2
    STREAM_CLOSED = 3
    GAUGE = 4
    PROBE = 5

    @property
    def label(self) -> str:
        """The name in metrics, headers and the journal."""
        return self._name_.lower()


class EntryState(enum.IntEnum):
    """What kind of entry it is (see the diagram above). Numbers are stored in journals."""

    POSTED = 0
    PENDING = 1
    RESOLVED = 2
    VOIDED = 3
    EXPIRED = 4
    LATE = 5
    CORRECTION = 6
    WRITTEN_OFF = 7

    @property
    def moves(self) -> bool:
        """Whether an entry of this kind changes balances."""
        return self not in _STANDING


_STANDING = (EntryState.PENDING, EntryState.VOIDED, EntryState.EXPIRED)


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One immutable line in a book.

    `at` is when it was booked, in seconds on the book's monotonic clock. `occurred_at` is when it
    happened by the engine's own account, mapped to the same clock, where that is known; it may be
    earlier than `at` and out of order. `refers_to` is the `sequence` of the entry that this one
    resolves, voids, expires, follows late or corrects. `due_at` is set on PENDING only.
    """

    sequence: int
    at: float
    debit: Account
    credit: Account
    amount: int
    state: EntryState = EntryState.POSTED
    evidence: Evidence = Evidence.NONE
    note: str = ""
    refers_to: int = -1
    due_at: float | None = None
    occurred_at: float | None = None

    def __str__(self) -> str:
        ledger = self.debit.ledger.label
        words = f"{ledger}: {self.debit.label} → {self.credit.label} {self.amount} {self.debit.unit}"
        if self.state is not EntryState.POSTED:
            words += f" [{self.state.name.lower()}]"
        if self.evidence is not Evidence.NONE:
            words += f" ({self.evidence.label})"
        return f"{words} {self.note}".rstrip()
