"""Runs an audit: who is there, what does it say when nobody disturbs it, then one scenario after another."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

import msgspec

from stopguard.audit import scenarios_abort, scenarios_leaving, scenarios_shapes, scenarios_whole
from stopguard.audit.checks import judge
from stopguard.audit.errors import AuditRefused, CredentialsRefused, ModelUnknown, TargetLost, TargetUnreachable
from stopguard.audit.plan import Budget, Plan
from stopguard.audit.scenario import SCENARIOS, Scenario
from stopguard.audit.settle import Observation, settle
from stopguard.audit.stage import Canary, Measured, Skip, Stage, Ticket, why
from stopguard.audit.target import Observer, Reading, TargetModel, make_observer
from stopguard.audit.verdict import (
    AuditReport,
    Cell,
    Outcome,
    ScenarioReport,
    StepTimes,
    TargetLine,
    percentile,
)
from stopguard.audit.watch import Watch
from stopguard.audit.world import World
from stopguard.errors import LimitReached
from stopguard.ledger import Evidence

__all__ = ["Audit", "Progress", "chosen", "find_model"]

#: Called before and after each scenario: (number from 1, of how many, scenario, its report or None).
Progress = Callable[[int, int, Scenario, ScenarioReport | None], None]

#: They put themselves into the table when they are imported.
SCENARIO_MODULES = (scenarios_leaving, scenarios_abort, scenarios_shapes, scenarios_whole)

_CANARIES = ("a letter about the winter garden", "the story of the bridge keeper", "what the quiet engine said")
_CANARY_TOKENS = 48
_BUSY_READINGS = 3
_BUSY_SECONDS = 0.4


def chosen(plan: Plan) -> list[Scenario]:
    """The scenarios of a plan, in the order of the table."""
    plan.check(list(SCENARIOS))
    return [scenario for name, scenario in SCENARIOS.items() if not plan.scenarios or name in plan.scenarios]


async def find_model(world: World, wanted: str) -> TargetModel:
    """The model to ask; without a wish, the first that the target lists."""
    answer = await world.control("GET", "/v1/models")
    if answer.status == 0:
        raise TargetUnreachable(f"nobody answers at {answer.failure}")
    if answer.status in {401, 403}:
        raise CredentialsRefused(
            f"the target refuses these credentials (HTTP {answer.status}): give its key with --key"
        )
    listed = answer.json()
    entries = listed.get("data") if isinstance(listed, dict) else None
    if answer.status != 200 or not isinstance(entries, list):
        if wanted:
            return TargetModel(name=wanted)
        raise TargetUnreachable(
            f"/v1/models answers {answer.status} without a list of models: is this an OpenAI-compatible server? "
            "Give the address without a path, or name the --model to go on without the list"
        )
    rows = [entry for entry in entries if isinstance(entry, dict) and entry.get("id")]
    names = [str(entry["id"]) for entry in rows]
    if not names or (wanted and wanted not in names):
        raise ModelUnknown(
            f"the target does not serve {wanted or 'any model'}; it serves: {', '.join(names[:8]) or 'none'}"
        )
    row = next(entry for entry in rows if not wanted or entry["id"] == wanted)
    adapters = [str(entry["id"]) for entry in rows if entry.get("parent") and entry["id"] != row["id"]]
    context = row.get("max_model_len") or (row.get("meta") or {}).get("n_ctx") or 0
    return TargetModel(name=str(row["id"]), context_tokens=int(context), adapters=tuple(adapters))


class Audit:
    """One audit of one target. `run` may be called once; it leaves no load behind, whatever happens."""

    def __init__(
        self,
        world: World,
        plan: Plan,
        *,
        url: str,
        via: str = "",
        engine: str = "auto",
        observe: str = "",
        model: str = "",
        progress: Progress | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.world = world
        self.plan = plan
        self.url = url
        self.via = via
        self.engine = engine
        self.observe = observe
        self.wanted_model = model
        self.progress = progress or (lambda *_: None)
        self.observer = observer
        self.numbers = random.Random(plan.seed)
        self.measured = Measured()
        self.canaries: list[Canary] = []
        self.reports: list[ScenarioReport] = []
        self.initial: Reading | None = None
        self.budget = Budget(plan, 0.0)
        self.last_seen: Observation | None = None
        self._started = datetime.now(UTC).isoformat(timespec="seconds")

    async def run(self) -> AuditReport:
        """The whole audit. Raises a `StopGuardError` when it cannot begin; later troubles are in the report."""
        world, started_at = self.world, self.world.now()
        self.budget = Budget(self.plan, started_at)
        try:
            scenarios = chosen(self.plan)
            await self._meet()
            await self._baseline()
            broken_off, unreachable = await self._scenarios(scenarios)
        finally:
            await asyncio.shield(world.aclose())
        facts = self.watch.observer.facts
        return AuditReport(
            target=TargetLine(
                url=self.url,
                via=self.via,
                engine=self.identity.kind,
                version=self.identity.version,
                model=self.model.name,
                observed_by=facts.observed_by,
                best_evidence=facts.grade,
                poll_seconds=facts.safe_interval_seconds,
            ),
            scenarios=tuple(self.reports),
            requests_sent=self.budget.requests,
            tokens_asked=self.budget.tokens,
            seconds=world.now() - started_at,
            started=self._started,
            seed=self.plan.seed,
            broken_off=broken_off,
            unreachable=unreachable,
            deadline_seconds=self.plan.deadline_seconds,
        )

    # Before ---------------------------------------------------------------------------------------

    async def _meet(self) -> None:
        world = self.world
        self.model = await find_model(world, self.wanted_model)
        observer = self.observer or await make_observer(self.engine, self.observe, world.control, world.now, self.model)
        self.watch = Watch(world, observer)
        self.identity = await observer.identify()
        if not self.plan.shared:
            await self._refuse_busy()
        self.initial = await self.watch.poll()

    async def _refuse_busy(self) -> None:
        """A target that visibly serves others is not ours to load."""
        readings: list[Reading] = []
        for number in range(_BUSY_READINGS):
            if number:
                await self.world.sleep(_BUSY_SECONDS)
            reading = await self.watch.poll()
            if reading is None:
                return
            readings.append(reading)
        busy = sum(bool(reading.places) for reading in readings)
        tokens = [reading.generated_tokens_total for reading in readings if reading.generated_tokens_total is not None]
        if len(set(tokens)) > 1 or (busy == len(readings) and not tokens):
            count = max(reading.places or 0 for reading in readings)
            raise AuditRefused(
                f"the engine is serving others ({count} requests in it): audit it when it is idle, "
                "or use --shared to count only the audit's own requests"
            )

    async def _baseline(self) -> None:
        """The fixed prompts on a quiet engine: their outputs, and how fast it is."""
        stage = self._stage()
        for number, prompt in enumerate(_CANARIES):
            cold = Canary(number, prompt, _CANARY_TOKENS, "")
            ticket = await self._plain(stage, cold)
            reply = ticket.reply
            self.canaries.append(Canary(number, prompt, _CANARY_TOKENS, reply.text))
            if reply.first_at is not None and reply.last_at is not None and reply.events > 1:
                self.measured.first_token_seconds = max(0.001, reply.first_at - ticket.opened_at)
                self.measured.token_seconds = max(1e-4, (reply.last_at - reply.first_at) / (reply.events - 1))
        short = await stage.open("companion", stream=False, tokens=4)
        await stage.all_ended([short], self.plan.deadline_seconds * 4)
        self.measured.short_seconds = max(0.001, (short.reply.ended_at or self.world.now()) - short.opened_at)
        await self._stability(stage)

    async def _plain(self, stage: Stage, canary: Canary) -> Ticket:
        ticket = await stage.open("companion", canary=canary)
        await stage.all_ended([ticket], max(60.0, self.plan.deadline_seconds * 4))
        reply = ticket.reply
        if reply.complete and reply.status == 200 and reply.text:
            return ticket
        if reply.status in {401, 403}:
            raise CredentialsRefused(
                f"the target refuses these credentials (HTTP {reply.status}): give its key with --key"
            )
        if reply.status == 404:
            raise ModelUnknown(f"a plain call fails ({why(reply)}): does it serve {self.model.name}?")
        if reply.status is None:
            raise TargetUnreachable(f"a plain call fails: {why(reply)}")
        raise AuditRefused(f"a plain call fails already, so nothing can be staged ({why(reply)})")

    async def _stability(self, stage: Stage) -> None:
        """Whether the outputs stay the same under load without any stop: else they prove nothing under stops."""
        tickets = [await stage.open("companion", canary=canary) for canary in self.canaries]
        fillers = [await stage.open("companion", tokens=_CANARY_TOKENS) for _ in range(3)]
        await stage.all_ended([*tickets, *fillers], max(60.0, self.plan.deadline_seconds * 4))
        for number, ticket in enumerate(tickets):
            if ticket.reply.text != self.canaries[number].cold:
                self.canaries[number] = msgspec.structs.replace(self.canaries[number], stable=False)
        await self.watch.poll()

    def _stage(self) -> Stage:
        return Stage(
            world=self.world,
            watch=self.watch,
            plan=self.plan,
            budget=self.budget,
            model=self.model,
            measured=self.measured,
            canaries=self.canaries,
            numbers=self.numbers,
            through_gateway=bool(self.via),
            initial=self.initial,
        )

    # Scenarios ------------------------------------------------------------------------------------

    async def _scenarios(self, scenarios: Sequence[Scenario]) -> tuple[str, bool]:
        broken_off, unreachable = "", False
        for number, scenario in enumerate(scenarios, 1):
            self.progress(number, len(scenarios), scenario, None)
            if not broken_off and self.budget.overdue(self.world.now()):
                broken_off = f"the audit has taken longer than {self.plan.seconds_max:.0f} s"
            if broken_off:
                report = self._skipped(scenario, broken_off)
            else:
                try:
                    report = await self._one(scenario)
                except TargetLost as error:
                    broken_off, unreachable = f"the engine went away during {scenario.name}: {error}", True
                    report = self._lost(scenario, str(error))
                except LimitReached as error:
                    broken_off = str(error)
                    report = self._skipped(scenario, broken_off)
                if self.last_seen is not None and self.last_seen.exhausted:
                    broken_off = f"the pool was full of leaked blocks after {scenario.name}"
                health = report.cell("health")
                if health is not None and health.outcome is Outcome.LEAK:
                    broken_off = f"the engine was no longer alive after {scenario.name}"
            self.reports.append(report)
            self.progress(number, len(scenarios), scenario, report)
        return broken_off, unreachable

    async def _one(self, scenario: Scenario) -> ScenarioReport:
        reason = self.watch.observer.facts.skips.get(scenario.name, "")
        if self.via and not scenario.via:
            reason = reason or "it says nothing about a gateway"
        if reason:
            return self._skipped(scenario, reason)
        started_at = self.world.now()
        # Totals that others share in prove nothing about us: then only single requests are followed.
        before = None if self.plan.shared else await self._quiet()
        self.watch.forget()
        stage = self._stage()
        skipped = ""
        try:
            await scenario.run(stage)
        except Skip as skip:
            skipped = str(skip)
            for ticket in stage.victims():
                ticket.role = "companion"
        seen = await settle(stage, before)
        self.last_seen = seen
        if (
            seen.sick
            and (await self.watch.observer.health()) == 0
            and (await self.world.control("GET", "/v1/models")).status == 0
        ):
            raise TargetLost("it does not answer any more")
        cells = judge(stage, seen)
        seconds = self.world.now() - started_at
        if skipped and not any(cell.outcome.accuses for cell in cells):
            return self._skipped(scenario, skipped, seconds)
        return self._report(scenario, stage, seen, cells, seconds)

    async def _quiet(self) -> Reading | None:
        """The reading that a scenario starts from, once the one before has drained."""
        reading = await self.watch.poll()
        for _ in range(20):
            if reading is None or not reading.places:
                break
            await self.world.sleep(max(self.watch.interval_seconds, 3 * self.measured.token_seconds))
            reading = await self.watch.poll()
        return reading

    def _report(
        self, scenario: Scenario, stage: Stage, seen: Observation, cells: Iterable[Cell], seconds: float
    ) -> ScenarioReport:
        steps = {
            name: StepTimes(
                count=len(spans), p50_ms=percentile(spans, 0.5) * 1000, p99_ms=percentile(spans, 0.99) * 1000
            )
            for name, spans in seen.steps.items()
            if spans
        }
        self._put_off(scenario, steps, stage)
        if scenario.name == "queued" and seen.tokens_wasted:
            stage.notes.append(
                f"noticed only when the request had its turn: {seen.tokens_wasted} tokens were computed for nobody"
            )
        return ScenarioReport(
            name=scenario.name,
            title=scenario.title,
            cells=tuple(cells),
            stops=sum(ticket.stopped_at is not None for ticket in stage.victims()),
            steps=steps,
            tokens_wasted=seen.tokens_wasted,
            notes=tuple(stage.notes),
            seconds=seconds,
        )

    def _put_off(self, scenario: Scenario, steps: dict[str, StepTimes], stage: Stage) -> None:
        """Say it when a stop comes much later only because somebody else is served."""
        quiet = next((report for report in self.reports if report.name == "non-streaming"), None)
        if scenario.name != "busy-neighbour" or quiet is None:
            return
        for step in ("notify", "stop"):
            if step in steps and step in quiet.steps:
                busy_ms, quiet_ms = steps[step].p50_ms, quiet.steps[step].p50_ms
                if busy_ms > 2 * quiet_ms + 500:
                    stage.notes.append(
                        f"put off by the neighbour: {step} after {busy_ms:.0f} ms, {quiet_ms:.0f} ms without one"
                    )
                return

    def _skipped(self, scenario: Scenario, reason: str, seconds: float = 0.0) -> ScenarioReport:
        return ScenarioReport(name=scenario.name, title=scenario.title, skipped=reason, seconds=seconds)

    def _lost(self, scenario: Scenario, reason: str) -> ScenarioReport:
        cell = Cell(
            ledger="health",
            outcome=Outcome.UNPROVEN,
            evidence=Evidence.NONE,
            detail=f"the engine went away while this was staged ({reason}): read its own log",
        )
        return ScenarioReport(name=scenario.name, title=scenario.title, cells=(cell,))
