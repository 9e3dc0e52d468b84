"""What the gateway's side knows of vLLM, against answers as vLLM 0.32 gives them (the real one: tests/engines)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from stopguard.engines import EngineFacts, EngineUnreachable, GaugeUnit, RouteAnswer
from stopguard.ledger import Evidence
from stopguard.stops import AbortAnswer, DoorKind, Semantics, Source, StopCause
from stopguard_vllm.adapter import VLLMAdapter
from stopguard_vllm.metrics import Recency, parse
from stopguard_vllm.names import external_ids

OURS = "sg-" + "a" * 32
CAUSE = StopCause(semantics=Semantics.CANCEL, source=Source.API, reason="test", observed_at=0.0)


def page(
    running: int = 2, waiting: int = 1, usage: float = 0.25, generated: int = 100, engines: int = 1, blocks: str = "41"
) -> bytes:
    lines = ["# HELP vllm:num_requests_running Number of requests", "process_open_fds 32.0"]
    for engine in range(engines):
        labels = f'engine="{engine}",model_name="tiny"'
        lines += [
            f"vllm:num_requests_running{{{labels}}} {running}.0",
            f"vllm:num_requests_waiting{{{labels}}} {waiting}.0",
            f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} 7.0',
            f"vllm:kv_cache_usage_perc{{{labels}}} {usage}",
            f"vllm:num_preemptions_total{{{labels}}} 3.0",
            f"vllm:prompt_tokens_total{{{labels}}} 50.0",
            f"vllm:generation_tokens_total{{{labels}}} {generated}.0",
            f'vllm:cache_config_info{{block_size="32",engine="{engine}",num_gpu_blocks="{blocks}",x="a b"}} 1.0',
            f'vllm:request_success_total{{finished_reason="abort",{labels}}} 0.0',
            f'vllm:request_success_total{{finished_reason="stop",{labels}}} 9.0',
        ]
    return "\n".join(lines).encode() + b"\n"


# ---- metrics ---------------------------------------------------------------------------------------------


def test_a_page_is_read() -> None:
    numbers = parse(page())
    assert numbers is not None
    assert (numbers.running, numbers.waiting, numbers.preemptions_total, numbers.aborts_total) == (2, 1, 3, 0)
    assert (numbers.blocks_used, numbers.blocks_total, numbers.block_tokens) == (10, 40, 32)


def test_engines_of_one_server_are_summed() -> None:
    numbers = parse(page(engines=2))
    assert numbers is not None
    assert (numbers.running, numbers.waiting, numbers.engines) == (4, 2, 2)
    assert (numbers.blocks_used, numbers.blocks_total) == (20, 80)


def test_blocks_are_not_guessed() -> None:
    numbers = parse(page(blocks="None"))
    assert numbers is not None
    assert (numbers.blocks_used, numbers.blocks_total) == (None, None)
    assert parse(b"sglang:num_running_reqs 1.0\n") is None


def test_how_old_the_numbers_may_be() -> None:
    recency = Recency(still_seconds=2.0)

    def read(at: float, **options: Any) -> float:
        numbers = parse(page(**options))
        assert numbers is not None
        return recency.hold_since(at, numbers)

    assert read(10.0, generated=1) == 0.0  # nothing was read before
    assert read(10.1, generated=1) == 0.0  # nothing has moved: it may be long ago
    assert read(10.2, generated=2) == 10.1  # a step has ended since the reading before
    assert read(20.0, generated=2) == 10.1
    idle = {"generated": 3, "running": 0, "waiting": 0}
    assert read(20.1, **idle) == 20.0
    assert read(21.0, **idle) == 20.0  # a step of something new may be under way
    assert read(22.5, **idle) == 20.5  # no step lasts as long as this


# ---- recognition -----------------------------------------------------------------------------------------


def facts(**answers: RouteAnswer) -> EngineFacts:
    return EngineFacts({"/" + path.replace("_", "/"): answer for path, answer in answers.items()})


def models(owner: str) -> RouteAnswer:
    return RouteAnswer(status=200, text=msgspec.json.encode({"data": [{"id": "m", "owned_by": owner}]}).decode())


def test_it_is_recognised_by_its_metrics() -> None:
    assert VLLMAdapter.recognises(facts(metrics=RouteAnswer(status=200, text=page().decode()))) == 1.0


def test_another_servers_metrics_are_not_its_own() -> None:
    other = RouteAnswer(status=200, text="sglang:num_running_reqs 1.0\n")
    assert VLLMAdapter.recognises(facts(v1_models=models("vllm"), metrics=other)) == 0.0


def test_without_metrics_its_models_and_version_speak() -> None:
    version = RouteAnswer(status=200, text='{"version":"0.32.0"}')
    assert VLLMAdapter.recognises(facts(v1_models=models("vllm"))) == 0.5  # asked on
    assert VLLMAdapter.recognises(facts(v1_models=models("vllm"), version=version)) == 0.5
    gone = RouteAnswer(status=404)
    assert VLLMAdapter.recognises(facts(v1_models=models("vllm"), version=version, metrics=gone)) == 0.9
    assert VLLMAdapter.recognises(facts(v1_models=models("someone"), version=version)) == 0.0


# ---- the adapter -------------------------------------------------------------------------------------------


class Server:
    """Answers as vLLM does; `posts` are the bodies that the abort route got."""

    def __init__(self, *, abort_route: str = "", metrics: bool = True) -> None:
        self.abort_route = abort_route
        self.metrics = metrics
        self.posts: list[Any] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        match request.method, request.url.path:
            case "GET", "/version":
                return httpx.Response(200, json={"version": "0.32.0"})
            case "GET", "/metrics" if self.metrics:
                return httpx.Response(200, content=page())
            case "POST", self.abort_route:
                self.posts.append(msgspec.json.decode(request.content))
                return httpx.Response(200, json={"status": "aborted", "aborted": 1})
            case "POST", "/inference/v1/abort_requests":  # always there, and disabled
                return httpx.Response(403, json={"error": {"code": 403}})
            case _:
                return httpx.Response(404)


def with_adapter(server: Server, work: Callable[[VLLMAdapter], Any]) -> Any:
    async def run() -> Any:
        adapter = VLLMAdapter("v", "http://127.0.0.1:1", transport=httpx.MockTransport(server))
        try:
            return await work(adapter)
        finally:
            await adapter.aclose()

    return asyncio.run(run())


@pytest.mark.parametrize("route", ["", "/abort_requests", "/inference/v1/abort_requests"])
def test_the_second_door_is_there_where_it_opens(route: str) -> None:
    server = Server(abort_route=route)

    async def identify(adapter: VLLMAdapter) -> VLLMAdapter:
        assert (await adapter.identify()).version == "0.32.0"
        return adapter

    adapter = with_adapter(server, identify)
    kinds = [door.kind for door in adapter.profile.doors]
    assert kinds == [DoorKind.CLOSE, *([DoorKind.CALL] if route else [])]
    assert adapter.capabilities.aborts_by_id == bool(route)
    assert adapter.profile.best_evidence is Evidence.GAUGE
    assert not adapter.profile.stream_end_is_ack  # the front end ends a stream before its core has heard
    assert all(post["request_ids"] for post in server.posts)


def test_without_metrics_nothing_is_promised() -> None:
    async def identify(adapter: VLLMAdapter) -> VLLMAdapter:
        await adapter.identify()
        return adapter

    adapter = with_adapter(Server(metrics=False), identify)
    assert adapter.profile.best_evidence is Evidence.SENT
    assert adapter.gauge_seconds == 0.0
    assert adapter.capabilities.gauge_unit is GaugeUnit.NONE


def test_an_abort_names_what_our_id_may_have_become() -> None:
    server = Server(abort_route="/abort_requests")

    async def abort(adapter: VLLMAdapter) -> list[AbortAnswer]:
        await adapter.identify()
        server.posts.clear()
        doors = ["abort_requests", "abort_requests", "another"]
        ids = [OURS, "", OURS]
        return [(await adapter.abort(name, door, CAUSE)).answer for name, door in zip(ids, doors, strict=True)]

    answers = with_adapter(server, abort)
    assert answers == [AbortAnswer.ACCEPTED, AbortAnswer.FAILED, AbortAnswer.FAILED]
    assert server.posts == [{"request_ids": external_ids(OURS)}]
    assert {f"chatcmpl-{OURS}", f"cmpl-{OURS}-0", f"cmpl-{OURS}-3"} <= set(external_ids(OURS))
    assert all(OURS in name for name in external_ids(OURS))


def test_gauges_say_since_when_they_hold() -> None:
    async def read(adapter: VLLMAdapter) -> Any:
        return await adapter.gauges()

    gauges = with_adapter(Server(), read)
    assert (gauges.running, gauges.waiting, gauges.blocks_used, gauges.blocks_total) == (2, 1, 10, 40)
    assert gauges.block_tokens == 32
    assert gauges.holds_since == 0.0
    with pytest.raises(EngineUnreachable, match="404"):
        with_adapter(Server(metrics=False), read)
