"""`stopguard demo --engine KIND`: a storm of stops against a real engine, and its settled books.

The engine is installed where it is not (once), started on this machine with a small random model, and put behind a
gateway; where it has a plugin, the probe inside reports to us. Then real HTTP clients come, and leave in every state:
waiting, in prefill, before the first byte, in decode, without streaming, with several choices. In the end the books
say what became of each, and on what evidence.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import msgspec

from stopguard.engines import Engine, EngineUnreachable
from stopguard.engines.registry import adapter_class, create
from stopguard.errors import StopGuardError
from stopguard.gateway.probing import ProbeSettings, Probing
from stopguard.gateway.server import Gateway, loop_factory
from stopguard.gateway.settings import EngineSettings, GatewaySettings, Listener
from stopguard.ledger import EngineGauges, RequestLedgers
from stopguard.stops import Effect, StopConfig, effects
from stopguard.testing import rig
from stopguard.testing.live import LiveStorm
from stopguard.testing.plan import ClientPlan, Ending, StormPlan, plan_storm
from stopguard.testing.report import StormReport

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["EngineDemo", "engine_document", "print_engine_report", "real_plan", "run_engine_demo"]

#: Enough slots for several requests to be met while they run.
_OPTIONS: Final[dict[str, dict[str, Any]]] = {"llamacpp": {"slots": 8}}
_SETTLE_SECONDS: Final = 60.0
_PATIENCE_SECONDS: Final = 120.0
_READY_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.1
_PROMPT_TOKENS_MAX: Final = 240
_LONGER: Final = 4
_EXAMPLES: Final = 5


def real_plan(seed: int, requests: int) -> StormPlan:
    """A storm with what any engine understands: no adapters, images, grammars or priorities; outputs are longer."""
    plan = plan_storm(seed, requests, over_seconds=max(2.0, requests / 6))

    def adapted(client: ClientPlan) -> ClientPlan:
        return msgspec.structs.replace(
            client,
            # There is no order to preempt in this demo: such a client just stays.
            ending=Ending.FINISH if client.ending is Ending.PREEMPT else client.ending,
            prompt_tokens=min(client.prompt_tokens, _PROMPT_TOKENS_MAX),
            max_tokens=client.max_tokens * _LONGER,
            after_tokens=client.after_tokens * _LONGER,
            priority=0,
            lora="",
            images=0,
            grammar="",
            speculative=False,
        )

    return msgspec.structs.replace(plan, clients=tuple(map(adapted, plan.clients)))


class EngineDemo:
    """One storm against one real engine. `settled` and `gateway` may be read while it runs."""

    def __init__(
        self,
        kind: str,
        engine: rig.RunningEngine,
        plan: StormPlan,
        *,
        probes: ProbeSettings | None = None,
        on_closed: Callable[[RequestLedgers], None] | None = None,
    ) -> None:
        self.kind = kind
        self.engine = engine
        self.plan = plan
        self.report = StormReport(seed=plan.seed, policy=kind, faults=())
        self.grades: Counter[tuple[str, str, str]] = Counter()
        self.unproved: list[str] = []
        self.gauges: EngineGauges | None = None
        self.version = ""
        self.probed = False
        self.outcomes: Counter[str] = Counter()
        self.gateway: Gateway | None = None
        self.started_at = monotonic()
        self._probes = probes
        self._on_closed = on_closed

    @property
    def settled(self) -> int:
        """How many requests have left the book."""
        return self.report.requests

    @property
    def clean(self) -> bool:
        """No leak, nothing unfinished, no error in the books, and an engine that holds no request, if it says so."""
        report, gauges = self.report, self.gauges
        busy = 0 if gauges is None else (gauges.running or 0) + (gauges.waiting or 0)
        return not (report.leaks or report.unfinished or report.book_errors or busy)

    async def run(self, show: Callable[[EngineDemo], None]) -> None:
        """Run the storm to its end; `show` is called now and then."""
        adapter = create(self.kind, self.kind, self.engine.url)
        self.gateway = gateway = Gateway(
            [(adapter, EngineSettings())],
            GatewaySettings(listeners=(Listener(port=0),)),
            stop_config=StopConfig(settle_seconds=_SETTLE_SECONDS, write_off_seconds=600.0),
        )
        gateway.observers.append(self._on_effect)
        await gateway.start()
        probing = Probing(gateway, self._probes, {self.kind: self.kind}) if self._probes is not None else None
        try:
            if probing is not None:
                await probing.start()
            await self._meet(gateway, probing)
            host, port = gateway.addresses[0]
            storm = LiveStorm(
                self.plan,
                f"http://{host}:{port}",
                model=self.engine.model,
                patience_seconds=_PATIENCE_SECONDS,
                fields={"temperature": 0, **adapter.capabilities.endless_fields},
            )
            self.started_at = monotonic()
            clients = asyncio.create_task(storm.run())
            while not clients.done() or any(not request.overdue for request in gateway.book):
                show(self)
                await asyncio.sleep(_POLL_SECONDS)
            await clients
            show(self)
            self.outcomes = storm.outcomes
            self.report.close(gateway.controller, monotonic() - self.started_at, None)
            self.gauges = await self._idle(adapter)
        finally:
            await gateway.shutdown(drain_seconds=0.0)
            if probing is not None:
                await probing.close()

    async def _meet(self, gateway: Gateway, probing: Probing | None) -> None:
        """Wait until the gateway knows the engine, and its probe where one is to come."""
        member = gateway.fleet.members[0]
        due_at = monotonic() + _READY_SECONDS
        while member.models is None or member.identity is None:
            if monotonic() > due_at:
                raise EngineUnreachable(f"{self.kind} at {self.engine.url} lists no models")
            await asyncio.sleep(_POLL_SECONDS)
        self.version = member.identity.version
        while probing is not None and not member.profile.probed and monotonic() < due_at:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)
        self.probed = member.profile.probed

    async def _idle(self, adapter: Engine) -> EngineGauges | None:
        """The engine's gauges when it is idle, or the last ones seen."""
        gauges = None
        with contextlib.suppress(EngineUnreachable):
            due_at = monotonic() + _SETTLE_SECONDS
            while adapter.gauge_seconds > 0:
                await asyncio.sleep(adapter.gauge_seconds)
                gauges = await adapter.gauges()
                if gauges is None or not (gauges.running or gauges.waiting) or monotonic() > due_at:
                    break
        return gauges

    def _on_effect(self, effect: Effect, at: float) -> None:
        if not isinstance(effect, effects.Settled):
            return
        self.report.add(effect.tracked)
        ledgers = effect.tracked.ledgers
        stop = ledgers.stop
        if stop is None:
            self.grades["finish", "confirmed", "–"] += 1
        else:
            outcome = "written off" if ledgers.written_off else stop.outcome
            self.grades[stop.semantics, outcome, stop.evidence.label] += 1
            if outcome in ("written off", "unconfirmed") and len(self.unproved) < _EXAMPLES:
                self.unproved.append(f"{ledgers.request_id}: {stop.reason}, {stop.attempts} attempts")
        if self._on_closed is not None:
            self._on_closed(ledgers)


def run_engine_demo(
    kind: str,
    plan: StormPlan,
    *,
    say: Callable[[str], None],
    show: Callable[[EngineDemo], None],
    on_closed: Callable[[RequestLedgers], None] | None = None,
) -> EngineDemo:
    """Install and start the engine, run the storm, end everything that was started."""
    recipe = rig.recipe_of(kind)
    needs = adapter_class(kind).launch_needs
    probes, environment = None, {}
    if needs.plugin:
        token = secrets.token_hex(16)
        address = f"tcp://127.0.0.1:{rig.free_port()}"
        probes = ProbeSettings(listen=(address,), token=token)
        environment = {"STOPGUARD_COLLECTOR": address, "STOPGUARD_COLLECTOR_TOKEN": token}
    with rig.start(recipe, options=_OPTIONS.get(kind), environment=environment, say=say) as engine:
        demo = EngineDemo(kind, engine, plan, probes=probes, on_closed=on_closed)
        with asyncio.Runner(loop_factory=loop_factory()) as runner, _one_error():
            runner.run(demo.run(show))
    return demo


@contextlib.contextmanager
def _one_error() -> Iterator[None]:
    """A task group wraps even a single error; the user gets that one."""
    try:
        yield
    except ExceptionGroup as group:
        known = group.subgroup(StopGuardError)
        raise known.exceptions[0] if known is not None else group from None


def engine_document(demo: EngineDemo) -> dict[str, Any]:
    """The settled books as plain data, for `--format json`."""
    from stopguard.cli.demo import steps_document

    report = demo.report
    return {
        "engine": demo.kind,
        "version": demo.version,
        "probed": demo.probed,
        "seed": report.seed,
        "clean": demo.clean,
        "requests": report.requests,
        "elapsed_seconds": round(report.elapsed_seconds, 3),
        "endings": [
            {"semantics": semantics, "outcome": outcome, "evidence": evidence, "requests": number}
            for (semantics, outcome, evidence), number in sorted(demo.grades.items())
        ],
        "steps_ms": steps_document(report),
        "tokens": report.tokens,
        "leaks": report.leak_lines,
        "book_errors": report.book_errors,
        "unfinished": report.unfinished,
    }


def print_engine_report(console: Console, demo: EngineDemo) -> None:
    """The settled books, with what each stop's claim rests on."""
    from stopguard.cli.demo import print_leaks, print_steps, print_timeline, table

    report = demo.report
    console.print()
    inside = "a probe inside reports" if demo.probed else "seen from outside"
    console.rule(f"[bold]{demo.kind} {demo.version}[/] ({inside})", align="left")
    console.print(
        f"{report.requests} requests closed in {report.elapsed_seconds:.1f} s (seed {report.seed}); "
        f"the clients saw: {', '.join(f'{number} {what}' for what, number in demo.outcomes.most_common())}\n"
    )
    rows = table("how it ended", "outcome", "evidence", "requests")
    for (semantics, outcome, evidence), number in sorted(demo.grades.items()):
        good = outcome in ("confirmed", "raced_finish")
        rows.add_row(semantics, outcome if good else f"[red]{outcome}[/]", evidence, str(number))
    console.print(rows)
    print_steps(console, report)
    book = report.tokens
    console.print(
        f"Tokens: {book['delivered']} delivered, {book['discarded']} discarded, {book['stale']} stale"
        if demo.probed
        else f"Tokens: {book['delivered']} delivered (what was computed for nobody only a probe can say)"
    )
    for line in demo.unproved:
        console.print(f"  [yellow]not confirmed[/] {line}")
    print_leaks(console, report, _engine_says(demo), clean=demo.clean)
    if report.example is not None:
        console.print("\nOne stop, over its five ledgers:")
        print_timeline(console, report.example)


def _engine_says(demo: EngineDemo) -> str:
    gauges = demo.gauges
    if gauges is None:
        return "has no gauges to be asked"
    if gauges.running or gauges.waiting:
        return f"[red]still has {gauges.running} running, {gauges.waiting} waiting[/]"
    return "says itself that it runs nothing"
