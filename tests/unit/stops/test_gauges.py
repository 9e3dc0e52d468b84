from __future__ import annotations

from stopguard.ledger import EngineGauges, Evidence
from stopguard.stops import AbortAnswer, engine_died, observe_gauges
from tests.unit.stops.scene import GAUGED, PROBED, STREAM, Scene


def look(scene: Scene, running: int | None, waiting: int | None = 0, at: float | None = None) -> list[str]:
    gauges = EngineGauges(at=scene.at if at is None else at, running=running, waiting=waiting)
    return scene.said(observe_gauges(scene.controller, "gauged", scene.at, gauges))


def test_an_accepted_stop_asks_for_the_gauges() -> None:
    scene = Scene()
    tracked = scene.running(GAUGED)
    scene.leave(tracked)
    answer = scene.controller.abort_answered(tracked, scene.at, "call", AbortAnswer.ACCEPTED)
    assert scene.said(answer) == ["observe gauged"]


def test_as_few_in_the_engine_as_are_alive_proves_every_stop() -> None:
    scene = Scene()
    scene.running(GAUGED, "alive")
    stopping = [scene.running(GAUGED, name) for name in ("r1", "r2")]
    for tracked in stopping:
        scene.leave(tracked)
    scene.at += 1.0
    assert look(scene, running=2) == ["observe gauged"]  # one too many: it could be either
    assert look(scene, running=0, waiting=1) == ["observe gauged"]  # as few as are alive, but seen only once
    scene.at += 1.0
    assert look(scene, running=0, waiting=1) == ["settled r1", "settled r2"]
    stop = stopping[0].ledgers.stop
    assert stop is not None
    assert (stop.outcome, stop.evidence) == ("confirmed", Evidence.GAUGE)


def test_a_finish_that_is_not_known_yet_does_not_confirm_somebody_elses_stop() -> None:
    scene = Scene()
    ending = scene.running(GAUGED, "ending")
    scene.leave(scene.running(GAUGED, "lost"))  # its abort got lost: it still runs
    scene.at += 1.0
    # "ending" is over in the engine, and its last byte is still on the way: one runs, one is alive.
    assert look(scene, running=1) == ["observe gauged"]
    scene.said(scene.controller.engine_finished(ending, scene.at))
    scene.said(scene.controller.client_served(ending, scene.at))
    scene.at += 1.0
    assert look(scene, running=1) == ["observe gauged"]
    assert not scene.empty()
    scene.at += 1.0
    assert look(scene, running=0) == ["settled lost"]


def test_two_readings_at_once_are_one() -> None:
    scene = Scene()
    scene.running(GAUGED, "alive")
    scene.leave(scene.running(GAUGED))
    scene.at += 1.0
    assert look(scene, running=1) == ["observe gauged"]
    assert look(scene, running=1) == ["observe gauged"]


def test_an_empty_engine_is_proof_at_once() -> None:
    scene = Scene()
    scene.running(GAUGED, "alive")
    scene.leave(scene.running(GAUGED))
    scene.at += 1.0
    assert look(scene, running=0) == ["settled r1"]


def test_gauges_from_before_the_abort_prove_nothing() -> None:
    scene = Scene()
    scene.leave(scene.running(GAUGED))
    assert look(scene, running=0, at=scene.at - 1.0) == []
    assert look(scene, running=0, at=scene.at) == []


def test_silence_proves_nothing() -> None:
    scene = Scene()
    scene.leave(scene.running(GAUGED))
    scene.at += 1.0
    assert look(scene, running=None) == []
    assert look(scene, running=0, waiting=None) == []
    assert not scene.empty()


def test_without_a_stop_nothing_is_asked() -> None:
    scene = Scene()
    scene.running(GAUGED)
    assert look(scene, running=5) == []


def test_a_dead_engine_holds_nothing() -> None:
    scene = Scene()
    left, listening, other = (
        scene.running(PROBED, "left"),
        scene.running(PROBED, "listening"),
        scene.running(STREAM, "o"),
    )
    scene.leave(left)
    words = scene.said(engine_died(scene.controller, "probed", scene.at, "process died"))
    assert words == [
        "settled left",
        "stop began listening",
        "tell listening process died: unsafe; reason=the engine was lost and may have been working",
    ]
    assert scene.said(scene.controller.client_told(listening, scene.at)) == ["settled listening"]
    assert list(scene.controller.tracked.values()) == [other]
    assert not scene.controller.parts
    assert scene.said(engine_died(scene.controller, "probed", scene.at, "again")) == []


def test_a_dead_engine_takes_its_overdue_requests_along() -> None:
    scene = Scene()
    scene.leave(scene.running(PROBED))
    assert any(word.startswith("leaked") for word in scene.step(111.0))
    assert scene.said(engine_died(scene.controller, "probed", scene.at, "process died")) == ["settled r1"]
    assert scene.book.statistics().closed_late == 1
    assert scene.empty()


def test_gauges_that_are_behind_prove_nothing_of_a_request_that_had_no_output() -> None:
    """It may have come after them: then its absence is no end."""
    scene = Scene()
    tracked = scene.running(GAUGED)
    tracked.output_started = False
    scene.leave(tracked)
    left_at = scene.at
    scene.at += 1.0

    def behind(holds_since: float) -> list[str]:
        gauges = EngineGauges(at=scene.at, running=0, waiting=0, holds_since=holds_since)
        return scene.said(observe_gauges(scene.controller, "gauged", scene.at, gauges))

    assert behind(left_at - 0.5) == ["observe gauged"]  # read again: there will be newer ones
    assert behind(left_at + 0.5) == ["settled r1"]


def test_gauges_that_are_behind_contain_whoever_has_had_output() -> None:
    scene = Scene()
    tracked = scene.running(GAUGED)
    tracked.output_started = True
    scene.leave(tracked)
    scene.at += 1.0
    gauges = EngineGauges(at=scene.at, running=0, waiting=0, holds_since=0.0)
    assert scene.said(observe_gauges(scene.controller, "gauged", scene.at, gauges)) == ["settled r1"]
