"""What a closed request looks like as spans: plain values, no exporter and no library.

One request is a SERVER span ``chat MODEL``, whose parent is the client's span. If it was stopped it has a child
``stopguard.stop`` with an event for each step. A stop that is confirmed is no error: status unset, and
``stopguard.outcome`` says cancelled. An error has the status ERROR and one of four `error.type`:

* ``leak``: a ledger was open at its deadline;
* ``stop_unconfirmed``: nobody knows whether the engine let go of it;
* ``watchdog``: one of StopGuard's own deadlines ended it, not the client;
* ``request_failed``: the engine or the gateway could not go on with it.

`gen_ai.*` attributes are only on spans: those conventions are still in development.
"""

from __future__ import annotations

import msgspec

from stopguard.ledger import Account, RequestLedgers, StopSummary

__all__ = ["SpanEvent", "SpanFacts", "spans_of"]

_OPERATIONS = {
    "chat": "chat",
    "responses": "chat",
    "messages": "chat",
    "completions": "text_completion",
    "native": "text_completion",
    "embeddings": "embeddings",
}
"""Kinds of routes in the words of OpenTelemetry's generative-AI conventions; others keep their own."""

Attributes = dict[str, str | int | float | bool]


class SpanEvent(msgspec.Struct, frozen=True):
    """One step; `at` in book seconds."""

    name: str
    at: float
    attributes: Attributes = {}


class SpanFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One span; times in book seconds. `error` is an `error.type`, or empty for an unset status."""

    name: str
    started_at: float
    ended_at: float
    attributes: Attributes
    events: tuple[SpanEvent, ...] = ()
    error: str = ""
    error_text: str = ""


def spans_of(ledgers: RequestLedgers, operation: str, ended_at: float) -> tuple[SpanFacts, SpanFacts | None]:
    """The request's span and its stop's, if it was stopped. The books are closed and change no more."""
    stop = ledgers.stop
    name = _OPERATIONS.get(operation, operation) or "request"
    error = _error(ledgers, stop)
    attributes: Attributes = {
        "gen_ai.operation.name": name,
        "gen_ai.request.model": ledgers.model,
        "gen_ai.usage.output_tokens": ledgers.tokens_delivered,
        "stopguard.request.id": ledgers.request_id,
        "stopguard.engine": ledgers.engine,
        "stopguard.outcome": _outcome(stop, error),
    }
    child = None if stop is None else _stop_span(ledgers, stop, ended_at, error)
    if error:
        attributes["error.type"] = error
    request = SpanFacts(
        name=f"{name} {ledgers.model}",
        started_at=ledgers.opened_at,
        ended_at=ended_at,
        attributes=attributes,
        error=error,
        error_text=_text(ledgers, stop, error),
    )
    return request, child


def _stop_span(ledgers: RequestLedgers, stop: StopSummary, ended_at: float, error: str) -> SpanFacts:
    attributes: Attributes = {
        "stopguard.stop.semantics": stop.semantics,
        "stopguard.stop.source": stop.source,
        "stopguard.stop.reason": stop.reason,
        "stopguard.stop.evidence": stop.evidence.label,
        "stopguard.stop.attempts": stop.attempts,
        "stopguard.outcome": _outcome(stop, error),
        "stopguard.wasted_tokens": ledgers.balances[Account.OUTPUT_DISCARDED] + ledgers.balances[Account.OUTPUT_STALE],
    }
    if stop.retry:
        attributes["stopguard.retry"] = stop.retry
    # A stop that failed for another reason than the stop itself is an error of the request, not of the stop.
    if error == "request_failed":
        error = ""
    if error:
        attributes["error.type"] = error
    steps = (
        ("disconnect_detected" if stop.source == "client" else "stop_observed", stop.observed_at),
        ("abort_sent", stop.notified_at),
        ("engine_ack", stop.acked_at),
        ("released", stop.released_at),
        ("settled", stop.settled_at),
    )
    events = [SpanEvent(name, at) for name, at in steps if at is not None]
    events += [
        SpanEvent(
            "leak", leak.found_at, {"stopguard.ledger": leak.ledger.label, "stopguard.account": leak.account.label}
        )
        for leak in ledgers.leaks or ()
    ]
    return SpanFacts(
        name="stopguard.stop",
        started_at=stop.observed_at,
        ended_at=max(ended_at, stop.observed_at),
        attributes=attributes,
        events=tuple(sorted(events, key=lambda event: event.at)),
        error=error,
        error_text=_text(ledgers, stop, error),
    )


def _error(ledgers: RequestLedgers, stop: StopSummary | None) -> str:
    if ledgers.leaks:
        return "leak"
    if ledgers.written_off or (stop is not None and stop.outcome not in ("confirmed", "raced_finish", "failed")):
        return "stop_unconfirmed"
    if stop is None:
        return ""
    if stop.source == "deadline":
        return "watchdog"
    return "request_failed" if stop.semantics == "fail" else ""


def _outcome(stop: StopSummary | None, error: str) -> str:
    if error:
        return error
    if stop is None or stop.outcome == "raced_finish":
        return "finished"
    return "cancelled"


def _text(ledgers: RequestLedgers, stop: StopSummary | None, error: str) -> str:
    if error == "leak":
        found = ledgers.leaks or []
        return ", ".join(f"{one.ledger.label}.{one.account.label} {one.amount} {one.account.unit}" for one in found)
    if error and stop is not None:
        return f"{stop.reason}: {stop.outcome}, evidence {stop.evidence.label}"
    return error.replace("_", " ")
