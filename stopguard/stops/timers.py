"""A timer wheel: thousands of deadlines for one timer of the event loop.

Deadlines of requests are set often, cancelled almost always, and need no precision beyond a few
milliseconds: exactly what a hashed wheel is for. Setting and cancelling cost one dictionary
operation each, whatever the number of timers, and a cancelled timer leaves nothing behind (a heap
with lazy deletion would keep it until its time).

A timer fires at the first `advance` that is a tick or more after its time (and perhaps at an earlier one, but
never before its time); `next_due` says when to come. Timers that fire in the
same `advance` come in the order of their due times, then of their setting.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar

from stopguard.errors import LimitReached
from stopguard.ledger.errors import TimeWentBackwards

__all__ = ["Timer", "TimerWheel"]

T = TypeVar("T")


class Timer(Generic[T]):
    """One deadline. `due_at` is in the wheel's seconds; `armed` is False once it fired or was cancelled."""

    __slots__ = ("armed", "due_at", "number", "payload", "tick")

    def __init__(self, payload: T, due_at: float, tick: int, number: int) -> None:
        self.payload = payload
        self.due_at = due_at
        self.tick = tick
        self.number = number
        self.armed = True


class TimerWheel(Generic[T]):
    """Deadlines in `slots` buckets of `tick_seconds` each; later ones go round more than once.

    `limit` bounds the number of armed timers; `set` raises `LimitReached` beyond it.
    """

    def __init__(self, at: float, *, tick_seconds: float = 0.005, slots: int = 4096, limit: int = 1_000_000) -> None:
        if tick_seconds <= 0 or slots < 1 or limit < 1:
            raise ValueError("a wheel needs a positive tick, at least one slot and room for a timer")
        self._tick_seconds = tick_seconds
        self._slots: list[dict[int, Timer[T]]] = [{} for _ in range(slots)]
        self._now_tick = self._tick_of(at)
        self._at = at
        self._limit = limit
        self._armed = 0
        self._numbers = 0

    def __len__(self) -> int:
        return self._armed

    @property
    def now(self) -> float:
        """Where the wheel stands."""
        return self._at

    def set(self, payload: T, due_at: float) -> Timer[T]:
        """Arm a timer. One that is due already fires at the next `advance`."""
        if self._armed >= self._limit:
            raise LimitReached("timers", self._limit, "more requests wait for a deadline than this process can keep")
        if not abs(due_at) < math.inf:
            raise TimeWentBackwards(f"a timer cannot be due at {due_at}")
        # Rounded up, so that a bucket is never opened before its timers are due.
        tick = self._now_tick if due_at <= self._at else max(self._tick_of(due_at) + 1, self._now_tick)
        timer = Timer(payload, due_at, tick, self._numbers)
        self._numbers += 1
        self._slots[tick % len(self._slots)][timer.number] = timer
        self._armed += 1
        return timer

    def cancel(self, timer: Timer[T]) -> None:
        """Disarm a timer; harmless when it fired or was cancelled before."""
        if timer.armed:
            timer.armed = False
            bucket = self._slots[timer.tick % len(self._slots)]
            del bucket[timer.number]
            if not bucket:
                bucket.clear()  # an emptied dictionary keeps its table, and each of these would grow to its own peak
            self._armed -= 1

    def advance(self, at: float) -> list[T]:
        """Move to `at` and return the payloads of the timers that are due, each once."""
        if not self._at <= at < math.inf:
            raise TimeWentBackwards(f"the wheel stands at {self._at} and cannot go to {at}")
        self._at = at
        target = self._tick_of(at)
        if not self._armed:
            self._now_tick = max(self._now_tick, target)
            return []
        due: list[Timer[T]] = []
        first = self._now_tick
        # Beyond one full turn every bucket has been visited.
        last = min(target, first + len(self._slots) - 1)
        for tick in range(first, last + 1):
            bucket = self._slots[tick % len(self._slots)]
            if bucket:
                fired = [timer for timer in bucket.values() if timer.tick <= target and timer.due_at <= at]
                for timer in fired:
                    del bucket[timer.number]
                    timer.armed = False
                if not bucket:
                    bucket.clear()
                due += fired
        self._armed -= len(due)
        # The bucket of the present tick may still hold timers that are due within it.
        self._now_tick = max(self._now_tick, target)
        due.sort(key=lambda timer: (timer.due_at, timer.number))
        return [timer.payload for timer in due]

    def next_due(self) -> float | None:
        """When to call `advance` next: not later than the earliest timer is due; `None` when there is none.

        Exact within one tick for timers of the present turn; for later ones it is the end of the turn.
        """
        if not self._armed:
            return None
        slots = len(self._slots)
        for tick in range(self._now_tick, self._now_tick + slots):
            bucket = self._slots[tick % slots]
            if bucket and any(timer.tick == tick for timer in bucket.values()):
                return tick * self._tick_seconds
        return (self._now_tick + slots) * self._tick_seconds

    def _tick_of(self, at: float) -> int:
        # A time that `next_due` gave is a whole number of ticks, and must not be rounded to the tick before it.
        return int(at / self._tick_seconds + 1e-6)
