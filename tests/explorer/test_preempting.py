"""Every interleaving of what can happen to a request that makes room, with the coordinator and the controller together.

Two requests run in the background (`a`, `b`) at an engine with two places, and an urgent one (`u`) comes. From there
everything that a client, an engine, a way or time can do is done in every order: a cancel while the preemption is
under way, while the request is away, while it comes back; a finish in the same turn; the engine's death while
somebody is parked; a deadline while parked; two preemptions of one request; refusals of both kinds. Worlds that look
the same are walked on from only once; each is rebuilt from its events, so nothing is shared.
"""

from __future__ import annotations

from collections import deque

import msgspec
import pytest

from stopguard.preemption.seats import SeatState
from stopguard.stops import Client, DeadlineKind, Engine, Semantics, engine_died
from stopguard.stops.machine import ENGINE_ENDED
from tests.unit.preemption.scene import SETTINGS, Stage

DEPTH = 9
WORLDS_MAX = 60_000
LONG = SETTINGS.longest_parked_seconds + 1.0
TOTAL_SECONDS = 8.0


class Walk:
    """One world, rebuilt from `events`. `orders` are the decisions that the coordinator made."""

    def __init__(self, events: tuple[str, ...]) -> None:
        settings = msgspec.structs.replace(SETTINGS, cool_down_seconds=0.4, hold_seconds=0.1)
        self.stage = Stage(settings, places=2)
        self.orders: list[str] = []
        self.resuming: set[str] = set()
        self.waits = 0
        for name in ("a", "b"):
            self.stage.running(name, tokens=20)
            self.stage.scene.controller.set_deadline(
                self.stage.requests[name], DeadlineKind.TOTAL, self.stage.at + TOTAL_SECONDS
            )
        self.note(self.stage.queued("u", "urgent"))
        for event in events:
            self.do(event)

    # ---- what can happen -----------------------------------------------------------------------

    def possible(self) -> list[str]:
        found = []
        for name, tracked in self.stage.requests.items():
            machine = tracked.machine
            seat = self.stage.coordinator.seat_of(tracked)
            if machine.client is Client.LISTENING:
                found.append(f"{name} leaves")
            if machine.engine is Engine.DISPATCHED and name not in self.resuming and not tracked.muted:
                found.append(f"{name} finishes")
            if machine.engine is Engine.PREEMPTING:
                found += [f"{name} parks", f"{name} refuses", f"{name} finishes"]
            if name in self.resuming and machine.engine is Engine.SHELVED:
                found += [f"{name} returns", f"{name} cannot return"]
            if machine.engine is Engine.ABORTING:
                found.append(f"{name} is stopped")
                if seat is None:
                    found.append(f"{name} parks late")
            free = self.stage.room("stream").places_free > 0
            if name == "u" and machine.engine is Engine.UNDISPATCHED and not tracked.muted and free:
                found.append("u is sent")
            if name == "u" and machine.engine is Engine.DISPATCHED and not tracked.output_started:
                found.append("u starts")
        if "u" not in self.stage.requests and self.waits < 2:
            found.append("another u comes")
        if self.waits < 3:
            found += ["time passes, little", "time passes, much"]
        if any(
            each.machine.engine not in (*ENGINE_ENDED, Engine.UNDISPATCHED) for each in self.stage.requests.values()
        ):
            found.append("the engine dies")
        return found

    def do(self, event: str) -> None:
        stage = self.stage
        name = event.split(" ", 1)[0]
        match event.split(" ", 1)[1] if name in stage.requests else event:
            case "leaves":
                tracked = stage.requests[name]
                stage.scene.leave(tracked)
                stage.coordinator.ended(tracked, stage.at)
            case "finishes":
                tracked = stage.requests[name]
                stage.scene.said(stage.scene.controller.engine_finished(tracked, stage.at))
                stage.scene.said(stage.scene.controller.client_served(tracked, stage.at))
                stage.coordinator.ended(tracked, stage.at)
            case "parks":
                self.note(stage.parked(name))
            case "parks late":
                # The way reports what it did before it heard of the cancel.
                stage.parked(name)
            case "refuses":
                self.note(stage.refused(name))
            case "returns":
                self.resuming.discard(name)
                self.note(stage.back(name))
            case "cannot return":
                self.resuming.discard(name)
                stage.coordinator.refused(stage.requests[name], stage.at, "unreachable")
            case "is stopped":
                stage.scene.said(stage.scene.controller.stream_ended_by_engine(stage.requests[name], stage.at))
            case "is sent":
                self.note(stage.sent("u"))
            case "starts":
                self.note(stage.started("u"))
            case "another u comes":
                self.waits += 1
                self.note(stage.queued("u", "urgent"))
            case "time passes, little":
                self.waits += 1
                self.let_pass(0.5)
            case "time passes, much":
                self.waits += 1
                self.let_pass(TOTAL_SECONDS + 0.5)
            case "the engine dies":
                stage.scene.said(engine_died(stage.scene.controller, "stream", stage.at, "crash"))
            case other:
                raise AssertionError(other)
        self.sweep()
        self.note(stage.decide())
        self.check()

    def let_pass(self, seconds: float) -> None:
        self.stage.scene.later(seconds)

    def sweep(self) -> None:
        """What the edge does: who was stopped or is settled needs no room any more."""
        stage = self.stage
        controller = stage.scene.controller
        for name, tracked in list(stage.requests.items()):
            if tracked.muted:
                stage.coordinator.ended(tracked, stage.at)
            if tracked.muted and tracked.machine.client is Client.DISMISSED and tracked.told:
                stage.scene.said(controller.client_told(tracked, stage.at))
            if tracked.request_id not in controller.tracked:
                stage.coordinator.ended(tracked, stage.at)
                del stage.requests[name]
                self.resuming.discard(name)

    def note(self, words: list[str]) -> None:
        for word in words:
            if word.startswith("bring back "):
                name = word.removeprefix("bring back ")
                assert name not in self.resuming
                self.resuming.add(name)
            if not word.startswith("look"):
                self.orders.append(word)

    # ---- what must hold ------------------------------------------------------------------------

    def check(self) -> None:
        stage = self.stage
        stage.coordinator.verify()
        stage.scene.book.verify()
        for name, tracked in stage.requests.items():
            seat = stage.coordinator.seat_of(tracked)
            if tracked.muted:
                # Rule 4: a cancel outlives a preemption; nobody will ever order anything of it again.
                assert seat is None, name
                assert tracked.machine.engine not in (Engine.PREEMPTING, Engine.RESUMING, Engine.SHELVED), name
                continue
            assert tracked.preemptions <= SETTINGS.preemptions_per_request
            if tracked.cause is not None:
                assert tracked.cause.semantics is Semantics.PREEMPT
            if tracked.machine.engine is Engine.SHELVED:
                assert seat is not None, name
                assert seat.state in (SeatState.PARKED, SeatState.RETURNING), seat
        assert not stage.scene.controller.anomalies.late_events

    def ends_well(self) -> None:
        """From here on nobody interferes: whoever is parked goes on, and in the end nothing is left."""
        stage = self.stage
        for _ in range(200):
            if not stage.requests:
                break
            events = self.possible()
            quiet = [
                event
                for event in events
                if event.endswith((" parks", " returns", " is stopped", "is sent", "u starts", " finishes"))
                and not (event.endswith(" finishes") and event[0] != "u" and self.parked_now())
            ]
            if quiet:
                self.do(quiet[0])
                continue
            due_at = stage.coordinator.next_due()
            self.let_pass(max(0.05, min(due_at - stage.at, LONG)))
            self.sweep()
            self.note(stage.decide())
            self.check()
        assert not stage.requests, (stage.requests, stage.coordinator)
        assert not len(stage.coordinator)
        stage.scene.later(CONFIG_WRITE_OFF)
        assert stage.scene.empty()

    def parked_now(self) -> bool:
        return bool(self.stage.coordinator.parked_seats())

    def signature(self) -> tuple[object, ...]:
        """What decides how it goes on."""
        stage = self.stage
        rows: list[object] = [self.waits, tuple(sorted(self.resuming)), stage.coordinator.guard.closed]
        for name in ("a", "b", "u"):
            tracked = stage.requests.get(name)
            if tracked is None:
                rows.append(name)
                continue
            seat = stage.coordinator.seat_of(tracked)
            machine = tracked.machine
            rows.append((machine.client, machine.engine, machine.books, tracked.preemptions, tracked.output_started))
            if seat is not None:
                whom = seat.for_whom
                rows.append(
                    (
                        seat.state,
                        round(stage.at - seat.parked_at, 3) if seat.state is SeatState.PARKED else 0,
                        None if seat.resumed_at is None else round(stage.at - seat.resumed_at, 3),
                        max(0.0, round(seat.retry_at - stage.at, 3)),
                        whom is not None and whom.state,
                        len(seat.relief),
                    )
                )
        return tuple(rows)


CONFIG_WRITE_OFF = 400.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_interleaving_ends_well() -> None:
    seen: set[tuple[object, ...]] = set()
    frontier: deque[tuple[str, ...]] = deque([()])
    orders: dict[str, int] = {}
    preempted_twice = 0
    worlds = 0
    while frontier:
        events = frontier.popleft()
        walk = Walk(events)
        mark = walk.signature()
        if mark in seen:
            continue
        seen.add(mark)
        worlds += 1
        assert worlds <= WORLDS_MAX
        for order in walk.orders:
            kind = order.partition(" ")[0] + " " + order.split(" ")[1]
            orders[kind] = orders.get(kind, 0) + 1
        preempted_twice += any(tracked.preemptions >= 2 for tracked in walk.stage.requests.values())
        if len(events) < DEPTH:
            frontier.extend((*events, event) for event in walk.possible())
        walk.ends_well()
    print(f"{worlds} worlds, {preempted_twice} with a request preempted twice, orders {orders}")
    assert worlds > 1000
    assert preempted_twice
    assert set(orders) == {"take off", "bring back"}
