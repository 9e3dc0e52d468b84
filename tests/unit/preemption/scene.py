"""A coordinator with a real controller and book, one engine whose room the test sets, and a way that may refuse."""

from __future__ import annotations

from stopguard.preemption import (
    BringBack,
    Claim,
    Classes,
    Coordinator,
    Decision,
    Exactness,
    Gone,
    Look,
    Mode,
    Parked,
    PreemptionSettings,
    Refused,
    Room,
    Running,
    TakeOff,
    Verdict,
    WayKind,
)
from stopguard.stops import Semantics, Source, StopCause, Tracked, preemptions
from tests.unit.stops.scene import STREAM, Scene

SETTINGS = PreemptionSettings(mode=Mode.PREEMPT, ceiling="urgent", preemptions_per_request=2)


class FakeWay:
    """Can everything but what `never` names."""

    kind = WayKind.GATEWAY

    def __init__(self) -> None:
        self.never: dict[str, str] = {}

    def can(self, tracked: Tracked) -> Verdict:
        reason = self.never.get(tracked.request_id, "")
        return Verdict(Exactness.NEVER, reason) if reason else Verdict(Exactness.EXACT)

    async def preempt(self, tracked: Tracked) -> Parked | Refused | Gone:
        raise NotImplementedError

    async def resume(self, tracked: Tracked) -> Running | Refused | Gone:
        raise NotImplementedError


class Stage:
    """One engine, `stream`, with `places` places; requests by name."""

    def __init__(self, settings: PreemptionSettings = SETTINGS, places: int = 4) -> None:
        self.scene = Scene()
        self.classes = Classes(settings)
        self.places = places
        self.gauged: Room | None = None
        # How many slots it has; `None`: it has none.
        self.slots: int | None = None
        self.queue_level = -1
        self.way = FakeWay()
        self.coordinator = Coordinator(settings, self.room, self.classes.top, lambda _engine: self.queue_level)
        self.coordinator.ways.append(self.way)
        self.requests: dict[str, Tracked] = {}
        self.claims: dict[str, Claim] = {}

    @property
    def at(self) -> float:
        return self.scene.at

    def room(self, _engine: str) -> Room:
        there = len(self.scene.controller.in_engine.get("stream", ()))
        free, slots_free = self.places - there, None if self.slots is None else self.slots - there
        if self.gauged is None:
            return Room(places_free=free, slots_free=slots_free)
        return Room(
            places_free=free,
            read_at=self.gauged.read_at,
            waiting=self.gauged.waiting,
            blocks_used=self.gauged.blocks_used,
            blocks_total=self.gauged.blocks_total,
            slots_free=slots_free,
        )

    def says(self, *, used: int, total: int = 100, waiting: int = 0) -> None:
        """The engine's gauges, read now."""
        self.gauged = Room(places_free=0, read_at=self.at, waiting=waiting, blocks_used=used, blocks_total=total)

    def new(self, name: str, priority_class: str, *, prompt: int = 64, most: int | None = 500) -> Tracked:
        tracked = self.scene.admitted(name)
        self.requests[name] = tracked
        self.claims[name] = Claim(
            priority_class=self.classes.by_name[priority_class],
            tenant="t",
            weight=1.0,
            arrived_at=self.at,
            prompt_tokens=prompt,
            max_tokens=most,
        )
        return tracked

    def queued(self, name: str, priority_class: str, **facts: int) -> list[str]:
        tracked = self.new(name, priority_class, **facts)
        self.coordinator.queued(tracked, self.claims[name], ["stream"], self.at)
        return self.decide()

    def sent(self, name: str, priority_class: str = "background", **facts: int) -> list[str]:
        self.send(name if name in self.requests else self.new(name, priority_class, **facts).request_id)
        return self.decide()

    def send(self, name: str) -> None:
        self.scene.controller.dispatch(self.requests[name], self.at, STREAM)
        self.coordinator.sent(self.requests[name], self.claims[name], "stream", self.at)

    def running(self, name: str, priority_class: str = "background", *, tokens: int = 20, **facts: int) -> None:
        """At the engine, with output."""
        self.sent(name, priority_class, **facts)
        self.started(name)
        self.requests[name].events += tokens

    def started(self, name: str) -> list[str]:
        self.scene.controller.output_started(self.requests[name], self.at)
        self.coordinator.started(self.requests[name], self.at)
        return self.decide()

    def parked(self, name: str) -> list[str]:
        """The way has taken it off."""
        tracked = self.requests[name]
        self.scene.said(preemptions.preempted(self.scene.controller, tracked, self.at, shelved=True))
        self.coordinator.parked(tracked, self.at)
        return self.decide()

    def back(self, name: str) -> list[str]:
        """The way has let it go on."""
        self.send(name)
        self.coordinator.running(self.requests[name], self.at)
        return self.decide()

    def refused(self, name: str, reason: str = "busy", retry_after_seconds: float = 0.0) -> list[str]:
        self.scene.said(self.scene.controller.preempt_refused(self.requests[name], self.at))
        self.coordinator.refused(self.requests[name], self.at, reason, retry_after_seconds)
        return self.decide()

    def finished(self, name: str) -> list[str]:
        tracked = self.requests.pop(name)
        self.scene.said(self.scene.controller.engine_finished(tracked, self.at))
        self.scene.said(self.scene.controller.client_served(tracked, self.at))
        self.coordinator.ended(tracked, self.at)
        return self.decide()

    def left(self, name: str) -> list[str]:
        """Its client is gone, and the engine has let go of it."""
        tracked = self.requests.pop(name)
        self.scene.leave(tracked)
        self.coordinator.ended(tracked, self.at)
        words = self.decide()
        if name in self.scene.controller.tracked:
            self.scene.said(self.scene.controller.stream_ended_by_engine(tracked, self.at))
        return words

    def later(self, seconds: float) -> list[str]:
        self.scene.later(seconds)
        return self.decide()

    def decide(self) -> list[str]:
        """What the coordinator wants now, ordered from the controller, in words."""
        words = [self._order(decision) for decision in self.coordinator.decide(self.at)]
        self.coordinator.verify()
        self.scene.book.verify()
        return words

    def _order(self, decision: Decision) -> str:
        if isinstance(decision, Look):
            return f"look at {decision.engine}"
        if isinstance(decision, BringBack):
            return f"bring back {decision.seat.tracked.request_id}"
        assert isinstance(decision, TakeOff)
        victim, whom = decision.seat.tracked, decision.for_whom.tracked
        cause = StopCause(
            semantics=Semantics.PREEMPT, source=Source.PREEMPTION, reason=decision.pressure.reason, observed_at=self.at
        )
        self.scene.said(preemptions.preempt(self.scene.controller, victim, self.at, cause))
        return f"take off {victim.request_id} for {whom.request_id} ({decision.pressure.reason})"
