"""Abort doors, ids, identification and native routes: each style has what its engine has."""

from __future__ import annotations

from typing import Any

import pytest

from stopguard.refengine.http_face import FaceOptions
from stopguard.refengine.http_virtual import VirtualServer
from stopguard.refengine.interface import EngineConfig
from stopguard.refengine.model import BOS, encode
from tests.unit.refengine_http.helpers import (
    CHAT,
    COMPLETIONS,
    POLICIES,
    all_ended,
    assert_settled,
    chat,
    completion,
    first_token,
    server,
)

pytestmark = pytest.mark.anyio


def _reasons(events: list[Any]) -> list[str]:
    return [
        choice["finish_reason"]
        for event in events
        if isinstance(event, dict)
        for choice in event["choices"]
        if choice["finish_reason"]
    ]


async def test_vllm_aborts_by_external_id_and_counts_what_was_given() -> None:
    async with server("vllm") as virtual:
        streamed = await virtual.open("POST", CHAT, chat(300, stream=True), headers={"X-Request-Id": "r1"})
        whole = await virtual.open("POST", COMPLETIONS, completion(300), headers={"X-Request-Id": "r2"})
        await first_token(virtual, streamed)
        ids = ["chatcmpl-r1", "cmpl-r2-0", "unknown"]
        answer = await virtual.fetch("POST", "/abort_requests", {"request_ids": ids})
        assert answer.json() == {"status": "aborted", "aborted": 3}
        await virtual.run_until(lambda: streamed.ended and whole.ended)
        assert streamed.events[-1] == "[DONE]"
        assert _reasons(streamed.events) == ["abort"]
        assert streamed.events[0]["id"] == "chatcmpl-r1"
        assert whole.status == 200
        assert whole.json()["id"] == "cmpl-r2"
        assert whole.json()["choices"][0]["finish_reason"] == "abort"
        assert virtual.clock.at < 0.1
        await assert_settled(virtual)


async def test_vllm_has_no_abort_route_outside_its_development_mode() -> None:
    async with VirtualServer("vllm", EngineConfig()) as virtual:
        for route in ("/abort_requests", "/pause", "/resume"):
            assert (await virtual.fetch("POST", route, {})).status == 404


async def test_vllm_twins_bear_one_id_and_die_together() -> None:
    async with server("vllm") as virtual:
        twins = [await virtual.open("POST", CHAT, chat(300), headers={"X-Request-Id": "twin"}) for _ in range(2)]
        await virtual.advance(0.05)
        assert len(virtual.snapshot().requests) == 2
        await virtual.fetch("POST", "/abort_requests", {"request_ids": ["chatcmpl-twin"]})
        await virtual.run_until(lambda: all(twin.ended for twin in twins))
        assert {twin.json()["choices"][0]["finish_reason"] for twin in twins} == {"abort"}
        await assert_settled(virtual)


async def test_vllm_without_ids_aborts_everything() -> None:
    async with server("vllm") as virtual:
        several = [await virtual.open("POST", CHAT, chat(300)) for _ in range(3)]
        await virtual.advance(0.05)
        assert (await virtual.fetch("POST", "/abort_requests", {})).json()["aborted"] == 3
        await virtual.run_until(lambda: all(exchange.ended for exchange in several))
        await assert_settled(virtual)


async def test_vllm_pauses_and_resumes() -> None:
    async with server("vllm") as virtual:
        exchange = await virtual.open("POST", CHAT, chat(40))
        await virtual.advance(0.05)
        assert (await virtual.fetch("POST", "/pause?mode=keep")).json() == {"status": "paused"}
        assert (await virtual.fetch("GET", "/is_paused")).json() == {"is_paused": True}
        await virtual.advance(5.0)
        assert not exchange.ended
        assert (await virtual.fetch("POST", "/pause?mode=bad")).status == 400
        await virtual.fetch("POST", "/resume")
        await virtual.run_until(lambda: exchange.ended)
        assert exchange.json()["usage"]["completion_tokens"] == 40
        await assert_settled(virtual)


async def test_sglang_aborts_by_rid_and_by_prefix() -> None:
    async with server("sglang") as virtual:
        named = [await virtual.open("POST", CHAT, chat(300, rid=rid)) for rid in ("abc", "abcd", "xyz")]
        await virtual.advance(0.05)
        answer = await virtual.fetch("POST", "/abort_request", {"rid": "abc"})
        assert (answer.status, answer.body) == (200, b"")
        await virtual.advance(0.1)
        assert [exchange.ended for exchange in named] == [True, True, False]
        assert named[0].json()["id"] == "abc"
        assert named[0].json()["choices"][0]["finish_reason"] == "abort"
        assert (await virtual.fetch("POST", CHAT, chat(4, rid="xyz"))).status == 400, "a live id is taken"
        await virtual.fetch("POST", "/abort_request", {"abort_all": True})
        await virtual.run_until(lambda: named[2].ended)
        await assert_settled(virtual)


async def test_sglang_cannot_abort_children_by_rid() -> None:
    async with server("sglang") as virtual:
        exchange = await virtual.open("POST", CHAT, chat(60, rid="many", n=2))
        await virtual.advance(0.05)
        assert (await virtual.fetch("POST", "/abort_request", {"rid": "many"})).status == 200
        await virtual.run_until(lambda: exchange.ended)
        assert exchange.json()["usage"]["completion_tokens"] == 120


async def test_sglang_generate_is_cumulative() -> None:
    async with server("sglang") as virtual:
        body = {"text": "the river", "sampling_params": {"max_new_tokens": 12}, "rid": "g1"}
        whole = (await virtual.fetch("POST", "/generate", body)).json()
        assert whole["meta_info"]["id"] == "g1"
        assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
        streamed = (await virtual.fetch("POST", "/generate", {**body, "stream": True})).events
        assert streamed[-1] == "[DONE]"
        assert streamed[-2]["text"] == whole["text"]
        assert [len(event["output_ids"]) for event in streamed[:-1]] == list(range(1, 13))
        resumed = {
            "input_ids": [BOS, *encode("the river"), *whole["output_ids"][:5]],
            "sampling_params": {"max_new_tokens": 7},
            "return_prompt_token_ids": True,
        }
        rest = (await virtual.fetch("POST", "/generate", resumed)).json()
        assert rest["output_ids"] == whole["output_ids"][5:]
        assert rest["prompt_token_ids"] == resumed["input_ids"]
        several = (await virtual.fetch("POST", "/generate", {**body, "rid": None, "text": ["a", "b"]})).json()
        assert len(several) == 2


async def test_sglang_pauses_by_retracting() -> None:
    async with server("sglang") as virtual:
        exchange = await virtual.open("POST", CHAT, chat(40))
        await virtual.advance(0.1)
        answer = await virtual.fetch("POST", "/pause_generation", {"mode": "retract"})
        assert answer.json()["status"] == "ok"
        await virtual.advance(0.1)
        assert virtual.engine.gauges().blocks_held == 0
        assert (await virtual.fetch("POST", "/pause_generation", {"mode": "bad"})).status == 400
        await virtual.fetch("POST", "/continue_generation", {})
        await virtual.run_until(lambda: exchange.ended)
        assert exchange.json()["usage"]["completion_tokens"] == 40


async def test_sglang_health_issues_a_generation() -> None:
    async with server("sglang") as virtual:
        assert (await virtual.fetch("GET", "/health")).status == 200
        await assert_settled(virtual)
        assert [e.request_id for e in virtual.face.log(100) if e.kind == "Added"] == ["HEALTH_CHECK_1"]


async def test_llamacpp_delete_cuts_a_stream_and_nothing_else() -> None:
    async with server("llamacpp", max_running=1) as virtual:
        running = await virtual.open("POST", CHAT, chat(300, stream=True), headers={"X-Conversation-Id": "one"})
        await first_token(virtual, running)
        queued = await virtual.open("POST", CHAT, chat(8, stream=True), headers={"X-Conversation-Id": "two"})
        for name in ("one", "two", "nobody"):
            assert (await virtual.fetch("DELETE", f"/v1/stream/{name}")).status == 204
        await virtual.run_until(lambda: running.ended and queued.ended)
        assert running.complete
        assert "[DONE]" not in running.events
        assert _reasons(running.events) == []
        assert queued.events[-1] == "[DONE]"
        assert _reasons(queued.events) == ["length"]
        await assert_settled(virtual)


async def test_llamacpp_completion_resumes_from_ids() -> None:
    async with server("llamacpp") as virtual:
        body = {"prompt": "the river", "n_predict": 10, "return_tokens": True}
        whole = (await virtual.fetch("POST", "/completion", body)).json()
        assert whole["stop_type"] == "limit"
        assert len(whole["tokens"]) == 10
        resumed = {**body, "prompt": [BOS, *encode("the river"), *whole["tokens"][:4]], "n_predict": 6, "stream": True}
        events = (await virtual.fetch("POST", "/completion", resumed)).events
        assert [token for event in events for token in event["tokens"]] == whole["tokens"][4:]
        assert [event["stop"] for event in events][-2:] == [False, True]
        mixed = await virtual.fetch("POST", "/completion", {"prompt": [1, "a"]})
        assert mixed.status == 400
        assert mixed.json()["error"]["type"] == "invalid_request_error"
        ids = (await virtual.fetch("POST", "/tokenize", {"content": "the river"})).json()["tokens"]
        assert (await virtual.fetch("POST", "/detokenize", {"tokens": ids})).json() == {"content": "the river"}


async def test_deepinfer_says_how_many_it_took_out() -> None:
    async with server("deepinfer") as virtual:
        exchange = await virtual.open("POST", CHAT, chat(300), headers={"X-Request-Id": "d1"})
        await first_token(virtual, exchange)
        assert (await virtual.fetch("POST", "/abort", {"request_id": "no"})).json()["aborted"] == 0
        assert (await virtual.fetch("POST", "/abort", {"request_id": "d1"})).json()["aborted"] == 1
        await virtual.run_until(lambda: exchange.ended)
        assert exchange.json()["choices"][0]["finish_reason"] == "abort"
        assert (await virtual.fetch("POST", "/abort", {"request_id": ""})).status == 400
        await assert_settled(virtual)


@pytest.mark.parametrize("policy", POLICIES)
async def test_each_style_is_recognised_by_its_routes(policy: str) -> None:
    present = {
        "vllm": {"/version", "/metrics", "/load", "/ping"},
        "sglang": {"/metrics", "/v1/loads", "/get_server_info", "/model_info"},
        "llamacpp": {"/slots", "/props", "/metrics"},
        "trtllm": {"/version", "/metrics"},
        "deepinfer": {"/deepinfer/gauges"},
    }
    every = set().union(*present.values())
    async with server(policy) as virtual:
        found = {route for route in every if (await virtual.fetch("GET", route)).status == 200}
        assert found == present[policy]
        models = (await virtual.fetch("GET", "/v1/models")).json()
        assert models["data"][0]["id"] == "base"
        assert (await virtual.fetch("GET", "/health")).status == 200
        assert (await virtual.fetch("GET", "/v1/chat/completions")).status == 405
        assert (await virtual.fetch("POST", "/nothing")).status == 404
        assert (await virtual.fetch("GET", "/health")).headers["x-reference-engine"].startswith(policy)


async def test_limits_answer_as_the_engine_does() -> None:
    for policy, status in (("vllm", 503), ("deepinfer", 429)):
        options = FaceOptions(exchanges_max=2, body_bytes_max=2000)
        async with VirtualServer(policy, EngineConfig(), options=options) as virtual:
            open_ones = [await virtual.open("POST", CHAT, chat(50)) for _ in range(2)]
            assert (await virtual.fetch("POST", CHAT, chat(50))).status == status
            await virtual.run_until(all_ended(open_ones))
            assert (await virtual.fetch("POST", CHAT, chat(50))).status == 200
            assert (await virtual.fetch("POST", CHAT, body=[b"x" * 1500, b"x" * 1500])).status == 413
            announced = await virtual.fetch("POST", CHAT, body=b"", headers={"Content-Length": "99999"})
            assert announced.status == 413
    async with VirtualServer("vllm", EngineConfig(max_running=1, max_waiting=1)) as virtual:
        for _ in range(2):
            await virtual.open("POST", CHAT, chat(50))
        assert (await virtual.fetch("POST", CHAT, chat(50))).status == 503
        await assert_settled(virtual)
