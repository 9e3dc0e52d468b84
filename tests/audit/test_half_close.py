"""A half-close through a gateway: taken for leaving, or served on. What is neither is caught."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from stopguard.audit import AuditReport, Outcome
from stopguard.engines import OpenAIEngine
from stopguard.gateway.server import Gateway
from stopguard.gateway.settings import EngineSettings, GatewaySettings, HalfClose, Listener
from stopguard.ledger import Book
from tests.audit.rig import accusations
from tests.audit.test_sockets import engine, relay, run

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@asynccontextmanager
async def stopguard(url: str, half_close: HalfClose) -> AsyncIterator[str]:
    """StopGuard's own gateway before the engine at `url`."""
    settings = GatewaySettings(listeners=(Listener(port=0),))
    liveness = msgspec.structs.replace(settings.liveness, half_close=half_close)
    settings = msgspec.structs.replace(settings, liveness=liveness)
    gateway = Gateway([(OpenAIEngine("engine", url), EngineSettings())], settings, book=Book())
    await gateway.start()
    try:
        for member in gateway.fleet.members:
            await gateway.fleet.refresh(member)
        yield f"http://127.0.0.1:{gateway.addresses[0][1]}"
    finally:
        await gateway.shutdown(drain_seconds=0.1)


def notes(report: AuditReport) -> list[str]:
    (scenario,) = report.scenarios
    assert not scenario.skipped
    return [note for note in scenario.notes if "half-closed" in note]


async def test_a_gateway_that_takes_it_for_leaving() -> None:
    async with engine() as (url, face), stopguard(url, HalfClose.CANCEL) as via:
        report = await run(url, via, scenarios=("half-close",))
        assert report.outcome is Outcome.PASS, accusations(report)
        assert notes(report) == []
        assert not face.exchanges


async def test_a_gateway_that_serves_on_until_the_client_is_gone() -> None:
    async with engine() as (url, face), stopguard(url, HalfClose.ALLOW) as via:
        report = await run(url, via, scenarios=("half-close",))
        assert report.outcome is Outcome.PASS, accusations(report)
        assert len(notes(report)) == 2
        assert not face.exchanges


async def test_a_gateway_that_serves_on_and_never_notices() -> None:
    async with engine() as (url, _), relay(url) as via:
        report = await run(url, via, scenarios=("half-close",), deadline_seconds=1.0)
    assert {(name, cell.ledger) for name, cell in report.accusations()} == {("half-close", "stream")}
    assert len(notes(report)) == 2


async def test_a_gateway_that_shuts_its_client_out_and_lets_the_engine_go_on() -> None:
    async with engine() as (url, _), relay(url, shuts_out=True) as via:
        report = await run(url, via, scenarios=("half-close",), deadline_seconds=1.0)
    assert {(name, cell.ledger) for name, cell in report.accusations()} == {("half-close", "stream")}
    assert notes(report) == []
