from __future__ import annotations

import pytest

from stopguard.errors import LimitReached
from stopguard.ledger import BookLimits, Ledger
from stopguard.probe import wire
from stopguard.stops import ClientPolicy, IllegalTransition, Semantics, Source, StopCause, Tracked, preemptions
from tests.unit.ledger.complete_state import state_of_book
from tests.unit.stops.scene import PROBED, STREAM, Scene, finished, stopped


def order(scene: Scene, tracked: Tracked) -> list[str]:
    cause = StopCause(semantics=Semantics.PREEMPT, source=Source.PREEMPTION, reason="room", observed_at=scene.at)
    return scene.said(preemptions.preempt(scene.controller, tracked, scene.at, cause))


def shelved(scene: Scene, tracked: Tracked) -> list[str]:
    return scene.said(preemptions.preempted(scene.controller, tracked, scene.at, shelved=True))


def taken_off() -> list[object]:
    return [
        wire.Preempted("r1", 2.0, 3),
        wire.Moved("r1", 2.0, "preempted"),
        wire.BlocksReturned("r1", 2.0, 4),
    ]


def back() -> list[object]:
    return [wire.Resumed("r1", 3.0), wire.Moved("r1", 3.0, "running"), wire.BlocksHeld("r1", 3.0, 4)]


def test_inside_and_back() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    assert order(scene, tracked) == ["preempt r1"]
    assert repr(tracked.machine) == "<Machine client=LISTENING engine=PREEMPTING books=OPEN>"
    assert scene.frame(*taken_off()) == []
    assert repr(tracked.machine) == "<Machine client=LISTENING engine=PARKED books=OPEN>"
    assert tracked.ledgers.describe(Ledger.QUEUE) == "queue: preempted 1 places"
    assert scene.said(preemptions.resume(scene.controller, tracked, scene.at)) == ["resume r1"]
    assert scene.frame(*back()) == []
    assert repr(tracked.machine) == "<Machine client=LISTENING engine=DISPATCHED books=OPEN>"
    assert (tracked.cause, tracked.preemptions, tracked.ledgers.tokens_recomputed) == (None, 1, 3)
    scene.frame(*finished())
    assert scene.said(scene.controller.client_served(tracked, scene.at)) == ["settled r1"]
    assert tracked.ledgers.stop is None
    assert scene.empty()


def test_shelved_at_the_gateway_and_sent_again() -> None:
    scene = Scene()
    tracked = scene.running(STREAM)
    order(scene, tracked)
    assert shelved(scene, tracked) == []
    assert tracked.ledgers.describe(Ledger.QUEUE) == "queue: preempted 1 places"
    assert tracked.ledgers.describe(Ledger.KV) == "kv: empty"
    scene.controller.dispatch(tracked, scene.at, STREAM)
    assert tracked.ledgers.describe(Ledger.QUEUE) == "queue: waiting 1 places"
    scene.said(scene.controller.engine_finished(tracked, scene.at))
    assert scene.said(scene.controller.client_served(tracked, scene.at)) == ["settled r1"]
    assert scene.empty()


def test_by_the_engine_itself() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    scene.frame(*taken_off())
    assert repr(tracked.machine) == "<Machine client=LISTENING engine=PARKED books=OPEN>"
    scene.frame(*back())
    assert repr(tracked.machine) == "<Machine client=LISTENING engine=DISPATCHED books=OPEN>"


def test_one_that_is_not_confirmed_in_time_did_not_happen() -> None:
    scene = Scene()
    tracked = scene.running(STREAM)
    order(scene, tracked)
    assert scene.step(106.0) == []
    assert repr(tracked.machine) == "<Machine client=LISTENING engine=DISPATCHED books=OPEN>"
    assert tracked.cause is None
    assert shelved(scene, tracked) == []  # and then it happened after all
    assert repr(tracked.machine) == "<Machine client=LISTENING engine=SHELVED books=OPEN>"
    assert tracked.ledgers.describe(Ledger.QUEUE) == "queue: preempted 1 places"


def test_a_client_that_leaves_while_its_request_is_shelved() -> None:
    scene = Scene()
    tracked = scene.running(STREAM)
    order(scene, tracked)
    shelved(scene, tracked)
    assert scene.leave(tracked) == ["stop began r1", "settled r1"]
    assert scene.empty()


def test_what_drains_is_not_kept_when_it_is_shelved() -> None:
    """Its client has left, and there is no work under way any more: the request must end, not be forgotten."""
    scene = Scene()
    tracked = scene.running(STREAM)
    scene.leave(tracked, policy=ClientPolicy(None))
    order(scene, tracked)
    assert shelved(scene, tracked) == ["stop began r1", "settled r1"]
    assert tracked.ledgers.stop is not None
    assert (tracked.ledgers.stop.semantics, tracked.ledgers.stop.reason) == ("cancel", "shelved")
    assert scene.empty()


def test_a_finish_overtakes_a_preemption() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    order(scene, tracked)
    scene.frame(*finished())
    assert scene.said(scene.controller.client_served(tracked, scene.at)) == ["settled r1"]
    assert scene.empty()


def test_a_cancel_overtakes_a_shelving() -> None:
    scene = Scene()
    tracked = scene.running(STREAM)
    order(scene, tracked)
    assert scene.leave(tracked) == ["stop began r1", "knock 1 at call for r1"]
    assert shelved(scene, tracked) == ["settled r1"]
    assert tracked.ledgers.stop is not None
    assert tracked.ledgers.stop.outcome == "confirmed"


def test_an_abort_while_it_is_parked() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    scene.frame(*taken_off())
    assert scene.leave(tracked) == ["stop began r1", "knock 1 at probe for r1"]
    assert scene.frame(*stopped()[:3]) == ["settled r1"]


def test_what_is_ordered_of_the_wrong_state_is_illegal_and_changes_nothing() -> None:
    scene = Scene()
    tracked = scene.admitted()
    before = state_of_book(scene.book)
    with pytest.raises(IllegalTransition, match="PREEMPT_SENT is impossible"):
        order(scene, tracked)
    with pytest.raises(IllegalTransition, match="RESUME_SENT is impossible"):
        preemptions.resume(scene.controller, tracked, scene.at)
    assert state_of_book(scene.book) == before
    assert tracked.cause is None


def test_one_that_was_preempted_too_often_is_left_to_run() -> None:
    scene = Scene(BookLimits(entries_per_request=40))
    tracked = scene.running(STREAM)
    while not tracked.ledgers.nearly_full:
        order(scene, tracked)
        shelved(scene, tracked)
        scene.controller.dispatch(tracked, scene.at, STREAM)
    with pytest.raises(LimitReached, match="r1 was preempted too often: let it run"):
        order(scene, tracked)
    assert repr(tracked.machine) == "<Machine client=LISTENING engine=DISPATCHED books=OPEN>"
    assert scene.leave(tracked) == ["stop began r1", "knock 1 at call for r1"]
    assert scene.said(scene.controller.stream_ended_by_engine(tracked, scene.at)) == ["settled r1"]


def test_a_resumption_that_the_engine_refuses_leaves_it_parked() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    order(scene, tracked)
    scene.frame(*taken_off())
    preemptions.resume(scene.controller, tracked, scene.at)
    assert scene.said(preemptions.resume_refused(scene.controller, tracked, scene.at)) == []
    assert repr(tracked.machine) == "<Machine client=LISTENING engine=PARKED books=OPEN>"
    # It counts as no further preemption, and it may be ordered again.
    assert tracked.preemptions == 1
    assert scene.said(preemptions.resume(scene.controller, tracked, scene.at)) == ["resume r1"]
    scene.frame(*back())
    before = repr(tracked.machine)
    preemptions.resume_refused(scene.controller, tracked, scene.at)
    assert repr(tracked.machine) == before == "<Machine client=LISTENING engine=DISPATCHED books=OPEN>"


def test_who_is_withdrawn_after_a_preemption_is_told_so() -> None:
    scene = Scene()
    tracked = scene.running(STREAM)
    order(scene, tracked)
    shelved(scene, tracked)
    assert scene.stop(tracked) == [
        "stop began r1",
        "tell r1 api: safe; reason=stopped for a preemption",
    ]
