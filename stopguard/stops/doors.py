"""Doors: the ways to stop a request at an engine, in the order to try, and what each answer is worth.

An adapter describes its engine as an `EngineProfile`. The controller knocks on one door after
another, with backoff, until there is an ack or the deadline; it never knows which engine it is.
"""

from __future__ import annotations

import enum

import msgspec

from stopguard.ledger.entries import Evidence

__all__ = ["AbortAnswer", "Door", "DoorKind", "EngineProfile", "RetryPolicy"]


class DoorKind(enum.StrEnum):
    """How the edge carries out a knock."""

    CLOSE = "close"
    """Close the upstream connection of the request."""
    CALL = "call"
    """Call the engine's own abort interface through its adapter."""
    PROBE = "probe"
    """Send the abort through the probe's control channel."""


class AbortAnswer(enum.Enum):
    """What an engine's door answered."""

    SENT = "sent"
    """There is no answer by nature (a closed connection)."""
    ACCEPTED = "accepted"
    """It said yes. Not an ack."""
    REFUSED = "refused"
    """It will not do it now; try again."""
    UNKNOWN = "unknown"
    """It does not know the id: too early, too late, or wrong."""
    GONE = "gone"
    """It says, in a way that is worth the door's `worth`, that the request is no longer there."""
    FAILED = "failed"
    """The knock itself failed (connection refused, timeout, an error status)."""


class Door(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One way to stop a request.

    `worth` is the evidence that its best answer gives. `ends_stream` says that knocking closes our
    upstream stream, so that the engine can no longer end it by itself and thereby prove anything.
    """

    name: str
    kind: DoorKind
    worth: Evidence = Evidence.SENT
    ends_stream: bool = False


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How often to knock: `tries_per_door` at each door but the last, `tries` in all.

    Between two knocks it waits `first_wait_seconds` × `factor`^n, at most `longest_wait_seconds`.
    """

    tries_per_door: int = 3
    first_wait_seconds: float = 0.1
    factor: float = 2.0
    longest_wait_seconds: float = 2.0
    tries: int = 12

    def wait_seconds(self, attempt: int) -> float:
        """The pause after attempt number `attempt` (counted from 1)."""
        return min(self.longest_wait_seconds, self.first_wait_seconds * self.factor ** (attempt - 1))


CLOSE_CONNECTION = Door(name="close", kind=DoorKind.CLOSE, worth=Evidence.SENT, ends_stream=True)


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the controller must know of an engine, and all it knows.

    `best_evidence` is the highest grade that can be had from this engine as it is set up. With
    SENT or ACCEPTED nothing can ever be proved: such a stop ends as `unconfirmed` as soon as the
    last door has been knocked on, and its claim is written off as unprovable, not reported as a
    leak. `probed` means that events from inside the scheduler arrive and books are exact.
    `stream_end_is_ack`: when the engine itself ends the upstream stream after an abort, its
    scheduler has let go of the request (not so where a front end answers before the core has heard).
    """

    name: str
    doors: tuple[Door, ...] = (CLOSE_CONNECTION,)
    best_evidence: Evidence = Evidence.SENT
    probed: bool = False
    stream_end_is_ack: bool = False
    retry: RetryPolicy = RetryPolicy()

    @property
    def closes_first(self) -> bool:
        """Whether the connection is the first door outside: then it can be closed while the probe is being told."""
        outside = [door for door in self.doors[:2] if door.kind is not DoorKind.PROBE]
        return bool(outside) and outside[0].kind is DoorKind.CLOSE
