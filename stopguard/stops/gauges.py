"""Evidence from outside: what an engine's aggregate numbers prove about our stops, and its death."""

from __future__ import annotations

from collections.abc import Sequence

from stopguard.ledger import EngineGauges, Evidence
from stopguard.stops import movements
from stopguard.stops.controller import NOTHING, STOPPING, Controller
from stopguard.stops.effects import Effect, Observe
from stopguard.stops.tracked import Tracked

__all__ = ["engine_died", "observe_gauges"]


def observe_gauges(controller: Controller, engine: str, at: float, gauges: EngineGauges) -> Sequence[Effect]:
    """If the engine runs no more requests than we have live ones there, every stop has happened.

    That holds for the stops that were notified before the gauges were read. With one request more,
    nothing can be said about any of them, and the gauges are wanted again.

    One reading is proof only when the engine runs nothing at all. Otherwise a live request may just have
    ended without our knowing, and what seems to have room is the one that was not stopped; so the same must
    be seen again, `StopConfig.gauge_apart_seconds` later, when we know of that end.
    """
    members = controller.in_engine.get(engine)
    if not members or gauges.running is None or gauges.waiting is None:
        return NOTHING
    stopping = [tracked for tracked in members.values() if tracked.machine.engine in STOPPING]
    told = []
    for tracked in stopping:
        stop = tracked.ledgers.stop
        if stop is not None and stop.notified_at is not None and stop.notified_at < _known_at(tracked, gauges):
            told.append(tracked)
    if not told:
        return (Observe(engine),) if stopping and gauges.holds_since is not None else NOTHING
    in_engine = gauges.running + gauges.waiting
    if in_engine > len(members) - len(stopping):
        for tracked in told:
            tracked.cleared_at = None
        return (Observe(engine),)
    effects: list[Effect] = []
    unsure = False
    for tracked in told:
        if tracked.cleared_at is None:
            tracked.cleared_at = gauges.at
        if in_engine == 0 or gauges.at - tracked.cleared_at >= controller.config.gauge_apart_seconds:
            effects += controller.acknowledged(tracked, at, Evidence.GAUGE)
        else:
            unsure = True
    if unsure:
        effects.append(Observe(engine))
    return effects


def _known_at(tracked: Tracked, gauges: EngineGauges) -> float:
    """The moment of which the gauges speak, as far as this request goes.

    Gauges that are behind contain whatever has had output. What has had none may have come after them, so that its
    absence says nothing before they are known to be newer.
    """
    if gauges.holds_since is None or tracked.output_started:
        return gauges.at
    return gauges.holds_since


def engine_died(controller: Controller, engine: str, at: float, reason: str) -> Sequence[Effect]:
    """The engine's process is gone, and with it everything that it held."""
    effects: list[Effect] = []
    for tracked in list(controller.in_engine.get(engine, {}).values()):
        effects += controller.engine_lost(tracked, at, reason)
        movements.release_engine_side(tracked.ledgers, at, Evidence.STREAM_CLOSED, "the engine is gone")
        controller.forget_parts(tracked)
        effects += controller.try_settle(tracked, at)
    return effects
