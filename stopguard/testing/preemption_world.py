"""A world in virtual time for preemption: clients, StopGuard's admission and coordinator, and the reference engine.

Everything but the sockets is the real thing: the queue, the coordinator with its guard, the controller with its
machines and books, and an engine that computes real (toy) tokens from real blocks. So a run also proves something: the
tokens of every stream are compared with those of a run that nobody disturbed.

`inside` preempts by the engine's own command (`ReferenceEngine.preempt`), `gateway` stops the request and sends it
again as token ids, as for an engine that has no preemption.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import msgspec

from stopguard.ledger import Book, Evidence
from stopguard.preemption import (
    BringBack,
    Claim,
    Classes,
    Coordinator,
    Exactness,
    FairQueue,
    Gone,
    Mode,
    Parked,
    PreemptionSettings,
    Refused,
    Room,
    Running,
    SeatState,
    TakeOff,
    TenantStanding,
    Verdict,
    WayKind,
)
from stopguard.probe import wire
from stopguard.refengine import DEFAULT_POLICY, EngineConfig, ReferenceEngine, RequestSpec, SamplingParameters
from stopguard.refengine.driver import VirtualDriver
from stopguard.stops import (
    Controller,
    Effect,
    EngineProfile,
    Semantics,
    Source,
    StopCause,
    Tracked,
    observe_frame,
    preemptions,
)
from stopguard.testing.preemption_loads import Arrival, Load

__all__ = ["SMALL_POOL", "Client", "Run", "World"]

ENGINE = "reference"
VOCABULARY = 200
#: 100 blocks of 16 tokens: about five long requests fill it.
SMALL_POOL = EngineConfig(blocks=100, block_tokens=16, max_running=16, max_model_tokens=2048)
_STEPS_MAX = 400_000


class Client(msgspec.Struct):
    """One request and what its client saw. Times in seconds; `None`: it did not happen."""

    request_id: str
    arrival: Arrival
    prompt: tuple[int, ...]
    tokens: list[int] = msgspec.field(default_factory=list)
    sent_at: float | None = None
    first_at: float | None = None
    ended_at: float | None = None
    parked_seconds: float = 0.0
    longest_parked_seconds: float = 0.0
    preemptions: int = 0

    @property
    def first_seconds(self) -> float:
        """From its arrival to its first token."""
        return math.inf if self.first_at is None else self.first_at - self.arrival.at

    @property
    def total_seconds(self) -> float:
        """From its arrival to its end."""
        return math.inf if self.ended_at is None else self.ended_at - self.arrival.at


class Run(msgspec.Struct):
    """What one run gave."""

    clients: list[Client]
    makespan_seconds: float
    engine_recomputed_tokens: int
    """By the engine's own preemptions."""
    ordered_recomputed_tokens: int
    """By ours."""
    computed_tokens: int
    taken: int
    refusals: dict[str, int]
    guard_closings: int
    peak_recomputed_share: float


class _SimulatedWay:
    """What the coordinator asks. The world itself does the rest, at the pace of the engine's steps."""

    def __init__(self, kind: WayKind, stubborn: bool) -> None:
        self.kind = kind
        self._stubborn = stubborn

    def can(self, tracked: Tracked) -> Verdict:
        if self._stubborn:
            return Verdict(Exactness.NEVER, "grammar")
        if not tracked.output_started:
            return Verdict(Exactness.NEVER, "not_started")
        return Verdict(Exactness.EXACT)

    async def preempt(self, tracked: Tracked) -> Parked | Refused | Gone:
        raise NotImplementedError("the world orders it by itself")

    async def resume(self, tracked: Tracked) -> Running | Refused | Gone:
        raise NotImplementedError("the world orders it by itself")


class World:
    """One run of one load. `places` is how many requests the engine may be sent at once."""

    def __init__(
        self,
        load: Load,
        settings: PreemptionSettings,
        *,
        way: WayKind = WayKind.INSIDE,
        engine_policy: str = DEFAULT_POLICY,
        config: EngineConfig = SMALL_POOL,
        native_priority: bool = True,
        places: int = 64,
        seed: int = 0,
    ) -> None:
        standings = {each.tenant: TenantStanding(ceiling=_most_urgent(settings)) for each in load.arrivals}
        self.settings = msgspec.structs.replace(settings, tenants=standings, block_tokens=config.block_tokens)
        self.classes = Classes(self.settings)
        self._engine = ReferenceEngine(config, engine_policy, seed=seed)
        self._driver = VirtualDriver(self._engine, steps_max=_STEPS_MAX)
        self._config = config
        self._native = native_priority
        self._places = places
        inside = way is WayKind.INSIDE
        self._profile = EngineProfile(name=ENGINE, probed=inside, best_evidence=Evidence.PROBE)
        self._book = Book()
        self._controller = Controller(self._book, at=0.0)
        queueing = settings.mode is not Mode.OFF
        self._queue: FairQueue[str] = FairQueue(
            limit=100_000,
            levels=len(self.classes.ranked) if queueing else 1,
            promote_seconds=self.settings.promote_seconds,
        )
        self._fair = queueing
        self.coordinator = Coordinator(self.settings, self._room, self.classes.top, self._queue_level)
        self._way = _SimulatedWay(way, load.unpreemptible)
        if settings.mode is Mode.PREEMPT:
            self.coordinator.ways.append(self._way)
        numbers = random.Random(f"prompts {seed}")
        self.clients = [
            Client(f"r{number}", each, tuple(numbers.randrange(VOCABULARY) for _ in range(each.prompt_tokens)))
            for number, each in enumerate(load.arrivals)
        ]
        self._by_id = {client.request_id: client for client in self.clients}
        self._tracked: dict[str, Tracked] = {}
        self._claims: dict[str, Claim] = {}
        # The engine's id of the incarnation that runs now, and whose it is.
        self._incarnations: dict[str, str] = {}
        self._owners: dict[str, str] = {}
        self._frame: wire.Frame | None = None
        self._frame_at = -math.inf
        self._parked_at: dict[str, float] = {}
        self._recomputed = 0
        self._peak_share = 0.0
        self._next_arrival = 0

    # ---- the run -------------------------------------------------------------------------------

    def run(self) -> Run:
        """Until everybody has been served."""
        while self._open():
            at = self._next_event_at()
            assert at < math.inf, f"nothing will ever happen again: {self.coordinator!r} {self._queue!r}"
            self._driver.now = max(self._driver.now, at)
            self._arrive(at)
            due = self._engine.next_event_at(self._driver.now)
            if due is not None and due <= at:
                self._step(at)
            self._settle(at)
        gauges = self._engine.gauges()
        return Run(
            clients=self.clients,
            makespan_seconds=max(client.ended_at or math.inf for client in self.clients),
            engine_recomputed_tokens=gauges.recomputed_tokens_total - (self._recomputed if self._profile.probed else 0),
            ordered_recomputed_tokens=self._recomputed,
            computed_tokens=gauges.prompt_tokens_total + gauges.generated_tokens_total,
            taken=self.coordinator.taken,
            refusals=dict(self.coordinator.refusals),
            guard_closings=self.coordinator.guard.closings,
            peak_recomputed_share=self._peak_share,
        )

    def verify(self) -> None:
        """The books balance and nothing is left of anybody."""
        self._book.verify()
        self.coordinator.verify()
        self._queue.verify()
        assert not len(self._book), self._book
        assert not len(self.coordinator), self.coordinator
        assert not len(self._queue), self._queue
        assert self._engine.snapshot(self._driver.now).settled
        assert not self._controller.anomalies.late_events or self._profile.probed

    def _open(self) -> bool:
        return self._next_arrival < len(self.clients) or bool(self._tracked)

    def _next_event_at(self) -> float:
        at = self.coordinator.next_due()
        if self._next_arrival < len(self.clients):
            at = min(at, self.clients[self._next_arrival].arrival.at)
        for due in (self._engine.next_event_at(self._driver.now), self._controller.next_due()):
            if due is not None:
                at = min(at, due)
        return max(at, self._driver.now)

    def _arrive(self, at: float) -> None:
        while self._next_arrival < len(self.clients) and self.clients[self._next_arrival].arrival.at <= at:
            client = self.clients[self._next_arrival]
            self._next_arrival += 1
            arrival = client.arrival
            tracked = self._controller.admit(client.request_id, at, model="toy")
            granted = self.classes.grant(arrival.tenant, header=arrival.priority_class)
            claim = Claim(
                priority_class=granted.priority_class,
                tenant=arrival.tenant,
                weight=1.0,
                arrived_at=at,
                prompt_tokens=arrival.prompt_tokens,
                max_tokens=arrival.max_tokens,
            )
            self._tracked[client.request_id], self._claims[client.request_id] = tracked, claim
            self._queue.offer(
                client.request_id,
                tenant=arrival.tenant if self._fair else "",
                weight=1.0,
                rank=claim.rank if self._fair else 0,
                pool=ENGINE,
                arrived_at=at,
                at=at,
            )
            self.coordinator.queued(tracked, claim, (ENGINE,), at)

    # ---- the engine ----------------------------------------------------------------------------

    def _step(self, at: float) -> None:
        result = self._driver.step()
        self._frame, self._frame_at = result.frame, at
        for output in result.outputs:
            owner = self._owners.get(output.request_id)
            if owner is not None and self._incarnations.get(owner) == output.request_id and output.token_ids:
                self._deliver(self._by_id[owner], list(output.token_ids), at)
        if self._profile.probed:
            self._do(observe_frame(self._controller, ENGINE, at, result.frame))
        for event in result.frame.events:
            self._hear(event, at)

    def _deliver(self, client: Client, tokens: list[int], at: float) -> None:
        tracked = self._tracked[client.request_id]
        client.tokens += tokens
        if not self._profile.probed:
            tracked.events += len(tokens)
        if client.first_at is None:
            client.first_at = at
            self._controller.output_started(tracked, at)
            self.coordinator.started(tracked, at)

    def _hear(self, event: wire.Event, at: float) -> None:
        owner = self._owners.get(event.request_id)
        if owner is None or self._incarnations.get(owner) != event.request_id:
            return
        tracked, client = self._tracked[owner], self._by_id[owner]
        seat = self.coordinator.seat_of(tracked)
        if isinstance(event, wire.Preempted) and seat is not None and seat.state is SeatState.TAKING:
            self._recomputed += event.recompute_tokens
            self._parked(client, tracked, at)
        elif isinstance(event, wire.Moved) and event.place == "running":
            if seat is not None and seat.state is SeatState.RETURNING:
                self._back(client, tracked, at)
        elif isinstance(event, wire.Finished):
            stopped = event.reason in ("abort", "cancelled")
            if stopped and seat is not None and seat.state is SeatState.TAKING:
                self._do(preemptions.preempted(self._controller, tracked, at, shelved=True))
                del self._incarnations[owner]
                self._parked(client, tracked, at)
            elif not stopped:
                self._finished(client, tracked, at)

    def _parked(self, client: Client, tracked: Tracked, at: float) -> None:
        client.preemptions += 1
        self._parked_at[client.request_id] = at
        self.coordinator.parked(tracked, at)

    def _back(self, client: Client, tracked: Tracked, at: float) -> None:
        seconds = at - self._parked_at.pop(client.request_id)
        client.parked_seconds += seconds
        client.longest_parked_seconds = max(client.longest_parked_seconds, seconds)
        self.coordinator.running(tracked, at)

    def _finished(self, client: Client, tracked: Tracked, at: float) -> None:
        client.ended_at = at
        if not self._profile.probed:
            self._do(self._controller.engine_finished(tracked, at))
        self._do(self._controller.client_served(tracked, at))
        self.coordinator.ended(tracked, at)
        del self._tracked[client.request_id]
        del self._incarnations[client.request_id]

    # ---- StopGuard -----------------------------------------------------------------------------

    def _settle(self, at: float) -> None:
        """Decide and send until nothing changes any more at this moment."""
        self._do(self._controller.advance(at))
        while True:
            decisions = self.coordinator.decide(at)
            for decision in decisions:
                if isinstance(decision, TakeOff):
                    self._take_off(decision, at)
                elif isinstance(decision, BringBack):
                    self._bring_back(decision, at)
            acted = any(isinstance(each, (TakeOff, BringBack)) for each in decisions)
            if not self._send(at) and not acted:
                break
        self._peak_share = max(self._peak_share, self.coordinator.guard.recomputed_share)

    def _send(self, at: float) -> bool:
        sent = False
        while self._places_free() > 0:
            picked = self._queue.pick(at, self._by_id.get)
            if picked is None:
                break
            client = picked[1]
            self._claims[client.request_id].served_as = self.classes.ranked[picked[2]] if self._fair else None
            client.sent_at = at
            self._submit(client, at)
            sent = True
        return sent

    def _submit(self, client: Client, at: float) -> None:
        request_id, claim = client.request_id, self._claims[client.request_id]
        tracked = self._tracked[request_id]
        incarnation = request_id if not client.tokens else f"{request_id}+{len(client.tokens)}.{client.preemptions}"
        self._incarnations[request_id] = incarnation
        self._owners[incarnation] = request_id
        self._controller.dispatch(tracked, at, self._profile)
        left = client.arrival.max_tokens - len(client.tokens)
        spec = RequestSpec(
            incarnation,
            (*client.prompt, *client.tokens),
            SamplingParameters(max_tokens=left, ignore_eos=True),
            priority=claim.engine_priority(lower_is_more_urgent=False) if self._native else 0,
        )
        self._engine.submit(spec, at)
        self.coordinator.sent(tracked, claim, ENGINE, at)

    def _take_off(self, decision: TakeOff, at: float) -> None:
        tracked = decision.seat.tracked
        cause = StopCause(
            semantics=Semantics.PREEMPT,
            source=Source.PREEMPTION,
            reason=decision.pressure.reason,
            observed_at=at,
            actor=decision.for_whom.tracked.request_id,
        )
        self._do(preemptions.preempt(self._controller, tracked, at, cause))
        if self._way.kind is WayKind.INSIDE:
            self._engine.preempt(tracked.request_id, at)
        else:
            self._recomputed += decision.candidate.recompute_tokens
            self._engine.abort(self._incarnations[tracked.request_id], at, door="inside")

    def _bring_back(self, decision: BringBack, at: float) -> None:
        tracked = decision.seat.tracked
        if self._way.kind is WayKind.INSIDE:
            self._do(preemptions.resume(self._controller, tracked, at))
            self._engine.resume(tracked.request_id, at)
        else:
            decision.seat.claim.served_as = self.classes.ranked[decision.level]
            self._submit(self._by_id[tracked.request_id], at)

    def _room(self, _engine: str) -> Room:
        frame = self._frame
        free = self._places_free()
        if frame is None:
            return Room(places_free=free, block_tokens=self._config.block_tokens)
        total = self._config.blocks
        return Room(
            places_free=free,
            read_at=self._frame_at,
            waiting=frame.waiting_now,
            blocks_used=total - frame.blocks_free_now - frame.blocks_cached_now,
            blocks_total=total,
            block_tokens=self._config.block_tokens,
        )

    def _places_free(self) -> int:
        held = sum(
            seat.way is not None and seat.way.kind is WayKind.INSIDE and seat.state is SeatState.PARKED
            for seat in self.coordinator.away()
        )
        return self._places - len(self._controller.in_engine.get(ENGINE, ())) + held

    def _queue_level(self, _engine: str) -> int:
        return self._queue.highest_level(lambda _pool: True)

    def _do(self, wanted: Iterable[Effect]) -> None:
        """Nothing here listens, so what the controller wants done is only checked for what must not happen."""
        for effect in wanted:
            assert type(effect).__name__ in {"Preempt", "Resume", "Settled"}, effect


def _most_urgent(settings: PreemptionSettings) -> str:
    return max(settings.classes, key=lambda name: settings.classes[name].urgency)
