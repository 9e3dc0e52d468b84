"""What a scheduler says becomes movements; what it says wrongly becomes a book error, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from stopguard.ledger import Account, BookLimits, Ledger
from stopguard.probe import wire
from tests.unit.ledger.complete_state import state_of
from tests.unit.stops.scene import PROBED, Scene, finished, stopped


def errors(scene: Scene) -> list[str]:
    return [error.text for error in scene.controller.anomalies.book_errors]


def test_every_kind_of_event_step_by_step() -> None:
    scene = Scene()
    tracked = scene.admitted()
    scene.controller.dispatch(tracked, scene.at, PROBED)
    ledgers = tracked.ledgers

    def kv(*events: Any) -> str:
        scene.frame(*events)
        ledgers.fold(scene.at)
        return ledgers.describe(Ledger.KV)

    def output(*events: Any) -> str:
        scene.frame(*events)
        ledgers.fold(scene.at)
        return ledgers.describe(Ledger.OUTPUT)

    scene.frame(wire.Added("r1", 1.0, 7))
    assert ledgers.describe(Ledger.QUEUE) == "queue: waiting 1 places"
    scene.frame(wire.Moved("r1", 1.0, "running"))
    assert ledgers.describe(Ledger.QUEUE) == "queue: running 1 places"
    assert kv(wire.BlocksHeld("r1", 1.0, 4)) == "kv: claimed 1 claims, held 4 blocks"
    assert kv(wire.SlotTaken("r1", 1.0, "lora")) == "kv: claimed 1 claims, held 4 blocks, lora 1 slots"
    assert kv(wire.SlotReturned("r1", 1.0, "lora")) == "kv: claimed 1 claims, held 4 blocks"
    assert kv(wire.BlocksFenced("r1", 1.0, 3, 9)) == "kv: claimed 1 claims, held 1 blocks, fenced 3 blocks"
    assert kv(wire.BlocksReturned("r1", 1.0, 3, fenced=True)) == "kv: claimed 1 claims, held 1 blocks"
    assert kv(wire.HostHeld("r1", 1.0, 2)) == "kv: claimed 1 claims, held 1 blocks, host 2 blocks"
    assert kv(wire.HostReturned("r1", 1.0, 2)) == "kv: claimed 1 claims, held 1 blocks"
    assert output(wire.TokensComputed("r1", 1.0, 5)) == "output: in_flight 5 tokens"
    assert output(wire.TokensEmitted("r1", 1.0, 2)) == "output: in_flight 3 tokens, delivered 2 tokens"
    assert (
        output(wire.TokensDropped("r1", 1.0, 1)) == "output: in_flight 2 tokens, delivered 2 tokens, discarded 1 tokens"
    )
    assert output(wire.TokensDropped("r1", 1.0, 2, stale=True)) == (
        "output: delivered 2 tokens, discarded 1 tokens, stale 2 tokens"
    )
    scene.frame(wire.Preempted("r1", 1.0, 6), wire.Moved("r1", 1.0, "preempted"))
    assert ledgers.describe(Ledger.QUEUE) == "queue: preempted 1 places"
    assert ledgers.tokens_recomputed == 6
    scene.frame(wire.Resumed("r1", 1.0), wire.Moved("r1", 1.0, "running"))
    assert ledgers.describe(Ledger.QUEUE) == "queue: running 1 places"
    scene.frame(*finished(blocks=1))
    assert scene.said(scene.controller.client_served(tracked, scene.at)) == ["settled r1"]
    assert errors(scene) == []


WRONG: list[tuple[Any, str]] = [
    (wire.BlocksReturned("r1", 2.0, 5), "BlocksReturned from probed: r1: 5 blocks were to leave kv.held, which has 4"),
    (wire.BlocksReturned("r1", 2.0, 1, fenced=True), "which has 0 (0 of them reserved): a release happens once"),
    (wire.BlocksFenced("r1", 2.0, 5, 1), "5 blocks were to leave kv.held"),
    (wire.BlocksHeld("r1", 2.0, -3), "blocks held must be above zero, not -3"),
    (wire.BlocksHeld("r1", 2.0, 0), "blocks held must be above zero, not 0"),
    (wire.BlocksReturned("r1", 2.0, -1), "an amount is a whole number above zero, not -1"),
    (wire.TokensComputed("r1", 2.0, -1), "tokens computed must be above zero"),
    (wire.TokensEmitted("r1", 2.0, -1), "tokens emitted must be above zero"),
    (wire.TokensEmitted("r1", 2.0, 3), "3 tokens were emitted that were not in flight"),
    (wire.TokensDropped("r1", 2.0, 3), "3 tokens were to leave output.in_flight, which has 0"),
    (wire.HostReturned("r1", 2.0, 1), "1 blocks were to leave kv.host, which has 0"),
    (wire.SlotReturned("r1", 2.0, "grammar"), "1 slots were to leave kv.grammar, which has 0"),
    (wire.SlotTaken("r1", 2.0, "grammar", -1), "an amount is a whole number above zero, not -1"),
    (wire.Added("r1", 2.0, 7), "r1 was added twice"),
]


@pytest.mark.parametrize(("event", "text"), WRONG, ids=lambda value: str(value)[:40])
def test_what_the_books_cannot_hold_is_shown_and_changes_nothing(event: Any, text: str) -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    before = state_of(tracked.ledgers)
    assert scene.frame(event) == []
    assert len(errors(scene)) == 1
    assert text in errors(scene)[0]
    assert scene.controller.anomalies.book_error_count == 1
    assert state_of(tracked.ledgers) == before
    # Nor does it stand in the way of a stop.
    assert scene.leave(tracked) == ["stop began r1", "knock 1 at probe for r1"]
    assert scene.frame(*stopped()) == ["settled r1"]
    assert scene.empty()


def test_one_wrong_event_does_not_take_the_rest_of_its_frame_along() -> None:
    scene = Scene()
    one, two = scene.running(PROBED, "r1"), scene.running(PROBED, "r2")
    scene.leave(one)
    scene.leave(two)
    wrong = wire.BlocksReturned("r1", 2.0, 99)
    assert scene.frame(wrong, *stopped("r1"), *stopped("r2")) == ["settled r1", "settled r2"]
    assert len(errors(scene)) == 1


def test_a_second_release_after_the_books_were_closed() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    scene.leave(tracked)
    *_, returned = stopped()
    scene.frame(*stopped())
    assert scene.frame(returned) == []
    assert errors(scene) == ["BlocksReturned from probed after its books were closed"]
    assert scene.controller.anomalies.late_events == {"BlocksReturned": 1}


def test_the_second_word_about_what_is_over_is_harmless() -> None:
    scene = Scene()
    tracked = scene.running(PROBED)
    scene.leave(tracked)
    scene.frame(*stopped())
    scene.frame(wire.AbortArrived("r1", 3.0), wire.AbortNoop("r1", 3.0), wire.Finished("r1", 3.0, "abort"))
    scene.frame(wire.BlocksReturned("a stranger", 3.0, 4))
    assert errors(scene) == []
    assert sum(scene.controller.anomalies.late_events.values()) == 4


def test_blocks_taken_during_a_stop_are_one_leak_with_the_rest() -> None:
    """An engine that carries no abort out goes on computing, block by block: one line for people, not one each."""
    scene = Scene()
    tracked = scene.running(PROBED)
    scene.leave(tracked)
    for _ in range(5):
        scene.frame(wire.BlocksHeld("r1", 2.0, 1))
    words = scene.step(111.0)
    assert [word for word in words if "kv.held" in word] == ["leaked r1 kv.held 9"]
    assert len([word for word in words if word.startswith("leaked")]) == len(tracked.ledgers.leaks or ())


class TestChildren:
    def parent(self, scene: Scene) -> Any:
        tracked = scene.admitted()
        scene.controller.dispatch(tracked, scene.at, PROBED)
        scene.frame(
            *(wire.Added(f"r1-{n}", 1.0, 7, "r1") for n in (0, 1)),
            *(wire.Moved(f"r1-{n}", 1.0, "running") for n in (0, 1)),
            *(wire.BlocksHeld(f"r1-{n}", 1.0, 2) for n in (0, 1)),
        )
        return tracked

    def test_one_set_of_books_for_all(self) -> None:
        scene = Scene()
        tracked = self.parent(scene)
        tracked.ledgers.fold(scene.at)
        assert tracked.ledgers.describe(Ledger.QUEUE) == "queue: running 2 places"
        assert tracked.ledgers.describe(Ledger.KV) == "kv: claimed 1 claims, held 4 blocks"
        assert scene.frame(*finished("r1-0", blocks=2)) == []
        assert repr(tracked.machine) == "<Machine client=LISTENING engine=DISPATCHED books=OPEN>"
        assert scene.frame(*finished("r1-1", blocks=2)) == []
        assert repr(tracked.machine) == "<Machine client=LISTENING engine=FINISHED books=OPEN>"
        assert scene.said(scene.controller.client_served(tracked, scene.at)) == ["settled r1"]
        assert scene.empty()

    def test_one_child_that_is_preempted_does_not_stop_the_request(self) -> None:
        scene = Scene()
        tracked = self.parent(scene)
        scene.frame(wire.Preempted("r1-0", 2.0, 3), wire.Moved("r1-0", 2.0, "preempted"))
        assert tracked.ledgers.describe(Ledger.QUEUE) == "queue: running 1 places, preempted 1 places"
        assert repr(tracked.machine) == "<Machine client=LISTENING engine=DISPATCHED books=OPEN>"

    def test_a_child_that_survives_is_a_leak(self) -> None:
        scene = Scene()
        tracked = self.parent(scene)
        scene.leave(tracked)
        assert scene.frame(*stopped("r1-0", blocks=2)) == []
        assert tracked.ledgers.describe(Ledger.LINK) == "link: awaiting 1 notices (1 due)"
        words = scene.step(111.0)
        assert "leaked r1 kv.held 2" in words
        assert "leaked r1 queue.running 1" in words

    def test_a_child_added_twice(self) -> None:
        scene = Scene()
        self.parent(scene)
        scene.frame(wire.Added("r1-0", 1.0, 7, "r1"))
        assert errors(scene) == ["r1-0 was added twice"]


class TestAbortsAsTheEngineSeesThem:
    def test_one_that_came_too_early_is_repeated_when_there_is_something_to_stop(self) -> None:
        scene = Scene()
        tracked = scene.admitted()
        scene.controller.dispatch(tracked, scene.at, PROBED)
        scene.leave(tracked)
        assert scene.frame(wire.AbortNoop("r1", 2.0)) == []
        assert scene.frame(wire.Added("r1", 2.0, 7)) == ["knock 2 at probe for r1"]

    def test_one_that_is_refused_is_repeated_when_the_engine_wants(self) -> None:
        scene = Scene()
        tracked = scene.running(PROBED)
        scene.leave(tracked)
        assert scene.frame(wire.AbortRefused("r1", 2.0, 3.0)) == []
        assert scene.step(102.9) == []
        assert scene.step(103.1) == ["knock 2 at probe for r1"]


class TestAnEngineThatMovesWithoutEnd:
    def test_it_is_stopped_while_there_is_room_to(self) -> None:
        scene = Scene(BookLimits(entries_per_request=200))
        tracked = scene.running(PROBED)
        words: list[str] = []
        for number in range(300):
            place: Any = "preempted" if number % 2 else "running"
            words += scene.frame(wire.Moved("r1", 2.0, place))
        assert words[:2] == ["stop began r1", "knock 1 at probe for r1"]
        assert "its engine moves it without end" in errors(scene)[0]
        assert "entries a request reached (200)" in errors(scene)[-1]
        scene.step(1000.0)
        assert scene.empty()
        assert tracked.ledgers.written_off

    def test_its_stop_can_be_booked(self) -> None:
        scene = Scene(BookLimits(entries_per_request=200))
        tracked = scene.running(PROBED)
        number = 0
        while tracked.ledgers.stop is None:
            scene.frame(wire.Moved("r1", 2.0, "preempted" if number % 2 == 0 else "running"))
            number += 1
        assert scene.frame(*stopped()) == ["tell r1 entry_limit: safe; reason=confirmed stopped (probe)"]
        assert scene.said(scene.controller.client_told(tracked, scene.at)) == ["settled r1"]
        assert not tracked.ledgers.balances[Account.QUEUE_WRITTEN_OFF]
