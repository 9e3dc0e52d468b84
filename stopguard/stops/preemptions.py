"""Preemptions: a stop that lives on.

Two ways lead off an engine. *Inside*, the engine keeps the request (its own scheduler preempted it,
or a probe asked for it): it is PARKED, and RESUMED brings it back. *Shelved*, the gateway stopped it at
the engine and keeps what is needed to go on; it goes on by another `Controller.dispatch`.

A cancel outlives a preemption: whichever of the two comes first, what comes back is aborted, and
what was shelved is withdrawn, never sent again.
"""

from __future__ import annotations

from collections.abc import Sequence

from stopguard.errors import LimitReached
from stopguard.ledger import Account, Evidence
from stopguard.stops import movements
from stopguard.stops.cause import Semantics, Source, StopCause, prevails
from stopguard.stops.controller import NOTHING, STOPPING, Controller
from stopguard.stops.effects import Effect, Preempt, Resume
from stopguard.stops.machine import Engine, EngineEvent
from stopguard.stops.patience import TimerKind
from stopguard.stops.tracked import Tracked

__all__ = ["preempt", "preempted", "resume", "resume_refused", "resumed"]


def preempt(controller: Controller, tracked: Tracked, at: float, cause: StopCause) -> Sequence[Effect]:
    """Take the request off its engine; it will go on. Raises `LimitReached` when its books are nearly full."""
    if tracked.ledgers.nearly_full:
        raise LimitReached(
            "entries a request",
            tracked.ledgers.entry_limit,
            f"{tracked.request_id} was preempted too often: let it run",
        )
    tracked.machine.on_engine(EngineEvent.PREEMPT_SENT)
    if prevails(cause, tracked.cause):
        tracked.cause = cause
    movements.fold(tracked, at)
    tracked.ledgers.mark(at, f"preemption ordered ({cause.reason})")
    controller.arm(tracked, TimerKind.PREEMPT, at + controller.config.preempt_seconds)
    return (Preempt(tracked),)


def preempted(controller: Controller, tracked: Tracked, at: float, *, shelved: bool = False) -> Sequence[Effect]:
    """The engine has preempted it and keeps it, or (`shelved`) the gateway does."""
    machine = tracked.machine
    before = machine.engine
    machine.on_engine(EngineEvent.SHELVED if shelved else EngineEvent.PREEMPTED)
    controller.disarm(tracked, TimerKind.PREEMPT)
    if shelved and before in STOPPING:
        # The cancel overtook the preemption: what was stopped for it is simply stopped.
        movements.resolve_notices(tracked.ledgers, at, Evidence.STREAM_CLOSED)
        controller.conclude(tracked, "confirmed", Evidence.STREAM_CLOSED)
        return controller.engine_side_over(tracked, at, Evidence.STREAM_CLOSED)
    if machine.engine is Engine.WITHDRAWN and before is not Engine.WITHDRAWN:
        # It drained for a client that has left: there is nobody to go on for.
        movements.fold(tracked, at)
        movements.shelve(tracked.ledgers, at, Evidence.STREAM_CLOSED)
        controller.leave_engine(tracked)
        cause = StopCause(semantics=Semantics.CANCEL, source=Source.CLIENT, reason="shelved", observed_at=at)
        return controller.begin_stop(tracked, at, cause)
    if machine.engine in (Engine.PARKED, Engine.SHELVED) and before is not machine.engine:
        tracked.preemptions += 1
        movements.fold(tracked, at)
        tracked.ledgers.mark(at, "shelved at the gateway" if shelved else "preempted")
        if shelved:
            movements.shelve(tracked.ledgers, at, Evidence.STREAM_CLOSED)
            controller.leave_engine(tracked)
        elif not tracked.probed:
            movements.move_places(tracked.ledgers, at, Account.QUEUE_PREEMPTED)
    return NOTHING


def resume(controller: Controller, tracked: Tracked, at: float) -> Sequence[Effect]:
    """Let a parked request go on. A shelved one goes on by `Controller.dispatch`."""
    del controller  # the same signature as its siblings
    tracked.machine.on_engine(EngineEvent.RESUME_SENT)
    tracked.ledgers.mark(at, "resume ordered")
    return (Resume(tracked),)


def resume_refused(controller: Controller, tracked: Tracked, at: float) -> Sequence[Effect]:
    """The engine did not take it back: it is parked as before. Harmless when it has moved on meanwhile."""
    del controller  # the same signature as its siblings
    if tracked.machine.engine is Engine.RESUMING:
        tracked.machine.on_engine(EngineEvent.PREEMPTED)
        tracked.ledgers.mark(at, "not resumed")
    return NOTHING


def resumed(controller: Controller, tracked: Tracked, at: float) -> Sequence[Effect]:
    """The engine runs it again. If it was cancelled meanwhile, the abort is sent to what came back."""
    machine = tracked.machine
    machine.on_engine(EngineEvent.RESUMED)
    if machine.engine in STOPPING:
        tracked.ledgers.mark(at, "came back from a preemption after its cancel")
        return controller.knock_again(tracked, at)
    if machine.engine is Engine.DISPATCHED:
        if tracked.cause is not None and tracked.cause.semantics is Semantics.PREEMPT:
            tracked.cause = None
        if not tracked.probed:
            movements.move_places(tracked.ledgers, at, Account.QUEUE_RUNNING)
    return NOTHING
