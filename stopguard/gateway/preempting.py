"""Preempting: the edge of `stopguard.preemption` in the gateway.

There is one object a process, and only when classes are in use (`GatewaySettings.preemption`). The coordinator
decides; here a decision becomes an order to the controller, a call of a way, and a place that is kept free for
whoever comes back. A task exists for a preemption or a resumption that is under way, never for a request that waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from stopguard.engines import GaugeUnit
from stopguard.errors import LimitReached
from stopguard.ledger import EngineGauges
from stopguard.preemption import (
    BringBack,
    ChangedTooOften,
    Claim,
    Classes,
    Coordinator,
    Decision,
    Exactness,
    Forecast,
    Gone,
    Granted,
    Hopeless,
    Limits,
    Look,
    Mode,
    PriorityClass,
    Refused,
    Room,
    Running,
    SeatState,
    TakeOff,
    Way,
    WayKind,
    room_of,
)
from stopguard.stops import Engine, IllegalTransition, Semantics, Source, StopCause, Tracked, preemptions
from stopguard.telemetry.preemption import PreemptionNumbers

if TYPE_CHECKING:
    from stopguard.gateway.exchange import Exchange
    from stopguard.gateway.fleet import Member
    from stopguard.gateway.head import RequestHead
    from stopguard.gateway.server import Gateway

__all__ = ["Preempting", "PreemptingStatistics"]

logger = logging.getLogger("stopguard.preemption")

_BYTES_PER_TOKEN = 4
"""What a token of a prompt takes in a body, roughly: an engine with a probe says better."""
_CHANGES_MAX = 16
"""How often one request's class may change: a client that flaps would have everybody decide anew each time."""
_ALIVE = (Engine.PREEMPTING, Engine.DISPATCHED)


class _Wishes(msgspec.Struct, gc=False):
    """What a body says about urgency and length; everything else stays unread."""

    service_tier: Any = None
    priority: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    max_new_tokens: Any = None
    n_predict: Any = None
    sampling_params: Any = None

    @property
    def longest(self) -> int | None:
        """The longest answer that it allows, in tokens."""
        inner = self.sampling_params if isinstance(self.sampling_params, dict) else {}
        for value in (
            self.max_completion_tokens,
            self.max_tokens,
            self.max_output_tokens,
            self.max_new_tokens,
            self.n_predict,
            inner.get("max_new_tokens"),
        ):
            if type(value) is int and value > 0:
                return value
        return None


_NO_WISHES = _Wishes()
_decoder = msgspec.json.Decoder(_Wishes)


class PreemptingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Preemption at this moment. `refusals` counts, by reason, requests that were looked at and not chosen."""

    parked: int
    taken: int
    returned: int
    guard_closed: bool
    guard_closings: int
    recomputed_share: float
    refusals: dict[str, int]
    lowered: int
    hopeless: int


class Preempting:
    """Classes, deadlines and preemption of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.settings = gateway.settings.preemption
        self.classes = Classes(self.settings)
        self.forecast = Forecast()
        self.coordinator = Coordinator(self.settings, self._room, self.classes.top, self._queue_level)
        # Requests that asked for more than their tenant may have, and requests refused for their deadlines.
        self.lowered = 0
        self.hopeless = 0
        self._gauges: dict[str, EngineGauges] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._deciding = False
        self._again = False
        self._was_closed = False

    @property
    def ways(self) -> list[Way]:
        """How requests can be preempted, in the order of preference."""
        return self.coordinator.ways

    def add_way(self, way: Way) -> None:
        """One more way, where there is preempting at all; those inside engines go before the gateway's own."""
        if self.settings.mode is not Mode.PREEMPT:
            return
        self.ways.append(way)
        self.ways.sort(key=lambda each: each.kind is WayKind.GATEWAY)

    def may_preempt(self, exchange: Exchange) -> bool:
        """Whether this request might have to make room one day (and is worth being prepared for it)."""
        claim = exchange.claim
        return (
            self.settings.mode is Mode.PREEMPT
            and claim is not None
            and claim.priority_class.preemptible
            and any(each.preempts and each.rank > claim.rank for each in self.classes.ranked)
        )

    # ---- at admission --------------------------------------------------------------------------

    def claim(
        self, head: RequestHead, digest: str, body: bytes, candidates: list[Member], at: float
    ) -> tuple[Claim, Granted]:
        """What a new request may claim. Raises `UnknownClass`."""
        wishes = _wishes_in(body)
        tier = wishes.service_tier if isinstance(wishes.service_tier, str) else ""
        priority = wishes.priority if type(wishes.priority) is int else None
        lower = candidates[0].engine.capabilities.lower_is_more_urgent if candidates else True
        granted = self.classes.grant(
            digest, header=head.wanted_class, tier=tier, priority=priority, lower_is_more_urgent=lower
        )
        if granted.lowered_from:
            self.lowered += 1
        claim = Claim(
            priority_class=granted.priority_class,
            tenant=digest,
            weight=self.classes.weight(digest),
            arrived_at=at,
            prompt_tokens=len(body) // _BYTES_PER_TOKEN,
            max_tokens=wishes.longest,
        )
        return claim, granted

    def judge(self, claim: Claim, candidates: list[Member], limits: Limits, at: float) -> Hopeless | None:
        """Whether one of its deadlines cannot be met."""
        if self._gateway.fleet.choose_quietly(candidates) is not None and not any(
            self.coordinator.unstarted(member.profile.name) for member in candidates
        ):
            return None
        names = [member.profile.name for member in candidates]
        ahead = self._gateway.admission.ahead_of(claim.rank, candidates)
        waiting = min((self.coordinator.unstarted(name) for name in names), default=0)
        found = self.forecast.judge(names, ahead + waiting, limits, at)
        if found is not None:
            self.hopeless += 1
        return found

    def reclass(self, exchange: Exchange, wanted: PriorityClass, by: str, at: float) -> bool:
        """Give a request that lives another class, wherever it is. Returns whether that is another one than it had.

        It waits at its new rank, is looked at as a victim or as somebody urgent from now on, and its engine is told
        where it can be. Raises `ChangedTooOften`.
        """
        claim, tracked = exchange.claim, exchange.tracked
        if claim is None or claim.priority_class is wanted or self.coordinator.seat_of(tracked) is None:
            return False
        if claim.changes >= _CHANGES_MAX:
            raise ChangedTooOften(f"the class of {tracked.request_id} was changed {_CHANGES_MAX} times: let it be")
        tracked.ledgers.mark(at, f"class {wanted.name}, was {claim.priority_class.name}: {by}")
        claim.priority_class, claim.served_as = wanted, None
        claim.changes += 1
        gateway = self._gateway
        gateway.admission.queue.rerank(exchange, wanted.rank, at)
        self.coordinator.reclassed(tracked)
        if exchange.member is not None and gateway.probing is not None:
            name = exchange.member.profile.name
            if gateway.probing.can(name, "prioritise"):
                lower = exchange.member.engine.capabilities.lower_is_more_urgent
                self._start(self._tell(name, tracked, claim.engine_priority(lower_is_more_urgent=lower)))
        gateway.admission.pump(at)
        self.decide(at)
        gateway.wake_soon(at)
        return True

    async def _tell(self, engine: str, tracked: Tracked, priority: int) -> None:
        probing = self._gateway.probing
        assert probing is not None
        result = await probing.order(engine, "prioritise", tracked.request_id, priority=priority)
        if tracked.request_id in self._gateway.controller.tracked:
            tracked.ledgers.mark(monotonic(), f"its engine was told priority {priority}: {result.answer}")

    def queued(self, exchange: Exchange, candidates: list[Member], at: float) -> None:
        """It waits for one of `candidates`."""
        if exchange.claim is not None:
            names = [member.profile.name for member in candidates]
            self.coordinator.queued(exchange.tracked, exchange.claim, names, at)
            self.decide(at)

    # ---- on its way ----------------------------------------------------------------------------

    def placed(self, exchange: Exchange, at: float) -> None:
        """An engine was chosen for it; a connection may have to be made first."""
        self.dispatched(exchange, at)

    def dispatched(self, exchange: Exchange, at: float) -> None:
        """It was sent to its engine."""
        if exchange.claim is not None and exchange.member is not None:
            self.coordinator.sent(exchange.tracked, exchange.claim, exchange.member.profile.name, at)
            self.decide(at)

    def started(self, exchange: Exchange, at: float) -> None:
        """Its first output has come."""
        member = exchange.member
        seat = self.coordinator.seat_of(exchange.tracked)
        if member is None or seat is None:
            return
        name = member.profile.name
        first = seat.started_at is None
        self.coordinator.started(exchange.tracked, at)
        if first:
            waiting = self.coordinator.unstarted(name) > 0 or self._gateway.admission.highest_level(member) >= 0
            self.forecast.started(name, at, still_waiting=waiting, after_seconds=at - seat.sent_at)
        self.decide(at)

    def ended(self, tracked: Tracked, at: float) -> None:
        """It needs nothing any more (its stop began, or it is settled)."""
        if self.coordinator.seat_of(tracked) is not None:
            self.coordinator.ended(tracked, at)
            self.decide(at)

    def settled(self, tracked: Tracked, at: float) -> None:
        """Its books are closed: the place that it had at its engine is free."""
        if self.coordinator.seat_of(tracked) is not None:
            self.coordinator.ended(tracked, at)
        self.decide(at)

    @property
    def waits(self) -> bool:
        """Whether a decision may hang on how full engines are."""
        return self.coordinator.waits

    def gauges_read(self, engine: str, gauges: EngineGauges, at: float) -> None:
        """An engine has said how full it is, by its gauges or its probe."""
        self._gauges[engine] = gauges
        self.decide(at)

    # ---- time ----------------------------------------------------------------------------------

    def advance(self, at: float) -> None:
        """Time has passed."""
        if self.coordinator.next_due() <= at:
            self.decide(at)

    def next_due(self) -> float:
        """When to call `advance` next; infinity when only an event matters."""
        return self.coordinator.next_due()

    async def close(self) -> None:
        """End what is under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- carrying out --------------------------------------------------------------------------

    def decide(self, at: float) -> None:
        """Ask the coordinator and do what it says. What that causes is looked at in the same call, not within it."""
        if self._deciding:
            self._again = True
            return
        self._deciding = True
        try:
            self._again = True
            while self._again:
                self._again = False
                for decision in self.coordinator.decide(at):
                    self._carry_out(decision, at)
                self._shift_places()
        finally:
            self._deciding = False
        self._say_guard()
        due_at = self.coordinator.next_due()
        if due_at < float("inf"):
            self._gateway.wake_at(max(due_at, at))

    def _carry_out(self, decision: Decision, at: float) -> None:
        if isinstance(decision, Look):
            self._gateway.look(decision.engine)
        elif isinstance(decision, TakeOff):
            self._take_off(decision, at)
        else:
            self._bring_back(decision, at)

    def _take_off(self, decision: TakeOff, at: float) -> None:
        tracked = decision.seat.tracked
        whom = decision.for_whom.tracked
        cause = StopCause(
            semantics=Semantics.PREEMPT,
            source=Source.PREEMPTION,
            reason=decision.pressure.reason,
            observed_at=at,
            actor=whom.request_id,
        )
        try:
            ordered = preemptions.preempt(self._gateway.controller, tracked, at, cause)
        except (IllegalTransition, LimitReached) as error:
            self.coordinator.refused(tracked, at, "not_running")
            logger.debug("%s is not preempted: %s", tracked.request_id, error)
            return
        candidate = decision.candidate
        tracked.ledgers.mark(
            at,
            f"makes room for {whom.request_id} ({decision.pressure.reason}): {candidate.output_tokens} tokens out, "
            f"{candidate.recompute_tokens} to recompute, {candidate.remaining_tokens} to come",
        )
        self._gateway.carry_out(ordered, at)
        self._start(self._preempt(decision.way, tracked))

    async def _preempt(self, way: Way, tracked: Tracked) -> None:
        answer = await way.preempt(tracked)
        at = monotonic()
        gateway = self._gateway
        if isinstance(answer, Refused):
            gateway.carry_out(gateway.controller.preempt_refused(tracked, at), at)
            self.coordinator.refused(tracked, at, answer.reason, answer.retry_after_seconds)
        elif isinstance(answer, Gone) or tracked.machine.engine not in (Engine.PARKED, Engine.SHELVED):
            if tracked.machine.engine in _ALIVE:
                # It says gone and the machine says running: the controller's own timer gave up on it meanwhile.
                gateway.carry_out(gateway.controller.preempt_refused(tracked, at), at)
                self.coordinator.refused(tracked, at, "gone")
        else:
            self.coordinator.parked(tracked, at)
        self._shift_places()
        gateway.admission.pump(at)
        self.decide(at)
        gateway.wake_soon(at)

    def _bring_back(self, decision: BringBack, at: float) -> None:
        tracked = decision.seat.tracked
        decision.seat.claim.served_as = self.classes.ranked[decision.level]
        if decision.way.kind is WayKind.INSIDE:
            try:
                ordered = preemptions.resume(self._gateway.controller, tracked, at)
            except IllegalTransition:
                self.coordinator.refused(tracked, at, "not_parked")
                return
            self._gateway.carry_out(ordered, at)
        self._start(self._resume(decision.way, tracked))

    async def _resume(self, way: Way, tracked: Tracked) -> None:
        answer = await way.resume(tracked)
        at = monotonic()
        if isinstance(answer, Running):
            seat = self.coordinator.seat_of(tracked)
            if seat is not None:
                tracked.ledgers.mark(at, f"goes on after {at - seat.parked_at:.3f} s away")
            self.coordinator.running(tracked, at)
        elif isinstance(answer, Refused):
            if way.kind is WayKind.INSIDE:
                gateway = self._gateway
                gateway.carry_out(preemptions.resume_refused(gateway.controller, tracked, at), at)
            self.coordinator.refused(tracked, at, answer.reason, answer.retry_after_seconds)
        self._shift_places()
        self._gateway.admission.pump(at)
        self.decide(at)

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug of a way: the request itself is in the controller's hands, whose timers still run.
            logger.error("a way failed", exc_info=error)
            self._gateway.failed_effects += 1

    # ---- room ----------------------------------------------------------------------------------

    def _room(self, engine: str) -> Room:
        member = self._gateway.fleet.named(engine)
        if member is None:
            return Room(places_free=0)
        tokens = member.engine.capabilities.gauge_unit is GaugeUnit.TOKENS
        block_tokens = 1 if tokens else self.settings.block_tokens
        if self._gateway.probing is not None:
            said = (source.hello.block_tokens for source in self._gateway.probing.sources(engine))
            block_tokens = next((size for size in said if size), block_tokens)
        slots = member.engine.capabilities.slots
        slots_free = slots - member.load if slots else None
        return room_of(self._gauges.get(engine), member.places_free, block_tokens, slots_free)

    def _queue_level(self, engine: str) -> int:
        member = self._gateway.fleet.named(engine)
        return -1 if member is None else self._gateway.admission.highest_level(member)

    def _shift_places(self) -> None:
        """Keep places for those that come back from us, and give away those of who is held inside."""
        kept: Counter[str] = Counter()
        for seat in self.coordinator.away():
            if seat.way is None or not seat.engine:
                continue
            if seat.way.kind is WayKind.INSIDE:
                kept[seat.engine] -= seat.state is SeatState.PARKED
            elif seat.state is SeatState.RETURNING and seat.tracked.machine.engine is Engine.SHELVED:
                kept[seat.engine] += 1
        for member in self._gateway.fleet.members:
            member.places_kept = kept[member.profile.name]

    # ---- questions -----------------------------------------------------------------------------

    def verdicts(self, tracked: Tracked) -> list[tuple[str, Exactness, str]]:
        """What each way says of a request now: its kind, how exactly it could go on, and why not."""
        found = []
        for way in self.ways:
            verdict = way.can(tracked)
            found.append((way.kind.value, verdict.exactness, verdict.reason))
        return found

    def statistics(self) -> PreemptingStatistics:
        """Preemption now."""
        coordinator = self.coordinator
        return PreemptingStatistics(
            parked=len(coordinator.parked_seats()),
            taken=coordinator.taken,
            returned=coordinator.returned,
            guard_closed=coordinator.guard.closed,
            guard_closings=coordinator.guard.closings,
            recomputed_share=coordinator.guard.recomputed_share,
            refusals=dict(coordinator.refusals),
            lowered=self.lowered,
            hopeless=self.hopeless,
        )

    def numbers(self) -> PreemptionNumbers:
        """The same for the metrics, with what they need beside it. Called from another thread."""
        coordinator = self.coordinator
        at = monotonic()
        away = [at - seat.parked_at for seat in coordinator.away()]
        queued = dict.fromkeys((each.name for each in self.classes.ranked), 0)
        for exchange in self._gateway.admission.queue:
            if exchange.claim is not None:
                queued[exchange.claim.priority_class.name] += 1
        return PreemptionNumbers(
            away_seconds=dict(coordinator.away_seconds),
            longest_away_seconds=max(away, default=0.0),
            victims=dict(coordinator.victims),
            refusals=dict(coordinator.refusals),
            queued=queued,
            guard_closed=coordinator.guard.closed,
            recomputed_share=coordinator.guard.recomputed_share,
            lowered=self.lowered,
            hopeless=self.hopeless,
        )

    def _say_guard(self) -> None:
        guard = self.coordinator.guard
        if guard.closed is not self._was_closed:
            self._was_closed = guard.closed
            if guard.closed:
                logger.warning(
                    "preempting has stopped: %.1f %% of what was computed lately is computed again (at most %.1f %%)",
                    100 * guard.recomputed_share,
                    100 * self.settings.recomputed_share,
                )
            else:
                logger.info("preempting goes on: %.1f %% is recomputed", 100 * guard.recomputed_share)


def _wishes_in(body: bytes) -> _Wishes:
    try:
        return _decoder.decode(body) if body else _NO_WISHES
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _NO_WISHES
