"""An engine that is up and serves, much more slowly than before: the afterlife says SLOW, of the health ledger."""

from __future__ import annotations

from typing import Any

import pytest

from stopguard.audit import Audit, AuditReport, Outcome, Plan, exit_code
from stopguard.audit.world import Call, Exchange
from stopguard.refengine import EngineConfig
from stopguard.refengine.http_face import FaceOptions
from stopguard.refengine.http_virtual import VirtualServer
from tests.audit.rig import CONFIG
from tests.audit.virtual import VirtualWorld

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


class TiredWorld(VirtualWorld):
    """From the scenario `tired_at` on, each request is taken up only after `delay_seconds`."""

    def __init__(self, server: VirtualServer, delay_seconds: float, tired_at: str) -> None:
        super().__init__(server)
        self.delay_seconds = delay_seconds
        self.tired_at = tired_at
        self.tired = False

    def progress(self, number: int, of: int, scenario: Any, report: Any) -> None:
        self.tired = self.tired or scenario.name == self.tired_at

    async def open(self, call: Call, after: Exchange | None = None) -> Any:
        if self.tired:
            await self.sleep(self.delay_seconds)
        return await super().open(call, after)


async def audit(delay_seconds: float, tired_at: str = "afterlife", **plan: Any) -> AuditReport:
    server = VirtualServer("vllm", EngineConfig(**CONFIG), options=FaceOptions(dev_mode=True))
    async with server:
        world = TiredWorld(server, delay_seconds, tired_at)
        chosen = Plan(scenarios=("mid-stream", "afterlife"), **plan)
        return await Audit(world, chosen, url="virtual", engine="ref", progress=world.progress).run()


async def test_an_engine_that_has_become_slow_is_called_slow() -> None:
    report = await audit(3.0)
    ((name, cell),) = report.accusations()
    assert (name, cell.ledger, cell.outcome) == ("afterlife", "health", Outcome.SLOW)
    assert cell.measured_seconds > 3.0
    assert cell.limit_seconds < cell.measured_seconds
    assert cell.detail == "a fresh request takes much longer than before the stops"
    assert report.outcome is Outcome.SLOW
    assert exit_code([report]) == 1


async def test_the_limit_is_a_part_of_the_deadline() -> None:
    """As slow as before, but with a deadline of 60 s: a fifth of it is what a fresh request may take longer."""
    report = await audit(3.0, deadline_seconds=60.0)
    assert report.accusations() == []


async def test_an_engine_that_was_slow_from_the_beginning_is_not_accused() -> None:
    report = await audit(0.0)
    assert report.accusations() == []
    (afterlife,) = [scenario for scenario in report.scenarios if scenario.name == "afterlife"]
    health = afterlife.cell("health")
    assert health is not None
    assert health.outcome is Outcome.PASS
    assert any("at the beginning" in note for note in afterlife.notes)
