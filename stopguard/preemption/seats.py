"""Seats: one request as the coordinator sees it, from the moment it waits or is sent until it has ended."""

from __future__ import annotations

import enum

from stopguard.preemption.classes import Claim
from stopguard.preemption.ways import Way
from stopguard.stops import Tracked

__all__ = ["Seat", "SeatState"]


class SeatState(enum.Enum):
    """Where it stands."""

    QUEUED = "queued"
    """It waits with us for a place at an engine."""
    SENT = "sent"
    """It is at an engine and has no output yet."""
    RUNNING = "running"
    TAKING = "taking"
    """Its preemption was ordered."""
    PARKED = "parked"
    RETURNING = "returning"
    """Its resumption was ordered."""
    ENDED = "ended"


class Seat:
    """One request. `for_whom` is the one it was preempted for; `relief` are those that were preempted for it."""

    __slots__ = (
        "claim",
        "counted_tokens",
        "engine",
        "engines",
        "for_whom",
        "parked_at",
        "reasons",
        "relief",
        "relieved_at",
        "resumed_at",
        "retry_at",
        "rooms_made",
        "sent_at",
        "started_at",
        "state",
        "tracked",
        "way",
    )

    def __init__(self, tracked: Tracked, claim: Claim) -> None:
        self.tracked = tracked
        self.claim = claim
        self.state = SeatState.QUEUED
        # The engines that may serve it; once it is sent, the one that does.
        self.engines: tuple[str, ...] = ()
        self.engine = ""
        self.sent_at = 0.0
        self.started_at: float | None = None
        self.parked_at = 0.0
        # How often it has made room. An engine's own preemptions, which may be many in a small pool, do not count.
        self.rooms_made = 0
        self.resumed_at: float | None = None
        # Not before this moment is its preemption or resumption tried again, after a refusal.
        self.retry_at = 0.0
        self.way: Way | None = None
        self.for_whom: Seat | None = None
        self.relief: list[Seat] = []
        self.relieved_at: float | None = None
        self.counted_tokens = 0
        # Why it was not chosen, or got no room; each is counted once a request.
        self.reasons: set[str] | None = None

    @property
    def needy(self) -> bool:
        """Whether it may take the room of others, and has not started."""
        return self.claim.priority_class.preempts and self.state in (SeatState.QUEUED, SeatState.SENT)

    def __repr__(self) -> str:
        return f"<Seat {self.tracked.request_id} {self.claim.priority_class.name} {self.state.value} {self.engine}>"
