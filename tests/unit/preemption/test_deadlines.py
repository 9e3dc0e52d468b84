"""A deadline that cannot be met is refused; one that may be met is not."""

from __future__ import annotations

from stopguard.preemption import Forecast, Limits
from stopguard.stops import DeadlineKind


def busy(gap_seconds: float, samples: int = 12) -> tuple[Forecast, float]:
    """An engine at which somebody always waits, and the moment of its last start."""
    forecast = Forecast()
    at = 100.0
    forecast.started("e", at, still_waiting=True, after_seconds=0.2)
    for _ in range(samples):
        at += gap_seconds
        forecast.started("e", at, still_waiting=True, after_seconds=1.0)
    return forecast, at


def test_nothing_is_known_at_first() -> None:
    forecast, at = busy(1.0, samples=7)
    assert forecast.wait_seconds("e", 10, at) == 0.0
    assert forecast.judge(["e"], 1000, Limits(queue_seconds=0.1), at) is None
    assert Forecast().judge(["e"], 1000, Limits(queue_seconds=0.1), at) is None


def test_a_queue_moves_as_fast_as_it_did() -> None:
    forecast, at = busy(0.5)
    assert forecast.wait_seconds("e", 10, at) == 5.0
    assert forecast.judge(["e"], 10, Limits(queue_seconds=5.0), at) is None
    # A forecast is no promise: a quarter too long is believed to be possible.
    assert forecast.judge(["e"], 10, Limits(queue_seconds=4.1), at) is None
    hopeless = forecast.judge(["e"], 10, Limits(queue_seconds=2.0), at)
    assert hopeless is not None
    assert (hopeless.kind, hopeless.expected_seconds, hopeless.retry_after_seconds) == (DeadlineKind.QUEUE, 5.0, 3)


def test_the_first_token_comes_after_the_wait_and_the_total_is_no_less() -> None:
    forecast, at = busy(0.5)
    # What a start takes by itself is what it took when nobody waited.
    first = forecast.judge(["e"], 4, Limits(first_token_seconds=1.0, total_seconds=1.0), at)
    assert first is not None
    assert first.kind is DeadlineKind.FIRST_TOKEN
    assert round(first.expected_seconds, 3) == 2.2
    total = forecast.judge(["e"], 4, Limits(total_seconds=1.0), at)
    assert total is not None
    assert total.kind is DeadlineKind.TOTAL


def test_idle_time_between_starts_is_no_pace() -> None:
    forecast = Forecast()
    for number in range(20):
        forecast.started("e", 10.0 * number, still_waiting=False, after_seconds=0.1)
    assert forecast.wait_seconds("e", 5, 200.0) == 0.0


def test_old_news_refuses_nobody() -> None:
    forecast, at = busy(0.5)
    assert forecast.judge(["e"], 10, Limits(queue_seconds=0.1), at + 31.0) is None


def test_one_engine_that_may_make_it_is_enough() -> None:
    forecast, at = busy(0.5)
    assert forecast.judge(["e", "unknown"], 10, Limits(queue_seconds=0.1), at) is None
    assert forecast.judge([], 10, Limits(queue_seconds=0.1), at) is None


def test_the_advice_has_a_limit() -> None:
    forecast, at = busy(20.0)
    hopeless = forecast.judge(["e"], 100, Limits(queue_seconds=1.0), at)
    assert hopeless is not None
    assert hopeless.retry_after_seconds == 60
