"""The proof, second half: a healthy engine is never accused, whichever of the five it stops like."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from stopguard.audit import SCENARIOS, Outcome
from stopguard.refengine import POLICIES
from tests.audit.rig import Score, accusations, audit

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

#: `STOPGUARD_AUDIT_RUNS=100` looks longer.
RUNS = int(os.environ.get("STOPGUARD_AUDIT_RUNS", "20"))

#: What an engine of this kind cannot stage, and says so.
CANNOT = {
    "vllm": set(),
    "sglang": {"before-first-byte", "wrong-victim"},
    "llamacpp": {"before-first-byte", "preempted"},
    "trtllm": set(),
    "deepinfer": set(),
}


@pytest.mark.parametrize("seed", range(RUNS))
async def test_a_healthy_engine_is_not_accused(seed: int, score: Score) -> None:
    policy = list(POLICIES)[seed % len(POLICIES)]
    report = await audit(policy, seed=seed, **_variant(seed))
    score.healthy.append(not report.accusations())
    assert accusations(report) == []
    assert not report.broken_off
    assert [scenario.name for scenario in report.scenarios] == list(SCENARIOS)


def _variant(seed: int) -> dict[str, Any]:
    """Another engine each time; the first round is the usual one."""
    if seed < len(POLICIES):
        return {}
    numbers = random.Random(seed)
    return {
        "blocks": numbers.choice((128, 256, 512)),
        "max_running": numbers.choice((4, 8, 16)),
        "prefix_cache": numbers.random() < 0.7,
        "host_blocks": numbers.choice((0, 0, 128)),
        "pipeline_depth": numbers.choice((None, 1, 2)),
        "prefill_chunk_tokens": numbers.choice((64, 128, 256)),
        "speculative_tokens": numbers.choice((1, 3)),
    }


@pytest.mark.parametrize("policy", POLICIES)
async def test_it_passes_whole_and_skips_only_what_cannot_be(policy: str) -> None:
    report = await audit(policy, seed=40)
    assert report.outcome is Outcome.PASS
    skipped = {scenario.name for scenario in report.scenarios if scenario.outcome is Outcome.SKIPPED}
    assert skipped <= CANNOT[policy]
    stopped = next(scenario for scenario in report.scenarios if scenario.name == "non-streaming")
    assert set(stopped.steps) == {"notify", "stop", "release", "settle"}
    assert stopped.stops == 2


async def test_the_log_alone_is_as_good_as_the_list() -> None:
    report = await audit("vllm", seed=42, observe="log")
    assert report.outcome is Outcome.PASS, accusations(report)
    assert report.target.observed_by == "/ref/log"


@pytest.mark.parametrize("policy", POLICIES)
async def test_gauges_alone_accuse_nobody(policy: str) -> None:
    report = await audit(policy, seed=41, observe="metrics")
    assert accusations(report) == []


async def test_the_same_seed_gives_the_same_report() -> None:
    first = await audit("vllm", seed=5, scenarios=("mid-stream", "storm"))
    second = await audit("vllm", seed=5, scenarios=("mid-stream", "storm"))
    assert first.scenarios == second.scenarios


async def test_a_starved_detection_is_said_even_where_it_is_in_time() -> None:
    report = await audit("llamacpp", seed=6, scenarios=("non-streaming", "busy-neighbour"))
    notes = [note for scenario in report.scenarios for note in scenario.notes]
    assert any(note.startswith("put off by the neighbour") for note in notes), notes
