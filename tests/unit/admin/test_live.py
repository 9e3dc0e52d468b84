"""The view of a real gateway: what it reads follows from the books, and its stops happen on the relay's loop."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from stopguard.admin import StopWanted, View
from stopguard.admin.live import LiveView
from stopguard.engines import ModelEntry, OpenAIEngine
from stopguard.gateway.server import Gateway
from stopguard.gateway.settings import EngineSettings
from stopguard.ledger import EngineGauges
from stopguard.stops import Tracked

pytestmark = pytest.mark.anyio


class Gauged(OpenAIEngine):
    """An engine with gauges that a test sets."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "http://127.0.0.1:1")
        self.gauge_seconds = 1.0
        self.reported: EngineGauges | None = None

    async def gauges(self) -> EngineGauges | None:
        return self.reported


class Setting:
    """A gateway that does not listen, its view on the same loop, and requests put into it by hand."""

    def __init__(self) -> None:
        self.engines = [Gauged("gpu0"), Gauged("gpu1")]
        self.gateway = Gateway([(engine, EngineSettings()) for engine in self.engines])
        self.view = LiveView(self.gateway, None, asyncio.get_running_loop())

    def run(self, number: int, *, engine: int = 0, model: str = "base", group: str = "") -> Tracked:
        controller, at = self.gateway.controller, self.view.now()
        tracked = controller.admit(f"sg-{number}", at, model=model)
        controller.dispatch(tracked, at, self.engines[engine].profile)
        stands_in: Any = SimpleNamespace(
            request_id=tracked.request_id, tracked=tracked, asked_model=model, head=SimpleNamespace(group=group)
        )
        self.gateway.registry.alive[tracked.request_id] = stands_in
        return tracked


@pytest.fixture
async def setting() -> Setting:
    return Setting()


async def test_it_is_a_view(setting: Setting) -> None:
    view: View = setting.view
    assert view.open_requests() == []


async def test_it_is_ready_when_some_engine_has_answered(setting: Setting) -> None:
    signs = setting.view.signs()
    assert signs.reasons == ("no engine answers",)
    members = setting.gateway.fleet.members
    members[0].models = {"base": ModelEntry(id="base")}
    signs = setting.view.signs()
    assert (signs.reasons, signs.warnings) == ((), ("engine gpu1 does not answer",))
    members[0].eject(setting.view.now())
    assert setting.view.signs().reasons == ("no engine answers",)
    members[0].answered()
    setting.gateway.draining = True
    assert setting.view.signs().reasons == ("it is shutting down",)


async def test_the_relay_answers_when_its_loop_turns(setting: Setting) -> None:
    assert await setting.view.relay_answers(1.0)
    stuck = asyncio.new_event_loop()  # a loop that nobody runs
    try:
        assert not await LiveView(setting.gateway, None, stuck).relay_answers(0.01)
    finally:
        stuck.close()
    assert not await LiveView(setting.gateway, None, stuck).relay_answers(1.0)


@pytest.mark.parametrize(
    ("wanted", "stopped"),
    [
        (StopWanted(group="a"), {"sg-1", "sg-2"}),
        (StopWanted(model="small"), {"sg-3"}),
        (StopWanted(engine="gpu1"), {"sg-2", "sg-3"}),
        (StopWanted(everything=True), {"sg-1", "sg-2", "sg-3", "sg-4"}),
        (StopWanted(ids=("sg-4", "sg-1")), {"sg-4", "sg-1"}),
        (StopWanted(group="nobody"), set()),
    ],
)
async def test_it_stops_what_is_wanted_and_nothing_else(
    setting: Setting, wanted: StopWanted, stopped: set[str]
) -> None:
    requests = [
        setting.run(1, group="a"),
        setting.run(2, group="a", engine=1),
        setting.run(3, model="small", engine=1),
        setting.run(4),
    ]
    taken = await setting.view.stop(wanted)
    assert {one.request_id for one in taken} == stopped
    assert {one.result for one in taken} <= {"stopping"}
    assert {tracked.request_id for tracked in requests if tracked.cause is not None} == stopped


async def test_what_cannot_be_stopped_is_said(setting: Setting) -> None:
    stopping = setting.run(1)
    await setting.view.stop(StopWanted(ids=("sg-1",), reason="first"))
    finished = setting.run(2)
    setting.gateway.controller.engine_finished(finished, setting.view.now())
    ended = setting.run(3)
    setting.gateway.controller.engine_finished(ended, setting.view.now())
    setting.gateway.controller.client_served(ended, setting.view.now())
    del setting.gateway.registry.alive["sg-3"]
    taken = await setting.view.stop(StopWanted(ids=("sg-1", "sg-2", "sg-3", "sg-4"), reason="second"))
    assert [(one.request_id, one.result) for one in taken] == [
        ("sg-1", "already"),
        ("sg-2", "already"),
        ("sg-3", "already"),
        ("sg-4", "unknown"),
    ]
    assert stopping.cause is not None
    assert stopping.cause.reason == "first"


async def test_many_stops_let_the_relay_breathe(setting: Setting) -> None:
    for number in range(200):
        setting.run(number)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    taken = await setting.view.stop(StopWanted(everything=True))
    counting.cancel()
    assert len(taken) == 200
    assert turns > 200 // 32


async def test_engines_are_counted_from_the_books(setting: Setting) -> None:
    setting.run(1)
    setting.run(2)
    first, second = setting.view.engines()
    assert (first.name, first.in_engine, first.stopping) == ("gpu0", 2, 0)
    assert (second.name, second.in_engine) == ("gpu1", 0)
    assert first.doors == ("close",)


async def test_a_difference_that_lasts_is_told_from_one_that_was_under_way(setting: Setting) -> None:
    setting.run(1)
    engine = setting.engines[0]
    assert await setting.view.reconcile_with("gpu0") is None
    assert await setting.view.reconcile_with("nobody") is None
    for reported, lasting in ((3, 0), (1, 0), (3, 0), (3, 0), (3, 1)):
        engine.reported = EngineGauges(at=setting.view.now(), running=reported, waiting=0)
        comparison = await setting.view.reconcile_with("gpu0")
        assert comparison is not None
        assert setting.view.reconciliations()["gpu0"] is comparison
        assert len(setting.view.persistent("gpu0")) == lasting
    assert setting.view.persistent("gpu1") == []
