"""The stand-in has the properties for which it stands: checked, so that what is measured against it means something."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.trtllm.rig import Visitor, standin

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(300)]


async def test_the_poll_finds_a_disconnect_within_a_second_and_not_at_once(tmp_path: Path) -> None:
    async with standin(tmp_path / "log", step_seconds=0.005) as engine:
        waits = []
        for number in range(3):
            visitor = await Visitor.connect(engine.port)
            await visitor.ask(stream=True)
            await visitor.until(b"data: ")
            left_at = await visitor.leave()
            truth = await engine.until(lambda truth, number=number: len(truth["left"]) > number)  # type: ignore[misc]
            request_id, reason, at = truth["left"][-1]
            assert (request_id, reason) == (number + 1, "cancelled")
            waits.append(at - left_at)
        assert 0.5 < max(waits) < 3.0, waits
        await engine.until(lambda truth: truth["watchers"] == 0)
        assert sum("is disconnected, abort" in line for line in engine.lines()) == 3


async def test_a_cancel_that_is_refused_is_tried_again_each_loop(tmp_path: Path) -> None:
    async with standin(tmp_path / "log", step_seconds=0.01, refusals=30) as engine:
        visitor = await Visitor.connect(engine.port)
        await visitor.ask(stream=True)
        await visitor.until(b"data: ")
        await visitor.leave()
        # Its poll has said so, and 30 loops later it is gone.
        await asyncio.to_thread(_wait_for_line, engine.log, "is disconnected, abort 1")
        before = (await engine.truth())["iterations"]
        after = await engine.until(lambda truth: bool(truth["left"]))
        assert after["left"][0][1] == "cancelled"
        assert 20 <= after["iterations"] - before <= 40


async def test_reading_the_records_empties_them(tmp_path: Path) -> None:
    async with standin(tmp_path / "log", return_perf_metrics=True) as engine:
        assert (await engine.client.get("/metrics")).json() == []
        visitor = await Visitor.connect(engine.port)
        await visitor.ask(max_tokens=5)
        await visitor.answer()
        records = (await engine.client.get("/metrics")).json()
        assert len(records) == 5
        assert records[-1]["numActiveRequests"] == 0
        assert (await engine.client.get("/metrics")).json() == []
        await visitor.leave()


async def test_the_gauges_of_prometheus_are_behind_after_a_stop(tmp_path: Path) -> None:
    async with standin(tmp_path / "log", return_perf_metrics=True) as engine:
        other = await Visitor.connect(engine.port)
        await other.ask(max_tokens=30, stream=True)
        visitor = await Visitor.connect(engine.port)
        await visitor.ask(stream=True)
        await other.until(b"[DONE]\n\n")
        await visitor.leave()
        await engine.until(lambda truth: truth["active"] == 0)
        text = (await engine.client.get("/prometheus/metrics")).text
        assert 'trtllm_num_requests_running{engine_type="pytorch",model_name="tiny"} 1.0' in text
        await other.leave()


async def test_whoever_is_cancelled_while_it_waits_leaves_without_a_word(tmp_path: Path) -> None:
    """Its promise never ends, and the handler of an answer that is not streamed waits for ever."""
    async with standin(tmp_path / "log", max_batch_size=1) as engine:
        running = await Visitor.connect(engine.port)
        await running.ask(stream=True, max_tokens=400)
        await running.until(b"data: ")
        waiting = await Visitor.connect(engine.port)
        await waiting.ask()
        await engine.until(lambda truth: truth["waiting"] == 1)
        await waiting.leave()
        truth = await engine.until(lambda truth: truth["waiting"] == 0)
        assert truth["left"] == [[2, "cancelled while waiting", truth["left"][0][2]]]
        await running.until(b"[DONE]\n\n")
        await engine.until(lambda truth: truth["watchers"] == 0)
        truth = await engine.truth()
        assert (truth["promises"], truth["results"]) == (1, 1)
        await running.leave()


async def test_on_uvicorn_a_poll_ends_within_a_second_of_its_response(tmp_path: Path) -> None:
    """The server says that the client is gone after each response, so that the poll ends, connection open or not."""
    async with standin(tmp_path / "log") as engine:
        visitor = await Visitor.connect(engine.port)
        for _ in range(20):
            await visitor.ask(max_tokens=2)
            await visitor.answer()
        assert (await engine.truth())["watchers"] > 0
        await engine.until(lambda truth: truth["watchers"] == 0)
        await visitor.leave()


async def test_a_server_that_keeps_its_end_to_itself_lets_the_poll_live_for_ever(tmp_path: Path) -> None:
    """What NVIDIA/TensorRT-LLM#13777 reports: as many watchers, and outputs kept alive, as there were requests."""
    async with standin(tmp_path / "log", silent_after_end=True) as engine:
        visitor = await Visitor.connect(engine.port)
        for _ in range(20):
            await visitor.ask(max_tokens=2)
            await visitor.answer()
        await asyncio.sleep(2.5)
        truth = await engine.truth()
        assert (truth["watchers"], truth["promises"]) == (20, 20)
        await visitor.leave()


def _wait_for_line(log: Path, wanted: str) -> None:
    import time

    due = time.monotonic() + 20
    while wanted not in log.read_text(encoding="utf-8"):
        assert time.monotonic() < due
        time.sleep(0.005)
