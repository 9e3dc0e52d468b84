"""What `stopguard demo` runs on: reference engine, gateway and clients, in one process, over real sockets.

The engine's frames go straight to the gateway's controller, as a probe inside a real engine would send
them; so the books are exact, and every stop is proved by the scheduler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

import msgspec

from stopguard.engines.ids import with_our_ids
from stopguard.engines.registry import create
from stopguard.errors import StopGuardError
from stopguard.gateway.server import Gateway, loop_factory
from stopguard.gateway.settings import EngineSettings, GatewaySettings, Listener
from stopguard.ledger import Evidence, RequestLedgers
from stopguard.probe import wire
from stopguard.refengine import EngineConfig, ReferenceEngine
from stopguard.refengine.http_face import Face, FaceOptions
from stopguard.refengine.http_server import serving
from stopguard.stops import Effect, Semantics, Source, StopCause, StopConfig, effects, observe_frame
from stopguard.testing.live import LiveStorm
from stopguard.testing.plan import StormPlan
from stopguard.testing.report import StormReport

__all__ = ["DemoRig", "run_rig"]

_ENGINE = "reference"
#: Its pool is too small for the storm, so that it has to preempt.
_SMALL_ENGINE = EngineConfig(blocks=96, max_running=16, host_blocks=32)
_PATIENCE_SECONDS = 5.0
_SETTLE_SECONDS = 3.0
_POLL_SECONDS = 0.05


class DemoRig:
    """One storm through a real gateway. `settled` and `gateway` may be read while it runs."""

    def __init__(
        self,
        plan: StormPlan,
        policy: str,
        faults: tuple[str, ...],
        *,
        on_closed: Callable[[RequestLedgers], None] | None = None,
    ) -> None:
        self.plan = plan
        self.engine = ReferenceEngine(
            EngineConfig(blocks=400, max_running=16, host_blocks=32), policy, faults, plan.seed
        )
        self.report = StormReport(seed=plan.seed, policy=policy, faults=faults)
        self.gateway: Gateway | None = None
        self.started_at = monotonic()
        self._on_closed = on_closed
        self._storm: LiveStorm | None = None

    async def run(self, show: Callable[[DemoRig], None]) -> StormReport:
        """Run the storm to its end; `show` is called now and then."""
        face = Face(self.engine, options=FaceOptions(dev_mode=True), on_frame=self._on_frame, seed=self.plan.seed)
        async with serving(face) as url:
            adapter = create("ref", _ENGINE, url)
            adapter.profile = msgspec.structs.replace(adapter.profile, best_evidence=Evidence.PROBE, probed=True)
            self.gateway = Gateway(
                [(adapter, EngineSettings())],
                GatewaySettings(listeners=(Listener(port=0),)),
                stop_config=StopConfig(settle_seconds=_SETTLE_SECONDS, write_off_seconds=600.0),
            )
            self.gateway.observers.append(self._on_effect)
            await self.gateway.start()
            host, port = self.gateway.addresses[0]
            self.started_at = monotonic()
            self._storm = LiveStorm(
                self.plan, f"http://{host}:{port}", patience_seconds=_PATIENCE_SECONDS, fail=self._fail
            )
            clients = asyncio.create_task(self._storm.run())
            while not clients.done() or self._unsettled:
                show(self)
                await asyncio.sleep(_POLL_SECONDS)
            await clients
            show(self)
            elapsed = monotonic() - self.started_at
            snapshot = None if self.engine.crashed else self.engine.snapshot(self.engine.now)
            self.report.steps = self.engine.gauges().steps_total
            self.report.close(self.gateway.controller, elapsed, snapshot)
            await self.gateway.shutdown(drain_seconds=0.0)
        return self.report

    def _fail(self, request_id: str) -> None:
        """Stop a request as an operator would whose machine goes down."""
        gateway = self.gateway
        tracked = gateway.controller.tracked.get(request_id) if gateway is not None else None
        if gateway is not None and tracked is not None:
            cause = StopCause(
                semantics=Semantics.FAIL,
                source=Source.GATEWAY,
                reason="operator",
                observed_at=monotonic(),
                actor="demo",
            )
            gateway.stop(tracked, cause)

    @property
    def _unsettled(self) -> bool:
        """Whether a request is open that may still settle or leak."""
        gateway = self.gateway
        return gateway is not None and any(not request.overdue for request in gateway.book)

    @property
    def settled(self) -> int:
        """How many requests have left the book."""
        return self.report.requests

    def _on_frame(self, frame: wire.Frame) -> None:
        gateway = self.gateway
        if gateway is not None and frame.events:
            at = monotonic()
            gateway.carry_out(observe_frame(gateway.controller, _ENGINE, at, with_our_ids(frame)), at)

    def _on_effect(self, effect: Effect, at: float) -> None:
        if isinstance(effect, effects.Settled):
            self.report.add(effect.tracked)
            if self._on_closed is not None:
                self._on_closed(effect.tracked.ledgers)


def run_rig(rig: DemoRig, show: Callable[[DemoRig], None]) -> StormReport:
    """Run the rig in an event loop of its own."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            return runner.run(rig.run(show))
        except ExceptionGroup as group:
            known = group.subgroup(StopGuardError)
            raise known.exceptions[0] if known is not None else group from None
