"""What an audit says: one verdict for each scenario and ledger, with its evidence; and the exit code.

Beside the five ledgers there are three things that no single request's books can show and that an audit
must judge all the same: `crosstalk` (whether outputs are still those of a quiet engine), `counters`
(whether the engine's own totals are true) and `health` (whether it still serves anybody).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence

import msgspec

from stopguard.ledger import Evidence

__all__ = [
    "LEDGERS",
    "SCHEMA_VERSION",
    "STEPS",
    "AuditReport",
    "Cell",
    "Outcome",
    "ScenarioReport",
    "StepTimes",
    "TargetLine",
    "exit_code",
    "percentile",
]

SCHEMA_VERSION = 1

#: The five ledgers of a stop, then what only the engine as a whole can show.
LEDGERS = ("queue", "kv", "output", "link", "stream", "crosstalk", "counters", "health")

#: The four steps of a stop, each measured from the moment at which the client stopped.
STEPS = ("notify", "stop", "release", "settle")


class Outcome(enum.StrEnum):
    """The five things that an audit can say."""

    PASS = "pass"
    LEAK = "leak"
    SLOW = "slow"
    UNPROVEN = "unproven"
    SKIPPED = "skipped"

    @property
    def accuses(self) -> bool:
        """Whether this blames the target."""
        return self in {Outcome.LEAK, Outcome.SLOW}


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One ledger in one scenario.

    `amount`, `unit` and `age_seconds` are those of a leak; `measured_seconds` and `limit_seconds` those of
    a slow stop. `detail` is one sentence for people. `evidence` is the grade of what this rests on.
    """

    ledger: str
    outcome: Outcome
    evidence: Evidence = Evidence.NONE
    detail: str = ""
    amount: int = 0
    unit: str = ""
    age_seconds: float = 0.0
    measured_seconds: float = 0.0
    limit_seconds: float = 0.0

    @property
    def text(self) -> str:
        """As people read it: `LEAK(7 blocks, 10.0 s)`."""
        word = self.outcome.name
        match self.outcome:
            case Outcome.LEAK:
                return f"{word}({self.amount} {self.unit}, {self.age_seconds:.1f} s)"
            case Outcome.SLOW:
                return f"{word}({self.measured_seconds:.2f} s, limit {self.limit_seconds:.2f} s)"
            case Outcome.UNPROVEN:
                return f"{word}({self.evidence.label})"
            case _:
                return word


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One step over all stops that reached it, in milliseconds from the client's stop."""

    count: int
    p50_ms: float
    p99_ms: float


class ScenarioReport(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario. `skipped` is the reason when it was not staged; then there are no cells."""

    name: str
    title: str
    cells: tuple[Cell, ...] = ()
    skipped: str = ""
    stops: int = 0
    steps: dict[str, StepTimes] = {}
    tokens_wasted: int | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def accusations(self) -> tuple[Cell, ...]:
        """The cells that blame the target."""
        return tuple(cell for cell in self.cells if cell.outcome.accuses)

    @property
    def outcome(self) -> Outcome:
        """The worst of its cells."""
        if self.skipped:
            return Outcome.SKIPPED
        return worst(cell.outcome for cell in self.cells)

    def cell(self, ledger: str) -> Cell | None:
        """The cell of `ledger`, if this scenario judges it."""
        return next((cell for cell in self.cells if cell.ledger == ledger), None)


class TargetLine(msgspec.Struct, frozen=True, kw_only=True):
    """What was audited, and how it was watched."""

    url: str
    via: str = ""
    engine: str = ""
    version: str = ""
    model: str = ""
    observed_by: str = ""
    best_evidence: Evidence = Evidence.NONE
    poll_seconds: float = 0.0


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole audit. `broken_off` is why it ended before its time, empty when it did not."""

    target: TargetLine
    scenarios: tuple[ScenarioReport, ...]
    requests_sent: int = 0
    tokens_asked: int = 0
    seconds: float = 0.0
    started: str = ""
    seed: int = 0
    broken_off: str = ""
    unreachable: bool = False
    deadline_seconds: float = 0.0
    schema_version: int = SCHEMA_VERSION

    def accusations(self) -> list[tuple[str, Cell]]:
        """(scenario, cell) of everything that blames the target."""
        return [(report.name, cell) for report in self.scenarios for cell in report.accusations]

    def accused_ledgers(self) -> set[str]:
        """The ledgers that are blamed anywhere."""
        return {cell.ledger for _, cell in self.accusations()}

    @property
    def outcome(self) -> Outcome:
        """The worst of all scenarios."""
        return worst(report.outcome for report in self.scenarios)


_ORDER = (Outcome.LEAK, Outcome.SLOW, Outcome.UNPROVEN, Outcome.PASS, Outcome.SKIPPED)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The worst of `outcomes`; SKIPPED when there is none."""
    seen = set(outcomes)
    return next((outcome for outcome in _ORDER if outcome in seen), Outcome.SKIPPED)


def exit_code(reports: Sequence[AuditReport]) -> int:
    """0 all pass; 1 leak or slow; 2 the target went away; 3 nothing is blamed and something is unproven."""
    outcomes = {report.outcome for report in reports}
    if outcomes & {Outcome.LEAK, Outcome.SLOW}:
        return 1
    if not reports or any(report.unreachable for report in reports):
        return 2
    # Scenarios that were all skipped have proved nothing.
    return 0 if outcomes == {Outcome.PASS} and not any(report.broken_off for report in reports) else 3


def percentile(values: Sequence[float], share: float) -> float:
    """The `share` (0 to 1) percentile by nearest rank; of an empty sequence 0."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]
