"""Where metrics and traces are tied to a gateway: it knows nothing of them, and they only observe it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stopguard.gateway.exchange import Exchange
    from stopguard.gateway.server import Gateway
    from stopguard.telemetry.metrics import Telemetry

__all__ = ["observe"]


def observe(
    gateway: Gateway, environment: Mapping[str, str], kinds: Mapping[str, str] = MappingProxyType({})
) -> Telemetry:
    """Metrics for `gateway`, and traces when OpenTelemetry's variables name an endpoint.

    `kinds` are the kinds of the engines that were configured, or found, by name.

    The caller closes `telemetry.tracer`, if there is one, when the gateway has shut down.
    """
    from stopguard.telemetry.metrics import create_telemetry
    from stopguard.telemetry.tracing import tracer_from

    members = {member.engine.name: member for member in gateway.fleet.members}
    telemetry = create_telemetry(
        gateway.book,
        gateway.controller,
        [member.profile for member in members.values()],
        lambda name: tuple(members[name].models or ()),
        healthy=lambda name: members[name].healthy,
        tracer=tracer_from(environment),
    )
    telemetry.identities = lambda: {
        name: (kinds.get(name, identity.kind), identity.version)
        for name, member in members.items()
        if (identity := member.identity) is not None
    }
    if gateway.preempting is not None:
        telemetry.preemption = gateway.preempting.numbers
    if gateway.parking is not None:
        telemetry.continuation = gateway.parking.numbers
    gateway.observers.append(telemetry)
    if telemetry.tracer is not None:

        def admitted(exchange: Exchange) -> None:
            telemetry.admitted(exchange.tracked, exchange.head.forward, exchange.kind.value)

        gateway.on_admitted = admitted
    return telemetry
