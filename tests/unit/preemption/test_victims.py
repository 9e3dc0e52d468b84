"""Policies order, `eligible` forbids."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stopguard.errors import ConfigurationError
from stopguard.ledger import EngineGauges
from stopguard.preemption import (
    POLICIES,
    Candidate,
    Claim,
    Classes,
    Exactness,
    PreemptionSettings,
    Room,
    Verdict,
    room_of,
)
from stopguard.preemption.pressure import at_engine, fits, in_queue
from stopguard.preemption.victims import candidate_of, choose, eligible, policy_named
from tests.unit.stops.scene import PROBED, STREAM, Scene

SETTINGS = PreemptionSettings()
CLASSES = Classes(SETTINGS)


def candidate(name: str = "a", **facts: Any) -> Candidate:
    usual: dict[str, Any] = {
        "rank": 0,
        "preemptible": True,
        "prompt_tokens": 100,
        "output_tokens": 50,
        "remaining_tokens": 100,
        "blocks_held": 10,
        "blocks_freed": 10,
        "recompute_tokens": 150,
        "arrived_at": 0.0,
        "rooms_made": 0,
    }
    return Candidate(request_id=name, **{**usual, **facts})


def first(policy: str, *candidates: Candidate) -> str:
    chosen = choose(POLICIES[policy], candidates)
    assert chosen is not None
    return chosen.request_id


def test_each_policy_looks_at_its_figure() -> None:
    short = candidate("short", output_tokens=5, arrived_at=1.0, blocks_freed=4, recompute_tokens=60)
    long = candidate("long", output_tokens=500, blocks_freed=20, recompute_tokens=500, remaining_tokens=2000)
    new = candidate("new", output_tokens=40, arrived_at=9.0, remaining_tokens=20)
    everybody = (short, long, new)
    assert first("fewest_output_first", *everybody) == "short"
    assert first("longest_output_first", *everybody) == "long"
    assert first("newest_first", *everybody) == "new"
    assert first("most_blocks_freed", *everybody) == "long"
    # 60/100, 500/2000 and 150/20 tokens lost for each that is still to come.
    assert first("least_work_lost", *everybody) == "long"


@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(
        st.builds(
            candidate,
            st.text("abc", min_size=1, max_size=3),
            rank=st.integers(0, 2),
            output_tokens=st.integers(0, 3),
            recompute_tokens=st.integers(0, 3),
            remaining_tokens=st.integers(0, 3),
            blocks_freed=st.integers(0, 3),
            arrived_at=st.sampled_from([0.0, 1.0]),
        ),
        unique_by=lambda each: each.request_id,
    ),
)
def test_the_choice_is_of_the_least_urgent_class_and_does_not_hang_on_the_order(
    policy: str, candidates: list[Candidate]
) -> None:
    chosen = choose(POLICIES[policy], candidates)
    assert chosen == choose(POLICIES[policy], reversed(candidates))
    if candidates:
        assert chosen is not None
        assert chosen.rank == min(each.rank for each in candidates)
    else:
        assert chosen is None


def test_an_unknown_policy_is_the_operators_error() -> None:
    with pytest.raises(ConfigurationError, match="no victim policy 'youngest'; there are: least_work_lost"):
        policy_named("youngest")


EXACT = Verdict(Exactness.EXACT)


@pytest.mark.parametrize(
    ("facts", "verdict", "rank", "expected"),
    [
        ({}, EXACT, 1, ""),
        ({}, Verdict(Exactness.APPROXIMATE, "sampled"), 1, ""),
        ({}, EXACT, 0, "class"),
        ({"rank": 2}, EXACT, 1, "class"),
        ({"preemptible": False}, EXACT, 1, "unpreemptible"),
        ({}, Verdict(Exactness.NEVER, "grammar"), 1, "grammar"),
        ({}, Verdict(Exactness.NEVER), 1, "inexact"),
        ({"rooms_made": 3}, EXACT, 1, "too_often"),
        ({"resumed_at": 99.0}, EXACT, 1, "cool_down"),
        ({"resumed_at": 98.0}, EXACT, 1, ""),
        ({"remaining_tokens": 15}, EXACT, 1, "nearly_done"),
    ],
)
def test_who_is_left_alone(facts: dict[str, Any], verdict: Verdict, rank: int, expected: str) -> None:
    tracked = Scene().running(STREAM)
    assert eligible(candidate(**facts), tracked, verdict, rank, SETTINGS, 100.0) == expected


def test_who_is_being_stopped_is_no_victim() -> None:
    scene = Scene()
    tracked = scene.running(STREAM)
    scene.leave(tracked)
    assert eligible(candidate(), tracked, EXACT, 1, SETTINGS, 100.0) == "not_running"
    waiting = scene.admitted("r2")
    assert eligible(candidate(), waiting, EXACT, 1, SETTINGS, 100.0) == "not_running"


def claim(prompt: int = 100, most: int | None = 400) -> Claim:
    return Claim(
        priority_class=CLASSES.default,
        tenant="t",
        weight=1.0,
        arrived_at=0.0,
        prompt_tokens=prompt,
        max_tokens=most,
    )


def test_the_facts_without_a_probe_are_estimated_from_tokens() -> None:
    tracked = Scene().running(STREAM)
    tracked.events += 60
    facts = candidate_of(tracked, claim(), settings=SETTINGS, block_tokens=16, blocks_needed=4, prefix_cache=True)
    # 160 tokens are 10 blocks, of which the other takes 4: 6 x 16 stay in the cache.
    assert (facts.blocks_held, facts.output_tokens, facts.recompute_tokens) == (10, 60, 64)
    assert facts.remaining_tokens == 340
    facts = candidate_of(tracked, claim(), settings=SETTINGS, block_tokens=16, blocks_needed=4, prefix_cache=False)
    assert facts.recompute_tokens == 160
    facts = candidate_of(
        tracked, claim(most=None), settings=SETTINGS, block_tokens=16, blocks_needed=100, prefix_cache=True
    )
    assert (facts.recompute_tokens, facts.remaining_tokens) == (160, SETTINGS.assumed_tokens)


def test_with_a_probe_the_blocks_are_those_of_the_books() -> None:
    tracked = Scene().running(PROBED, blocks=4)
    facts = candidate_of(tracked, claim(), settings=SETTINGS, block_tokens=16, blocks_needed=1, prefix_cache=False)
    assert (facts.blocks_held, facts.blocks_freed) == (4, 4)


def test_pressure_has_three_signs() -> None:
    urgent = claim(prompt=160)
    assert in_queue(Room(places_free=0)) is not None
    assert in_queue(Room(places_free=1)) is None

    def asked(room: Room, at: float) -> tuple[str | None, float | None]:
        pressure, again_at = at_engine(room, urgent, 10.0, at, SETTINGS)
        return (f"{pressure.reason} {pressure.blocks_needed}" if pressure else None), again_at

    def full(**facts: Any) -> Room:
        usual = {"places_free": 9, "read_at": 10.01, "waiting": 0, "blocks_used": 10, "blocks_total": 100}
        return Room(**{**usual, **facts})

    assert asked(full(), 10.02) == (None, 10.05)
    assert asked(full(), 10.06) == (None, None)
    assert asked(full(blocks_used=95), 10.06) == ("kv 6", None)
    assert asked(full(blocks_used=180, blocks_total=200), 10.06) == ("kv 11", None)
    assert asked(full(waiting=2), 10.06) == ("waiting 0", None)
    assert asked(full(waiting=2, blocks_used=None), 10.06) == ("waiting 11", None)
    # A reading from before it was sent counts as none.
    assert asked(full(read_at=9.9, waiting=2), 10.06) == (None, 10.5)
    assert asked(Room(places_free=9), 10.5) == ("slow 11", None)
    # With a slot of its own it computes its prompt: nobody has to go, however long that takes.
    assert asked(Room(places_free=0, slots_free=0), 19.0) == (None, None)
    assert asked(Room(places_free=9, slots_free=-1), 10.5) == ("slow 11", None)
    assert asked(full(slots_free=0, waiting=1), 10.06) == ("waiting 0", None)


def test_whether_there_is_room_to_come_back() -> None:
    room = room_of(EngineGauges(at=1.0, waiting=0, blocks_used=70, blocks_total=100), 3, 16)
    assert fits(room, 10, SETTINGS, alone=False) is True
    assert fits(room, 11, SETTINGS, alone=False) is False
    assert fits(room, 11, SETTINGS, alone=True) is True
    assert fits(room_of(None, 3, 16), 1, SETTINGS, alone=False) is None
    assert fits(room_of(None, 0, 16), 1, SETTINGS, alone=True) is False
    assert fits(room_of(None, 3, 16, 1), 1, SETTINGS, alone=False) is True
    assert fits(room_of(None, 3, 16, 0), 1, SETTINGS, alone=False) is None
    waiting = room_of(EngineGauges(at=1.0, waiting=1, blocks_used=0, blocks_total=100), 3, 16)
    assert fits(waiting, 1, SETTINGS, alone=False) is False
    assert waiting.kv_usage == 0.0
    said = EngineGauges(at=1.0, blocks_used=1, blocks_total=100, block_tokens=32)
    assert (room_of(said, 3, 16).block_tokens, waiting.block_tokens) == (32, 16)
    assert waiting.blocks_free == 100
