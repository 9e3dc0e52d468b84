"""Whatever happens to a healthy engine: blocks add up after every step, and at the end nothing is open."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stopguard.refengine import POLICIES, ReferenceEngine
from tests.unit.refengine.storms import SMALL, Operation, random_operations, run_storm, storms

CASES = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("policy", POLICIES)
@CASES
@given(operations=storms, depth=st.sampled_from([None, 1, 2, 3]), host_blocks=st.sampled_from([0, 12]))
def test_every_storm_settles(policy: str, operations: list[Operation], depth: int | None, host_blocks: int) -> None:
    config = msgspec.structs.replace(SMALL, pipeline_depth=depth, host_blocks=host_blocks)
    engine = ReferenceEngine(config, policy)
    driver, books = run_storm(engine, operations)
    snapshot = engine.snapshot(driver.now)
    assert snapshot.settled, snapshot
    assert books.open() == []
    assert not engine.watchers
    assert "error" not in snapshot.gauges.finished_total


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("policy", POLICIES)
def test_long_storms_settle_and_nobody_reads_foreign_kv(policy: str, seed: int) -> None:
    numbers = random.Random(seed)
    config = msgspec.structs.replace(
        SMALL, pipeline_depth=numbers.choice([None, 1, 2, 3]), host_blocks=numbers.choice([0, 12])
    )
    engine = ReferenceEngine(config, policy, seed=seed)
    driver, books = run_storm(engine, random_operations(numbers, 150))
    snapshot = engine.snapshot(driver.now)
    assert snapshot.settled, snapshot
    assert books.open() == []
    finished = snapshot.gauges.finished_total
    assert set(finished) & {"abort", "cancelled"}, "the storm stopped nobody"
    assert finished["length"] > 10
    assert (snapshot.gauges.preemptions_total > 0) == engine.policy.preempts


@pytest.mark.parametrize("policy", POLICIES)
@settings(CASES, max_examples=15)
@given(operations=storms)
def test_the_same_calls_give_the_same_frames(policy: str, operations: list[Operation]) -> None:
    first, _ = run_storm(ReferenceEngine(SMALL, policy, seed=3), operations)
    again, _ = run_storm(ReferenceEngine(SMALL, policy, seed=3), operations)
    assert first.frames == again.frames
    assert first.sequences == again.sequences
