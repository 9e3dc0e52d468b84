"""Preemption inside the engine, by its probe: exact, since the engine itself keeps the request and goes on with it.

The order goes through the probe's channel; that it was carried out is said by the engine's own events, which move
the controller as they would for a preemption that the engine has thought of itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from stopguard.preemption.ways import (
    EXACT,
    Exactness,
    Gone,
    Parked,
    Refused,
    Running,
    Verdict,
    WayKind,
)
from stopguard.probe import wire
from stopguard.probe.collector import OrderResult
from stopguard.stops import Engine, Tracked

if TYPE_CHECKING:
    from stopguard.gateway.probing import Probing
    from stopguard.gateway.server import Gateway

__all__ = ["InsideWay"]

_NO_PROBE: Final = Verdict(Exactness.NEVER, "no_probe")
_NOT_THERE: Final = Verdict(Exactness.NEVER, "not_in_scheduler")
_EVENT_SECONDS: Final = 4.0


class InsideWay:
    """The way through the probes of a gateway's engines."""

    kind = WayKind.INSIDE

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def can(self, tracked: Tracked) -> Verdict:
        """Exact wherever every rank of its engine has a probe that preempts, and the scheduler has the request."""
        probing = self._gateway.probing
        if probing is None or not tracked.probed or tracked.profile is None:
            return _NO_PROBE
        name = tracked.profile.name
        if not (probing.can(name, "preempt") and probing.can(name, "resume")):
            return _NO_PROBE
        return EXACT if tracked.part_places else _NOT_THERE

    async def preempt(self, tracked: Tracked) -> Parked | Refused | Gone:
        """Have the scheduler take its room away between two steps; done when it says that it has."""
        before = tracked.ledgers.tokens_recomputed
        refused = await self._order(tracked, "preempt")
        if refused is not None:
            return refused
        state = await self._until(tracked, Engine.PREEMPTING)
        if state is Engine.PARKED:
            return Parked(max(0, tracked.ledgers.tokens_recomputed - before))
        return Refused("no_event") if state in (Engine.PREEMPTING, Engine.DISPATCHED) else Gone()

    async def resume(self, tracked: Tracked) -> Running | Refused | Gone:
        """Let the scheduler have it back; done when it says that it runs."""
        refused = await self._order(tracked, "resume")
        if refused is not None:
            return refused
        state = await self._until(tracked, Engine.RESUMING)
        if state in (Engine.DISPATCHED, Engine.RESUMING):
            # Still RESUMING: it is in the engine's queue again, and the engine decides when it runs.
            return Running()
        return Refused("preempted_again") if state is Engine.PARKED else Gone()

    async def _order(self, tracked: Tracked, action: wire.Action) -> Refused | Gone | None:
        probing: Probing | None = self._gateway.probing
        if probing is None or tracked.profile is None:
            return Refused("no_probe")
        return _refusal(await probing.order(tracked.profile.name, action, tracked.request_id))

    async def _until(self, tracked: Tracked, state: Engine) -> Engine:
        """The machine's state once it is not `state` any more, or after some seconds."""
        probing = self._gateway.probing
        if probing is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EVENT_SECONDS):
                    while tracked.machine.engine is state:
                        await probing.next_frame()
        return tracked.machine.engine


def _refusal(result: OrderResult) -> Refused | Gone | None:
    if result.answer in ("applied", "accepted"):
        return None
    if result.answer in ("gone", "unknown"):
        return Gone()
    return Refused(result.detail or result.answer, result.retry_after_seconds)
