"""A controller with a clock that only the test moves, and effects as short words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stopguard.ledger import Book, BookLimits, Evidence
from stopguard.probe import wire
from stopguard.stops import (
    CLOSE_CONNECTION,
    Controller,
    Door,
    DoorKind,
    Effect,
    EngineProfile,
    RetryPolicy,
    Semantics,
    Source,
    StopCause,
    StopConfig,
    Tracked,
    effects,
    observe_frame,
)

RETRY = RetryPolicy(tries_per_door=2, first_wait_seconds=0.1, factor=2.0, longest_wait_seconds=1.0, tries=5)
CALL = Door(name="call", kind=DoorKind.CALL, worth=Evidence.STREAM_CLOSED)
PROBE = Door(name="probe", kind=DoorKind.PROBE, worth=Evidence.PROBE)

PROBED = EngineProfile(
    name="probed", doors=(PROBE, CLOSE_CONNECTION), best_evidence=Evidence.PROBE, probed=True, retry=RETRY
)
STREAM = EngineProfile(name="stream", doors=(CALL, CLOSE_CONNECTION), best_evidence=Evidence.STREAM_CLOSED, retry=RETRY)
GAUGED = EngineProfile(name="gauged", doors=(CALL, CLOSE_CONNECTION), best_evidence=Evidence.GAUGE, retry=RETRY)
SILENT = EngineProfile(name="silent", doors=(CALL, CLOSE_CONNECTION), best_evidence=Evidence.ACCEPTED, retry=RETRY)
ALL_PROFILES = (PROBED, STREAM, GAUGED, SILENT)

CONFIG = StopConfig(settle_seconds=10.0, tell_seconds=0.5, preempt_seconds=5.0, write_off_seconds=300.0)


def word(effect: Effect) -> str:
    """An effect as a test writes it down."""
    match effect:
        case effects.Knock():
            return f"knock {effect.attempt} at {effect.door.name} for {effect.tracked.request_id}"
        case effects.TellClient():
            return f"tell {effect.tracked.request_id} {effect.cause.reason}: {effect.advice.header()}"
        case effects.Observe():
            return f"observe {effect.engine}"
        case effects.StopBegan():
            return f"stop began {effect.tracked.request_id}"
        case effects.Leaked():
            leak = effect.leak
            return f"leaked {leak.request_id} {leak.ledger.label}.{leak.account.label} {leak.amount}"
        case effects.Settled():
            return f"settled {effect.tracked.request_id}"
        case effects.Preempt():
            return f"preempt {effect.tracked.request_id}"
        case effects.Resume():
            return f"resume {effect.tracked.request_id}"


class Scene:
    """A book, its controller and the present moment. Each event returns its effects in words."""

    def __init__(self, limits: BookLimits | None = None, config: StopConfig = CONFIG) -> None:
        self.book = Book(limits)
        self.controller = Controller(self.book, config, at=100.0)
        self.at = 100.0
        self.frames = 0

    def said(self, wanted: Iterable[Effect]) -> list[str]:
        words = [word(effect) for effect in wanted]
        self.book.verify()
        return words

    def admitted(self, request_id: str = "r1") -> Tracked:
        return self.controller.admit(request_id, self.at, model="m")

    def running(self, profile: EngineProfile, request_id: str = "r1", *, blocks: int = 4) -> Tracked:
        """A request whose engine has sent its first output (or, with a probe, holds its blocks)."""
        tracked = self.admitted(request_id)
        self.controller.dispatch(tracked, self.at, profile)
        if profile.probed:
            assert not self.frame(
                wire.Added(request_id, 1.0, 7),
                wire.Moved(request_id, 1.0, "running"),
                wire.BlocksHeld(request_id, 1.0, blocks),
            )
            tracked.ledgers.fold(self.at)
        else:
            self.controller.output_started(tracked, self.at)
        return tracked

    def frame(self, *events: Any, engine: str = "probed") -> list[str]:
        """The engine's scheduler speaks."""
        self.frames += 1
        frame = wire.Frame(self.frames, self.frames, 1.0, list(events), 0, 0, 0, 0)
        return self.said(observe_frame(self.controller, engine, self.at, frame))

    def leave(self, tracked: Tracked, method: str = "eof", **arguments: Any) -> list[str]:
        return self.said(self.controller.client_left(tracked, self.at, method, **arguments))

    def stop(
        self,
        tracked: Tracked,
        reason: str = "api",
        semantics: Semantics = Semantics.CANCEL,
        source: Source = Source.API,
    ) -> list[str]:
        cause = StopCause(semantics=semantics, source=source, reason=reason, observed_at=self.at)
        return self.said(self.controller.stop(tracked, self.at, cause))

    def later(self, seconds: float) -> list[str]:
        """Let time pass in one go."""
        self.at += seconds
        return self.said(self.controller.advance(self.at))

    def step(self, until: float) -> list[str]:
        """Let time pass as an edge does: from one due timer to the next."""
        words: list[str] = []
        while (due := self.controller.next_due()) is not None and due <= until:
            self.at = max(self.at, due)
            words += self.said(self.controller.advance(self.at))
        self.at = until
        return words

    def empty(self) -> bool:
        """Whether nothing of any request is left in the controller or open in the book."""
        controller = self.controller
        left = (controller.tracked, controller.parts, *controller.in_engine.values())
        return not any(left) and not len(controller.wheel) and not len(self.book)


def stopped(request_id: str = "r1", *, blocks: int = 4) -> list[Any]:
    """What an honest scheduler says of an abort that took effect."""
    return [
        wire.AbortArrived(request_id, 2.0),
        wire.AbortApplied(request_id, 2.0),
        wire.Moved(request_id, 2.0, "gone"),
        wire.BlocksReturned(request_id, 2.0, blocks),
    ]


def finished(request_id: str = "r1", *, blocks: int = 4, reason: str = "stop") -> list[Any]:
    """What an honest scheduler says of a request that ended by itself."""
    return [
        wire.Finished(request_id, 2.0, reason),
        wire.Moved(request_id, 2.0, "gone"),
        wire.BlocksReturned(request_id, 2.0, blocks),
    ]
