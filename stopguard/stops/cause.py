"""Why a request stops: four meanings, never merged, and who started it.

A `StopCause` travels with the request from the moment the stop is observed. The first cause stays,
with one exception: a cancel or a failure replaces a preemption that is under way, since a
preemption means that the request lives on and the newer cause says that it does not.
"""

from __future__ import annotations

import enum

import msgspec

__all__ = ["Semantics", "Source", "StopCause", "prevails"]


class Semantics(enum.StrEnum):
    """What a stop means for the work and for the client."""

    CANCEL = "cancel"
    """The client wants it no more: nothing is recomputed."""
    PREEMPT = "preempt"
    """A more urgent request needs the room: the stream pauses and goes on."""
    FINISH = "finish"
    """The model is done."""
    FAIL = "fail"
    """Something broke or was refused; the client is told whether a retry is safe."""


class Source(enum.StrEnum):
    """Who or what started the stop."""

    CLIENT = "client"
    """The client's connection ended."""
    API = "api"
    """Somebody called the cancel API."""
    DEADLINE = "deadline"
    SUPERSEDED = "superseded"
    """A retry with the same idempotency key took its place."""
    PREEMPTION = "preemption"
    MODEL = "model"
    ENGINE = "engine"
    GATEWAY = "gateway"
    """A limit, a refusal, a shutdown of StopGuard itself."""


class StopCause(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One stop's reason.

    `observed_at` is when StopGuard knew, `occurred_at` when it really happened, where that is known
    (both in monotonic seconds). `reason` is a short stable word (eof, reset, stall, total_deadline,
    shutdown, …) and `actor` names who ordered it, never with a secret in it.
    """

    semantics: Semantics
    source: Source
    reason: str
    observed_at: float
    actor: str = ""
    occurred_at: float | None = None


def prevails(new: StopCause, current: StopCause | None) -> bool:
    """Whether `new` becomes the request's cause."""
    return current is None or (current.semantics is Semantics.PREEMPT and new.semantics is not Semantics.PREEMPT)
