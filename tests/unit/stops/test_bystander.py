"""Requests that do not pass through us: opened, stopped and closed by what the scheduler says of them."""

from __future__ import annotations

import pytest

from stopguard.errors import LimitReached
from stopguard.ledger import BookLimits, Evidence, Ledger
from stopguard.probe import wire
from stopguard.stops.bystander import bystander_profile, lost_sight, stop_seen, take_in
from tests.unit.stops.scene import Scene, finished

PROFILE = bystander_profile("e")


def running(scene: Scene, request_id: str = "r1") -> None:
    take_in(scene.controller, request_id, scene.at, PROFILE, "m")
    added = (wire.Added(request_id, 1.0, 7), wire.Moved(request_id, 1.0, "running"))
    assert scene.frame(*added, wire.BlocksHeld(request_id, 1.0, 4)) == []


def test_a_normal_life() -> None:
    scene = Scene()
    running(scene)
    tracked = scene.controller.tracked["r1"]
    assert tracked.ledgers.describe(Ledger.STREAM) == "stream: closed 1 connections"
    scene.frame(wire.TokensComputed("r1", 1.0, 3), wire.TokensEmitted("r1", 1.0, 3))
    assert scene.frame(*finished()) == ["settled r1"]
    assert tracked.ledgers.stop is None
    assert "delivered 3" in tracked.ledgers.describe(Ledger.OUTPUT)


def test_a_stop_of_somebody_else_has_the_same_four_steps() -> None:
    scene = Scene()
    running(scene)
    tracked = scene.controller.tracked["r1"]
    scene.at += 1.0
    words = scene.said(stop_seen(scene.controller, tracked, scene.at, scene.at - 0.002))
    assert words == ["stop began r1", "knock 1 at probe for r1"]
    assert stop_seen(scene.controller, tracked, scene.at, scene.at) == ()
    at = scene.at
    gone = (wire.BlocksReturned("r1", 1.0, 4), wire.Moved("r1", 1.0, "gone"))
    assert scene.frame(wire.AbortArrived("r1", 1.0), wire.AbortApplied("r1", 1.0), *gone) == ["settled r1"]
    stop = tracked.ledgers.stop
    assert stop is not None
    assert (stop.semantics, stop.source, stop.reason) == ("cancel", "engine", "abort_seen")
    assert (stop.outcome, stop.evidence) == ("confirmed", Evidence.PROBE)
    assert stop.occurred_at == pytest.approx(at - 0.002)
    assert None not in (stop.notified_at, stop.acked_at, stop.released_at, stop.settled_at)


def test_a_leak_is_found() -> None:
    scene = Scene()
    running(scene)
    tracked = scene.controller.tracked["r1"]
    scene.said(stop_seen(scene.controller, tracked, scene.at, scene.at))
    scene.frame(wire.AbortApplied("r1", 1.0), wire.BlocksReturned("r1", 1.0, 3), wire.Moved("r1", 1.0, "gone"))
    scene.at += 11.0
    assert scene.said(scene.controller.advance(scene.at)) == ["leaked r1 kv.held 1"]


def test_a_probe_that_is_gone_leaves_nothing_open_and_claims_nothing() -> None:
    scene = Scene()
    running(scene)
    running(scene, "r2")
    tracked = scene.controller.tracked["r1"]
    scene.said(stop_seen(scene.controller, tracked, scene.at, scene.at))
    scene.at += 1.0
    words = scene.said(lost_sight(scene.controller, "e", scene.at, "probe_lost"))
    assert sorted(word for word in words if word.startswith("settled")) == ["settled r1", "settled r2"]
    assert scene.controller.tracked == scene.controller.parts == {}
    assert scene.controller.in_engine["e"] == {}
    given_up = [entry.note for entry in tracked.ledgers.entries if "nobody says" in entry.note]
    assert given_up


def test_the_book_may_be_full() -> None:
    scene = Scene(BookLimits(open_requests=1))
    running(scene)
    with pytest.raises(LimitReached):
        take_in(scene.controller, "r2", scene.at, PROFILE, "m")
    assert list(scene.controller.tracked) == ["r1"]
