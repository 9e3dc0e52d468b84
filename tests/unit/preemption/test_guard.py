"""The guard closes above its ceiling, opens again at half of it, and bounds what is lost."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stopguard.preemption import Guard, PreemptionSettings

SETTINGS = PreemptionSettings(recomputed_share=0.1, window_seconds=60.0, window_tokens=1000)


def test_it_closes_above_the_ceiling_and_opens_at_half_of_it() -> None:
    guard = Guard(SETTINGS)
    guard.recomputing(100, 0.0)
    assert guard.allows(0.0)
    guard.recomputing(1, 0.0)
    assert not guard.allows(0.0)
    guard.computed(1500, 0.0)
    # 6.7 %: below the ceiling, above half of it.
    assert not guard.allows(0.0)
    guard.computed(600, 0.0)
    assert guard.allows(0.0)
    assert guard.closings == 1


def test_time_forgives() -> None:
    guard = Guard(SETTINGS)
    guard.recomputing(150, 0.0)
    assert not guard.allows(0.0)
    assert not guard.allows(60.0)
    assert guard.allows(70.0)
    assert guard.recomputed_share == pytest.approx(150 * 2.718281828 ** (-70 / 60) / 1000)


@given(
    events=st.lists(
        st.tuples(st.sampled_from(["computed", "wanted", "time"]), st.integers(0, 500)), min_size=1, max_size=200
    ),
    share=st.sampled_from([0.01, 0.1, 0.5]),
)
def test_what_is_lost_is_bounded_however_it_is_driven(events: list[tuple[str, int]], share: float) -> None:
    """Whoever asks as often as it can: recomputed ≤ share × (computed + the floor) + one victim, without fading."""
    guard = Guard(msgspec.structs.replace(SETTINGS, recomputed_share=share, window_seconds=1e12))
    at, computed, recomputed, largest = 0.0, 0, 0, 0
    for kind, amount in events:
        if kind == "computed":
            guard.computed(amount, at)
            computed += amount
        elif kind == "time":
            at += amount
        elif guard.allows(at):
            guard.recomputing(amount, at)
            recomputed += amount
            largest = max(largest, amount)
        assert recomputed <= share * max(1000, computed) + largest + 1e-6
