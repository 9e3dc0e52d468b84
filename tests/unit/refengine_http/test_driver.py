"""The clock, the catch-up, and the frames: the engine's time line does not depend on who wakes up when."""

from __future__ import annotations

import asyncio

import pytest

from stopguard.errors import LimitReached
from stopguard.probe import wire
from stopguard.refengine.engine import ReferenceEngine
from stopguard.refengine.http_driver import Driver, Inbox, RealClock, VirtualClock
from stopguard.refengine.interface import EngineConfig, RequestSpec, SamplingParameters, StepResult
from tests.unit.refengine_http.helpers import CHAT, chat, server

pytestmark = pytest.mark.anyio


def _spec(name: str, tokens: int = 50) -> RequestSpec:
    return RequestSpec(name, tuple(range(300, 340)), SamplingParameters(max_tokens=tokens))


class _LateClock(VirtualClock):
    """A virtual clock that remembers how far it was put back."""

    slipped = 0.0

    def slip(self, seconds: float) -> None:
        self.slipped += seconds
        self.at -= seconds


def _frames(wake_ups: list[float]) -> list[bytes]:
    clock, frames = VirtualClock(), list[bytes]()

    def keep(result: StepResult) -> None:
        frames.append(wire.encode_frame(result.frame))

    driver = Driver(ReferenceEngine(EngineConfig(), "vllm"), clock, [keep])
    driver.submit(_spec("a"), "a", Inbox())
    for at in wake_ups:
        clock.at = at
        driver.catch_up()
    return frames


def test_a_late_wake_up_changes_no_frame() -> None:
    punctual = _frames([step * 0.001 for step in range(1, 1000)])
    assert punctual == _frames([1.0]) == _frames([0.0301, 0.3, 0.9, 1.0])
    assert len(punctual) > 50


def test_a_process_that_stood_still_does_not_play_it_all() -> None:
    clock = _LateClock()
    config = EngineConfig(max_model_tokens=100_000, blocks=10_000)
    driver = Driver(ReferenceEngine(config, "vllm"), clock)
    driver.submit(_spec("a", 60_000), "a", Inbox())
    clock.at = 100.0
    at = driver.catch_up()
    assert clock.slipped == driver.slipped_seconds > 90.0
    assert at == pytest.approx(100.0 - clock.slipped)
    assert driver.due_at() is not None


def test_the_real_clock_keeps_its_speed() -> None:
    clock = RealClock(10.0)
    start = clock.now()
    assert 0.0 < clock.delay(start + 10.0) <= 1.0
    clock.slip(5.0)
    assert clock.now() < start


async def test_an_inbox_wakes_for_output_departure_and_failure() -> None:
    for leave in (True, False):
        inbox = Inbox()
        waiting = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        inbox.leave() if leave else inbox.fail("dead")
        assert await waiting == []
        assert (inbox.client_gone, inbox.failure) == ((True, "") if leave else (False, "dead"))


async def test_an_observer_that_raises_does_not_harm_the_engine() -> None:
    async with server("vllm") as virtual:

        def broken(frame: wire.Frame) -> None:
            raise RuntimeError("no")

        virtual.face.on_frame = broken
        assert (await virtual.fetch("POST", CHAT, chat(5))).status == 200
        assert virtual.face.observer_errors > 5


async def test_frames_are_numbered_without_a_hole() -> None:
    async with server("vllm") as virtual:
        frames: list[wire.Frame] = []
        virtual.face.on_frame = frames.append
        await virtual.fetch("POST", CHAT, chat(20, n=2))
        numbers = [frame.sequence for frame in frames]
        assert numbers == list(range(1, len(frames) + 1))
        added = [event for frame in frames for event in frame.events if isinstance(event, wire.Added)]
        assert len(added) == 2
        assert len({event.parent_id for event in added} - {""}) == 1


async def test_waiting_for_what_never_comes_ends_with_an_error() -> None:
    async with server("vllm") as virtual:
        with pytest.raises(LimitReached, match="nothing more happens"):
            await virtual.run_until(lambda: False)


# The sender -----------------------------------------------------------------------------------------
