"""A client leaves: in every window, streaming or not, and the engine reacts as its policy says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stopguard.refengine.http_virtual import VirtualExchange, VirtualServer
from tests.unit.refengine_http.helpers import CHAT, POLICIES, assert_settled, chat, first_token, server

pytestmark = pytest.mark.anyio


async def _stage(virtual: VirtualServer, window: str, *, stream: bool) -> VirtualExchange:
    """A request whose place is `window`."""
    body = chat(600, stream=stream)
    if window == "queued":
        for _ in range(2):
            await virtual.open("POST", CHAT, chat(150))
        await virtual.advance(0.05)
    if window == "prefill":
        body = chat(700, stream=stream, words=60)
    exchange = await virtual.open("POST", CHAT, body)
    match window:
        case "queued":
            await virtual.advance(0.02)
            assert [view.place for view in virtual.snapshot().requests].count("waiting") == 1
        case "prefill":
            await virtual.advance(0.012)
            assert [view.output_tokens for view in virtual.snapshot().requests] == [0]
        case _:
            await first_token(virtual, exchange)
    return exchange


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("window", ["queued", "prefill", "decode"])
async def test_the_engine_settles_after_the_client_has_left(policy: str, stream: bool, window: str) -> None:
    async with server(policy, max_running=2, prefill_chunk_tokens=32, blocks=160, max_model_tokens=1200) as virtual:
        exchange = await _stage(virtual, window, stream=stream)
        await exchange.disconnect()
        assert exchange.ended, "the face lets go at once, whatever the engine does"
        assert not exchange.complete
        await assert_settled(virtual)
        log = virtual.face.log(10_000)
        [gone] = [entry for entry in log if entry.kind == "client_gone"]
        [applied] = [entry for entry in log if entry.kind == "AbortApplied"]
        assert applied.request_id == gone.request_id
        if policy == "vllm":
            assert applied.at - gone.at < 0.05, "event-driven: the next step boundaries"
        if policy == "trtllm" or (policy == "llamacpp" and not stream):
            assert applied.at - gone.at > 0.1, "a poll"
        if policy == "sglang" and not stream:
            assert applied.at - gone.at > 1.0, "the 4 s poll, counted from the request's start"


async def test_a_disconnect_after_the_end_is_no_abort() -> None:
    async with server("vllm") as virtual:
        exchange = await virtual.fetch("POST", CHAT, chat(5, stream=True))
        await exchange.disconnect()
        await assert_settled(virtual)
        assert not [entry for entry in virtual.face.log(500) if entry.kind in {"client_gone", "AbortArrived"}]


async def test_a_client_that_leaves_during_its_upload_never_reaches_the_engine() -> None:
    async with server("vllm") as virtual:
        exchange = await virtual.open("POST", CHAT, body=[b'{"messages": ['], upload_ends=False)
        await exchange.disconnect()
        assert exchange.ended
        assert exchange.status is None
        assert virtual.face.log(10) == []


async def test_a_client_that_stops_reading_and_then_leaves() -> None:
    async with server("vllm") as virtual:
        exchange = await virtual.open("POST", CHAT, chat(300, stream=True))
        await first_token(virtual, exchange)
        exchange.stall()
        await virtual.advance(0.5)
        assert virtual.face.exchanges, "the write waits"
        seen = len(exchange.events)
        await exchange.disconnect()
        assert exchange.ended
        assert len(exchange.events) == seen
        await assert_settled(virtual)


async def test_the_other_choices_stop_as_well() -> None:
    async with server("vllm") as virtual:
        exchange = await virtual.open("POST", CHAT, chat(300, n=3, stream=True))
        await first_token(virtual, exchange)
        await exchange.disconnect()
        await assert_settled(virtual)
        assert virtual.engine.gauges().aborts_total == 3


async def test_a_fault_in_the_front_end_lets_the_request_run_on() -> None:
    async with server("vllm", faults=("disconnect-ignored-without-stream",)) as virtual:
        exchange = await virtual.open("POST", CHAT, chat(300))
        await first_token(virtual, exchange)
        await exchange.disconnect()
        await virtual.advance(1.0)
        assert [view.place for view in virtual.snapshot().requests] == ["running"]
        assert virtual.face.exchanges == set()
        assert len(virtual.face.driver.tickets) == 1, "the ticket lives as long as the engine's request"
        await assert_settled(virtual)
        assert virtual.face.driver.outputs_unclaimed > 200


async def test_a_conversation_outlives_its_connection_until_it_is_deleted() -> None:
    headers = {"X-Conversation-Id": "talk-1"}
    async with server("llamacpp") as virtual:
        exchange = await virtual.open("POST", CHAT, chat(600, stream=True), headers=headers)
        await first_token(virtual, exchange)
        await exchange.disconnect()
        await virtual.advance(2.0)
        assert len(virtual.snapshot().requests) == 1
        deleted = await virtual.fetch("DELETE", "/v1/stream?conv_id=talk-1")
        assert deleted.status == 204
        await virtual.advance(0.05)
        assert virtual.snapshot().requests == []
        await assert_settled(virtual)


async def test_a_cancelled_server_task_tells_the_engine() -> None:
    async with server("vllm") as virtual:
        exchange = await virtual.open("POST", CHAT, chat(300, stream=True))
        await first_token(virtual, exchange)
        exchange._task.cancel()
        await asyncio.gather(exchange._task, return_exceptions=True)
        virtual._exchanges.clear()
        await assert_settled(virtual)
        assert virtual.engine.gauges().aborts_total == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("like_uvicorn", [True, False])
async def test_no_task_is_left_behind(policy: str, like_uvicorn: bool) -> None:
    async with server(policy) as virtual:
        virtual.disconnects_after_end = like_uvicorn
        before = asyncio.all_tasks()
        open_ones: list[Any] = [await virtual.open("POST", CHAT, chat(50, stream=bool(i % 2))) for i in range(6)]
        await virtual.advance(0.1)
        for exchange in open_ones[:3]:
            await exchange.disconnect()
        await virtual.run_until(lambda: all(exchange.ended for exchange in open_ones))
        assert asyncio.all_tasks() == before
