"""Every interleaving of what can happen to two requests, and of everything that can happen to one.

`STOPGUARD_EXPLORER_DEPTH` (default 8) is the number of events in a sequence of two requests; one request goes one
deeper. What is walked is printed at the end of the run.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from stopguard.stops import Controller, EngineProfile, effects
from stopguard.stops.machine import ENGINE_TABLE, Engine, EngineEvent
from tests.explorer.clone import check_rules
from tests.explorer.walk import EVERYTHING, PathFailed, Walk, walk
from tests.explorer.world import EVENTS, GAUGED, PROBED, PROFILES, SILENT, STREAM, World, apply

DEPTH = int(os.environ.get("STOPGUARD_EXPLORER_DEPTH", "8"))
SECONDS_MAX = 3600 if DEPTH > 8 else 300
#: For two requests, what couples and overtakes: at most one preemption and one lost abort in a sequence.
TWO_REQUESTS = frozenset(
    {
        *("cancel", "second cancel", "preempt", "preempted", "resume", "resumed", "finish", "served", "ack"),
        *("late output", "abort lost", "engine crash", "time passes", "gauges"),
    }
)
#: How many times "time passes, until the next deadline" may be one of the events of a sequence.
TIME_STEPS = {"probed": 1, "stream": 2, "gauged": 1, "silent": 2}


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """The walker breaks the cycles that it makes; looking for others takes a third of the time."""
    gc.disable()
    yield
    gc.enable()


def alphabet_of(profile: EngineProfile) -> frozenset[str]:
    """Gauges are an event of their own; output that comes late is as with the other engines without a probe."""
    return TWO_REQUESTS - {"late output"} if profile is GAUGED else TWO_REQUESTS


def two(profile: EngineProfile) -> World:
    world = World(profile, ["a", "b"], dispatched=True)
    world.time_left = TIME_STEPS[profile.name]
    if profile.probed:
        computed = next(do for name, _, do in EVENTS if name == "output computed")
        for name in world.peers:
            apply(world, name, computed)  # a token is in flight: it may come late
    return world


#: What cannot happen at an engine of this kind.
NEVER = {
    "probed": {"stream broken", "answer lost", "gauges"},
    "stream": {"resumed", "output leaves", "release", "gauges"},
    "gauged": {"resumed", "output leaves", "release"},
    "silent": {"resumed", "output leaves", "release", "gauges", "answer lost", "abort found nothing"},
}


def check_seen(seen: Walk, alphabet: frozenset[str], profile: EngineProfile) -> None:
    """A walk in which an event never happened would prove nothing about it."""
    assert set(seen.events) == alphabet - NEVER[profile.name]
    assert seen.ends["settled"]
    assert seen.ends["written off"]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX)
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_two_requests(profile: EngineProfile, report: list[str]) -> None:
    seen = walk(two(profile), DEPTH, alphabet_of(profile))
    report.append(seen.line())
    print(seen.line())
    check_seen(seen, alphabet_of(profile), profile)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX)
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_one_request_and_everything(profile: EngineProfile, report: list[str]) -> None:
    alphabet = EVERYTHING - {"late output"}  # it is "output leaves", which may come at any time
    seen = walk(World(profile, ["a"], dispatched=False), DEPTH + 1, alphabet)
    report.append(seen.line())
    print(seen.line())
    check_seen(seen, alphabet, profile)


def test_the_number_of_interleavings_is_that_of_a_plain_enumeration() -> None:
    """States are joined and paths added up; going through every sequence one by one counts the same."""

    def enumerate_all(world: World, depth: int) -> int:
        from tests.explorer.world import enabled

        events = enabled(world, TWO_REQUESTS)
        if not depth or not events:
            return 1
        count = 0
        for _, peer_name, do in events:
            after = world.copy()
            apply(after, peer_name, do)
            count += enumerate_all(after, depth - 1)
            after.dispose()
        return count

    for profile in (PROBED, STREAM, SILENT):
        assert walk(two(profile), 3, TWO_REQUESTS).interleavings == enumerate_all(two(profile), 3)


def test_a_copy_shares_nothing_that_changes() -> None:
    check_rules()
    world = two(PROBED)
    key = world.key()
    for name, possible, do in EVENTS:
        after = world.copy()
        assert after.key() == key
        if possible(after, after.peers["a"]):
            apply(after, "a", do)
            assert after.key() != key, name
        assert world.key() == key, name
        world.check()


class TestTheExplorerFinds:
    """Each breaks one thing and must see the walk fail."""

    def test_a_cancel_that_does_not_outlive_a_preemption(self, monkeypatch: pytest.MonkeyPatch) -> None:
        table = {**ENGINE_TABLE[Engine.ABORTING], EngineEvent.RESUMED: Engine.DISPATCHED}
        monkeypatch.setitem(ENGINE_TABLE, Engine.ABORTING, table)
        with pytest.raises(PathFailed, match="resumed"):
            walk(two(PROBED), 6, TWO_REQUESTS)

    def test_a_knock_that_is_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        honest = Controller._knock

        def silent(self: Controller, tracked: object, at: float) -> tuple[()]:
            honest(self, tracked, at)  # type: ignore[arg-type]
            return ()

        monkeypatch.setattr(Controller, "_knock", silent)
        # Nobody is told, the abort never arrives: the honest engine finishes by itself, and that is not a stop.
        seen = walk(two(PROBED), 3, TWO_REQUESTS)
        assert "ack" not in seen.events

    def test_an_answer_that_is_taken_for_an_ack(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from stopguard.stops import AbortAnswer

        honest = Controller.abort_answered

        def credulous(
            self: Controller, tracked: object, at: float, door: str, answer: AbortAnswer, retry_after: float = 0.0
        ) -> object:
            if answer is AbortAnswer.ACCEPTED:
                answer = AbortAnswer.GONE
            return honest(self, tracked, at, door, answer, retry_after)  # type: ignore[arg-type]

        monkeypatch.setattr(Controller, "abort_answered", credulous)
        with pytest.raises(PathFailed, match=r"abort lost .\n.*settled, and the engine still works"):
            walk(two(STREAM), 3, TWO_REQUESTS)

    def test_a_timer_that_survives_its_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def forgetful(self: Controller, tracked: object) -> effects.Settled:
            self.leave_engine(tracked)  # type: ignore[arg-type]
            del self.tracked[tracked.request_id]  # type: ignore[attr-defined]
            return effects.Settled(tracked)  # type: ignore[arg-type]

        monkeypatch.setattr(Controller, "detach", forgetful)
        with pytest.raises(PathFailed):
            walk(two(STREAM), 3, TWO_REQUESTS)
