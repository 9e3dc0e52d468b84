"""The data plane: a drop-in proxy that knows within a millisecond that nobody is listening.

Start at `server` (the gateway), then `exchange` (one request on its way), `downstream` and `upstream` (the two
connections it joins), `liveness` (how a client is known to be gone) and `head` (why nothing can be smuggled).
"""

from stopguard.gateway.server import Gateway, loop_factory
from stopguard.gateway.settings import (
    EngineSettings,
    GatewaySettings,
    HalfClose,
    Idempotency,
    Limits,
    Listener,
    Liveness,
    Policies,
    Timeouts,
)
from stopguard.gateway.statistics import GatewayStatistics

__all__ = [
    "EngineSettings",
    "Gateway",
    "GatewaySettings",
    "GatewayStatistics",
    "HalfClose",
    "Idempotency",
    "Limits",
    "Listener",
    "Liveness",
    "Policies",
    "Timeouts",
    "loop_factory",
]
