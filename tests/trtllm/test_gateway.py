"""The gateway with the adapter in front of the stand-in, with the patch and without."""

from __future__ import annotations

import statistics
from itertools import chain
from pathlib import Path

import pytest

from stopguard.ledger import Evidence
from tests.trtllm.rig import Visitor, gateway, standin
from tests.trtllm.table import COLUMNS, STATES, column, print_table, warmed

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.timeout(400)
async def test_every_state_with_and_without(tmp_path: Path) -> None:
    figures = {}
    for number, (name, (patch, through)) in enumerate(COLUMNS.items()):
        log = tmp_path / f"{number}.log"
        figures[name], books = await column(log, patch=patch, through=through, repeats=2)
        if through:
            stops = [tracked.ledgers.stop for tracked in books]
            assert {stop.outcome for stop in stops} == {"confirmed"}
            assert {stop.evidence for stop in stops} == {Evidence.GAUGE}
    print_table(figures)
    mean = {name: statistics.mean(chain.from_iterable(times.values())) for name, times in figures.items()}
    assert 0.25 < mean["stock"] < 2.0
    assert mean["patched"] < mean["stock"] / 3
    assert mean["patched, StopGuard"] < mean["stock, StopGuard"] / 3
    for name in STATES:
        # The poll may find it in its last moment; the event is there within a few steps of 10 ms.
        assert min(figures["patched, StopGuard"][name]) < 0.3, name


async def test_connections_are_used_again_only_with_the_patch(tmp_path: Path) -> None:
    for patch in (False, True):
        async with standin(tmp_path / f"{patch}.log", patch=patch) as engine, gateway(engine) as front:
            visitor = await Visitor.connect(front.port)
            for _ in range(5):
                await visitor.ask(max_tokens=2)
                await visitor.answer()
                await front.next_settled()
            assert len(front.pool.idle) == patch
            await visitor.leave()


async def test_a_refused_cancel_is_waited_for_and_not_called_a_leak(tmp_path: Path) -> None:
    async with standin(tmp_path / "log", patch=True, refusals=100, return_perf_metrics=True) as engine:
        await warmed(engine)
        async with gateway(engine) as front:
            await front.learn()
            visitor = await Visitor.connect(front.port)
            await visitor.ask(stream=True)
            await visitor.until(b"data: ")
            left_at = await visitor.leave()
            tracked = await front.next_settled()
            stop = tracked.ledgers.stop
            assert (stop.outcome, stop.evidence) == ("confirmed", Evidence.GAUGE)
            (_, reason, gone_at) = (await engine.truth())["left"][-1]
            assert reason == "cancelled"
            assert gone_at - left_at > 0.8, "it was not refused"
            assert stop.acked_at >= gone_at, "it was confirmed before it had happened"
            assert front.leaks == []


async def test_nothing_is_confirmed_by_a_record_of_before(tmp_path: Path) -> None:
    """A request that is left while it waits to be computed is not in the last record: that proves nothing yet."""
    async with standin(tmp_path / "log", return_perf_metrics=True, step_seconds=0.4) as engine:
        await warmed(engine)
        async with gateway(engine) as front:
            await front.learn()
            visitor = await Visitor.connect(front.port)
            await visitor.ask(messages=[{"role": "user", "content": "word " * 2000}])
            await engine.until(lambda truth: truth["active"] == 1)
            await visitor.leave()
            tracked = await front.next_settled()
            (_, reason, gone_at) = (await engine.truth())["left"][-1]
            assert reason == "cancelled"
            assert tracked.ledgers.stop.acked_at >= gone_at


async def test_without_records_a_stop_is_unconfirmed(tmp_path: Path) -> None:
    async with standin(tmp_path / "log", no_iter_perf_stats=True) as engine:
        await warmed(engine)
        async with gateway(engine) as front:
            await front.learn()
            visitor = await Visitor.connect(front.port)
            await visitor.ask(stream=True)
            await visitor.until(b"data: ")
            await visitor.leave()
            tracked = await front.next_settled()
            stop = tracked.ledgers.stop
            assert (stop.outcome, stop.evidence) == ("unconfirmed", Evidence.SENT)
            assert front.leaks == []
            await engine.until(lambda truth: truth["active"] == 0)
