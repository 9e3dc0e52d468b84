"""Metrics and traces: what StopGuard tells the outside about its stops.

Start at `catalogue` (every metric that exists), then `metrics` (the observer of effects, and what a scrape gets),
`collector` (how the books are read while the relay works), and `tracing` (spans, made when books close).
"""

from stopguard.telemetry.catalogue import CATALOGUE, Metric
from stopguard.telemetry.metrics import Telemetry, create_telemetry
from stopguard.telemetry.tracing import Tracer, create_tracer, endpoint_from, tracer_from

__all__ = [
    "CATALOGUE",
    "Metric",
    "Telemetry",
    "Tracer",
    "create_telemetry",
    "create_tracer",
    "endpoint_from",
    "tracer_from",
]
