"""What a storm came to: the settled book, the four steps, the waste, the leaks."""

from __future__ import annotations

import statistics
from collections import Counter

import msgspec

from stopguard.ledger import Account, Leak, Ledger, RequestRecord
from stopguard.refengine import EngineSnapshot
from stopguard.stops import Controller, Tracked

__all__ = ["STEPS", "StepTimes", "StormReport"]

#: The four steps of a stop, each as the span from the moment the stop was observed.
STEPS = ("notify", "in-flight output", "release", "settle")


class StepTimes(msgspec.Struct, frozen=True):
    """One step over all stops that reached it, in milliseconds."""

    count: int
    p50_ms: float
    p99_ms: float


class StormReport:
    """Filled while the storm runs (`add` for each closed request), closed once."""

    def __init__(self, *, seed: int, policy: str, faults: tuple[str, ...]) -> None:
        self.seed = seed
        self.policy = policy
        self.faults = faults
        self.requests = 0
        self.endings: Counter[tuple[str, str]] = Counter()
        self.evidence: Counter[str] = Counter()
        self.leaks: list[Leak] = []
        self.crosstalk: list[str] = []
        self.crashes: list[str] = []
        self.book_errors: list[str] = []
        self.late_events: Counter[str] = Counter()
        self.outputs_muted = 0
        self.outputs_for_nobody = 0
        self.preemptions = 0
        self.steps = 0
        self.tokens: dict[str, int] = {}
        self.tokens_recomputed = 0
        self.elapsed_seconds = 0.0
        self.unfinished: list[str] = []
        self.example: RequestRecord | None = None
        self.leaky_example: RequestRecord | None = None
        self.snapshot: EngineSnapshot | None = None
        self.leak_lines: list[str] = []
        self._spans: dict[str, list[float]] = {name: [] for name in STEPS}

    def add(self, tracked: Tracked) -> None:
        """A request has left the book."""
        ledgers = tracked.ledgers
        self.requests += 1
        self.preemptions += tracked.preemptions
        self.tokens_recomputed += ledgers.tokens_recomputed
        stop = ledgers.stop
        if stop is None:
            self.endings["finish", "confirmed"] += 1
            return
        outcome = "written off" if ledgers.written_off else stop.outcome
        self.endings[stop.semantics, outcome] += 1
        self.evidence[stop.evidence.label] += 1
        moments = (stop.notified_at, stop.output_settled_at, stop.released_at, stop.settled_at)
        for name, moment in zip(STEPS, moments, strict=True):
            if moment is not None:
                self._spans[name].append((moment - stop.observed_at) * 1000)
        if ledgers.leaks and self.leaky_example is None:
            self.leaky_example = ledgers.record()
        if self._is_better_example(tracked):
            self.example = ledgers.record()

    def close(self, controller: Controller, elapsed_seconds: float, snapshot: EngineSnapshot | None) -> None:
        """Take what is left in the books."""
        book = controller.book
        book.verify()
        self.elapsed_seconds = elapsed_seconds
        self.leaks = book.leaks()
        now = controller.wheel.now
        self.leak_lines = [leak.describe(now) for leak in self.leaks]
        self.unfinished = [request.request_id for request in book if not request.leaks]
        for request in book:
            if request.leaks and self.leaky_example is None:
                self.leaky_example = request.record()
        self.book_errors = [f"{error.request_id}: {error.text}" for error in controller.anomalies.book_errors]
        self.late_events = Counter(controller.anomalies.late_events)
        self.tokens = {
            "delivered": book.total(Account.OUTPUT_DELIVERED),
            "discarded": book.total(Account.OUTPUT_DISCARDED),
            "stale": book.total(Account.OUTPUT_STALE),
        }
        self.snapshot = snapshot

    @property
    def step_times(self) -> dict[str, StepTimes]:
        """p50 and p99 of each step, from the moment the stop was observed."""
        times = {}
        for name, spans in self._spans.items():
            if spans:
                cuts = statistics.quantiles(spans, n=100, method="inclusive") if len(spans) > 1 else spans * 99
                times[name] = StepTimes(len(spans), statistics.median(spans), cuts[98])
        return times

    @property
    def engine_settled(self) -> bool:
        """Whether the engine itself holds nothing any more."""
        return self.snapshot is not None and self.snapshot.settled

    @property
    def clean(self) -> bool:
        """No leak, no cross-talk, no crash, no book error, nothing unfinished, an engine that holds nothing."""
        return (
            not (self.leaks or self.crosstalk or self.crashes or self.book_errors or self.unfinished)
            and self.engine_settled
        )

    @property
    def tokens_wasted(self) -> int:
        """Computed for nobody."""
        return self.tokens.get("discarded", 0) + self.tokens.get("stale", 0)

    def leaks_by_ledger(self) -> Counter[Ledger]:
        """How many leaks each ledger has."""
        return Counter(leak.ledger for leak in self.leaks)

    def _is_better_example(self, tracked: Tracked) -> bool:
        """A good example is a cancel that was confirmed by the scheduler while tokens were in flight."""
        stop = tracked.ledgers.stop
        if stop is None or stop.outcome != "confirmed" or stop.semantics != "cancel" or stop.acked_at is None:
            return False
        wasted = tracked.ledgers.balances[Account.OUTPUT_STALE] + tracked.ledgers.balances[Account.OUTPUT_DISCARDED]
        if self.example is None:
            return True
        best = self.example.balances()
        best_wasted = best.get(Account.OUTPUT_STALE, 0) + best.get(Account.OUTPUT_DISCARDED, 0)
        return (wasted > 0) > (best_wasted > 0)
