"""The proof, first half: every seeded fault of the reference engine is caught, and the right ledger is named."""

from __future__ import annotations

from typing import Any

import pytest

from stopguard.refengine import FAULTS
from tests.audit.rig import Score, accusations, audit

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

#: Where a fault needs more than the usual engine: the policy, and the configuration.
STAGED: dict[str, tuple[str, dict[str, Any]]] = {
    "host-backup-leaked": ("sglang", {"host_blocks": 512}),
}

#: Faults whose damage is honestly in two books: a block with two owners, or one that is reused too early.
SECOND_LEDGER = {"block-freed-twice": "crosstalk", "cleanup-needs-admission": "crosstalk"}


@pytest.mark.parametrize("name", FAULTS)
async def test_the_fault_is_caught_and_its_ledger_named(name: str, score: Score) -> None:
    policy, config = STAGED.get(name, ("vllm", {}))
    report = await audit(policy, (name,), seed=1, **config)
    ledger = FAULTS[name].ledger
    accused = report.accused_ledgers()
    score.faults[name] = ledger in accused
    score.exact += accused == {ledger}
    assert ledger in accused, accusations(report)
    assert accused <= {ledger, SECOND_LEDGER.get(name, ledger)}, accusations(report)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("blocks-leaked-on-abort", "llamacpp"),
        ("abort-lost", "sglang"),
        ("abort-lost-in-prefill", "deepinfer"),
        ("blocks-leaked-between-chunks", "deepinfer"),
        ("disconnect-masked", "trtllm"),
        ("child-survives", "sglang"),
        ("running-gauge-drifts", "trtllm"),
        ("global-stop-flag", "llamacpp"),
        ("healthy-while-wedged", "deepinfer"),
    ],
)
async def test_it_is_caught_under_another_policy(name: str, policy: str) -> None:
    report = await audit(policy, (name,), seed=2)
    assert FAULTS[name].ledger in report.accused_ledgers(), accusations(report)


@pytest.mark.parametrize(
    "name",
    [
        "blocks-leaked-on-abort",
        "lora-slot-leaked",
        "abort-lost",
        "unknown-abort-crashes",
        "running-gauge-drifts",
        "abort-counter-blind",
        "watcher-leaks",
        "fence-skipped",
        "prefix-victim",
        "disconnect-ignored-without-stream",
    ],
)
async def test_gauges_alone_are_enough(name: str) -> None:
    report = await audit("vllm", (name,), seed=1, observe="metrics")
    assert FAULTS[name].ledger in report.accused_ledgers(), accusations(report)


async def test_a_rare_fault_is_caught_by_the_storm() -> None:
    report = await audit("vllm", ("blocks-leaked-on-abort:0.2",), seed=3, scenarios=("storm",))
    assert report.accused_ledgers() == {"kv"}, accusations(report)
