"""`SpanFacts` as OpenTelemetry's own span objects. The only module that imports OpenTelemetry's SDK."""

from __future__ import annotations

from typing import Protocol

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from stopguard import __version__
from stopguard.telemetry.spans import SpanFacts

__all__ = ["Build", "builder"]

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class Build(Protocol):
    """Makes one span. Ids are whole numbers; `offset_seconds` added to book time is wall time."""

    def __call__(
        self,
        facts: SpanFacts,
        trace_id: int,
        span_id: int,
        parent_id: int | None,
        offset_seconds: float,
        *,
        server: bool,
    ) -> ReadableSpan: ...


def builder(service_name: str) -> Build:
    """A maker of spans of the service `service_name` (`OTEL_SERVICE_NAME` and resource attributes go before)."""
    resource = Resource({"service.name": service_name, "service.version": __version__}).merge(Resource.create())
    scope = InstrumentationScope("stopguard", __version__)

    def build(
        facts: SpanFacts,
        trace_id: int,
        span_id: int,
        parent_id: int | None,
        offset_seconds: float,
        *,
        server: bool,
    ) -> ReadableSpan:
        def nanoseconds(at: float) -> int:
            return int((at + offset_seconds) * 1e9)

        return ReadableSpan(
            name=facts.name,
            context=SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED),
            # The parent of a stop's span is ours, that of a request's is its client's.
            parent=None if parent_id is None else SpanContext(trace_id, parent_id, server, _SAMPLED),
            resource=resource,
            attributes=facts.attributes,
            events=[Event(event.name, event.attributes, nanoseconds(event.at)) for event in facts.events],
            kind=SpanKind.SERVER if server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, facts.error_text) if facts.error else Status(StatusCode.UNSET),
            start_time=nanoseconds(facts.started_at),
            end_time=nanoseconds(facts.ended_at),
            instrumentation_scope=scope,
        )

    return build
