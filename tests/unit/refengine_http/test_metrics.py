"""Gauges in the style of each engine: right while something runs, back at zero afterwards, late where they are late."""

from __future__ import annotations

import pytest

from tests.unit.refengine_http.helpers import CHAT, POLICIES, assert_settled, chat, first_token, server

pytestmark = pytest.mark.anyio


def values(text: str) -> dict[str, float]:
    """Name with labels -> value; fails on a line that is no sample and no comment."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0] + ("{abort}" if 'finished_reason="abort"' in name else "")] = float(value)
    return found


async def test_vllm_gauges() -> None:
    async with server("vllm", max_running=2) as virtual:
        open_ones = [await virtual.open("POST", CHAT, chat(100)) for _ in range(3)]
        await virtual.advance(0.2)
        exchange = await virtual.fetch("GET", "/metrics")
        assert exchange.headers["content-type"].startswith("text/plain; version=0.0.4")
        busy = values(exchange.body.decode())
        assert busy["vllm:num_requests_running"] == 2
        assert busy["vllm:num_requests_waiting"] == 1
        assert 0 < busy["vllm:kv_cache_usage_perc"] < 1
        for exchange in open_ones:
            await exchange.disconnect()
        await assert_settled(virtual)
        idle = values((await virtual.fetch("GET", "/metrics")).body.decode())
        assert idle["vllm:num_requests_running"] == idle["vllm:num_requests_waiting"] == 0
        assert idle["vllm:kv_cache_usage_perc"] == 0
        assert idle["vllm:request_success_total{abort}"] == 0, "vLLM counts no cancels"
        assert virtual.engine.gauges().aborts_total == 3
        assert idle["vllm:generation_tokens_total"] > 20


async def test_vllm_gauge_drift_shows() -> None:
    async with server("vllm", faults=("running-gauge-drifts",)) as virtual:
        exchange = await virtual.open("POST", CHAT, chat(100))
        await first_token(virtual, exchange)
        await exchange.disconnect()
        await virtual.finish()
        assert values((await virtual.fetch("GET", "/metrics")).body.decode())["vllm:num_requests_running"] != 0


async def test_sglang_gauges_are_late_but_not_when_idle() -> None:
    async with server("sglang") as virtual:
        exchange = await virtual.open("POST", CHAT, chat(100))
        await virtual.advance(0.08)
        late = values((await virtual.fetch("GET", "/metrics")).body.decode())
        assert late["sglang:num_running_reqs"] == 0
        await virtual.advance(0.1)
        load = (await virtual.fetch("GET", "/v1/loads")).json()["loads"][0]
        assert load["num_running_reqs"] == 1, "published every 15 steps"
        assert load["num_used_tokens"] > 0
        await virtual.advance(0.3)
        assert values((await virtual.fetch("GET", "/metrics")).body.decode())["sglang:num_running_reqs"] == 1
        await virtual.run_until(lambda: exchange.ended)
        idle = values((await virtual.fetch("GET", "/metrics")).body.decode())
        assert idle["sglang:num_running_reqs"] == idle["sglang:num_used_tokens"] == 0
        assert (await virtual.fetch("GET", "/v1/loads")).json()["loads"][0]["num_running_reqs"] == 0
        assert idle["sglang:num_requests_total"] == 1


async def test_llamacpp_slots_persist_and_polling_them_starves_detection() -> None:
    async with server("llamacpp", max_running=2) as virtual:
        whole = await virtual.open("POST", CHAT, chat(700))
        await first_token(virtual, whole)
        slots = (await virtual.fetch("GET", "/slots")).json()
        assert [slot["is_processing"] for slot in slots] == [True, False]
        assert slots[0]["n_prompt_tokens"] > 0
        await whole.disconnect()
        for _ in range(10):
            await virtual.advance(0.25)
            assert (await virtual.fetch("GET", "/slots")).json()[0]["is_processing"], "each poll restarts the wait"
        await virtual.advance(1.5)
        after = (await virtual.fetch("GET", "/slots")).json()[0]
        assert not after["is_processing"]
        assert after["n_prompt_tokens"] == slots[0]["n_prompt_tokens"]
        metrics = values((await virtual.fetch("GET", "/metrics")).body.decode())
        assert metrics["llamacpp:requests_processing"] == metrics["llamacpp:requests_deferred"] == 0
        await assert_settled(virtual)


async def test_trtllm_records_are_drained_on_read() -> None:
    async with server("trtllm") as virtual:
        await virtual.fetch("POST", CHAT, chat(20))
        records = (await virtual.fetch("GET", "/metrics")).json()
        assert len(records) >= 20
        assert max(record["numActiveRequests"] for record in records) == 1
        assert records[-1]["numActiveRequests"] == records[-1]["kvCacheStats"]["usedNumBlocks"] == 0
        assert (await virtual.fetch("GET", "/metrics")).json() == []


async def test_deepinfer_shows_plain_totals() -> None:
    async with server("deepinfer") as virtual:
        await virtual.fetch("POST", CHAT, chat(20))
        totals = (await virtual.fetch("GET", "/deepinfer/gauges")).json()
        assert totals["running"] == totals["waiting"] == totals["blocks_used"] == 0
        assert (totals["generated_tokens_total"], totals["blocks_total"]) == (20, 64)


@pytest.mark.parametrize("policy", POLICIES)
async def test_health_knows_a_dead_engine_and_not_a_wedged_one(policy: str) -> None:
    async with server(policy, faults=("healthy-while-wedged",)) as virtual:
        exchange = await virtual.open("POST", CHAT, chat(700))
        await first_token(virtual, exchange)
        await exchange.disconnect()
        await virtual.advance(20.0)
        assert (await virtual.fetch("GET", "/health")).status == 200
        truth = (await virtual.fetch("GET", "/ref/health")).json()
        assert truth["alive"] is False
    async with server("vllm", faults=("unknown-abort-crashes",)) as virtual:
        streams = [await virtual.open("POST", CHAT, chat(300, stream=bool(index))) for index in range(2)]
        await virtual.advance(0.1)
        await virtual.fetch("POST", "/abort_requests", {"request_ids": ["nobody"]})
        await virtual.run_until(lambda: all(exchange.ended for exchange in streams))
        assert streams[0].status == 500
        assert streams[1].events[-2]["error"]["code"] == 500
        assert streams[1].events[-1] == "[DONE]"
        assert (await virtual.fetch("GET", "/health")).status == 503
        assert (await virtual.fetch("POST", CHAT, chat(3))).status == 500
        assert virtual.face.driver.tickets == {}


async def test_a_core_that_breaks_its_own_rules_dies_in_public() -> None:
    """A strict pool refuses the second free; the clients get an error instead of silence."""
    async with server("vllm") as virtual:
        exchange = await virtual.open("POST", CHAT, chat(100))
        await first_token(virtual, exchange)
        core = virtual.engine._core
        core.pool.give(list(core.running[0].table))
        await virtual.run_until(lambda: exchange.ended)
        assert exchange.status == 500
        assert (await virtual.fetch("GET", "/health")).status == 503


async def test_truth_routes() -> None:
    async with server("vllm") as virtual:
        exchange = await virtual.open("POST", CHAT, chat(100), headers={"X-Request-Id": "q"})
        await first_token(virtual, exchange)
        name = "chatcmpl-q"
        snapshot = (await virtual.fetch("GET", "/ref/snapshot")).json()
        assert [view["request_id"] for view in snapshot["requests"]] == [name]
        assert not snapshot["settled"]
        assert (await virtual.fetch("POST", "/ref/preempt", {"request_id": name})).status == 200
        await virtual.advance(1.0)
        assert (await virtual.fetch("GET", "/ref/gauges")).json()["blocks_held"] == 0
        assert not exchange.ended
        assert (await virtual.fetch("POST", "/ref/resume", {"request_id": name})).status == 200
        await virtual.run_until(lambda: exchange.ended)
        assert exchange.json()["usage"]["completion_tokens"] == 100
        log = (await virtual.fetch("GET", f"/ref/log?request_id={name}&limit=1000")).json()["entries"]
        kinds = [entry["kind"] for entry in log]
        assert kinds[0] == "submitted"
        assert {"Added", "Preempted", "Resumed", "Finished"} <= set(kinds)
        last = log[-1]["number"]
        assert (await virtual.fetch("GET", f"/ref/log?after={last}")).json()["entries"] == []
        assert (await virtual.fetch("GET", "/ref/log?limit=x")).status == 400
        assert (await virtual.fetch("POST", "/ref/pause", {"mode": "hold"})).status == 200
        assert (await virtual.fetch("POST", "/ref/pause", {"mode": "retract"})).status == 400
        assert (await virtual.fetch("POST", "/ref/resume", {})).status == 200
        late = await virtual.open("POST", CHAT, chat(300), headers={"X-Request-Id": "z"})
        await first_token(virtual, late)
        answer = (await virtual.fetch("POST", "/ref/abort", {"request_id": "chatcmpl-z", "door": "inside"})).json()
        assert answer[0]["kind"] == "accepted"
        assert (await virtual.fetch("POST", "/ref/abort", {"request_id": "a", "door": "window"})).status == 400
        await virtual.run_until(lambda: late.ended)
        await assert_settled(virtual)
