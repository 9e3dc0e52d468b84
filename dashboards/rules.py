"""Prometheus rules: what is worth recording, and the eight alerts.

Times are in seconds and are written with a scale, so that a test can run the same rules twenty times faster
against a Prometheus that scrapes every second.
"""

from __future__ import annotations

import json

import msgspec

from dashboards.boards import OBJECTIVE_SECONDS
from dashboards.expressions import increase, pick, quantile, rate, ratio, stopped

__all__ = ["ALERTS", "Alert", "Recording", "alerts", "recordings", "to_yaml"]

_INTERVAL = 15
_SHORT = 300
_LONG = 600
_BY = "job, engine"
_RUNBOOK = "docs/dashboards.md#"

UNCONFIRMED_RATIO_MAX = 0.01
PREEMPTIONS_A_REQUEST_MAX = 0.25


class Recording(msgspec.Struct, frozen=True):
    """A series that is computed ahead, named LABELS:METRIC:OPERATION."""

    record: str
    expr: str


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One alert. `lasts` is how long the expression must hold, in seconds before scaling."""

    alert: str
    expr: str
    lasts: int
    severity: str
    summary: str
    description: str


def duration(seconds: float) -> str:
    """A PromQL duration: ``5m``, ``90s``, ``1500ms``."""
    milliseconds = round(seconds * 1000)
    for size, unit in ((3_600_000, "h"), (60_000, "m"), (1000, "s")):
        if milliseconds >= size and milliseconds % size == 0:
            return f"{milliseconds // size}{unit}"
    return f"{milliseconds}ms"


def recordings(scale: float = 1.0) -> tuple[Recording, ...]:
    """What dashboards of services around StopGuard may want, without knowing its histograms."""
    window = duration(_SHORT * scale)
    ended = 'semantics!="preempt"'
    return (
        Recording(
            "job_engine:stopguard_stop_to_settled_seconds:p99_5m",
            quantile(0.99, "stopguard_stop_to_settled_seconds", by=_BY, where="", window=window),
        ),
        Recording(
            "job_engine:stopguard_stop_to_settled_seconds:p50_5m",
            quantile(0.5, "stopguard_stop_to_settled_seconds", by=_BY, where="", window=window),
        ),
        Recording(
            "job_engine:stopguard_stops:rate5m",
            rate("stopguard_stops_total", by=f"{_BY}, semantics, outcome", where="", window=window),
        ),
        Recording(
            "job_engine:stopguard_unconfirmed_stops:ratio_rate5m",
            ratio(
                rate("stopguard_stops_total", by=_BY, where=f'{stopped("")}, outcome="unconfirmed"', window=window),
                rate("stopguard_stops_total", by=_BY, where=stopped(""), window=window),
            ),
        ),
        Recording(
            "job_engine:stopguard_wasted_tokens:ratio_rate5m",
            ratio(
                rate("stopguard_tokens_total", by=_BY, where='disposition!="delivered"', window=window),
                rate("stopguard_tokens_total", by=_BY, where="", window=window),
            ),
        ),
        Recording(
            "job_engine:stopguard_preemptions_per_request:ratio_rate5m",
            ratio(
                rate("stopguard_preemptions_total", by=_BY, where='reason="engine"', window=window),
                rate("stopguard_stops_total", by=_BY, where=ended, window=window),
            ),
        ),
    )


def alerts(scale: float = 1.0) -> tuple[Alert, ...]:
    """The alerts; `docs/dashboards.md` says for each what to look at first."""
    long, orphaned = duration(_LONG * scale), duration(120 * scale)
    return (
        Alert(
            alert="StopGuardLeak",
            expr=f"{increase('stopguard_leaks_total', by=f'{_BY}, ledger', where='', window=long)} > 0",
            lasts=0,
            severity="critical",
            summary="{{ $labels.engine }} leaks: its {{ $labels.ledger }} ledger",
            description="Something was due from {{ $labels.engine }} and has not come. GET /leaks names the requests.",
        ),
        Alert(
            alert="StopGuardSlowStops",
            expr=f"job_engine:stopguard_stop_to_settled_seconds:p99_5m > {OBJECTIVE_SECONDS}",
            lasts=300,
            severity="warning",
            summary="Stops at {{ $labels.engine }} take {{ $value | humanizeDuration }}",
            description="The slowest hundredth of stops takes longer than the objective to close all five ledgers.",
        ),
        Alert(
            alert="StopGuardUnconfirmedStops",
            expr=f"job_engine:stopguard_unconfirmed_stops:ratio_rate5m > {UNCONFIRMED_RATIO_MAX}",
            lasts=300,
            severity="warning",
            summary="{{ $value | humanizePercentage }} of the stops at {{ $labels.engine }} are not confirmed",
            description="Aborts were sent and nothing proves that they were carried out.",
        ),
        Alert(
            alert="StopGuardOrphanWork",
            expr=f"min_over_time({pick('stopguard_orphans', '')}[{orphaned}]) > 0",
            lasts=60,
            severity="critical",
            summary="{{ $labels.engine }} has {{ $value }} {{ $labels.unit }} ({{ $labels.ledger }}) that nobody owns",
            description="The engine's own gauges show more than all known requests own, in every comparison.",
        ),
        Alert(
            alert="StopGuardProbeGap",
            expr=f"{increase('stopguard_probe_gaps_total', by=_BY, where='', window=long)} > 0",
            lasts=0,
            severity="warning",
            summary="Frames of the probe in {{ $labels.engine }} are missing",
            description="What was said in them is unknown until the next snapshot; the books may show phantoms.",
        ),
        Alert(
            alert="StopGuardPreemptionThrash",
            expr=f"job_engine:stopguard_preemptions_per_request:ratio_rate5m > {PREEMPTIONS_A_REQUEST_MAX}",
            lasts=300,
            severity="warning",
            summary="{{ $labels.engine }} preempts {{ $value | humanize }} times for each request that ends",
            description="Its KV memory is too small for what it was given, so it computes the same tokens again.",
        ),
        Alert(
            alert="StopGuardBookErrors",
            expr=f"{increase('stopguard_book_errors_total', by='job', where='', window=long)} > 0",
            lasts=0,
            severity="warning",
            summary="An engine says what cannot be true",
            description="Like a second release of the same block. GET /books has the latest ones in words.",
        ),
        Alert(
            alert="StopGuardEngineDown",
            expr=f"{pick('stopguard_engine_up', '')} == 0",
            lasts=60,
            severity="critical",
            summary="{{ $labels.engine }} does not answer",
            description="It was ejected after several failures in a row and is asked again with growing pauses.",
        ),
    )


ALERTS = tuple(alert.alert for alert in alerts())


def to_yaml(scale: float = 1.0) -> str:
    """The rule file. Strings are quoted as in JSON, which YAML reads as they are."""
    lines = [
        "# Written by `python -m dashboards.generate`; change dashboards/rules.py instead.",
        "groups:",
        "  - name: stopguard-recordings",
        f"    interval: {duration(_INTERVAL * scale)}",
        "    rules:",
    ]
    for recording in recordings(scale):
        lines += [f"      - record: {recording.record}", f"        expr: {_quoted(recording.expr)}"]
    lines += ["  - name: stopguard-alerts", f"    interval: {duration(_INTERVAL * scale)}", "    rules:"]
    for alert in alerts(scale):
        lines += [f"      - alert: {alert.alert}", f"        expr: {_quoted(alert.expr)}"]
        if alert.lasts:
            lines.append(f"        for: {duration(alert.lasts * scale)}")
        lines += [
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {_quoted(alert.summary)}",
            f"          description: {_quoted(alert.description)}",
            f"          runbook: {_quoted(_RUNBOOK + alert.alert.lower())}",
        ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
