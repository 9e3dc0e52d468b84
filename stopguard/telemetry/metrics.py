"""Metrics: an observer of the controller's effects, and what a scrape is answered.

Theory
------
`Telemetry` is called with every effect, on the relay's thread. It adds to plain numbers (`cells`) and never
looks at a clock, takes a lock, or waits. What is a state (requests by state, open ledgers, tokens in the books)
it does not follow at all: the collector reads that from the books when somebody scrapes.

A latency is observed when the books of a stopped request are closed, from the instants in its `StopSummary`.
A step that has no instant is not observed: nothing is ever counted as having taken no time because nobody
knows how long it took. A stop without evidence is the outcome `unconfirmed`.

Labels are closed sets. Engines are the configured ones, models those that the engines list; a request with any
other name counts as `other`, so a client that invents names adds no series.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from stopguard.ledger import Account, Book, Evidence, Reconciliation, RequestLedgers, StopSummary
from stopguard.probe.wire import Frame
from stopguard.stops import Controller, Effect, EngineProfile, Tracked, effects
from stopguard.telemetry.catalogue import METHOD, OUTCOME, metric
from stopguard.telemetry.cells import Cell, Distribution, Distributions
from stopguard.telemetry.collector import BooksCollector
from stopguard.telemetry.preemption import ContinuationNumbers, PreemptionNumbers
from stopguard.telemetry.step_time import StepClock, stream_pace
from stopguard.telemetry.timeline_facts import preemptions, retry_reason
from stopguard.telemetry.trace_context import find, parse
from stopguard.telemetry.tracing import TRACE_ID, TRACEPARENT, Tracer

__all__ = ["Telemetry", "create_telemetry"]

NO_ENGINE = "none"
OTHER = "other"

_OUTCOMES = frozenset(OUTCOME.values)
_METHODS = frozenset(METHOD.values)
_PACE_EVERY = 16
_FINISHED = ("finish", "confirmed")
_FINISHED_UNPROVED = ("finish", "unconfirmed")
_DISCARDED = Account.OUTPUT_DISCARDED
_STALE = Account.OUTPUT_STALE
_WATCHED = (Evidence.STREAM_CLOSED, Evidence.PROBE)


class Telemetry:
    """Hang it among `Gateway.observers`; give `render` to whoever serves `/metrics`.

    `engines` are the profiles of the configured engines, `models` lists what an engine serves now. `healthy` says
    whether an engine answers. `reconciliations`, which may be set later, gives the newest comparison with each
    engine's gauges. With a `tracer` every closed request becomes spans.
    """

    def __init__(
        self,
        book: Book,
        controller: Controller,
        engines: Iterable[EngineProfile],
        models: Callable[[str], Collection[str]],
        *,
        healthy: Callable[[str], bool] | None = None,
        reconciliations: Callable[[], Mapping[str, Reconciliation]] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.book = book
        self.controller = controller
        self.profiles = {profile.name: profile for profile in engines}
        self.models = models
        self.healthy = healthy
        self.reconciliations = reconciliations
        self.tracer = tracer
        #: Kind and version of each engine that has said them, by its name.
        self.identities: Callable[[], Mapping[str, tuple[str, str]]] | None = None
        #: Preemption in numbers, while classes are in use.
        self.preemption: Callable[[], PreemptionNumbers] | None = None
        #: Streams that were cut and went on, or did not, where that can happen.
        self.continuation: Callable[[], ContinuationNumbers] | None = None
        #: By engine: probes connected, those in a gap, gaps so far, frames dropped so far.
        self.probes: Callable[[], Mapping[str, tuple[int, int, int, int]]] | None = None
        self.steps = {name: StepClock() for name in self.profiles}
        self.probe_gaps = dict.fromkeys(self.profiles, 0)
        self.probe_lag = Distribution(metric("stopguard_probe_lag_seconds").bounds)
        self.detection = Distributions(
            metric("stopguard_disconnect_detection_seconds"), ((method,) for method in METHOD.values)
        )
        self.cells: dict[tuple[str, str], Cell] = {}
        self._finished = 0
        self._scrape = threading.Lock()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(BooksCollector(self))
        ProcessCollector(registry=self._registry)

    # ---- the relay's side: effects ---------------------------------------------------------------

    def __call__(self, effect: Effect, at: float) -> None:
        """Observe one effect. Never raises for what an effect can be, never waits."""
        if isinstance(effect, effects.Settled):
            self._settled(effect.tracked, at)
        elif isinstance(effect, effects.StopBegan):
            self._note_trace(effect.tracked)
        elif isinstance(effect, effects.Knock):
            if effect.attempt > 1:
                ledgers = effect.tracked.ledgers
                self._cell(ledgers).retries.add((retry_reason(ledgers.marks),))
        elif isinstance(effect, effects.Leaked):
            leak = effect.leak
            self.cell(leak.engine, leak.model).leaks.add((leak.ledger.label,))

    def admitted(self, tracked: Tracked, head_lines: bytes, operation: str) -> None:
        """A request was taken in: remember whose trace it belongs to. Only needed when there is a tracer.

        `head_lines` are the header lines that go on to the engine, `operation` is the kind of its route.
        """
        tracer = self.tracer
        if tracer is not None:
            labels = tracked.ledgers.labels
            if labels is None:
                labels = tracked.ledgers.labels = {}
            tracer.admitted(labels, find(head_lines), operation)

    def probe_frame(self, engine: str, frame: Frame, lag_seconds: float | None = None) -> None:
        """A frame has come from an engine's probe, `lag_seconds` after the step that it reports."""
        steps = self.steps.get(engine)
        if steps is not None:
            steps.on_frame(frame)
        if lag_seconds is not None:
            self.probe_lag.observe(lag_seconds)

    def probe_gap(self, engine: str) -> None:
        """A hole was found in the numbers of an engine's frames."""
        if engine in self.probe_gaps:
            self.probe_gaps[engine] += 1

    # ---- the scraper's side ----------------------------------------------------------------------

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """The exposition and its content type, for an `Accept` header. To be called in any thread but the relay's.

        OpenMetrics, with exemplars, where it is asked for; else the Prometheus text format.
        """
        encoder, content_type = choose_encoder(accept or "")
        with self._scrape:
            return encoder(self._registry), content_type

    def cell(self, engine: str, model: str) -> Cell:
        """Where `engine` and `model` are counted: under their names if these are of the closed sets."""
        cell = self.cells.get((engine, model))
        if cell is not None:
            return cell
        # A stranger's name is looked at each time, since remembering it would be the leak.
        engine, model = self.labels_for(engine, model)
        cell = self.cells.get((engine, model))
        # In one step, since a scrape makes cells as well.
        return cell or self.cells.setdefault((engine, model), Cell(engine, model, self._evidence(engine)))

    def labels_for(self, engine: str, model: str) -> tuple[str, str]:
        """The label values that stand for these names."""
        if engine != NO_ENGINE and engine not in self.profiles:
            engine = OTHER
        if (engine, model) in self.cells:
            return engine, model
        if len(self.cells) >= self.book.limits.engine_models:
            return engine, OTHER
        listed = [engine] if engine in self.profiles else list(self.profiles)
        return engine, model if any(model in self.models(name) for name in listed) else OTHER

    # ---- private: at the end of a request ----------------------------------------------------------

    def _cell(self, ledgers: RequestLedgers) -> Cell:
        return self.cells.get((ledgers.engine, ledgers.model)) or self.cell(ledgers.engine, ledgers.model)

    def _evidence(self, engine: str) -> tuple[str, ...]:
        profile = self.profiles.get(engine)
        best = Evidence.NONE if profile is None else profile.best_evidence
        return tuple(grade.label for grade in Evidence if Evidence.ACCEPTED < grade <= best)

    def _settled(self, tracked: Tracked, at: float) -> None:
        ledgers = tracked.ledgers
        cell = self._cell(ledgers)
        stop = ledgers.stop
        if tracked.preemptions or ledgers.tokens_recomputed:
            self._add_preemptions(cell, ledgers)
        if stop is None:
            cell.stops[_FINISHED_UNPROVED if ledgers.written_off else _FINISHED] += 1
            self._finished += 1
            if not self._finished % _PACE_EVERY and not tracked.probed:
                self._add_pace(tracked)
        else:
            self._stopped(cell, tracked, stop)
        if self.tracer is not None:
            self.tracer.ended(ledgers, at)

    def _stopped(self, cell: Cell, tracked: Tracked, stop: StopSummary) -> None:
        ledgers = tracked.ledgers
        semantics, grade = stop.semantics, stop.evidence.label
        outcome = stop.outcome if stop.outcome in _OUTCOMES else "unconfirmed"
        cell.stops[semantics, outcome] += 1
        trace_id = (ledgers.labels or {}).get(TRACE_ID, "")
        observed, notified, acked = stop.observed_at, stop.notified_at, stop.acked_at
        if stop.occurred_at is not None and stop.reason in _METHODS:
            self.detection[stop.reason,].observe(observed - stop.occurred_at, trace_id)
        if notified is not None:
            cell.abort_sent[semantics,].observe(notified - observed, trace_id)
            if acked is not None and stop.evidence > Evidence.ACCEPTED:
                cell.ack[semantics, grade].observe(acked - notified, trace_id)
        if acked is not None and stop.released_at is not None and stop.evidence > Evidence.ACCEPTED:
            cell.released[grade,].observe(stop.released_at - acked, trace_id)
        if stop.settled_at is not None:
            cell.settled[semantics,].observe(stop.settled_at - observed, trace_id)
        if outcome != "unconfirmed" and stop.evidence in _WATCHED:
            wasted = ledgers.balances[_DISCARDED] + ledgers.balances[_STALE]
            cell.wasted_tokens[semantics,].observe(wasted, trace_id)
            steps = self.steps.get(ledgers.engine)
            if wasted and steps is not None and steps.share_seconds is not None:
                cell.wasted_gpu_seconds += wasted * steps.share_seconds

    def _add_preemptions(self, cell: Cell, ledgers: RequestLedgers) -> None:
        cell.recomputed += ledgers.tokens_recomputed
        for preemption in preemptions(ledgers.marks):
            if preemption.happened:
                cell.preemptions.add((preemption.reason, preemption.mode))
            if preemption.seconds is not None:
                cell.stops["preempt", "confirmed" if preemption.happened else "failed"] += 1
                if preemption.happened:
                    grade = "probe" if preemption.mode == "inside" else "stream_closed"
                    cell.ack["preempt", grade].observe(preemption.seconds)

    def _add_pace(self, tracked: Tracked) -> None:
        steps = self.steps.get(tracked.ledgers.engine)
        pace = stream_pace(tracked) if steps is not None else None
        if steps is not None and pace is not None:
            steps.add(pace, len(self.controller.in_engine.get(tracked.ledgers.engine, ())) + 1)

    def _note_trace(self, tracked: Tracked) -> None:
        """A stop began: know its trace, so that a slow one can be looked at. The client's head is gone at the end."""
        ledgers = tracked.ledgers
        labels: dict[str, str] = {} if ledgers.labels is None else ledgers.labels
        if TRACE_ID in labels:
            return
        if TRACEPARENT not in labels:
            head: Any = getattr(tracked.owner, "head", None)
            lines = getattr(head, "forward", b"")
            found = find(lines) if lines else ""
            if self.tracer is not None:
                self.tracer.admitted(labels, found, "")
            elif found:
                labels[TRACEPARENT] = found
        context = parse(labels.get(TRACEPARENT, ""))
        if context is not None and context.sampled:
            labels[TRACE_ID] = context.trace_id
        if labels:
            ledgers.labels = labels


def create_telemetry(
    book: Book,
    controller: Controller,
    engines: Iterable[EngineProfile],
    models: Callable[[str], Collection[str]],
    *,
    healthy: Callable[[str], bool] | None = None,
    reconciliations: Callable[[], Mapping[str, Reconciliation]] | None = None,
    tracer: Tracer | None = None,
) -> Telemetry:
    """The telemetry of one process: an observer for the gateway, and `render` for `/metrics`.

    `models(engine)` must answer at once and from any thread, like a dictionary's keys.
    """
    return Telemetry(book, controller, engines, models, healthy=healthy, reconciliations=reconciliations, tracer=tracer)
