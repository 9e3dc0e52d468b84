"""Traces: every closed request becomes spans, which a thread sends to an OTLP receiver over HTTP.

Theory
------
Spans are made when the books of a request are closed, out of the books. Nothing is kept for a request while it
runs but the client's `traceparent`, in the labels of its own ledgers, so nothing can outlive it; and the relay's
thread does no more than put closed books in a bounded queue (OpenTelemetry's own tracer costs it 172
microseconds a sampled request, and 51 when nothing records). When the queue is full the span is dropped and
counted: a receiver that is away costs the relay nothing.

The engine gets the client's `traceparent` untouched, so its spans are siblings of ours.

OpenTelemetry (`stopguard[otel]`) is imported by `create_tracer`, and only with an endpoint. Without one there is
no tracer at all.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stopguard.errors import ConfigurationError
from stopguard.ledger import RequestLedgers
from stopguard.telemetry.spans import spans_of
from stopguard.telemetry.trace_context import parse

if TYPE_CHECKING:
    from stopguard.telemetry.otel_spans import Build

__all__ = ["OPERATION", "TRACEPARENT", "TRACE_ID", "Tracer", "create_tracer", "endpoint_from", "tracer_from"]

logger = logging.getLogger("stopguard.telemetry")

TRACEPARENT = "traceparent"
TRACE_ID = "trace_id"
OPERATION = "operation"

QUEUE_MAX = 8192
_BATCH = 256
_PAUSE_SECONDS = 1.0
_EXPORT_SECONDS = 5.0

_SAMPLERS = {"always_on": 1.0, "always_off": 0.0}

_Closed = tuple[RequestLedgers, float]


class Tracer:
    """The queue, its thread, and what turns `SpanFacts` into OTLP. Made by `create_tracer`.

    `ratio` is the share of requests that are traced when their client did not decide it (its `traceparent`'s
    sampled flag does). `dropped` counts the spans of requests that could not be sent.
    """

    def __init__(self, exporter: Any, build: Build, *, ratio: float, queue_max: int = QUEUE_MAX) -> None:
        self.dropped = 0
        self._exporter = exporter
        self._build = build
        self._ratio = ratio
        self._queue: deque[_Closed] = deque()
        self._queue_max = queue_max
        self._random = random.SystemRandom()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
        self._thread.start()

    # ---- the relay's side ------------------------------------------------------------------------

    def admitted(self, labels: dict[str, str], traceparent: str, operation: str) -> None:
        """Decide whether a request is traced, and as part of which trace; noted in `labels`."""
        if operation:
            labels[OPERATION] = operation
        if traceparent:
            labels[TRACEPARENT] = traceparent
            context = parse(traceparent)
            if context is not None and context.sampled:
                labels[TRACE_ID] = context.trace_id
        elif self._random.random() < self._ratio:
            labels[TRACE_ID] = f"{self._random.getrandbits(128) | 1:032x}"

    def ended(self, ledgers: RequestLedgers, at: float) -> None:
        """The books of a request are closed: have its spans sent, if it is traced. Never waits."""
        labels = ledgers.labels
        if labels is None or TRACE_ID not in labels:
            return
        if len(self._queue) >= self._queue_max:
            self.dropped += 1
            return
        self._queue.append((ledgers, at))
        if len(self._queue) >= _BATCH:
            self._wake.set()

    # ---- life --------------------------------------------------------------------------------------

    def close(self, timeout_seconds: float = _EXPORT_SECONDS) -> None:
        """Send what is queued, for at most `timeout_seconds`, and end the thread. Harmless twice."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            self._exporter.shutdown()  # ends a retry that waits
            self._thread.join(1.0)
        else:
            self._exporter.shutdown()

    def _run(self) -> None:
        while True:
            self._wake.wait(_PAUSE_SECONDS)
            self._wake.clear()
            stopping = self._stopping
            while self._queue:
                self._send([self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))])
            if stopping:
                return

    def _send(self, closed: list[_Closed]) -> None:
        # Book seconds to nanoseconds since 1970.
        offset = time.time() - time.monotonic()
        try:
            spans = [span for ledgers, at in closed for span in self._spans(ledgers, at, offset)]
            sent = self._exporter.export(spans).name == "SUCCESS"
        except Exception:  # the thread must live: a span is worth less than the next one
            logger.exception("spans could not be sent")
            sent = False
        if not sent:
            self.dropped += len(closed)

    def _spans(self, ledgers: RequestLedgers, at: float, offset: float) -> list[Any]:
        labels = ledgers.labels or {}
        request, stop = spans_of(ledgers, labels.get(OPERATION, ""), at)
        parent = parse(labels.get(TRACEPARENT, ""))
        trace_id = int(labels[TRACE_ID], 16)
        span_id = self._random.getrandbits(64) | 1
        spans = [
            self._build(
                request, trace_id, span_id, None if parent is None else int(parent.span_id, 16), offset, server=True
            )
        ]
        if stop is not None:
            spans.append(self._build(stop, trace_id, self._random.getrandbits(64) | 1, span_id, offset, server=False))
        return spans


def endpoint_from(environment: Mapping[str, str]) -> str:
    """The OTLP endpoint that OpenTelemetry's usual variables name, or nothing."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    exact = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    base = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    return exact or (f"{base.rstrip('/')}/v1/traces" if base else "")


def tracer_from(environment: Mapping[str, str]) -> Tracer | None:
    """The tracer that OpenTelemetry's usual variables ask for; `None` when they name no endpoint.

    `OTEL_TRACES_SAMPLER_ARG` is the share of requests whose client did not decide, under the samplers `traceidratio`
    and `parentbased_traceidratio`; without a sampler it is all of them. Raises `ConfigurationError`.
    """
    sampler = environment.get("OTEL_TRACES_SAMPLER", "").lower().removeprefix("parentbased_")
    if sampler not in ("", *_SAMPLERS, "traceidratio"):
        raise ConfigurationError(
            f"OTEL_TRACES_SAMPLER: there is no {sampler!r} here; use always_on, always_off or traceidratio"
        )
    given = environment.get("OTEL_TRACES_SAMPLER_ARG", "1")
    try:
        ratio = _SAMPLERS.get(sampler or "always_on", -1.0)
        ratio = float(given) if ratio < 0 else ratio
    except ValueError:
        raise ConfigurationError(f"OTEL_TRACES_SAMPLER_ARG: {given!r} is no number between 0 and 1") from None
    return create_tracer(endpoint_from(environment), ratio=ratio)


def create_tracer(
    endpoint: str | None,
    *,
    ratio: float = 1.0,
    headers: Mapping[str, str] | None = None,
    service_name: str = "stopguard",
    timeout_seconds: float = _EXPORT_SECONDS,
    queue_max: int = QUEUE_MAX,
) -> Tracer | None:
    """A tracer that sends to `endpoint` (an URL that ends in ``/v1/traces``); `None` without one.

    Raises `ConfigurationError` when the endpoint is no URL, the ratio is no share, or OpenTelemetry is missing.
    """
    if not endpoint:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigurationError(f"the OTLP endpoint must be an http:// or https:// URL, not {endpoint!r}")
    if not 0.0 <= ratio <= 1.0:
        raise ConfigurationError(f"the share of traced requests is between 0 and 1, not {ratio}")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415  (an extra)
            OTLPSpanExporter,
        )

        from stopguard.telemetry.otel_spans import builder  # noqa: PLC0415  (needs the same extra)
    except ImportError as error:
        raise ConfigurationError(
            f"traces need OpenTelemetry ({error.name} is missing): pip install 'stopguard[otel]'"
        ) from error
    exporter = OTLPSpanExporter(endpoint=endpoint, headers=dict(headers) if headers else None, timeout=timeout_seconds)
    # A receiver that is away is told by `stopguard_spans_dropped_total`, not by a line a second.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    return Tracer(exporter, builder(service_name), ratio=ratio, queue_max=queue_max)
