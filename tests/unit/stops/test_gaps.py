"""A hole in what the probe said: the books say so, a snapshot closes it, and a probe that stays away is given up."""

from __future__ import annotations

import pytest

from stopguard.ledger import Evidence, Ledger
from stopguard.probe import wire
from stopguard.stops import Engine, Tracked
from stopguard.stops.gaps import gap_began, observe_snapshot, probe_lost, unseen_everywhere
from stopguard.stops.straight import serve_whole
from tests.unit.stops.scene import GAUGED, PROBED, STREAM, Scene, finished, stopped


def row(place: wire.Place = "running", *, name: str = "r1", blocks: int = 4, **more: int) -> wire.RequestNow:
    amounts = {"tokens_computed": 0, "tokens_emitted": 0, "tokens_dropped": 0, **more}
    return wire.RequestNow(name, place, prompt_tokens=7, blocks_held=blocks, **amounts)  # type: ignore[arg-type]


def snapshot(*rows: wire.RequestNow, complete: bool = True) -> wire.Snapshot:
    return wire.Snapshot(1, 9, 9, 5.0, list(rows), 0, 0, 0, 0, complete)


def seen(
    scene: Scene, *rows: wire.RequestNow, complete: bool = True, mine: bool = True, unowned: bool = False
) -> list[str]:
    scene.at += 0.01
    taken = snapshot(*rows, complete=complete)
    found = observe_snapshot(scene.controller, "probed", scene.at, taken, lambda part: mine, unowned=unowned)
    return scene.said(found)


def books(tracked: Tracked, ledger: Ledger) -> str:
    return tracked.ledgers.describe(ledger)


def errors(scene: Scene) -> list[str]:
    return [error.text for error in scene.controller.anomalies.book_errors]


def test_the_books_say_that_there_is_a_gap() -> None:
    scene = Scene()
    tracked, other = scene.running(PROBED), scene.running(STREAM, "r2")
    gap_began(scene.controller, "probed", scene.at, "3 frames are missing")
    assert tracked.ledgers.marks[-1][1] == "gap: 3 frames are missing"
    assert not [text for _, text in other.ledgers.marks if "gap" in text]


def test_a_snapshot_that_agrees_changes_nothing() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    entries = len(tracked.ledgers.entries)
    assert seen(scene, row()) == []
    assert len(tracked.ledgers.entries) == entries
    assert not [text for _, text in tracked.ledgers.marks if "snapshot" in text]


def test_amounts_are_brought_to_what_the_engine_has() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    now = wire.RequestNow(
        *("r1", "running"),
        blocks_held=6,
        blocks_fenced=2,
        host_blocks=1,
        tokens_computed=10,
        tokens_emitted=7,
        tokens_dropped=1,
        slots={"lora": 1},
    )
    assert seen(scene, now) == []
    tracked.ledgers.fold(scene.at)
    assert (
        books(tracked, Ledger.KV) == "kv: claimed 1 claims, held 6 blocks, fenced 2 blocks, host 1 blocks, lora 1 slots"
    )
    assert books(tracked, Ledger.OUTPUT) == "output: in_flight 2 tokens, delivered 7 tokens, discarded 1 tokens"
    assert tracked.ledgers.marks[-1][1] == "gap: the books were brought to the engine's snapshot"
    assert seen(scene, row(blocks=3, tokens_computed=10, tokens_emitted=7, tokens_dropped=1)) == []
    tracked.ledgers.fold(scene.at)
    assert books(tracked, Ledger.KV) == "kv: claimed 1 claims, held 3 blocks"
    assert errors(scene) == []


def test_blocks_that_went_behind_a_fence_are_not_taken_twice() -> None:
    scene = Scene()
    tracked = scene.running(PROBED, blocks=4)
    assert seen(scene, wire.RequestNow("r1", "running", blocks_held=1, blocks_fenced=3)) == []
    assert books(tracked, Ledger.KV) == "kv: claimed 1 claims, held 1 blocks, fenced 3 blocks"
    assert sum(entry.amount for entry in tracked.ledgers.entries if entry.credit.label == "held") == 4


def test_places_and_preemptions_follow() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    seen(scene, row("preempted", blocks=0))
    assert books(tracked, Ledger.QUEUE) == "queue: preempted 1 places"
    assert (tracked.machine.engine, tracked.preemptions) == (Engine.PARKED, 1)
    seen(scene, row())
    assert books(tracked, Ledger.QUEUE) == "queue: running 1 places"
    assert tracked.machine.engine is Engine.DISPATCHED


def test_one_that_came_in_the_gap_is_known_afterwards_and_settles_by_its_events() -> None:
    scene = Scene()
    tracked = scene.admitted()
    scene.controller.dispatch(tracked, scene.at, PROBED)
    assert tracked.part_places is None
    seen(scene, row())
    assert books(tracked, Ledger.QUEUE) == "queue: running 1 places"
    scene.frame(*finished())
    assert scene.said(scene.controller.client_served(tracked, scene.at)) == ["settled r1"]
    assert errors(scene) == []


def test_one_that_finished_in_the_gap() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    scene.frame(wire.TokensComputed("r1", 1.0, 3))
    assert seen(scene) == []
    assert tracked.machine.engine is Engine.FINISHED
    assert books(tracked, Ledger.KV) == "kv: empty"
    assert "delivered 3" in books(tracked, Ledger.OUTPUT)
    assert scene.said(scene.controller.client_served(tracked, scene.at)) == ["settled r1"]


def test_one_whose_abort_was_carried_out_in_the_gap() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    scene.frame(wire.TokensComputed("r1", 1.0, 3))
    scene.controller.client_left(tracked, scene.at, "eof")
    assert seen(scene) == ["settled r1"]
    stop = tracked.ledgers.stop
    assert stop is not None
    assert (stop.outcome, stop.evidence) == ("confirmed", Evidence.PROBE)
    assert errors(scene) == []


def test_blocks_that_came_back_in_the_gap_after_the_end() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    scene.controller.client_left(tracked, scene.at, "eof")
    scene.frame(wire.AbortApplied("r1", 1.0), wire.Moved("r1", 1.0, "gone"))
    assert "held 4" in books(tracked, Ledger.KV)
    assert seen(scene, mine=False) == [], "another process says nothing of it"
    assert seen(scene) == ["settled r1"]
    assert errors(scene) == []


def test_blocks_that_are_still_behind_a_fence_after_the_end() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    scene.controller.client_left(tracked, scene.at, "eof")
    assert seen(scene, wire.RequestNow("r1", "gone", blocks_fenced=4)) == []
    assert "fenced 4" in books(tracked, Ledger.KV)
    assert "gone 1" in books(tracked, Ledger.QUEUE)
    assert scene.frame(wire.BlocksReturned("r1", 2.0, 4, fenced=True)) == ["settled r1"]
    assert errors(scene) == []


def test_blocks_in_use_that_nobody_has_may_be_those_of_one_that_is_over() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    scene.controller.client_left(tracked, scene.at, "eof")
    assert seen(scene, unowned=True) == []
    assert "held 4" in books(tracked, Ledger.KV)
    assert scene.later(11.0) == ["leaked r1 kv.held 4"]


@pytest.mark.parametrize("case", ["incomplete", "elsewhere"])
def test_what_is_not_in_it_for_another_reason_is_left_alone(case: str) -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    assert seen(scene, complete=case != "incomplete", mine=case != "elsewhere") == []
    assert books(tracked, Ledger.KV) == "kv: claimed 1 claims, held 4 blocks"
    assert tracked.machine.engine is Engine.DISPATCHED


def test_children_in_two_processes() -> None:
    """What one process says of its child says nothing of the other's."""
    scene = Scene()
    tracked = scene.admitted()
    scene.controller.dispatch(tracked, scene.at, PROBED)
    scene.frame(wire.Added("a", 1.0, 7, "r1"), wire.Added("b", 1.0, 7, "r1"), wire.BlocksHeld("a", 1.0, 8))
    taken = snapshot(row("running", name="a", blocks=4))
    scene.said(observe_snapshot(scene.controller, "probed", scene.at, taken, lambda part: part == "a"))
    assert books(tracked, Ledger.QUEUE) == "queue: waiting 1 places, running 1 places"
    assert books(tracked, Ledger.KV) == "kv: claimed 1 claims, held 8 blocks", "b's share is not known here"


def test_tokens_are_never_made_up() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    scene.frame(wire.TokensComputed("r1", 1.0, 3))
    seen(scene, row(tokens_computed=-1, tokens_emitted=-1, tokens_dropped=-1))
    assert tracked.ledgers.tokens_in_flight == 3
    seen(scene, row(tokens_computed=2, tokens_emitted=9, tokens_dropped=9))
    assert errors(scene) == []
    assert tracked.ledgers.tokens_computed == 3


# ---- requests that no scheduler has spoken of ---------------------------------------------------------


def test_one_that_was_refused_before_the_scheduler_saw_it() -> None:
    scene = Scene()
    tracked = scene.admitted()
    scene.controller.dispatch(tracked, scene.at, PROBED)
    scene.controller.engine_finished(tracked, scene.at)
    assert scene.said(scene.controller.client_served(tracked, scene.at)) == []
    asked_at = scene.at
    scene.at += 1.0
    early = unseen_everywhere(scene.controller, "probed", scene.at, {"other"}, asked_at - 1.0)
    assert scene.said(early) == [], "when the snapshot was asked for, it had not ended"
    assert scene.said(unseen_everywhere(scene.controller, "probed", scene.at, {"r1"}, asked_at)) == []
    assert scene.said(unseen_everywhere(scene.controller, "probed", scene.at, {"other"}, asked_at)) == ["settled r1"]


@pytest.mark.parametrize(("output", "seconds", "evidence"), [(True, 0.1, Evidence.PROBE), (False, 6.0, Evidence.GAUGE)])
def test_one_whose_abort_found_nothing(output: bool, seconds: float, evidence: Evidence) -> None:
    scene = Scene()
    tracked = scene.admitted()
    scene.controller.dispatch(tracked, scene.at, PROBED)
    if output:
        scene.controller.output_started(tracked, scene.at)
    scene.controller.client_left(tracked, scene.at, "eof")
    soon = unseen_everywhere(scene.controller, "probed", scene.at, (), scene.at)
    assert scene.said(soon) == (["settled r1"] if output else []), "it may be on its way to the scheduler"
    scene.at += seconds
    if not output:
        assert scene.said(unseen_everywhere(scene.controller, "probed", scene.at, (), scene.at)) == ["settled r1"]
    stop = tracked.ledgers.stop
    assert stop is not None
    assert (stop.outcome, stop.evidence) == ("confirmed", evidence)


def computed_for_children(scene: Scene, returned: int) -> Tracked:
    """A request whose prompt was computed in two blocks, once for all its children, of which none has come."""
    tracked = scene.admitted()
    scene.controller.dispatch(tracked, scene.at, PROBED)
    scene.frame(wire.Added("r1.first", scene.at, 4, "r1"), wire.BlocksHeld("r1.first", scene.at, 2))
    scene.frame(wire.BlocksReturned("r1.first", scene.at, returned), wire.Moved("r1.first", scene.at, "gone"))
    return tracked


def test_one_whose_parts_are_gone_and_whose_next_parts_never_came() -> None:
    """An engine computes a prompt once for several children (SGLang), and the client leaves before they are sent."""
    scene = Scene()
    tracked = computed_for_children(scene, returned=2)
    running = unseen_everywhere(scene.controller, "probed", scene.at + 60, (), scene.at + 60)
    assert scene.said(running) == [], "its children are on their way"
    scene.controller.client_left(tracked, scene.at, "eof")
    scene.frame(wire.AbortNoop("r1.first", scene.at))
    assert scene.said(unseen_everywhere(scene.controller, "probed", scene.at, (), scene.at)) == []
    scene.at += 6.0
    assert scene.said(unseen_everywhere(scene.controller, "probed", scene.at, (), scene.at)) == ["settled r1"]
    stop = tracked.ledgers.stop
    assert stop is not None
    assert (stop.outcome, stop.evidence) == ("confirmed", Evidence.GAUGE)
    assert not tracked.ledgers.leaks


def test_what_such_parts_have_kept_is_not_forgiven() -> None:
    scene = Scene()
    tracked = computed_for_children(scene, returned=1)
    scene.controller.client_left(tracked, scene.at, "eof")
    scene.at += 6.0
    assert scene.said(unseen_everywhere(scene.controller, "probed", scene.at, (), scene.at)) == []
    assert tracked.ledgers.blocks_held == 1


def test_one_that_runs_is_not_touched() -> None:
    scene = Scene()
    tracked = scene.admitted()
    scene.controller.dispatch(tracked, scene.at, PROBED)
    assert scene.said(unseen_everywhere(scene.controller, "probed", scene.at + 60, (), scene.at + 60)) == []
    assert tracked.machine.engine is Engine.DISPATCHED


# ---- a probe that does not come back --------------------------------------------------------------------


def _lost(scene: Scene, outside: object = GAUGED) -> list[str]:
    scene.at += 5.0
    return scene.said(probe_lost(scene.controller, "probed", scene.at, outside))  # type: ignore[arg-type]


def test_what_ran_goes_on_and_is_judged_from_outside() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    scene.frame(wire.TokensComputed("r1", 1.0, 3), wire.TokensEmitted("r1", 1.0, 2))
    tracked.events = 2
    assert _lost(scene) == []
    assert not tracked.probed
    assert "from here on by gauge" in tracked.ledgers.marks[-1][1]
    tracked.events = 6
    scene.controller.engine_finished(tracked, scene.at)
    assert scene.said(scene.controller.client_served(tracked, scene.at)) == ["settled r1"]
    assert tracked.ledgers.tokens_delivered == 3 + 4, "what the probe counted, and what passed since"
    assert scene.controller.parts == {}


def test_the_shortest_way_to_the_end_gives_back_what_the_probe_had_booked() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    _lost(scene)
    tracked.events = 3
    assert scene.said(serve_whole(scene.controller, tracked, scene.at)) == ["settled r1"]
    assert books(tracked, Ledger.KV) == "kv: empty"


def test_a_stop_that_waited_for_it_knocks_at_the_other_doors() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    scene.controller.client_left(tracked, scene.at, "eof")
    assert _lost(scene) == ["knock 1 at call for r1"]
    assert tracked.machine.engine is Engine.ABORTING


def test_a_stop_whose_stream_the_engine_has_closed() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    scene.controller.client_left(tracked, scene.at, "eof")
    scene.controller.stream_ended_by_engine(tracked, scene.at)
    assert _lost(scene, STREAM) == ["settled r1"]


def test_one_that_had_ended_is_closed() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    scene.controller.engine_finished(tracked, scene.at)
    scene.controller.client_served(tracked, scene.at)
    assert tracked.ledgers.closed_at is None
    assert _lost(scene) == ["settled r1"]


def test_what_it_says_afterwards_about_them_is_not_booked() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    _lost(scene)
    entries = len(tracked.ledgers.entries)
    scene.frame(*stopped())
    assert len(tracked.ledgers.entries) == entries
    assert tracked.machine.engine is Engine.DISPATCHED
