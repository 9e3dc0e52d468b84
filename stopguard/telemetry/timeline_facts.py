"""What only the timeline of a request says: how its preemptions went, and why an abort was repeated.

The controller notes both as marks, in the order in which they happened. This is the one place that reads their
words; its test drives the real controller, so that a changed word is a red test.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stopguard.ledger import Mark

__all__ = ["Preemption", "preemptions", "retry_reason"]

_ORDERED = "preemption ordered ("
_INSIDE = "preempted"
_SHELVED = "shelved at the gateway"
_REFUSED = "not preempted"
_KNOCK = "knock "
_DOOR = "door "
_APPEARED = ("the scheduler has ", "came back from a preemption")
_ANSWERS = frozenset({"refused", "unknown", "failed"})


class Preemption(msgspec.Struct, frozen=True):
    """One preemption: who wanted it, who kept the request, whether it took place, and how long after the order."""

    reason: str
    mode: str
    happened: bool
    seconds: float | None


def preemptions(marks: Sequence[Mark]) -> list[Preemption]:
    """All of a request's preemptions, in order. One that is still under way is not among them."""
    found = []
    ordered_at: float | None = None
    for at, text in marks:
        if text.startswith(_ORDERED):
            ordered_at = at
        elif text in (_INSIDE, _SHELVED, _REFUSED):
            found.append(
                Preemption(
                    reason="engine" if ordered_at is None else "ordered",
                    mode="gateway" if text == _SHELVED else "inside",
                    happened=text != _REFUSED,
                    seconds=None if ordered_at is None else at - ordered_at,
                )
            )
            ordered_at = None
    return found


def retry_reason(marks: Sequence[Mark]) -> str:
    """Why the last knock was made, although there had been one before."""
    knocks = 0
    for _, text in reversed(marks):
        if text.startswith(_KNOCK):
            knocks += 1
            if knocks == 2:
                break
        elif text.startswith(_APPEARED):
            return "appeared"
        elif text.startswith(_DOOR):
            answer = text.rpartition(": ")[2]
            return answer if answer in _ANSWERS else "unanswered"
    return "unanswered"
