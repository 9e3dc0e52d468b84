"""`stopguard audit` of the stand-in: nobody is accused, and the poll shows in the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from stopguard.audit import Audit, AuditReport, Outcome, Plan
from stopguard.audit.client import SocketWorld
from stopguard.ledger import Evidence
from tests.trtllm.rig import StandIn, standin
from tests.trtllm.table import warmed

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(300)]

SCENARIOS = ("mid-stream", "non-streaming", "queued", "prompt-list", "keep-alive", "afterlife")


async def audit(engine: StandIn) -> AuditReport:
    await warmed(engine)
    world = SocketWorld(engine.url, engine.url)
    return await Audit(world, Plan(scenarios=SCENARIOS), url=engine.url).run()


@pytest.mark.parametrize("patch", [False, True], ids=["stock", "patched"])
async def test_nobody_is_accused(tmp_path: Path, patch: bool) -> None:
    async with standin(tmp_path / "log", patch=patch, return_perf_metrics=True) as engine:
        report = await audit(engine)
    assert list(report.accusations()) == []
    assert (report.target.engine, report.target.version) == ("trtllm", "1.3.0-standin")
    for scenario in report.scenarios:
        assert not scenario.skipped, scenario.skipped
        for ledger in ("queue", "kv"):
            cell = scenario.cell(ledger)
            assert cell is not None
            assert (cell.outcome, cell.evidence) == (Outcome.PASS, Evidence.GAUGE)


async def test_a_pool_that_stays_taken_is_named(tmp_path: Path) -> None:
    """A worker that refuses every cancel for ever: who was stopped goes on, and is found."""
    async with standin(tmp_path / "log", patch=True, refusals=10**9, return_perf_metrics=True) as engine:
        await warmed(engine)
        world = SocketWorld(engine.url, engine.url)
        plan = Plan(scenarios=("mid-stream",), deadline_seconds=1.0)
        report = await Audit(world, plan, url=engine.url).run()
    assert {(name, cell.outcome) for name, cell in report.accusations()} == {("mid-stream", Outcome.LEAK)}
