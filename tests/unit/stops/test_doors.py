from __future__ import annotations

from stopguard.stops import RetryPolicy


def test_pauses_grow_to_a_limit() -> None:
    policy = RetryPolicy(first_wait_seconds=0.1, factor=2.0, longest_wait_seconds=0.5)
    assert [policy.wait_seconds(attempt) for attempt in (1, 2, 3, 4, 50)] == [0.1, 0.2, 0.4, 0.5, 0.5]
