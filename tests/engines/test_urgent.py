"""An urgent request at a real engine whose slots are all busy: it waits for nobody, and nobody loses a character.

A few requests of what `python -m benchmarks.urgent` does with many, at the engine that starts in a second.
"""

from __future__ import annotations

import statistics

import pytest

from benchmarks.urgent import measure

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.timeout(600)
def test_llamacpp_makes_room_for_the_urgent() -> None:
    result = measure("llamacpp", 4, 1, ("first come", "at the gateway"), seed=5)
    print(f"\n{result.table}")
    waiting, preempting = result.rows
    assert (waiting.preempted, waiting.not_full, preempting.not_full) == (0, 0, 0)
    assert preempting.preempted >= 2
    assert waiting.different + preempting.different == 0
    assert statistics.median(preempting.seconds) < statistics.median(waiting.seconds) / 2
