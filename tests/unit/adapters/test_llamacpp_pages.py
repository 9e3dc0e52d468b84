"""llama.cpp's log and pages, read without a server: what its lines mean, and what they do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import msgspec
import pytest

from stopguard.audit.target import Submitted, TargetModel
from stopguard.audit.world import Answer
from stopguard.engines import EngineFacts, EngineUnreachable, GaugeUnit, RouteAnswer
from stopguard.errors import ConfigurationError
from stopguard.ledger import Evidence
from stopguard.probe import wire
from stopguard_llamacpp import adapter as adapter_module
from stopguard_llamacpp.adapter import LlamaCppAdapter
from stopguard_llamacpp.log import ServerLog
from stopguard_llamacpp.observer import LOG_VARIABLE, LlamaCppObserver
from stopguard_llamacpp.pages import metric, read_slots

DEFER = "0.05.668.247 D srv  process_sing: no slot is available, defer task, id_task = 105\n"
SAMPLER = "\tdry_multiplier = 0.000, dry_base = 1.750, dry_allowed_length = 77, dry_penalty_last_n = 64\n"
LAUNCH = "0.05.676.814 I slot launch_slot_: id  1 | task 105 | processing task, is_child = 0\n"
TOKEN = "0.05.692.010 D slot process_toke: id  1 | task 105 | n_gen = 1, n_remaining = 99, next token:   891 ' xl'\n"
CANCEL = "0.06.174.021 W srv          stop: cancel task, id_task = 105\n"
RELEASE = "0.06.174.534 I slot      release: id  1 | task 105 | stop processing: n_tokens = 71, truncated = 0\n"


def kinds(log: ServerLog, text: str, at: float = 100.0) -> list[str]:
    return [type(event).__name__ for event in log.feed(text, at)]


def test_a_life_that_is_cancelled() -> None:
    log = ServerLog()
    assert kinds(log, LAUNCH) == ["Submitted", "Added", "Moved", "BlocksHeld"]
    assert log.running == {"105"}
    assert kinds(log, TOKEN) == ["TokensComputed", "TokensEmitted"]
    assert kinds(log, CANCEL) == ["AbortArrived"]
    assert log.running == {"105"}, "a cancel is posted, the slot is not free yet"
    assert kinds(log, RELEASE) == ["BlocksReturned", "AbortApplied", "Finished", "Moved"]
    assert not log.running
    assert not log.waiting
    assert not log.cancelled


def test_a_life_that_ends_by_itself_is_no_abort() -> None:
    log = ServerLog()
    log.feed(LAUNCH, 1.0)
    events = log.feed(RELEASE, 2.0)
    assert "AbortApplied" not in {type(event).__name__ for event in events}
    assert [event.reason for event in events if isinstance(event, wire.Finished)] == ["stop"]


def test_who_waits_is_cancelled_without_a_further_line() -> None:
    log = ServerLog()
    before = log.sees_queue
    assert kinds(log, DEFER) == ["Submitted", "Added", "Moved"]
    assert (before, log.sees_queue) == (False, True)
    assert log.waiting == {"105"}
    assert kinds(log, CANCEL) == ["AbortArrived", "AbortApplied", "Finished", "Moved"]
    assert not log.waiting


def test_at_the_default_verbosity_the_queue_is_unknown_and_a_cancel_still_counts() -> None:
    log = ServerLog()
    assert kinds(log, CANCEL) == ["Submitted", "Added", "AbortArrived", "AbortApplied", "Finished", "Moved"]
    assert not log.sees_queue


def test_lines_come_in_pieces_and_noise_is_nothing() -> None:
    log = ServerLog()
    whole = (
        "data: not a line of the log\n" + LAUNCH + "0.05.700.000 I slot print_timing: id  1 | task 105 | n_gen = 5\n"
    )
    events = [event for letter in whole for event in log.feed(letter, 3.0)]
    assert len(events) == 4
    assert log.feed(RELEASE.replace("105", "4"), 4.0) == [], "who was there before we looked is nobody's"


def test_times_are_the_logs_own() -> None:
    log = ServerLog()
    (early, *_) = log.feed(LAUNCH, 50.0)  # written at 5.676814, read late
    (late, *_) = log.feed(CANCEL, 50.2)  # written 0.497 s later, read at once: the better guess
    assert late.at == pytest.approx(50.2)
    (released, *_) = log.feed(RELEASE, 60.0)
    assert released.at - late.at == pytest.approx(0.000513)
    assert early.at >= late.at - 0.5


def test_a_mark_names_the_task_and_its_older_name_is_its_parent() -> None:
    log = ServerLog({77: "audit-x"}.get)  # type: ignore[arg-type]
    log.feed(DEFER, 1.0)
    events = log.feed(SAMPLER + LAUNCH, 2.0)
    assert [event.request_id for event in events] == ["105", *["audit-x/105"] * 4]
    assert isinstance(events[0], wire.Moved)
    assert events[0].place == "gone"
    assert isinstance(events[1], Submitted)
    assert isinstance(events[2], wire.Added)
    assert events[2].parent_id == "105"
    assert {event.request_id for event in log.feed(TOKEN + CANCEL + RELEASE, 3.0)} == {"audit-x/105"}
    assert [event.request_id for event in log.feed(LAUNCH.replace("105", "106"), 4.0)] == ["106"] * 4, (
        "the mark is used up"
    )


# ---- pages ----------------------------------------------------------------------------------------------


def slot(**fields: object) -> bytes:
    return msgspec.json.encode([{"id": 0, "n_ctx": 8192, "is_processing": False, **fields}])


@pytest.mark.parametrize("next_token", [[{"n_decoded": 5}], {"n_decoded": 5}])
def test_a_slot_counts_while_it_works(next_token: object) -> None:
    busy = read_slots(slot(is_processing=True, n_prompt_tokens=10, next_token=next_token))
    assert (busy.processing, busy.tokens_used, busy.tokens_total) == (1, 15, 8192)
    rests = read_slots(slot(n_prompt_tokens=10, next_token=next_token))
    assert (rests.processing, rests.tokens_used) == (0, 0), "what it keeps of an ended request is a cache"


def test_metrics_are_read_by_name() -> None:
    text = "# HELP llamacpp:x y\nllamacpp:requests_processing 3\nllamacpp:bad abc\nother:requests_deferred 9\n"
    assert metric(text) == {"requests_processing": 3.0}


# ---- the adapter ----------------------------------------------------------------------------------------


def llama(respond: Callable[[httpx.Request], httpx.Response]) -> LlamaCppAdapter:
    return LlamaCppAdapter("llama", "http://127.0.0.1:8080", transport=httpx.MockTransport(respond))


def pages(request: httpx.Request) -> httpx.Response:
    match request.url.path:
        case "/props":
            return httpx.Response(200, json={"total_slots": 1, "build_info": "b1-abc", "endpoint_metrics": True})
        case "/metrics":
            return httpx.Response(200, text="llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\n")
        case "/slots":
            return httpx.Response(200, content=slot(is_processing=True, n_prompt_tokens=7, next_token=[]))
    return httpx.Response(404)


def test_gauges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_module, "_LOOK_AFTER_SECONDS", 0.0)

    async def read() -> None:
        engine = llama(pages)
        identity = await engine.identify()
        assert (identity.kind, identity.version) == ("llamacpp", "b1-abc")
        gauges = await engine.gauges()
        await engine.aclose()
        assert gauges is not None
        assert (gauges.running, gauges.waiting, gauges.blocks_used, gauges.blocks_total) == (1, 2, 7, 8192)

    asyncio.run(read())


def test_without_metrics_nothing_is_promised() -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"total_slots": 1, "endpoint_metrics": False, "endpoint_slots": True})

    async def ask() -> LlamaCppAdapter:
        engine = llama(respond)
        await engine.identify()
        assert await engine.gauges() is None
        await engine.aclose()
        return engine

    engine = asyncio.run(ask())
    assert engine.profile.best_evidence is Evidence.SENT
    assert engine.gauge_seconds == 0.0
    assert engine.capabilities.gauge_unit is GaugeUnit.NONE


def test_pages_of_somebody_else_are_no_gauges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_module, "_LOOK_AFTER_SECONDS", 0.0)

    async def read() -> None:
        engine = llama(lambda request: httpx.Response(200, text="<html>"))
        with pytest.raises(EngineUnreachable):
            await engine.gauges()
        with pytest.raises(EngineUnreachable):
            await engine.identify()
        await engine.aclose()

    asyncio.run(read())


def test_clients_reach_no_control_route_and_keep_no_conversation() -> None:
    engine = llama(pages)
    assert {"/slots", "/slots/0", "/slots/3", "/v1/stream", "/props", "/lora-adapters"} <= engine.control_paths
    assert "x-conversation-id" in engine.owned_headers
    assert not engine.reuse_connections
    assert engine.placement.header != "X-Conversation-Id", "with it a client that leaves is not a stop"


def test_recognition() -> None:
    def facts(header: str = "", owner: str = "") -> EngineFacts:
        text = msgspec.json.encode({"data": [{"id": "m", "owned_by": owner}]}).decode()
        return EngineFacts({"/v1/models": RouteAnswer(status=200, headers={"server": header}, text=text)})

    assert LlamaCppAdapter.recognises(facts(header="llama.cpp")) == 1.0
    assert LlamaCppAdapter.recognises(facts(owner="llamacpp")) >= 0.9
    assert LlamaCppAdapter.recognises(facts(header="uvicorn", owner="vllm")) == 0.0


def test_the_log_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def control(method: str, path: str, body: object = None) -> Answer:
        return Answer(status=200)

    monkeypatch.delenv(LOG_VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match=LOG_VARIABLE):
        LlamaCppObserver(control, lambda: 0.0, TargetModel(name="m"), "log")
    monkeypatch.setenv(LOG_VARIABLE, "/nowhere/at/all")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        LlamaCppObserver(control, lambda: 0.0, TargetModel(name="m"), "log")
    with pytest.raises(ConfigurationError, match="metrics or log"):
        LlamaCppObserver(control, lambda: 0.0, TargetModel(name="m"), "probe")
