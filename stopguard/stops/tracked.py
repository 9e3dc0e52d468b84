"""One request as the controller sees it: its machine, its books, its stop and its timers in one object."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from stopguard.ledger.accounts import Account
from stopguard.ledger.request import RequestLedgers
from stopguard.stops.cause import StopCause
from stopguard.stops.doors import EngineProfile
from stopguard.stops.machine import Machine
from stopguard.stops.timers import Timer

__all__ = ["ClientPolicy", "DeadlineKind", "StopConfig", "TimerKind", "Tracked"]


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
    """

    settle_seconds: float = 10.0
    tell_seconds: float = 0.5
    preempt_seconds: float = 5.0
    write_off_seconds: float = 300.0
    book_errors: int = 1000


class Tracked:
    """One request.

    `events` is bumped by the relay for each piece of output that passed; `muted` is True from the
    moment a stop is observed: no byte may reach the client any more. `owner` belongs to the edge.
    """

    __slots__ = (
        "attempts",
        "cause",
        "deadlines",
        "discarding",
        "door_index",
        "events",
        "folded_events",
        "last_activity_at",
        "ledgers",
        "machine",
        "muted",
        "output_started",
        "owner",
        "part_ids",
        "part_places",
        "parts_over",
        "preemptions",
        "profile",
        "request_id",
        "settle_due",
        "timers",
        "told",
        "tries_at_door",
    )

    def __init__(self, ledgers: RequestLedgers, at: float) -> None:
        self.request_id = ledgers.request_id
        self.ledgers = ledgers
        self.machine = Machine()
        self.profile: EngineProfile | None = None
        self.cause: StopCause | None = None
        self.events = 0
        self.folded_events = 0
        self.last_activity_at = at
        self.muted = False
        self.output_started = False
        self.discarding = False
        self.told = False
        self.attempts = 0
        self.door_index = 0
        self.tries_at_door = 0
        self.preemptions = 0
        self.settle_due: float | None = None
        # Made on first use.
        self.timers: dict[TimerKind, Timer[Any]] | None = None
        self.deadlines: dict[DeadlineKind, tuple[Timer[Any], float]] | None = None
        self.part_places: dict[str, Account] | None = None
        self.part_ids: list[str] | None = None
        self.parts_over: dict[str, bool] | None = None

        self.owner: Any = None

    @property
    def probed(self) -> bool:
        """Whether the engine's scheduler itself reports on this request."""
        return self.profile is not None and self.profile.probed

    def __repr__(self) -> str:
        return f"<Tracked {self.request_id} {self.machine!r}>"
