"""One request as the controller sees it: its machine, its books, its stop and its timers in one object."""

from __future__ import annotations

from typing import Any

from stopguard.ledger.accounts import Account
from stopguard.ledger.request import RequestLedgers
from stopguard.stops.cause import StopCause
from stopguard.stops.doors import EngineProfile
from stopguard.stops.machine import Machine
from stopguard.stops.patience import DeadlineKind, TimerKind
from stopguard.stops.timers import Timer

__all__ = ["Tracked"]


class Tracked:
    """One request.

    `events` is bumped by the relay for each piece of output that passed; `muted` is True from the
    moment a stop is observed: no byte may reach the client any more. `owner` belongs to the edge.
    """

    __slots__ = (
        "attempts",
        "cause",
        "cleared_at",
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
        # When the engine's gauges first had no room for it any more, after its abort.
        self.cleared_at: float | None = None
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
