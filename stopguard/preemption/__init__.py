"""Preemption: the urgent request gets its room now, and the one that made room loses nothing.

Start at `classes` (who may ask for what), then `queue` (who goes next), `pressure` (whether somebody is held up),
`victims` (who makes room), `guard` (when to stop preempting) and `coordinator`, which puts them together. `ways`
says what a preemption is. Like the stops, all of it is sans-I/O: the gateway's `preempting` is its edge.
"""

from stopguard.preemption.classes import (
    ChangedTooOften,
    Claim,
    Classes,
    ClassesOff,
    Granted,
    PriorityClass,
    UnknownClass,
)
from stopguard.preemption.coordinator import BringBack, Coordinator, Decision, Look, TakeOff
from stopguard.preemption.deadlines import Forecast, Hopeless, Limits
from stopguard.preemption.guard import Guard
from stopguard.preemption.pressure import Pressure, Room, room_of
from stopguard.preemption.queue import FairQueue
from stopguard.preemption.seats import Seat, SeatState
from stopguard.preemption.settings import ClassSettings, Mode, PreemptionSettings, TenantStanding
from stopguard.preemption.victims import POLICIES, Candidate
from stopguard.preemption.ways import Exactness, Gone, Outcome, Parked, Refused, Running, Verdict, Way, WayKind

__all__ = [
    "POLICIES",
    "BringBack",
    "Candidate",
    "ChangedTooOften",
    "Claim",
    "ClassSettings",
    "Classes",
    "ClassesOff",
    "Coordinator",
    "Decision",
    "Exactness",
    "FairQueue",
    "Forecast",
    "Gone",
    "Granted",
    "Guard",
    "Hopeless",
    "Limits",
    "Look",
    "Mode",
    "Outcome",
    "Parked",
    "PreemptionSettings",
    "Pressure",
    "PriorityClass",
    "Refused",
    "Room",
    "Running",
    "Seat",
    "SeatState",
    "TakeOff",
    "TenantStanding",
    "UnknownClass",
    "Verdict",
    "Way",
    "WayKind",
    "room_of",
]
