"""The adapter for TensorRT-LLM, against a server by hand."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from stopguard.audit.errors import TargetLost, TargetUnreachable
from stopguard.audit.target import TargetModel
from stopguard.audit.world import Answer
from stopguard.engines import Engine, EngineFacts, EngineUnreachable, RouteAnswer, derived_evidence
from stopguard.engines.recognition import CERTAIN
from stopguard.engines.registry import create
from stopguard.errors import ConfigurationError
from stopguard.ledger import Evidence
from stopguard_trtllm import iterations
from stopguard_trtllm.adapter import PATCH, TensorRTLLMAdapter
from stopguard_trtllm.iterations import QUIET_SECONDS, Iterations, newest_record
from stopguard_trtllm.observer import TensorRTLLMObserver

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def record(active: int = 0, queued: int = 0, *, paused: int = 0, used: int = 0, number: int = 1) -> dict[str, Any]:
    """As `/metrics` has it, with fields beside those that are read."""
    return {
        "iter": number,
        "iterLatencyMS": 12.5,
        "numActiveRequests": active,
        "numQueuedRequests": queued,
        "numCompletedRequests": 0,
        "inflightBatchingStats": {"numPausedRequests": paused, "numGenRequests": active - paused},
        "kvCacheStats": {"maxNumBlocks": 100, "freeNumBlocks": 100 - used, "usedNumBlocks": used, "tokensPerBlock": 32},
    }


class Server:
    """Answers like `trtllm-serve`; what `/metrics` will say is put into `records`, one list a reading."""

    def __init__(self) -> None:
        self.records: deque[Any] = deque()
        self.asked: list[str] = []
        self.version_headers: dict[str, str] = {}
        self.version_status = 200

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(path)
        if path == "/v1/models":
            return httpx.Response(200, json={"object": "list", "data": [{"id": "m", "owned_by": "tensorrt_llm"}]})
        if path == "/version":
            return httpx.Response(self.version_status, json={"version": "1.3.0"}, headers=self.version_headers)
        assert path == "/metrics"
        answer = self.records.popleft() if self.records else []
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)

    def adapter(self) -> TensorRTLLMAdapter:
        return TensorRTLLMAdapter("gpu", "http://127.0.0.1:1", transport=httpx.MockTransport(self))


def best(adapter: TensorRTLLMAdapter) -> Evidence:
    return adapter.profile.best_evidence


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the adapter's time."""
    now = [100.0]
    monkeypatch.setattr("stopguard_trtllm.adapter.monotonic", lambda: now[0])

    def set_to(seconds: float) -> None:
        now[0] = seconds

    return set_to


def test_it_is_an_engine_and_is_found_by_its_name() -> None:
    engine = create("trtllm", "gpu", "http://127.0.0.1:1")
    assert isinstance(engine, TensorRTLLMAdapter)
    assert isinstance(engine, Engine)
    assert (engine.placement.header, engine.placement.body_field) == ("", "")
    assert engine.reuse_connections is False
    assert "/metrics" in engine.control_paths


def test_what_it_claims_at_first_is_what_its_door_is_worth() -> None:
    profile = Server().adapter().profile
    assert [door.name for door in profile.doors] == ["close"]
    assert profile.best_evidence is derived_evidence(profile, gauges=False) is Evidence.SENT
    assert not profile.stream_end_is_ack


async def test_it_says_what_it_is() -> None:
    identity = await Server().adapter().identify()
    assert (identity.kind, identity.version) == ("trtllm", "1.3.0")


@pytest.mark.parametrize(
    ("headers", "patched"),
    [({}, False), ({"x-stopguard-disconnects": "event-driven"}, True), ({"x-stopguard-disconnects": "no"}, False)],
)
async def test_connections_are_used_again_only_where_the_patch_says_so(headers: dict[str, str], patched: bool) -> None:
    server = Server()
    server.version_headers = headers
    adapter = server.adapter()
    await adapter.models()
    assert adapter.reuse_connections is adapter.patched is patched
    server.version_headers = {}  # it was started anew, without
    await adapter.models()
    assert adapter.reuse_connections is False


async def test_a_server_without_version_serves_all_the_same() -> None:
    server = Server()
    server.version_status = 404
    adapter = server.adapter()
    assert [model.id for model in await adapter.models()] == ["m"]
    assert (await adapter.identify()).version == ""
    assert adapter.patched is False


async def test_gauges_are_those_of_the_newest_record() -> None:
    server = Server()
    server.records.append([record(9, 9, used=90), record(5, 2, paused=1, used=40, number=2)])
    gauges = await server.adapter().gauges()
    assert gauges is not None
    # A paused request is one of the active ones, and counted once.
    assert (gauges.running, gauges.waiting) == (4, 3)
    assert (gauges.blocks_used, gauges.blocks_total) == (40, 100)


async def test_evidence_is_promised_only_when_records_have_been_seen() -> None:
    server = Server()
    adapter = server.adapter()
    await adapter.models()
    assert best(adapter) is Evidence.SENT
    server.records.append([record(0)])
    await adapter.models()
    assert best(adapter) is Evidence.GAUGE
    asked = server.asked.count("/metrics")
    await adapter.models()
    assert server.asked.count("/metrics") == asked, "once known, they are left to whoever else reads them"


@pytest.mark.parametrize(
    "answer",
    [
        httpx.ReadTimeout("it never ends on a busy engine"),
        httpx.Response(503),
        httpx.Response(200, text="# HELP this is Prometheus"),
        httpx.Response(200, json=[{"iter": "one"}]),
        httpx.Response(200, json={"numActiveRequests": 1}),
    ],
    ids=["timeout", "unavailable", "prometheus", "other-types", "no-list"],
)
async def test_gauges_that_cannot_be_read_promise_nothing_any_more(answer: Any) -> None:
    """A stop that only gauges could prove would be called a leak otherwise."""
    server = Server()
    adapter = server.adapter()
    server.records += [[record(0)], answer]
    await adapter.gauges()
    with pytest.raises(EngineUnreachable):
        await adapter.gauges()
    assert best(adapter) is Evidence.SENT
    server.records.append([record(1)])
    await adapter.gauges()
    assert best(adapter) is Evidence.GAUGE


async def test_models_come_although_gauges_do_not() -> None:
    server = Server()
    server.records.append(httpx.ReadTimeout("busy"))
    adapter = server.adapter()
    assert [model.id for model in await adapter.models()] == ["m"]
    assert adapter.profile.best_evidence is Evidence.SENT


# ---- of which moment a record speaks -----------------------------------------------------------------


async def test_a_new_record_is_newer_than_the_last_reading(clock: Callable[[float], None]) -> None:
    server = Server()
    server.records += [[record(1)], [record(2, number=2)]]
    adapter = server.adapter()
    clock(100.0)
    first = await adapter.gauges()
    clock(101.0)
    second = await adapter.gauges()
    assert first is not None
    assert second is not None
    assert (first.at, first.holds_since) == (100.0, 0.0)
    assert (second.at, second.holds_since, second.running) == (101.0, 100.0, 2)


async def test_where_there_is_no_new_record_the_old_one_holds_after_a_while(clock: Callable[[float], None]) -> None:
    server = Server()
    server.records.append([record(0)])
    adapter = server.adapter()
    clock(100.0)
    await adapter.gauges()
    seen = []
    for at in (100.3, 100.9, 101.0, 105.0):
        clock(at)
        gauges = await adapter.gauges()
        assert gauges is not None
        assert gauges.running == 0
        seen.append(gauges.holds_since)
    assert seen == [0.0, 0.0, 100.0, 105.0 - QUIET_SECONDS]


def test_a_long_reading_dates_what_follows_by_its_end() -> None:
    kept = Iterations()
    kept.read(newest_record(json.dumps([record(1)]).encode()), 10.0, 12.5)
    kept.read(None, 13.0, 13.0)
    gauges = kept.gauges(13.0)
    assert gauges is not None
    assert gauges.holds_since == 0.0
    kept.read(newest_record(json.dumps([record(0, number=2)]).encode()), 14.0, 14.0)
    gauges = kept.gauges(14.0)
    assert gauges is not None
    assert gauges.holds_since == 13.0


def test_before_the_first_iteration_nothing_is_said() -> None:
    kept = Iterations()
    kept.read(None, 10.0, 10.0)
    assert kept.gauges(10.0) is None


def test_records_without_caches_and_batches_are_read() -> None:
    kept = Iterations()
    kept.read(newest_record(b'[{"numActiveRequests": 3}]'), 1.0, 1.0)
    gauges = kept.gauges(1.0)
    assert gauges is not None
    assert (gauges.running, gauges.waiting, gauges.blocks_used) == (3, 0, None)
    assert iterations.newest_record(b"[]") is None


# ---- recognition, launching, the audit ---------------------------------------------------------------


def facts(owner: str, **headers: str) -> EngineFacts:
    text = json.dumps({"data": [{"id": "m", "owned_by": owner}]})
    return EngineFacts({"/v1/models": RouteAnswer(status=200, headers=headers, text=text)})


def test_it_recognises_its_own_and_nobody_else() -> None:
    assert TensorRTLLMAdapter.recognises(facts("tensorrt_llm")) >= CERTAIN
    assert TensorRTLLMAdapter.recognises(facts("vllm")) == 0
    assert 0.5 < TensorRTLLMAdapter.recognises(facts("tensorrt_llm", **{"x-reference-engine": "trtllm"})) < CERTAIN
    assert TensorRTLLMAdapter.recognises(EngineFacts({})) == 0


def test_a_launch_brings_the_patch() -> None:
    needs = TensorRTLLMAdapter.launch_needs
    assert needs.programs == ("trtllm-serve",)
    assert needs.arguments == (f"--custom_module_dirs={PATCH}",)
    assert (PATCH / "__init__.py").is_file()


class AuditControl:
    """The audit's way to the server."""

    def __init__(self, server: Server) -> None:
        self.server = server

    async def __call__(self, method: str, path: str, body: Any = None) -> Answer:
        response = self.server(httpx.Request(method, f"http://x{path}"))
        return Answer(status=response.status_code, headers=dict(response.headers), body=response.content)


async def test_the_audit_reads_the_same_records() -> None:
    server = Server()
    server.records += [[], [record(3, 1, paused=1, used=7, number=5)], []]
    observer = TensorRTLLMObserver(AuditControl(server), lambda: 50.0, TargetModel(name="m", adapters=("l",)))
    assert (await observer.identify()).version == "1.3.0"
    assert TensorRTLLMAdapter.observer is TensorRTLLMObserver
    for _ in range(2):
        reading = await observer.read()
        assert reading is not None
        assert (reading.places, reading.preempted, reading.blocks_missing, reading.steps_total) == (4, 1, 0, 5)
    assert observer.facts.grade is Evidence.GAUGE
    assert observer.facts.features["lora"] == {"model": "l"}
    assert not observer.facts.abort_door


async def test_the_audit_of_something_else_says_so() -> None:
    server = Server()
    server.version_status = 404
    observer = TensorRTLLMObserver(AuditControl(server), lambda: 50.0, TargetModel(name="m"))
    with pytest.raises(TargetUnreachable):
        await observer.identify()
    server.records.append(httpx.Response(500))
    with pytest.raises(TargetLost):
        await observer.read()
    server.records.append(httpx.Response(200, text="no json"))
    with pytest.raises(TargetLost):
        await observer.read()
    with pytest.raises(ConfigurationError, match="metrics only"):
        TensorRTLLMObserver(AuditControl(server), lambda: 50.0, TargetModel(name="m"), "probe")
