"""How long StopGuard waits for what: the limits of a request's time, and the controller's own timers."""

from __future__ import annotations

import enum

import msgspec

__all__ = ["ClientPolicy", "DeadlineKind", "StopConfig", "TimerKind"]


class ClientPolicy(msgspec.Struct, frozen=True, gc=False):
    """What happens to the work when its client leaves.

    `grace_seconds` 0 stops at once, `None` lets the engine finish (for billing), any other number
    lets it work on for that long.
    """

    grace_seconds: float | None = 0.0

    @property
    def stops_at_once(self) -> bool:
        """Whether a disconnect is a stop right away."""
        return self.grace_seconds == 0.0


class DeadlineKind(enum.StrEnum):
    """The limits that a request's time has."""

    QUEUE = "queue"
    """From admission to dispatch."""
    FIRST_TOKEN = "first_token"
    """From admission to the first byte of output."""
    TOTAL = "total"
    """From admission to the end."""
    IDLE = "idle"
    """Between two pieces of output."""


class TimerKind(enum.Enum):
    """The controller's own timers."""

    RETRY = "retry"
    SETTLE = "settle"
    GRACE = "grace"
    TELL = "tell"
    PREEMPT = "preempt"
    WRITE_OFF = "write_off"


class StopConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's patience, in seconds.

    `settle_seconds`: from a stop (or a finish) to five closed ledgers; later is a leak.
    `tell_seconds`: how long a dismissed client waits for the ack, so that it can be told whether a
    retry is safe. `write_off_seconds`: how long an overdue request is kept open for a late end.
    `gauge_apart_seconds`: how far apart two readings of an engine's gauges must be to be two.
    """

    settle_seconds: float = 10.0
    tell_seconds: float = 0.5
    preempt_seconds: float = 5.0
    write_off_seconds: float = 300.0
    gauge_apart_seconds: float = 0.05
    book_errors: int = 1000
