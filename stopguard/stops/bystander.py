"""Requests that do not pass through us: their books are opened by what the engine's own scheduler says.

Everything but the client's side can be seen from there. That side counts as over from the beginning (its stream
ledger is closed, with a note that says why), and as one whose engine may finish: nobody here stops anything because
of it. An abort that arrives in the scheduler is a stop that somebody else has ordered and carried out; it is
recorded with the same steps as ours, and nobody knocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from stopguard.ledger import Evidence
from stopguard.stops import movements
from stopguard.stops.cause import Semantics, Source, StopCause
from stopguard.stops.controller import NOTHING, Controller
from stopguard.stops.doors import Door, DoorKind, EngineProfile, RetryPolicy
from stopguard.stops.effects import Effect
from stopguard.stops.machine import ENGINE_ENDED, Client, ClientEvent
from stopguard.stops.tracked import Tracked

__all__ = ["bystander_profile", "lost_sight", "stop_seen", "take_in"]

_DOOR = Door(name="probe", kind=DoorKind.PROBE, worth=Evidence.PROBE)


def bystander_profile(name: str) -> EngineProfile:
    """An engine that is only watched: what its probe says, and the one door that the probe is."""
    return EngineProfile(
        name=name, doors=(_DOOR,), best_evidence=Evidence.PROBE, probed=True, retry=RetryPolicy(tries=3)
    )


def take_in(controller: Controller, request_id: str, at: float, profile: EngineProfile, model: str) -> Tracked:
    """Open the books of a request that the engine's scheduler has. Raises `LimitReached` when the book is full."""
    tracked = controller.admit(request_id, at, model=model, engine=profile.name)
    controller.dispatch(tracked, at, profile)
    tracked.machine.on_client(ClientEvent.GONE_DRAINING)
    movements.close_connection(tracked.ledgers, at, "its client talks to the engine itself")
    return tracked


def stop_seen(controller: Controller, tracked: Tracked, at: float, occurred_at: float) -> Sequence[Effect]:
    """An abort of it, which is not ours, has arrived in the scheduler."""
    machine = tracked.machine
    if machine.client is not Client.DRAINING or machine.engine in ENGINE_ENDED:
        return NOTHING
    cause = StopCause(
        semantics=Semantics.CANCEL,
        source=Source.ENGINE,
        reason="abort_seen",
        observed_at=at,
        occurred_at=min(at, occurred_at),
    )
    return controller.stop(tracked, at, cause)


def lost_sight(controller: Controller, engine: str, at: float, reason: str) -> Sequence[Effect]:
    """The probe is not heard any more, and nobody else will ever say how these requests end: give them up."""
    effects: list[Effect] = []
    for tracked in list(controller.in_engine.get(engine, {}).values()):
        effects += controller.engine_lost(tracked, at, reason)
        movements.fold(tracked, at)
        movements.give_up_engine_side(tracked.ledgers, at, f"nobody says how it ends ({reason})")
        controller.forget_parts(tracked)
        controller.leave_engine(tracked)
        effects += controller.try_settle(tracked, at)
    return effects
