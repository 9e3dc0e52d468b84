"""Who makes room for whom, when they come back, and what never happens."""

from __future__ import annotations

import math

import msgspec
import pytest

from stopguard.preemption import PreemptionSettings
from stopguard.preemption.seats import SeatState
from tests.unit.preemption.scene import SETTINGS, Stage


def full_stage(settings: PreemptionSettings = SETTINGS, names: tuple[str, ...] = ("a", "b")) -> Stage:
    stage = Stage(settings, places=len(names))
    for tokens, name in enumerate(names, start=1):
        stage.running(name, tokens=20 * tokens)
    return stage


def test_a_place_is_made_for_the_urgent_and_given_back() -> None:
    stage = full_stage()
    assert stage.queued("u", "urgent") == ["take off a for u (places)"]
    # One is under way: nobody else has to go.
    assert stage.later(1.0) == []
    assert stage.parked("a") == []
    assert stage.sent("u") == ["look at stream"]
    assert stage.started("u") == []
    assert stage.later(5.0) == []
    assert stage.finished("u") == ["bring back a"]
    assert stage.back("a") == []
    assert stage.coordinator.seat_of(stage.requests["a"]).state is SeatState.RUNNING  # type: ignore[union-attr]
    assert (stage.coordinator.taken, stage.coordinator.returned) == (1, 1)


def test_with_a_slot_for_each_one_makes_room_for_one_and_comes_back_into_the_next_that_is_free() -> None:
    stage = full_stage(names=("a", "b", "c"))
    stage.slots = 3
    stage.says(used=20)
    assert stage.queued("u", "urgent") == ["take off a for u (places)"]
    assert stage.parked("a") == []
    # Its prompt takes long; the gauges, which are old, are not waited for and nobody else has to go.
    assert stage.sent("u") == []
    assert stage.later(5.0) == []
    assert stage.started("u") == []
    assert stage.finished("u") == ["bring back a"]


def test_who_waits_in_a_full_engine_has_no_room_to_give() -> None:
    stage = Stage(places=9)
    stage.running("a", tokens=400)
    stage.sent("waiting")
    assert stage.sent("u", "urgent") == ["look at stream"]
    stage.later(0.06)
    stage.says(used=99, waiting=2)
    # `waiting` has lost nothing yet, so that it would be the cheapest.
    assert stage.decide() == ["take off a for u (kv)"]


def test_what_an_engine_preempts_by_itself_is_not_counted_as_room_made() -> None:
    stage = full_stage(names=("a",))
    stage.requests["a"].preemptions = 7
    assert stage.queued("u", "urgent") == ["take off a for u (places)"]


def test_a_free_place_is_enough() -> None:
    stage = full_stage()
    stage.places = 3
    assert stage.queued("u", "urgent") == []


def test_nobody_makes_room_for_an_equal_or_for_a_class_that_does_not_preempt() -> None:
    stage = full_stage()
    assert stage.queued("s", "standard") == []
    stage = Stage(places=1)
    stage.running("u1", "urgent")
    assert stage.queued("u2", "urgent") == []


def test_the_least_urgent_class_goes_first_whatever_the_policy_says() -> None:
    stage = Stage(places=2)
    stage.running("standard", "standard", tokens=1)
    stage.running("background", "background", tokens=400)
    assert stage.queued("u", "urgent") == ["take off background for u (places)"]


def test_who_cannot_go_on_exactly_is_never_chosen_and_it_is_said_why() -> None:
    stage = full_stage()
    stage.way.never = {"a": "grammar", "b": "tools"}
    assert stage.queued("u", "urgent") == []
    assert stage.coordinator.refusals == {"grammar": 1, "tools": 1}
    # Said once a request, however often it is looked at.
    stage.later(1.0)
    assert stage.coordinator.refusals == {"grammar": 1, "tools": 1}


def test_who_is_nearly_done_is_left_alone() -> None:
    stage = Stage(places=1)
    stage.running("a", most=30, tokens=20)
    assert stage.queued("u", "urgent") == []
    assert stage.coordinator.refusals == {"nearly_done": 1}


def test_two_urgent_ones_get_two_places() -> None:
    stage = full_stage()
    assert stage.queued("u1", "urgent") == ["take off a for u1 (places)"]
    assert stage.queued("u2", "urgent") == ["take off b for u2 (places)"]
    assert stage.queued("u3", "urgent") == []


def test_a_refused_preemption_is_given_to_another() -> None:
    stage = full_stage()
    assert stage.queued("u", "urgent") == ["take off a for u (places)"]
    assert stage.refused("a", retry_after_seconds=3.0) == ["take off b for u (places)"]
    assert stage.coordinator.refusals == {"busy": 1, "cool_down": 1}


def test_no_preemption_within_the_cool_down_and_none_too_often() -> None:
    stage = full_stage(names=("a",))
    for number in range(2):
        assert stage.queued(f"u{number}", "urgent") == [f"take off a for u{number} (places)"]
        stage.parked("a")
        stage.sent(f"u{number}")
        stage.started(f"u{number}")
        stage.later(1.0)
        assert stage.finished(f"u{number}") == ["bring back a"]
        stage.back("a")
        # Back only just now.
        assert stage.queued("early", "urgent") == []
        stage.left("early")
        stage.later(2.5)
    assert stage.queued("u2", "urgent") == []
    assert stage.coordinator.refusals["too_often"] == 1


def test_who_waits_for_the_cool_down_is_asked_about_again_in_time() -> None:
    stage = full_stage(names=("a",))
    stage.queued("u", "urgent")
    stage.parked("a")
    stage.sent("u")
    stage.started("u")
    stage.later(1.0)
    stage.finished("u")
    stage.back("a")
    stage.queued("u2", "urgent")
    due_at = stage.coordinator.next_due()
    assert due_at == pytest.approx(stage.at + 2.0)
    assert stage.later(due_at - stage.at) == ["take off a for u2 (places)"]


def test_an_engine_that_is_full_inside_is_looked_at_and_relieved() -> None:
    stage = Stage(places=64)
    stage.says(used=95)
    stage.running("a", prompt=320)
    stage.running("b", prompt=640)
    stage.later(1.0)
    # What the engine said before it was sent says nothing about it.
    assert stage.sent("u", "urgent", prompt=160) == ["look at stream"]
    stage.says(used=96, waiting=1)
    assert stage.decide() == []
    due_at = stage.coordinator.next_due()
    assert due_at == pytest.approx(stage.at + SETTINGS.patience_seconds)
    # 7 blocks are missing; `a` has 22.
    assert stage.later(0.05) == ["take off a for u (kv)"]
    assert stage.parked("a") == ["look at stream"]
    stage.says(used=74)
    assert stage.started("u") == []


def test_for_missing_blocks_several_make_room_at_once() -> None:
    stage = Stage(places=64)
    for name in ("a", "b", "c"):
        stage.running(name, prompt=64)
    stage.sent("u", "urgent", prompt=160)
    stage.says(used=100, waiting=1)
    assert stage.later(0.05) == [f"take off {name} for u (kv)" for name in ("a", "b")]


def test_an_engine_that_says_nothing_is_given_more_time() -> None:
    stage = Stage(places=64)
    stage.running("a")
    assert stage.sent("u", "urgent") == ["look at stream"]
    assert stage.later(0.3) == ["look at stream"]
    assert stage.later(0.21) == ["take off a for u (slow)", "look at stream"]
    # And its patience begins anew with each that has gone.
    stage.parked("a")
    stage.running("b")
    assert "take off b" not in " ".join(stage.later(0.3))


def test_an_engine_with_room_starts_it_by_itself() -> None:
    stage = Stage(places=64)
    stage.running("a")
    stage.sent("u", "urgent")
    stage.says(used=10)
    assert stage.later(0.06) == ["look at stream"]
    assert stage.coordinator.taken == 0


def test_who_made_room_stays_away_for_a_moment_and_while_others_need_it() -> None:
    stage = full_stage(names=("a",))
    stage.queued("u1", "urgent")
    stage.parked("a")
    stage.sent("u1")
    stage.queued("u2", "urgent")
    stage.started("u1")
    assert stage.finished("u1") == []
    assert stage.later(1.0) == []
    stage.sent("u2")
    stage.started("u2")
    assert stage.finished("u2") == ["bring back a"]


def test_where_the_engine_says_how_full_it_is_they_come_back_below_the_low_mark_one_by_one() -> None:
    stage = Stage(places=64)
    for name in ("a", "b"):
        stage.running(name, prompt=64)
    stage.running("other", "standard", prompt=64)
    stage.sent("u", "urgent", prompt=160)
    stage.says(used=100, waiting=1)
    assert stage.later(0.05) == ["take off a for u (kv)", "take off b for u (kv)"]
    stage.parked("a")
    stage.parked("b")
    stage.started("u")
    stage.later(0.2)
    stage.says(used=78)
    assert stage.decide() == ["look at stream"]
    stage.says(used=70)
    assert stage.decide() == ["bring back a"]
    assert stage.back("a") == ["bring back b"]


def test_alone_at_its_engine_it_needs_no_margin() -> None:
    stage = full_stage(names=("a",))
    stage.queued("u", "urgent")
    stage.parked("a")
    stage.sent("u")
    stage.started("u")
    stage.later(1.0)
    stage.says(used=100)
    assert stage.finished("u") == ["bring back a"]


def test_whoever_waits_in_our_queue_at_a_higher_level_goes_before_it() -> None:
    stage = full_stage(names=("a",))
    stage.queued("u", "urgent")
    stage.parked("a")
    stage.sent("u")
    stage.started("u")
    stage.later(1.0)
    stage.queue_level = 1
    assert stage.finished("u") == []
    # It rises like everybody who waits.
    assert stage.later(SETTINGS.promote_seconds) == ["bring back a"]


def test_nobody_stays_parked_for_ever() -> None:
    stage = Stage(places=64)
    stage.running("a")
    stage.running("other", "standard")
    stage.sent("u", "urgent")
    stage.says(used=100, waiting=1)
    assert stage.later(0.05) == ["take off a for u (kv)"]
    stage.parked("a")
    stage.started("u")
    waited = 0.0
    words: list[str] = []
    while "bring back a" not in words:
        # More urgent ones come without end, and the engine stays full.
        due_at = stage.coordinator.next_due()
        assert due_at < math.inf
        step = max(0.01, due_at - stage.at)
        stage.says(used=100, waiting=1)
        words = stage.later(step)
        waited += step
        assert waited <= SETTINGS.longest_parked_seconds + 1.0
    assert waited >= SETTINGS.longest_parked_seconds - 1.0


def test_a_refused_resumption_is_tried_again() -> None:
    stage = full_stage(names=("a",))
    stage.queued("u", "urgent")
    stage.parked("a")
    stage.sent("u")
    stage.started("u")
    stage.later(1.0)
    assert stage.finished("u") == ["bring back a"]
    stage.coordinator.refused(stage.requests["a"], stage.at, "unreachable", 2.0)
    assert stage.decide() == []
    assert stage.coordinator.is_parked(stage.requests["a"])
    assert stage.later(2.0) == ["bring back a"]


@pytest.mark.parametrize("moment", ["taking", "parked", "returning"])
def test_a_client_that_leaves_at_any_moment_leaves_nothing_behind(moment: str) -> None:
    stage = full_stage(names=("a",))
    stage.queued("u", "urgent")
    if moment == "taking":
        assert stage.left("a") == []
        stage.sent("u")
    else:
        stage.parked("a")
        stage.sent("u")
        stage.started("u")
        stage.later(1.0)
        if moment == "parked":
            assert stage.left("a") == []
            assert stage.finished("u") == []
        else:
            assert stage.finished("u") == ["bring back a"]
            assert stage.left("a") == []
    for name in list(stage.requests):
        stage.left(name)
    stage.scene.later(20.0)
    assert not len(stage.coordinator)
    assert stage.scene.empty()


def test_the_urgent_one_that_leaves_lets_the_other_come_back() -> None:
    stage = full_stage(names=("a",))
    stage.queued("u", "urgent")
    assert stage.left("u") == []
    assert stage.parked("a") == []
    assert stage.later(0.2) == ["bring back a"]


def test_the_guard_closes_and_says_so() -> None:
    settings = msgspec.structs.replace(SETTINGS, window_tokens=100, recomputed_share=0.01)
    stage = full_stage(settings, names=("a", "b"))
    assert stage.queued("u1", "urgent") == ["take off a for u1 (places)"]
    assert stage.coordinator.guard.closed
    assert stage.queued("u2", "urgent") == []
    assert stage.coordinator.refusals["guard"] == 1
    assert stage.coordinator.next_due() < math.inf
    # Work is done, and what was lost fades beside it.
    stage.coordinator.guard.computed(5000, stage.at)
    assert stage.later(0.3) == ["take off b for u2 (places)"]


def test_without_ways_nothing_is_ever_decided() -> None:
    stage = full_stage()
    stage.coordinator.ways.clear()
    assert stage.queued("u", "urgent") == []
    assert stage.coordinator.next_due() == math.inf
