"""What can be wrong with an entry. Each is raised before anything is changed."""

from __future__ import annotations

from stopguard.errors import BookkeepingError

__all__ = [
    "DuplicateRequest",
    "IllegalMovement",
    "InvalidAmount",
    "NotPending",
    "Overdraft",
    "RequestClosed",
    "TimeWentBackwards",
    "UnknownRequest",
]


class InvalidAmount(BookkeepingError):
    """The amount is negative, zero, or not a whole number."""


class IllegalMovement(BookkeepingError):
    """The two accounts are unknown, of different ledgers or units, or the debit is final."""


class Overdraft(BookkeepingError):
    """More was to leave an account than is in it: the second release of one thing looks like this."""


class RequestClosed(BookkeepingError):
    """The request is settled or written off; its books take no entry any more."""


class TimeWentBackwards(BookkeepingError):
    """An entry is older than the one before it: two clocks were mixed."""


class NotPending(BookkeepingError):
    """The entry that was to be resolved, voided or expired is not pending."""


class UnknownRequest(BookkeepingError):
    """The book has no such request."""


class DuplicateRequest(BookkeepingError):
    """The book has a request with this id already."""
