"""What engines said that the books cannot hold. Shown and counted, never raised into the edge.

One broken engine must not stop the gateway, and none of what it says may be lost: a second release,
a token after the end, an event about a request that nobody knows.
"""

from __future__ import annotations

from collections import Counter, deque

import msgspec

__all__ = ["Anomalies", "BookError"]


class BookError(msgspec.Struct, frozen=True, gc=False):
    """One statement that would have broken a rule of the books."""

    at: float
    request_id: str
    text: str


class Anomalies:
    """The latest book errors, how many there were, and how often each kind of event came too late."""

    def __init__(self, limit: int) -> None:
        self.book_errors: deque[BookError] = deque(maxlen=limit)
        self.book_error_count = 0
        self.late_events: Counter[str] = Counter()

    def record(self, at: float, request_id: str, text: str) -> None:
        """An engine said what the books cannot hold."""
        self.book_errors.append(BookError(at, request_id, text))
        self.book_error_count += 1
