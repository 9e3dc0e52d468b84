"""The patch in the stand-in, loaded as `trtllm-serve --custom_module_dirs` loads it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.trtllm.rig import Visitor, standin

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(300)]


async def test_a_disconnect_is_found_at_once(tmp_path: Path) -> None:
    async with standin(tmp_path / "log", patch=True, step_seconds=0.005) as engine:
        waits = []
        for number in range(10):
            visitor = await Visitor.connect(engine.port)
            stream = number % 2 == 0
            await visitor.ask(stream=stream)
            if stream:
                await visitor.until(b"data: ")
            else:
                await engine.until(lambda truth: truth["active"] == 1)
            left_at = await visitor.leave()
            truth = await engine.until(lambda truth, number=number: len(truth["left"]) > number)  # type: ignore[misc]
            assert truth["left"][-1][1] == "cancelled"
            waits.append(truth["left"][-1][2] - left_at)
        # The stock poll needs half a second on average; a step here takes 5 ms.
        assert sorted(waits)[5] < 0.2, waits
        truth = await engine.until(lambda truth: truth["watchers"] == truth["listeners"] == 0)
        assert truth["results"] == 0
        lines = engine.lines()
        assert sum("found by event" in line for line in lines) == 1
        assert sum("is disconnected, abort" in line for line in lines) == 10


async def test_watchers_end_with_their_promise_on_a_connection_that_lives(tmp_path: Path) -> None:
    """Also in a server that never says that a response has ended, where the stock poll lives for ever."""
    async with standin(tmp_path / "log", patch=True, silent_after_end=True) as engine:
        visitor = await Visitor.connect(engine.port)
        for number in range(50):
            await visitor.ask(max_tokens=2, stream=number % 2 == 0)
            if number % 2 == 0:
                await visitor.until(b"0\r\n\r\n")
            else:
                await visitor.answer()
        truth = await engine.until(lambda truth: truth["watchers"] == truth["listeners"] == 0)
        assert (truth["promises"], truth["results"]) == (0, 0)
        assert not any("is disconnected" in line for line in engine.lines())
        await visitor.leave()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_list_of_prompts_dies_as_one(tmp_path: Path, stream: bool) -> None:
    async with standin(tmp_path / "log", patch=True, max_batch_size=8) as engine:
        visitor = await Visitor.connect(engine.port)
        await visitor.ask("/v1/completions", prompt=["one", "two", "three", "four"], stream=stream)
        truth = await engine.until(lambda truth: truth["active"] == 4)
        assert (truth["watchers"], truth["listeners"]) == (4, 1)
        await visitor.leave()
        truth = await engine.until(lambda truth: truth["active"] == 0)
        assert [reason for _, reason, _ in truth["left"]] == ["cancelled"] * 4
        await engine.until(lambda truth: truth["watchers"] == truth["listeners"] == truth["results"] == 0)


async def test_neighbours_are_left_alone(tmp_path: Path) -> None:
    async with standin(tmp_path / "log", patch=True, max_batch_size=8) as engine:
        alone = await Visitor.connect(engine.port)
        await alone.ask(max_tokens=60)
        expected = (await alone.answer())["choices"]
        visitors = [await Visitor.connect(engine.port) for _ in range(8)]
        for number, visitor in enumerate(visitors):
            await visitor.ask(max_tokens=60 if number % 2 else 2000)
        await engine.until(lambda truth: truth["active"] == 8)
        for visitor in visitors[::2]:
            await visitor.leave()
        for visitor in visitors[1::2]:
            assert (await visitor.answer())["choices"] == expected
        truth = await engine.until(lambda truth: truth["active"] == 0)
        assert sorted(reason for _, reason, _ in truth["left"]) == ["cancelled"] * 4 + ["length"] * 5


async def test_an_unknown_server_starts_with_its_own_poll(tmp_path: Path) -> None:
    """Something put in before us has taken the method's place: one line, and all goes on as it was."""
    other = tmp_path / "other_module"
    other.mkdir()
    (other / "__init__.py").write_text(
        "from tensorrt_llm.serve.openai_server import OpenAIServer\n"
        "stock = OpenAIServer.await_disconnected\n"
        "async def await_disconnected(self, raw_request, promise, why=''):\n"
        "    await stock(self, raw_request, promise)\n"
        "OpenAIServer.await_disconnected = await_disconnected\n"
    )
    from tests.trtllm.rig import PATCH

    async with standin(tmp_path / "log", "--custom_module_dirs", str(other), str(PATCH)) as engine:
        visitor = await Visitor.connect(engine.port)
        await visitor.ask(max_tokens=3)
        assert (await visitor.answer())["choices"][0]["finish_reason"] == "length"
        await visitor.leave()
        assert "x-stopguard-disconnects" not in (await engine.client.get("/version")).headers
    (line,) = [line for line in engine.lines() if "StopGuard" in line]
    assert "has the arguments self, raw_request, promise, why; disconnects are still found by this server's own" in line


async def test_a_thousand_requests_leave_nothing(tmp_path: Path) -> None:
    async with standin(tmp_path / "log", patch=True, step_seconds=0.001, max_batch_size=16) as engine:

        async def several() -> None:
            visitor = await Visitor.connect(engine.port)
            for number in range(100):
                await visitor.ask(max_tokens=2, stream=number % 3 == 0)
                if number % 3 == 0:
                    await visitor.until(b"0\r\n\r\n")
                else:
                    await visitor.answer()
            await visitor.leave()

        before = await engine.truth()
        await asyncio.gather(*[several() for _ in range(10)])
        after = await engine.until(lambda truth: truth["tasks"] <= before["tasks"])
        assert (after["watchers"], after["listeners"], after["promises"], after["results"]) == (0, 0, 0, 0)
        assert len(after["left"]) == 1000


async def test_the_guard_frees_the_handler_of_a_request_that_was_dropped_while_it_waited(tmp_path: Path) -> None:
    """The worker says nothing of it, so that the handler would wait for ever."""
    for guarded in (False, True):
        options = {"middleware": "stopguard.middleware.DisconnectGuard"} if guarded else {}
        async with standin(tmp_path / f"{guarded}.log", patch=True, max_batch_size=1, **options) as engine:
            running = await Visitor.connect(engine.port)
            await running.ask(stream=True, max_tokens=1_000_000)
            await running.until(b"data: ")
            before = await engine.truth()
            waiting = await Visitor.connect(engine.port)
            await waiting.ask()
            await engine.until(lambda truth: truth["waiting"] == 1)
            await waiting.leave()
            await engine.until(lambda truth: truth["waiting"] == 0)
            await asyncio.sleep(1.0)  # longer than the guard lets a listener take
            after = await engine.truth()
            assert after["tasks"] == before["tasks"] + (not guarded)
            assert after["results"] == before["results"] + 1
