from __future__ import annotations

import math
import sys

import pytest

from stopguard.errors import LimitReached
from stopguard.ledger import TimeWentBackwards
from stopguard.stops import TimerWheel


def wheel(**arguments: float) -> TimerWheel[str]:
    return TimerWheel(0.0, tick_seconds=0.25, slots=4, limit=5)


def test_fires_once_never_early_and_within_a_tick() -> None:
    timers = wheel()
    timers.set("a", 0.3)
    assert timers.advance(0.29) == []
    assert timers.advance(0.5) == ["a"]
    assert timers.advance(9.0) == []
    assert not timers


def test_what_is_due_already_fires_at_the_next_advance() -> None:
    timers = wheel()
    timers.advance(10.0)
    for due in (10.0, 9.9, 0.0, -5.0):
        timers.set(f"due {due}", due)
    assert timers.advance(10.0) == ["due -5.0", "due 0.0", "due 9.9", "due 10.0"]


def test_order_is_that_of_the_due_times_then_of_the_setting() -> None:
    timers = wheel()
    for name, due in (("c", 0.9), ("a", 0.1), ("b1", 0.5), ("b2", 0.5)):
        timers.set(name, due)
    assert timers.advance(5.0) == ["a", "b1", "b2", "c"]


def test_cancelling_is_harmless_twice_and_after_the_end() -> None:
    timers = wheel()
    one, two = timers.set("one", 1.0), timers.set("two", 1.0)
    timers.cancel(one)
    timers.cancel(one)
    assert len(timers) == 1
    assert timers.advance(2.0) == ["two"]
    timers.cancel(two)
    assert (len(timers), one.armed, two.armed) == (0, False, False)


def test_one_that_is_many_turns_away() -> None:
    timers = wheel()  # one turn is a second
    timers.set("far", 7.6)
    for at in (1.0, 2.0, 3.5, 7.5):
        assert timers.advance(at) == []
        due = timers.next_due()
        assert due is not None
        assert due <= 7.75
    assert timers.advance(7.75) == ["far"]


def test_a_jump_over_many_turns_loses_nothing() -> None:
    timers = wheel()
    for name, due in (("a", 0.5), ("b", 3.1), ("c", 1.7), ("far", 100.0)):
        timers.set(name, due)
    assert timers.advance(50.0) == ["a", "c", "b"]
    assert timers.advance(100.25) == ["far"]


def test_when_to_come_next() -> None:
    timers = wheel()
    assert timers.next_due() is None
    timers.set("b", 0.6)
    assert timers.next_due() == 0.75
    timer = timers.set("a", 0.1)
    assert timers.next_due() == 0.25
    timers.cancel(timer)
    assert timers.next_due() == 0.75


def test_an_edge_that_comes_when_told_reaches_every_timer_without_idle_turns() -> None:
    timers = wheel()
    for number in range(5):
        timers.set(str(number), 0.1 + number * 1.3)
    fired, visits = [], 0
    while (due := timers.next_due()) is not None:
        fired += timers.advance(due)
        visits += 1
    assert fired == ["0", "1", "2", "3", "4"]
    assert visits <= 10


def test_its_limit() -> None:
    timers = wheel()
    for number in range(5):
        timers.set(str(number), 1.0)
    with pytest.raises(LimitReached, match=r"timers reached \(5\)"):
        timers.set("one too many", 1.0)
    assert len(timers) == 5
    timers.advance(2.0)
    timers.set("room again", 3.0)


@pytest.mark.parametrize("at", [4.9, -1.0, math.nan, math.inf])
def test_time_that_goes_backwards_or_nowhere(at: float) -> None:
    timers = wheel()
    timers.set("a", 6.0)
    timers.advance(5.0)
    with pytest.raises(TimeWentBackwards, match=r"stands at 5\.0 and cannot go to"):
        timers.advance(at)
    assert timers.now == 5.0
    assert timers.advance(6.25) == ["a"]


@pytest.mark.parametrize("due_at", [math.nan, math.inf, -math.inf])
def test_a_timer_for_no_time(due_at: float) -> None:
    timers = wheel()
    with pytest.raises(TimeWentBackwards, match="cannot be due at"):
        timers.set("a", due_at)
    assert not timers


def test_a_wheel_that_cannot_turn() -> None:
    for tick, slots, limit in ((0.0, 1, 1), (1.0, 0, 1), (1.0, 1, 0)):
        with pytest.raises(ValueError, match="a wheel needs"):
            TimerWheel(0.0, tick_seconds=tick, slots=slots, limit=limit)


def test_an_emptied_bucket_gives_its_memory_back() -> None:
    wheel: TimerWheel[int] = TimerWheel(0.0, tick_seconds=1.0, slots=4)
    empty = sys.getsizeof({})
    for timer in [wheel.set(number, 0.5) for number in range(50)]:
        wheel.cancel(timer)
    assert [sys.getsizeof(bucket) for bucket in wheel._slots] == [empty] * 4
    for number in range(50):
        wheel.set(number, 0.5)
    assert len(wheel.advance(1.0)) == 50
    assert [sys.getsizeof(bucket) for bucket in wheel._slots] == [empty] * 4
