"""A clock that moves only when it is told to, with a queue of what is to happen when.

It starts at a large, seeded offset, so that an instant of this clock and one of any other can never
be mixed up unnoticed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from stopguard.errors import LimitReached

__all__ = ["VirtualClock"]

Action = Callable[[], None]


class VirtualClock:
    """Virtual seconds. Actions of the same instant run in the order in which they were set."""

    def __init__(self, seed: int = 0, *, pending_limit: int = 1_000_000) -> None:
        self.now = random.Random(seed ^ 0x5EED).uniform(10_000.0, 200_000.0)
        self.started_at = self.now
        self._pending: list[tuple[float, int, Action]] = []
        self._pending_limit = pending_limit
        self._numbers = 0

    @property
    def elapsed_seconds(self) -> float:
        """How long the clock has run."""
        return self.now - self.started_at

    def at(self, when: float, action: Action) -> None:
        """Run `action` when the clock reaches `when` (at once, if that is past)."""
        if len(self._pending) >= self._pending_limit:
            raise LimitReached("pending actions", self._pending_limit, "the plan is larger than this clock can hold")
        heapq.heappush(self._pending, (max(when, self.now), self._numbers, action))
        self._numbers += 1

    def after(self, seconds: float, action: Action) -> None:
        """Run `action` in `seconds`."""
        self.at(self.now + seconds, action)

    def next_at(self) -> float | None:
        """When the next action is due."""
        return self._pending[0][0] if self._pending else None

    def move_to(self, when: float) -> None:
        """Let time pass, and run whatever becomes due on the way, in order."""
        if when < self.now:
            raise ValueError(f"the clock stands at {self.now} and cannot go back to {when}")
        while self._pending and self._pending[0][0] <= when:
            due_at, _, action = heapq.heappop(self._pending)
            self.now = max(self.now, due_at)
            action()
        self.now = when
