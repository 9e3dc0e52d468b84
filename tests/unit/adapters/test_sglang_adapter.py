"""What the SGLang adapter makes of SGLang's answers (recorded from 0.5.23)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anyio
import httpx
import pytest

from stopguard.engines import EngineFacts, EngineUnreachable, RouteAnswer
from stopguard.stops import AbortAnswer, Semantics, Source, StopCause
from stopguard_sglang.adapter import ABORT_DOOR, SGLangAdapter
from stopguard_sglang.loads import LOADS_PATH, gauges_of, read_loads

OURS = "sg-" + "0123456789abcdef" * 2
CAUSE = StopCause(semantics=Semantics.CANCEL, source=Source.CLIENT, reason="eof", observed_at=0.0)
MODELS = {"object": "list", "data": [{"id": "tiny", "owned_by": "sglang"}]}


def load(**changes: Any) -> dict[str, Any]:
    told = {
        "timestamp": 1796022105.5,
        "dp_rank": 0,
        "num_running_reqs": 0,
        "num_waiting_reqs": 0,
        "num_waiting_uncached_tokens": 0,
        "num_used_tokens": 0,
        "max_total_num_tokens": 65536,
        "queues": {"waiting": 0, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0},
    }
    return {**told, **changes}


def answer(*loads: dict[str, Any], at: str = "2026-11-30T07:01:46.500000+00:00") -> bytes:
    return json.dumps({"timestamp": at, "version": "0.5.23", "accelerator": None, "loads": list(loads)}).encode()


def adapter(handle: Callable[[httpx.Request], httpx.Response]) -> SGLangAdapter:
    return SGLangAdapter("one", "http://engine", transport=httpx.MockTransport(handle))


def test_gauges_are_as_old_as_the_oldest_rank() -> None:
    one = load(timestamp=1796022106.4, num_running_reqs=3, num_waiting_reqs=1, num_used_tokens=90)
    two = load(timestamp=1796022104.5, dp_rank=1, num_running_reqs=1, num_used_tokens=10)
    gauges = gauges_of(read_loads(answer(one, two)), asked_at=100.0)
    assert gauges is not None
    assert gauges.at == pytest.approx(98.0)
    assert (gauges.running, gauges.waiting) == (4, 1)
    assert (gauges.blocks_used, gauges.blocks_total) == (100, 131072)


def test_a_prefill_in_pieces_is_not_an_empty_engine() -> None:
    gauges = gauges_of(read_loads(answer(load(num_used_tokens=5120))), asked_at=1.0)
    assert gauges is not None
    assert gauges.running == 1


def test_a_grammar_being_compiled_waits() -> None:
    gauges = gauges_of(read_loads(answer(load(queues={"grammar": 2}))), asked_at=1.0)
    assert gauges is not None
    assert (gauges.running, gauges.waiting) == (0, 2)


def test_without_a_published_load_there_are_no_gauges() -> None:
    assert gauges_of(read_loads(answer()), asked_at=1.0) is None


def test_an_abort_is_accepted_and_no_more() -> None:
    asked: list[Any] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200)

    reply = anyio.run(adapter(handle).abort, OURS, ABORT_DOOR.name, CAUSE)
    assert reply.answer is AbortAnswer.ACCEPTED
    assert asked == [("/abort_request", {"rid": OURS})]


@pytest.mark.parametrize("wrong", ["", "sg-", OURS[:-1], OURS + "0", "abc", OURS + "_0"])
def test_only_whole_ids_of_ours_are_aborted(wrong: str) -> None:
    """SGLang matches by prefix, and an empty id is the beginning of every other."""

    def handle(request: httpx.Request) -> httpx.Response:
        raise AssertionError(f"the engine was asked to abort {wrong!r}")

    assert anyio.run(adapter(handle).abort, wrong, ABORT_DOOR.name, CAUSE).answer is AbortAnswer.UNKNOWN


@pytest.mark.parametrize("status", [401, 404, 500])
def test_a_door_that_does_not_open_has_failed(status: int) -> None:
    engine = adapter(lambda request: httpx.Response(status))
    assert anyio.run(engine.abort, OURS, ABORT_DOOR.name, CAUSE).answer is AbortAnswer.FAILED
    assert anyio.run(engine.abort, OURS, "close", CAUSE).answer is AbortAnswer.FAILED


def test_it_says_its_version() -> None:
    engine = adapter(lambda request: httpx.Response(200, content=answer(load())))
    identity = anyio.run(engine.identify)
    assert (identity.kind, identity.version) == ("sglang", "0.5.23")


@pytest.mark.parametrize("body", [b"", b"{}", b"<html>"])
def test_another_server_at_its_address_is_unreachable(body: bytes) -> None:
    engine = adapter(lambda request: httpx.Response(200, content=body))
    with pytest.raises(EngineUnreachable, match="/v1/loads"):
        anyio.run(engine.gauges)


def facts(models: Any = None, loads: bytes = b"") -> EngineFacts:
    answers = {}
    if models is not None:
        answers["/v1/models"] = RouteAnswer(status=200, text=json.dumps(models))
    if loads:
        answers[LOADS_PATH] = RouteAnswer(status=200, text=loads.decode())
    return EngineFacts(answers)


def test_it_is_recognised_by_its_loads_and_not_mistaken() -> None:
    recognises = SGLangAdapter.recognises
    assert recognises(facts(MODELS, answer(load()))) >= 0.9
    assert recognises(facts(None, answer(load()))) >= 0.9
    assert 0.0 < recognises(facts(MODELS)) < 0.9
    assert recognises(facts({"data": [{"id": "x", "owned_by": "vllm"}]}, answer(load()))) == 0.0
    assert recognises(facts()) == 0.0
