"""A gateway of one engine, with clients in the same loop, and what became of its books."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

from stopguard.audit.client import SocketWorld
from stopguard.engines.registry import create
from stopguard.gateway.server import Gateway
from stopguard.gateway.settings import EngineSettings, GatewaySettings, Listener
from stopguard.ledger import RequestLedgers
from stopguard.stops import Effect, StopConfig, effects


class Front:
    """A gateway and its closed books."""

    def __init__(self, gateway: Gateway, world: SocketWorld, closed: list[RequestLedgers]) -> None:
        self.gateway = gateway
        self.world = world
        self.closed = closed

    async def settled(self, count: int, seconds: float = 60.0) -> list[RequestLedgers]:
        """The first `count` closed books."""
        due_at = monotonic() + seconds
        while len(self.closed) < count:
            assert monotonic() < due_at, f"{len(self.closed)} of {count} books closed"
            await asyncio.sleep(0.02)
        return self.closed[:count]


@contextlib.asynccontextmanager
async def front(
    kind: str, url: str, *, concurrent_requests: int = 0, settle_seconds: float = 20.0, ejected_seconds: float = 0.5
) -> AsyncIterator[Front]:
    """A gateway in front of `url`, ready."""
    engine = create(kind, kind, url)
    limit: dict[str, Any] = {"concurrent_requests": concurrent_requests} if concurrent_requests else {}
    gateway = Gateway(
        [(engine, EngineSettings(ejected_seconds=ejected_seconds, refresh_seconds=0.5, **limit))],
        GatewaySettings(listeners=(Listener(port=0),)),
        stop_config=StopConfig(settle_seconds=settle_seconds, write_off_seconds=120.0),
    )
    closed: list[RequestLedgers] = []

    def watch(effect: Effect, at: float) -> None:
        if isinstance(effect, effects.Settled):
            closed.append(effect.tracked.ledgers)

    gateway.observers.append(watch)
    await gateway.start()
    host, port = gateway.addresses[0]
    world = SocketWorld(f"http://{host}:{port}", url)
    try:
        member = gateway.fleet.members[0]
        due_at = monotonic() + 30.0
        while member.identity is None:
            assert monotonic() < due_at, "the gateway does not get to know the engine"
            await asyncio.sleep(0.02)
        yield Front(gateway, world, closed)
    finally:
        await world.aclose()
        await gateway.shutdown(drain_seconds=0.0)
