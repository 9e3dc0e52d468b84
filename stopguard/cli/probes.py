"""Where probes are tied to a gateway and to its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stopguard.gateway.probing import ProbeSettings, Probing
    from stopguard.gateway.server import Gateway
    from stopguard.telemetry.metrics import Telemetry

__all__ = ["listen_for_probes"]


def listen_for_probes(
    gateway: Gateway,
    settings: ProbeSettings | None,
    kinds: Mapping[str, str],
    telemetry: Telemetry,
    *,
    bystander: bool = False,
) -> Probing | None:
    """Make `gateway` listen for probes, where `settings` say so; the caller starts it, and closes it at the end."""
    if settings is None:
        return None
    from stopguard.gateway.probing import Probing

    probing = Probing(
        gateway,
        settings,
        kinds,
        bystander=bystander,
        on_frame=telemetry.probe_frame,
        on_gap=telemetry.probe_gap,
    )
    telemetry.probes = probing.numbers
    return probing
