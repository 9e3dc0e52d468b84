"""What the benchmark `urgent` concludes from what it measured; the measuring itself needs an engine."""

from __future__ import annotations

import pytest

from benchmarks._urgent_load import Load, Way
from benchmarks.urgent import CASES, Row, in_turn, markdown, quantile, shares
from stopguard.preemption import Mode

LOAD = Load(clients=2, tokens=50)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([3.0], 0.95, 3.0),
        ([1.0, 2.0, 3.0, 4.0], 0.5, 2.0),
        ([4.0, 1.0, 3.0, 2.0], 1.0, 4.0),
        ([float(number) for number in range(1, 21)], 0.95, 19.0),
        ([1.0, 2.0], 0.0, 1.0),
    ],
)
def test_a_quantile_is_one_of_the_values(values: list[float], share: float, expected: float) -> None:
    assert quantile(values, share) == expected


@pytest.mark.parametrize(
    ("total", "turns", "expected"), [(20, 4, [5, 5, 5, 5]), (7, 3, [3, 2, 2]), (2, 5, [1, 1]), (1, 1, [1])]
)
def test_requests_are_dealt_out_evenly(total: int, turns: int, expected: list[int]) -> None:
    assert shares(total, turns) == expected


def test_each_way_goes_first_once_in_as_many_turns_as_there_are_ways() -> None:
    ways = [Way(name=name, mode=Mode.OFF) for name in "abc"]
    assert ["".join(way.name for way in in_turn(ways, turn)) for turn in range(4)] == ["abc", "bca", "cab", "abc"]


def test_a_table_compares_with_its_first_row() -> None:
    waited = Row("waiting", [2.0, 4.0, 3.0], streams=9, tokens=1000.0, loaded_seconds=2.0)
    jumped = Row("preempted", [0.1, 0.3, 0.2], streams=8, different=1, preempted=4, tokens=900.0, loaded_seconds=2.0)
    slower = Row("worse", [6.0], streams=1, tokens=10.0, loaded_seconds=1.0)
    table = markdown("engine", "1.0", LOAD, [waited, jumped, slower], prompts=(10, 300), alone=0.02)
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert rows == [
        "| waiting | 3000 | 4000 | 4000 | 3 | 1 | 0 | 9 of 9 | 500 |",
        "| preempted | 200 | 300 | 300 | 3 | 1/15.0 | 4 | 7 of 8 | 450 |",
        "| worse | 6000 | 6000 | 6000 | 1 | 2.0 | 0 | 1 of 1 | 10 |",
    ]
    assert "alone at the engine one takes 20" in table


def test_every_case_begins_with_waiting_and_has_ways_by_different_names() -> None:
    for case in CASES.values():
        assert case.ways[0].mode is Mode.OFF
        assert len({way.name for way in case.ways}) == len(case.ways) > 2


def test_classes_that_are_a_given_distance_apart() -> None:
    settings = Way(name="near", mode=Mode.QUEUE, apart=5).settings()
    urgencies = {name: each.urgency for name, each in settings.classes.items()}
    assert urgencies["urgent"] - urgencies["background"] == 5
    assert settings.classes["urgent"].preempts
    assert not settings.classes["background"].preempts
    usual = Way(name="usual", mode=Mode.QUEUE).settings()
    assert usual.classes["urgent"].urgency - usual.classes["background"].urgency == 20
