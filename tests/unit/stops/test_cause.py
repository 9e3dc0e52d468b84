from __future__ import annotations

import itertools

from stopguard.stops import Semantics, Source, StopCause, prevails


def cause(semantics: Semantics) -> StopCause:
    return StopCause(semantics=semantics, source=Source.API, reason="x", observed_at=1.0)


def test_the_first_cause_stays_except_that_an_end_replaces_a_preemption() -> None:
    for new, current in itertools.product(Semantics, Semantics):
        replaces = current is Semantics.PREEMPT and new is not Semantics.PREEMPT
        assert prevails(cause(new), cause(current)) == replaces
    assert all(prevails(cause(new), None) for new in Semantics)


def test_four_meanings_of_stop() -> None:
    assert [one.value for one in Semantics] == ["cancel", "preempt", "finish", "fail"]
