"""A storm: clients, StopGuard's heart and the reference engine in one virtual time, from one seed.

It drives the same `Controller` as the gateway does, with the reference engine behind it and its probe
frames as evidence, and plays the edge: it carries out effects and reports events. Nothing sleeps and
nothing is random beyond the seed, so that a storm replays exactly:

    stopguard demo --seed 7 --policy vllm --fault blocks-leaked-on-abort --trace

Every transition is one line of the trace. Each finished or surviving output is compared with what the
same request gives alone on a healthy engine: a difference is cross-talk.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from stopguard.errors import StopGuardError
from stopguard.ledger import Book, Evidence, RequestLedgers
from stopguard.refengine import (
    DEFAULT_POLICY,
    EngineConfig,
    EngineCrashed,
    NotSupported,
    Output,
    ReferenceEngine,
    RequestSpec,
    SamplingParameters,
)
from stopguard.refengine import AbortAnswer as EngineAnswer
from stopguard.stops import (
    AbortAnswer,
    ClientPolicy,
    Controller,
    DeadlineKind,
    Door,
    DoorKind,
    EngineProfile,
    Semantics,
    Source,
    StopCause,
    StopConfig,
    Tracked,
    effects,
    engine_died,
    observe_frame,
    preemptions,
)
from stopguard.stops.machine import CLIENT_ENDED, Client, Engine
from stopguard.testing.clock import VirtualClock
from stopguard.testing.plan import ClientPlan, Ending, StormPlan
from stopguard.testing.report import StormReport

__all__ = ["Storm", "StormConfig"]

_ENGINE = "reference"
_MODEL = "tiny"
_ANSWERS = {
    "accepted": AbortAnswer.ACCEPTED,
    "aborted": AbortAnswer.ACCEPTED,
    "suppressed": AbortAnswer.ACCEPTED,
    "try_again": AbortAnswer.REFUSED,
    "unknown": AbortAnswer.UNKNOWN,
    "no_door": AbortAnswer.FAILED,
}
_LATE_ABORTS = 0.2  # of all stops


class StormConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the storm runs on.

    `max_seconds` bounds its virtual time, `link_seconds` is the way to the engine, and
    `patience_seconds` the total deadline of every request: no client waits for ever.
    """

    policy: str = DEFAULT_POLICY
    faults: tuple[str, ...] = ()
    engine: EngineConfig = EngineConfig(blocks=320, max_running=16, host_blocks=64)
    stops: StopConfig = StopConfig(settle_seconds=8.0, write_off_seconds=60.0)
    link_seconds: float = 0.0005
    admission_seconds: float = 0.02
    patience_seconds: float = 30.0
    max_seconds: float = 300.0
    solo_outputs: bool = True


class _Client:
    """One client of the storm and its request."""

    __slots__ = ("output", "parts_finished", "plan", "spec", "tracked")

    def __init__(self, plan: ClientPlan, spec: RequestSpec) -> None:
        self.plan = plan
        self.spec = spec
        self.tracked: Tracked | None = None
        self.output: dict[int, list[int]] = {}
        self.parts_finished: set[int] = set()

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.output.values())


class Storm:
    """One run. `run()` takes it to its end; `advance_to` lets a display follow it."""

    def __init__(
        self,
        plan: StormPlan,
        config: StormConfig | None = None,
        *,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self.plan = plan
        self.config = config or StormConfig()
        self.clock = VirtualClock(plan.seed)
        self.book = Book()
        self.controller = Controller(self.book, self.config.stops, at=self.clock.now)
        self.engine = ReferenceEngine(self.config.engine, self.config.policy, self.config.faults, seed=plan.seed)
        self.report = StormReport(seed=plan.seed, policy=self.config.policy, faults=self.config.faults)
        self.profile = EngineProfile(
            name=_ENGINE,
            doors=(
                Door(name="abort", kind=DoorKind.CALL, worth=Evidence.ACCEPTED),
                Door(name="close", kind=DoorKind.CLOSE, ends_stream=True),
            ),
            best_evidence=Evidence.PROBE,
            probed=True,
        )
        self.crashed = False
        self._on_line = on_line
        self.on_closed: Callable[[RequestLedgers], None] | None = None
        self._rng = random.Random(plan.seed)
        self._solo: dict[RequestSpec, dict[int, list[int]]] = {}
        self._clients: dict[str, _Client] = {}
        for client in plan.clients:
            self.clock.after(client.arrives_after_seconds, lambda client=client: self._arrive(client))  # type: ignore[misc]

    # ---- running --------------------------------------------------------------------------------

    def run(self) -> StormReport:
        """To the end: every request settled, or reported and written off, or the time is up."""
        while self.advance():
            pass
        return self.finish()

    def advance(self) -> bool:
        """Go to the next instant at which something happens; False when nothing is left to happen."""
        clock = self.clock
        if clock.elapsed_seconds > self.config.max_seconds:
            return False
        engine_at = None if self.crashed else self.engine.next_event_at(clock.now)
        moments = [m for m in (clock.next_at(), engine_at, self.controller.next_due()) if m is not None]
        if not moments or (clock.next_at() is None and not self.controller.tracked):
            return False
        clock.move_to(max(clock.now, min(moments)))
        now = clock.now
        if not self.crashed and engine_at is not None and engine_at <= now:
            self._step_engine()
        self._carry_out(self.controller.advance(now))
        return True

    def finish(self) -> StormReport:
        """Close the report: what is left in the books and in the engine."""
        self._settle_engine()
        snapshot = None if self.crashed else self.engine.snapshot(self.clock.now)
        self.report.close(self.controller, self.clock.elapsed_seconds, snapshot)
        return self.report

    @property
    def settled(self) -> int:
        """How many requests have left the book."""
        counts = self.book.statistics()
        return counts.settled + counts.written_off

    # ---- clients ----------------------------------------------------------------------------------

    def _arrive(self, plan: ClientPlan) -> None:
        request_id = f"sg-{plan.number:06d}-{self._rng.getrandbits(64):016x}"
        rng = random.Random(f"{self.plan.seed}/{plan.number}")
        spec = RequestSpec(
            request_id=request_id,
            prompt=tuple(rng.randrange(260, 480) for _ in range(plan.prompt_tokens)),
            sampling=SamplingParameters(max_tokens=plan.max_tokens, n=plan.n),
            priority=plan.priority,
            stream=plan.stream,
            lora=plan.lora,
            images=plan.images,
            grammar=plan.grammar,
            speculative=plan.speculative,
        )
        client = _Client(plan, spec)
        self._clients[request_id] = client
        now = self.clock.now
        client.tracked = self.controller.admit(request_id, now, model=_MODEL, engine=_ENGINE)
        self._line(request_id, f"arrives: {plan.ending.value}, {plan.prompt_tokens} + {plan.max_tokens} tokens")
        ending = plan.ending
        if ending is Ending.CANCEL_IN_ADMISSION:
            self.clock.after(self.config.admission_seconds / 2, lambda: self._leave(client, "eof"))
        elif ending is Ending.CANCEL_WHILE_WAITING:
            self.clock.after(self.config.admission_seconds + 0.002, lambda: self._leave(client, "reset"))
        elif ending is Ending.CANCEL_IN_PREFILL:
            self.clock.after(self.config.admission_seconds + 0.03, lambda: self._leave(client, "eof"))
        patience = self.config.patience_seconds
        if ending is Ending.CANCEL_BY_DEADLINE:
            patience = 0.05 + 0.01 * plan.after_tokens
        self.controller.set_deadline(client.tracked, DeadlineKind.TOTAL, now + patience)
        self.clock.after(self.config.admission_seconds, lambda: self._dispatch(client))

    def _dispatch(self, client: _Client) -> None:
        tracked = client.tracked
        if tracked is None or tracked.machine.engine is not Engine.UNDISPATCHED or self.crashed:
            if tracked is not None and self.crashed and tracked.machine.client is Client.LISTENING:
                self._stop(client, Semantics.FAIL, Source.ENGINE, "no engine")
            return
        now = self.clock.now
        self.controller.dispatch(tracked, now, self.profile)
        self._guarded(lambda: self.engine.submit(client.spec, now))
        self._line(client.spec.request_id, "dispatched")

    def _leave(self, client: _Client, method: str) -> None:
        """The client closes its connection; StopGuard sees it after the length of the wire."""
        tracked = client.tracked
        if tracked is None or tracked.machine.client in CLIENT_ENDED:
            return
        occurred_at = self.clock.now

        def seen() -> None:
            now = self.clock.now
            self._line(client.spec.request_id, f"client left ({method})")
            self._carry_out(self.controller.client_left(tracked, now, method, ClientPolicy(), occurred_at=occurred_at))
            if client.plan.ending is Ending.CANCEL_TWICE:
                self._stop(client, Semantics.CANCEL, Source.API, "again")

        self.clock.after(self.config.link_seconds, seen)

    def _stop(self, client: _Client, semantics: Semantics, source: Source, reason: str) -> None:
        tracked = client.tracked
        if tracked is None or tracked.request_id not in self.controller.tracked:
            return
        now = self.clock.now
        self._line(client.spec.request_id, f"{semantics.value} by {source.value} ({reason})")
        cause = StopCause(semantics=semantics, source=source, reason=reason, observed_at=now, actor="storm")
        self._carry_out(self.controller.stop(tracked, now, cause))

    def _preempt(self, client: _Client) -> None:
        tracked = client.tracked
        if tracked is None or tracked.machine.engine is not Engine.DISPATCHED:
            return
        now = self.clock.now
        cause = StopCause(
            semantics=Semantics.PREEMPT, source=Source.PREEMPTION, reason="urgent request", observed_at=now
        )
        self._carry_out(preemptions.preempt(self.controller, tracked, now, cause))
        if client.plan.ending is Ending.CANCEL_WHILE_PREEMPTED:
            self.clock.after(0.03, lambda: self._leave(client, "eof"))
        else:
            self.clock.after(0.12, lambda: self._resume(client))

    def _resume(self, client: _Client) -> None:
        tracked = client.tracked
        if tracked is not None and tracked.machine.engine is Engine.PARKED:
            self._carry_out(preemptions.resume(self.controller, tracked, self.clock.now))

    def _on_output(self, output: Output) -> None:
        client = self._clients.get(output.request_id)
        if client is None or client.tracked is None:
            self.report.outputs_for_nobody += 1
            return
        tracked, plan = client.tracked, client.plan
        if tracked.muted or tracked.machine.client is not Client.LISTENING:
            self.report.outputs_muted += len(output.token_ids)
            return
        now = self.clock.now
        if client.tokens == 0 and output.token_ids:
            self.controller.output_started(tracked, now)
        before = client.tokens
        client.output.setdefault(output.index, []).extend(output.token_ids)
        tracked.ledgers.bytes_received += len(output.text.encode())
        tracked.ledgers.bytes_sent += len(output.text.encode())
        tracked.last_activity_at = now
        if before < plan.after_tokens <= client.tokens:
            self._turning_point(client)
        if plan.ending is Ending.CANCEL_AT_THE_END and client.tokens >= plan.max_tokens * plan.n - 1:
            self._leave(client, "eof")
        if output.finish_reason is not None:
            client.parts_finished.add(output.index)
            if len(client.parts_finished) == plan.n:
                self._all_delivered(client, output.finish_reason)

    def _turning_point(self, client: _Client) -> None:
        """The client has got as many tokens as its plan says."""
        ending = client.plan.ending
        if ending in (Ending.CANCEL_IN_DECODE, Ending.CANCEL_TWICE):
            self._leave(client, self._rng.choice(("eof", "reset", "write_error")))
        elif ending is Ending.CANCEL_BY_API:
            self._stop(client, Semantics.CANCEL, Source.API, "api")
        elif ending in (Ending.PREEMPT, Ending.CANCEL_WHILE_PREEMPTED):
            self._preempt(client)
        elif ending is Ending.FAIL:
            self._stop(client, Semantics.FAIL, Source.GATEWAY, "shutdown")

    def _all_delivered(self, client: _Client, reason: str) -> None:
        tracked = client.tracked
        assert tracked is not None
        now = self.clock.now
        if reason in ("abort", "cancelled"):
            return
        self._carry_out(self.controller.engine_finished(tracked, now, reason))
        if tracked.machine.client is Client.LISTENING:
            self._carry_out(self.controller.client_served(tracked, now))
            self._line(client.spec.request_id, f"served ({reason})")
        if self.config.solo_outputs and client.output != self._solo_output(client.spec):
            self.report.crosstalk.append(client.spec.request_id)
            self._line(client.spec.request_id, "CROSS-TALK: its output is not what it gives alone")

    # ---- the engine -------------------------------------------------------------------------------

    def _step_engine(self) -> None:
        now = self.clock.now
        try:
            result = self.engine.step(now)
        except EngineCrashed as error:
            self._engine_crashed(str(error))
            return
        # Outputs before the frame: a client can be served by the very step that ends its request.
        for output in result.outputs:
            self._on_output(output)
        if result.frame.events:
            self._carry_out(observe_frame(self.controller, _ENGINE, now, result.frame))
        self.report.steps += 1

    def _settle_engine(self) -> None:
        """Let the engine's own clean-up run out, bounded, once all requests have ended."""
        for _ in range(10_000):
            if self.crashed:
                return
            engine_at = self.engine.next_event_at(self.clock.now)
            if engine_at is None or engine_at > self.clock.now + 30.0:
                return
            self.clock.move_to(max(self.clock.now, engine_at))
            self._step_engine()

    def _engine_crashed(self, reason: str) -> None:
        self.crashed = True
        self.report.crashes.append(reason)
        self._line(_ENGINE, f"CRASHED: {reason}")
        self._carry_out(engine_died(self.controller, _ENGINE, self.clock.now, "engine died"))

    def _guarded(self, call: Callable[[], object]) -> None:
        try:
            call()
        except EngineCrashed as error:
            self._engine_crashed(str(error))
        except NotSupported:
            pass  # this engine has no such door

    def _solo_output(self, spec: RequestSpec) -> dict[int, list[int]]:
        """What this request gives alone, on a healthy engine without memory of others."""
        known = self._solo.get(spec)
        if known is not None:
            return known
        engine = ReferenceEngine(self.config.engine, self.config.policy, (), seed=0)
        at = 0.0
        result: dict[int, list[int]] = {}
        engine.submit(spec, at)
        for _ in range(100_000):
            due_at = engine.next_event_at(at)
            if due_at is None:
                break
            at = max(at, due_at)
            for output in engine.step(at).outputs:
                result.setdefault(output.index, []).extend(output.token_ids)
        self._solo[spec] = result
        return result

    # ---- effects ----------------------------------------------------------------------------------

    def _carry_out(self, wanted: Sequence[effects.Effect]) -> None:
        pending = list(wanted)
        while pending:
            effect = pending.pop(0)
            pending += self._do(effect)

    def _do(self, effect: effects.Effect) -> Sequence[effects.Effect]:
        now = self.clock.now
        match effect:
            case effects.Knock(tracked=tracked, door=door):
                self._line(tracked.request_id, f"knock {effect.attempt} at {door.name}")
                self.clock.after(self.config.link_seconds, lambda: self._knock(tracked, door))
            case effects.TellClient(tracked=tracked, advice=advice):
                self._line(tracked.request_id, f"client told; retry {advice.header()}")
                return self.controller.client_told(tracked, now)
            case effects.Preempt(tracked=tracked):
                return self._ask_engine(tracked, self.engine.preempt, refused=True)
            case effects.Resume(tracked=tracked):
                return self._ask_engine(tracked, self.engine.resume, refused=False)
            case effects.Leaked(leak=leak):
                self._line(leak.request_id, f"LEAK {leak.describe(now)}")
            case effects.Settled(tracked=tracked):
                self.report.add(tracked)
                if self.on_closed is not None:
                    self.on_closed(tracked.ledgers)
                self._clients.pop(tracked.request_id, None)
                self._line(tracked.request_id, "written off" if tracked.ledgers.written_off else "settled")
                self._abort_after_the_end(tracked)
            case effects.StopBegan() | effects.Observe():
                pass
        return ()

    def _abort_after_the_end(self, tracked: Tracked) -> None:
        """Aborts are at-least-once: now and then one comes when its request is over, or names nobody."""
        if tracked.ledgers.stop is None or tracked.preemptions or self.crashed or self._rng.random() > _LATE_ABORTS:
            return
        target = tracked.request_id if self._rng.random() < 0.5 else f"sg-none-{self._rng.getrandbits(64):016x}"
        self.clock.after(0.05, lambda: self._guarded(lambda: self.engine.abort(target, self.clock.now)))

    def _ask_engine(
        self, tracked: Tracked, command: Callable[[str, float], None], *, refused: bool
    ) -> Sequence[effects.Effect]:
        try:
            command(tracked.request_id, self.clock.now)
        except EngineCrashed as error:
            self._engine_crashed(str(error))
        except StopGuardError:
            # Not supported here, or ended in the same instant.
            return self.controller.preempt_refused(tracked, self.clock.now) if refused else ()
        return ()

    def _knock(self, tracked: Tracked, door: Door) -> None:
        if self.crashed or tracked.request_id not in self.controller.tracked:
            return
        now = self.clock.now
        try:
            if door.kind is DoorKind.CLOSE:
                self.engine.client_gone(tracked.request_id, now)
                answer = EngineAnswer(kind="accepted")
                word = AbortAnswer.SENT
            else:
                answer = self.engine.abort(tracked.request_id, now)
                word = _ANSWERS[answer.kind]
        except EngineCrashed as error:
            self._engine_crashed(str(error))
            return
        except NotSupported:
            word, answer = AbortAnswer.FAILED, EngineAnswer(kind="no_door")
        self._line(tracked.request_id, f"door {door.name}: {answer.kind}")
        self._carry_out(self.controller.abort_answered(tracked, now, door.name, word, answer.retry_after_seconds))

    def _line(self, who: str, what: str) -> None:
        if self._on_line is not None:
            self._on_line(f"{self.clock.elapsed_seconds:9.4f} {who[:24]:24} {what}")
