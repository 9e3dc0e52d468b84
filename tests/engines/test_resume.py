"""Streams of the real engines, preempted and resumed at random through a gateway: the ones that would have come.

Small counts, so that they fit in every run; `python -m benchmarks.resume ENGINE` does the same with hundreds.
"""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.resume import OPTIONS, run, trials_for
from stopguard.engines.registry import create
from stopguard.gateway.ledgered import LedgeredExchange
from stopguard.gateway.server import loop_factory
from stopguard.gateway.settings import ResumeSettings
from stopguard.testing import rig
from tests.resume.cuts import Answer, Cutter, Figures, cutting, narrow_wire

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def check(kind: str, figures: Figures) -> None:
    print(f"{kind}: {figures.line()}")
    assert not figures.differing, figures.differing
    # A tie of two tokens is decided anew by each rounding; with these models it is one stream in a hundred.
    assert len(figures.ties) + len(figures.unsteady) + figures.refused <= max(2, figures.streams // 10)
    assert figures.cut >= figures.streams * 3 // 4
    assert figures.multibyte


@pytest.mark.timeout(600)
def test_llamacpp() -> None:
    with rig.start(rig.recipe_of("llamacpp"), options=OPTIONS["llamacpp"]) as engine:
        check("llamacpp", run("llamacpp", engine.url, engine.model, 40))


@pytest.mark.timeout(1800)
def test_vllm() -> None:
    with rig.start(rig.recipe_of("vllm")) as engine:
        check("vllm", run("vllm", engine.url, engine.model, 24, at_once=2))
        check("vllm with log probabilities", run("vllm", engine.url, engine.model, 12, at_once=2, logprobs=True))


@pytest.mark.timeout(1800)
def test_sglang() -> None:
    with rig.start(rig.recipe_of("sglang")) as engine:
        check("sglang", run("sglang", engine.url, engine.model, 20, at_once=5))


@pytest.mark.timeout(600)
def test_llamacpp_is_killed_and_another_one_goes_on() -> None:
    """Two servers; eight streams run when one of them is killed. Every client has its whole answer."""
    recipe, options = rig.recipe_of("llamacpp"), {**OPTIONS["llamacpp"], "slots": 8}
    with rig.start(recipe, options=options) as first, rig.start(recipe, options=options) as second:

        async def main() -> tuple[list[Answer], list[Answer], int]:
            dead = asyncio.Event()
            async with (
                narrow_wire(first.url, 1, dead) as one,
                narrow_wire(second.url, 2) as other,
                cutting(
                    [create("llamacpp", "one", one), create("llamacpp", "other", other)],
                    resume=ResumeSettings(failover=True),
                ) as cutter,
            ):
                trials = trials_for("llamacpp", first.model, 8, logprobs=False, seed=3)
                for trial in trials:
                    trial.body["max_tokens"] = 150
                quiet = [await cutter.ask(trial.path, trial.body) for trial in trials]
                asked = [asyncio.create_task(cutter.ask(trial.path, trial.body)) for trial in trials]
                await begun(cutter, streams=8, tokens=20)
                first.process.kill()
                dead.set()
                return quiet, list(await asyncio.gather(*asked)), cutter.way.failed_over

        async def begun(cutter: Cutter, *, streams: int, tokens: int) -> None:
            """Until so many streams have so many tokens."""
            while True:
                alive = [each for each in cutter.gateway.registry.exchanges() if isinstance(each, LedgeredExchange)]
                if sum(each.transcript is not None and each.transcript.tokens >= tokens for each in alive) >= streams:
                    return
                await asyncio.sleep(0.001)

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            quiet, answers, failed_over = runner.run(main())
    print(f"llama.cpp killed: {failed_over} of {len(answers)} streams went on at the other server")
    assert failed_over >= 2
    for before, after in zip(quiet, answers, strict=True):
        assert after.error is None
        assert after.finish_reasons == ["length"]
        assert after.usage[-1:] == before.usage[-1:]
    # Side by side and alone an engine rounds differently: one may part at a tie, most may not.
    assert sum(before.text == after.text for before, after in zip(quiet, answers, strict=True)) >= len(answers) - 2


@pytest.mark.timeout(600)
def test_llamacpp_clients_that_leave_while_their_streams_are_between_two_incarnations() -> None:
    """During the preemption, while parked, during the resumption, just after: nothing is left at the engine or here."""

    async def one(cutter: Cutter, number: int) -> None:
        (trial,) = trials_for("llamacpp", "tiny", 1, logprobs=False, seed=100 + number)
        asking = asyncio.create_task(cutter.ask(trial.path, {**trial.body, "max_tokens": 2000}))
        name = f"asked-{cutter.asked + 1}"
        found: list[LedgeredExchange] = []
        while not found:
            await asyncio.sleep(0.001)
            alive = [each for each in cutter.gateway.registry.exchanges() if isinstance(each, LedgeredExchange)]
            mine = [each for each in alive if each.head.alias == name]
            found = [each for each in mine if each.transcript is not None and each.transcript.tokens > 5]
        tracked = found[0].tracked
        window = number % 4
        cutter.order(tracked)
        preempting = asyncio.create_task(cutter.way.preempt(tracked))
        if window == 0:
            asking.cancel()
        await preempting
        if window == 1:
            asking.cancel()
        resuming = asyncio.create_task(cutter.way.resume(tracked))
        if window == 2:
            await asyncio.sleep(0.0005 * number)
            asking.cancel()
        await resuming
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        async with asyncio.timeout(30.0):
            while tracked.request_id in cutter.gateway.controller.tracked:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def main(url: str) -> tuple[int | None, int | None]:
        engine = create("llamacpp", "llamacpp", url)
        async with narrow_wire(url) as wire, cutting([create("llamacpp", "llamacpp", wire)]) as cutter:
            for number in range(24):
                await one(cutter, number)
            assert not cutter.way.parked
            await engine.identify()
            gauges = await engine.gauges()
            await engine.aclose()
        assert gauges is not None
        return gauges.running, gauges.waiting

    with (
        rig.start(rig.recipe_of("llamacpp"), options=OPTIONS["llamacpp"]) as server,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        assert runner.run(main(server.url)) == (0, 0)
