"""Medians over rounds, their spread, ratios to nginx taken inside each round, and the verdicts on the targets."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.relay_bench.measures import MEASURES
from benchmarks.relay_bench.peers import BASELINE
from benchmarks.relay_bench.rounds import PeerResult
from benchmarks.relay_bench.windows import LATE, NEVER, NOT_STAGED, WINDOWS, Window

SUBJECT = "stopguard"
ROUTERS = ("sglang_router", "sglang_router_round_robin", "vllm_router", "vllm_router_round_robin")


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the rounds that have it."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def text(self, digits: int) -> str:
        """The median and, where there is more than one round, the lowest and the highest."""
        median = f"{self.median:,.{digits}f}"
        return median if self.rounds == 1 else f"{median} ({self.low:,.{digits}f}–{self.high:,.{digits}f})"


@dataclass(slots=True)
class PeerSummary:
    """One peer over all rounds."""

    name: str
    title: str
    version: str
    reason: str
    values: dict[str, Spread] = field(default_factory=dict)
    ratios: dict[str, Spread] = field(default_factory=dict)
    """To the baseline's figure of the same round."""
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Samples by outcome for each window, all rounds together."""
    notes: list[str] = field(default_factory=list)


def summarize(results: Mapping[str, PeerResult]) -> dict[str, PeerSummary]:
    """Every peer's summary, in the order of ``results``."""
    baseline = results.get(BASELINE)
    return {name: _summarize_one(result, baseline) for name, result in results.items()}


def _summarize_one(result: PeerResult, baseline: PeerResult | None) -> PeerSummary:
    summary = PeerSummary(result.name, result.title, result.version, result.reason)
    for key in MEASURES:
        values = [one.figures[key] for one in result.rounds if key in one.figures]
        if values:
            summary.values[key] = Spread.of(values)
        ratios = _ratios(key, result, baseline)
        if ratios:
            summary.ratios[key] = Spread.of(ratios)
    for number, one in enumerate(result.rounds, 1):
        for window, counts in one.outcomes.items():
            total = Counter(summary.outcomes.get(window)) + Counter(counts)
            summary.outcomes[window] = dict(total)
        summary.notes += [f"round {number}: {note}" for note in dict.fromkeys(one.notes)]
    return summary


def _ratios(key: str, result: PeerResult, baseline: PeerResult | None) -> list[float]:
    if baseline is None or result is baseline:
        return []
    pairs = zip(result.rounds, baseline.rounds, strict=False)
    return [
        ours.figures[key] / theirs.figures[key]
        for ours, theirs in pairs
        if key in ours.figures and theirs.figures.get(key, 0.0) > 0
    ]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One figure that StopGuard is to reach; ``reached`` is None where this run cannot say."""

    figure: str
    target: str
    seen: str
    reached: bool | None


def verdicts(summaries: Mapping[str, PeerSummary]) -> list[Verdict]:
    """StopGuard against its targets; empty when it was not measured."""
    subject = summaries.get(SUBJECT)
    if subject is None or not subject.values:
        return []
    found: list[Verdict] = []
    for window in WINDOWS:
        p50, p99 = f"{window.name}_p50_ms", f"{window.name}_p99_ms"
        found.append(_left_running(subject, window))
        if p50 not in subject.values:
            continue
        found.append(_against_baseline(subject, p50, f"{window.title}: close to close, p50", 1.25))
        found.append(_against_baseline(subject, p99, f"{window.title}: close to close, p99", 1.5))
        found += _below_routers(summaries, p50, f"{window.title}: close to close, p50")
    for key, title, most in (
        ("requests_32_processor_us", "CPU a small request", 2.5),
        ("paced_processor_us", "CPU a streamed chunk", 1.3),
    ):
        found.append(_against_baseline(subject, key, title, most))
        found += _below_routers(summaries, key, title)
    found.append(_against_baseline(subject, "added_p50_ms", "added latency, p50, 1 connection", 2.0))
    return found


def _left_running(subject: PeerSummary, window: Window) -> Verdict:
    counts = subject.outcomes.get(window.name, {})
    total = sum(counts.values())
    left, unstaged = counts.get(LATE, 0) + counts.get(NEVER, 0), counts.get(NOT_STAGED, 0)
    figure = f"{window.title}: left running upstream"
    if not total:
        return Verdict(figure, "none", f"{subject.title} has no figure", None)
    seen = f"{left} of {total}" + (f", {unstaged} {NOT_STAGED}" if unstaged else "")
    return Verdict(figure, "none", seen, left + unstaged == 0)


def _against_baseline(subject: PeerSummary, key: str, title: str, most: float) -> Verdict:
    target = f"≤ {most:g} × {BASELINE}"
    ratio = subject.ratios.get(key)
    if ratio is None:
        missing = BASELINE if key in subject.values else subject.title
        return Verdict(title, target, f"{missing} has no figure", None)
    return Verdict(title, target, f"{ratio.text(2)} ×", ratio.median <= most)


def _below_routers(summaries: Mapping[str, PeerSummary], key: str, title: str) -> list[Verdict]:
    ours = summaries[SUBJECT].values.get(key)
    found: list[Verdict] = []
    for name in ROUTERS:
        router = summaries.get(name)
        if router is None or ours is None:
            continue
        theirs = router.values.get(key)
        target = f"below {router.title}"
        # Where a router has no figure it saw no close at all: that is told by its own row.
        if theirs is not None:
            seen = f"{ours.median:.2f} against {theirs.median:.2f}"
            found.append(Verdict(title, target, seen, ours.median < theirs.median))
    return found
