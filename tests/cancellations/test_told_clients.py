"""A client that is still connected is never cut silently: cancel API, deadlines, broken engines, shutdown."""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

import pytest

from stopguard.engines import AbortReply, OpenAIEngine
from stopguard.gateway.settings import EngineSettings, GatewaySettings, Idempotency, Limits, Timeouts
from stopguard.ledger import EngineGauges, Evidence
from stopguard.stops import AbortAnswer, Door, DoorKind, StopCause, StopConfig
from tests.cancellations.peers import LIMIT, Client, Seen, Setup, eventually, gateway, request

pytestmark = pytest.mark.anyio

KEY = {"Authorization": "Bearer tenant-a"}
OTHER_KEY = {"Authorization": "Bearer tenant-b"}


async def start_stream(setup: Setup, headers: dict[str, str] | None = None, **fields: Any) -> tuple[Client, Seen, str]:
    """A client in the middle of a stream, its engine's side, and its id."""
    client = await setup.client()
    await client.ask(stream=True, headers=headers, **fields)
    seen = await setup.engine.next()
    seen.begin_stream()
    seen.event("one")
    received = await client.until(b"one")
    request_id = received.partition(b"x-stopguard-id: ")[2].partition(b"\r\n")[0].decode()
    return client, seen, request_id


async def ask_api(
    setup: Setup, method: str, path: str, headers: dict[str, str] | None = None, body: object = None
) -> tuple[int, dict[str, Any]]:
    client = await setup.client()
    payload = b"" if body is None else json.dumps(body).encode()
    await client.send(request(method=method, path=path, headers=headers, body=payload))
    status, _, answer = await client.response()
    client.close()
    return status, json.loads(answer)


def events(received: bytes) -> list[Any]:
    """The data of every event in a raw chunked stream."""
    found = []
    for line in received.split(b"\n"):
        if line.startswith(b"data: "):
            text = line[6:].strip()
            found.append(text.decode() if text == b"[DONE]" else json.loads(text))
    return found


@pytest.mark.parametrize("form", ["delete", "post"])
async def test_the_cancel_api_stops_a_stream_and_tells_its_client(form: str) -> None:
    async with gateway() as setup:
        client, seen, request_id = await start_stream(setup, KEY, n=2)
        if form == "delete":
            status, answer = await ask_api(setup, "DELETE", f"/v1/requests/{request_id}?wait=settled", KEY)
        else:
            status, answer = await ask_api(
                setup, "POST", f"/v1/requests/{request_id}/cancel?wait=settled&timeout=3", KEY
            )
        assert status == 200
        assert answer["id"] == request_id
        assert answer["stop"]["outcome"] == "unconfirmed"
        assert answer["stop"]["evidence"] == "sent"
        assert set(answer["ledgers"]) == {"queue", "kv", "output", "link", "stream"}
        assert answer["retry"]["safe"] is False
        async with asyncio.timeout(LIMIT):
            await seen.closed.wait()
        received = await client.until(b"\r\n0\r\n\r\n")
        last, done = events(received)[-2:]
        assert done == "[DONE]"
        assert [choice["finish_reason"] for choice in last["choices"]] == ["abort", "abort"]
        assert last["object"] == "chat.completion.chunk"
        assert last["stopguard"]["code"] == "cancelled"
        assert last["stopguard"]["retry"] == "unsafe"
        # The connection goes on.
        client.received = b""
        await client.ask()
        (await setup.engine.next()).json({})
        assert (await client.response())[0] == 200
        await setup.next_settled()
        await setup.next_settled()
        setup.assert_nothing_left()


async def test_a_stopped_request_without_a_response_gets_an_error_body() -> None:
    async with gateway() as setup:
        client = await setup.client()
        await client.ask(headers={**KEY, "X-Request-Id": "mine-1"})
        await setup.engine.next()
        status, answer = await ask_api(setup, "DELETE", "/v1/requests/mine-1", KEY)
        assert status in (200, 202)
        assert answer["id"].startswith("sg-")
        status, headers, body = await client.response()
        assert status == 499
        assert headers["x-stopguard-retry"].startswith("unsafe; reason=")
        assert headers["x-should-retry"] == "false"
        assert headers["x-request-id"] == "mine-1"
        assert headers["x-stopguard-id"] == answer["id"]
        error = json.loads(body)
        assert error["error"]["code"] == "cancelled"
        assert error["stopguard"]["id"] == answer["id"]
        await setup.next_settled()
        setup.assert_nothing_left()


async def test_the_cancel_api_knows_only_the_callers_own_requests() -> None:
    async with gateway() as setup:
        client, seen, request_id = await start_stream(setup, {**KEY, "X-Request-Id": "alias"})
        for name in (request_id, "alias", "sg-" + "0" * 32, "x/y"):
            assert (await ask_api(setup, "DELETE", f"/v1/requests/{name.replace('/', '%2F')}", OTHER_KEY))[0] == 404
        assert (await ask_api(setup, "DELETE", f"/v1/requests/{request_id}"))[0] == 404
        assert not seen.closed.is_set()
        status, answer = await ask_api(setup, "GET", f"/v1/requests/{request_id}", KEY)
        assert (status, answer["status"]) == (200, "active")
        seen.end_stream()
        await client.until(b"\r\n0\r\n\r\n")
        await setup.next_settled()
        status, answer = await ask_api(setup, "DELETE", f"/v1/requests/{request_id}", KEY)
        assert (status, answer["already"], answer["status"]) == (200, True, "settled")
        assert (await ask_api(setup, "DELETE", f"/v1/requests/{request_id}", OTHER_KEY))[0] == 404
        setup.assert_nothing_left()


async def test_groups_ids_and_models_can_be_stopped_together() -> None:
    async with gateway(models=(("tiny", "other"),)) as setup:
        group = {**KEY, "X-StopGuard-Group": "run-7"}
        a = await start_stream(setup, group)
        b = await start_stream(setup, group)
        c = await start_stream(setup, KEY)
        d = await start_stream(setup, KEY, model="other")
        foreign = await start_stream(setup, {**OTHER_KEY, "X-StopGuard-Group": "run-7"})
        status, answer = await ask_api(setup, "POST", "/v1/requests/cancel?wait=settled", KEY, {"group": "run-7"})
        assert status == 200
        assert {each["id"] for each in answer["data"]} == {a[2], b[2]}
        status, answer = await ask_api(setup, "POST", "/v1/requests/cancel", KEY, {"ids": [c[2], foreign[2]]})
        assert [each["status"] for each in sorted(answer["data"], key=lambda each: each["id"] == foreign[2])][
            1
        ] == "unknown"
        status, answer = await ask_api(setup, "POST", "/v1/requests/cancel", KEY, {"model": "other"})
        assert [each["id"] for each in answer["data"]] == [d[2]]
        for _ in range(4):
            await setup.next_settled()
        assert not foreign[1].closed.is_set()
        for bad in ({}, {"ids": ["x"], "group": "y"}, {"nonsense": 1}, {"ids": ["x"] * 1001}):
            assert (await ask_api(setup, "POST", "/v1/requests/cancel", KEY, bad))[0] == 400
        foreign[1].end_stream()
        await setup.next_settled()
        setup.assert_nothing_left()


async def test_who_waits_for_a_settlement_may_leave() -> None:
    engine = _called_engine(AbortAnswer.ACCEPTED)
    async with gateway(engine_class=engine, profile=GAUGED) as setup:
        _client, _seen, request_id = await start_stream(setup, KEY)
        caller = await setup.client()
        await caller.send(
            request(method="DELETE", path=f"/v1/requests/{request_id}?wait=settled", headers=KEY, body=b"")
        )
        await eventually(lambda: setup.gateway.statistics().cancel_waiters == 1)
        caller.close()
        await eventually(lambda: setup.gateway.statistics().cancel_waiters == 0)
        engine.released.set()
        await setup.next_settled()
        setup.assert_nothing_left()


GAUGED: dict[str, Any] = {
    "doors": (Door(name="abort", kind=DoorKind.CALL, worth=Evidence.ACCEPTED),),
    "best_evidence": Evidence.GAUGE,
}


def _called_engine(answer: AbortAnswer) -> Any:
    """An engine class with an abort interface of its own, and gauges that tell the truth once `released` is set."""
    from time import monotonic

    class Called(OpenAIEngine):
        aborted: ClassVar[list[str]] = []
        released: ClassVar[asyncio.Event] = asyncio.Event()

        def __init__(self, name: str, base_url: str) -> None:
            super().__init__(name, base_url)
            self.gauge_seconds = 0.01

        async def abort(self, request_id: str, door_name: str, cause: StopCause) -> AbortReply:
            type(self).aborted.append(request_id)
            return AbortReply(answer=answer)

        async def gauges(self) -> EngineGauges:
            at = monotonic()
            return EngineGauges(at=at, running=0 if type(self).released.is_set() else 1, waiting=0)

    return Called


async def test_a_stop_is_confirmed_by_the_engines_gauges() -> None:
    engine = _called_engine(AbortAnswer.ACCEPTED)
    async with gateway(engine_class=engine, profile=GAUGED, stop_config=StopConfig(tell_seconds=5.0)) as setup:
        client, seen, request_id = await start_stream(setup, KEY)
        status, answer = await ask_api(setup, "DELETE", f"/v1/requests/{request_id}", KEY)
        assert (status, answer["status"]) == (202, "stopping")
        assert engine.aborted
        assert set(engine.aborted) == {request_id}
        # What the engine still sends reaches nobody.
        seen.event("too late")
        status, answer = await ask_api(setup, "DELETE", f"/v1/requests/{request_id}?wait=settled&timeout=0.05", KEY)
        assert (status, answer["already"]) == (202, True)
        engine.released.set()
        tracked = await setup.next_settled()
        assert tracked.ledgers.stop.outcome == "confirmed"
        assert tracked.ledgers.stop.evidence is Evidence.GAUGE
        received = await client.until(b"\r\n0\r\n\r\n")
        assert b"too late" not in received
        assert events(received)[-2]["stopguard"]["retry"] == "safe"
        async with asyncio.timeout(LIMIT):
            await seen.closed.wait()
        setup.assert_nothing_left()


@pytest.mark.parametrize("way", ["close", "reset"])
async def test_a_broken_stream_is_never_a_clean_end(way: str) -> None:
    async with gateway() as setup:
        client, seen, _ = await start_stream(setup)
        getattr(seen, way)()
        received = await client.to_end()
        assert b"[DONE]" not in received
        assert not received.endswith(b"0\r\n\r\n")
        last = events(received)[-1]
        assert last["error"]["code"] == "engine_lost"
        assert last["stopguard"]["retry"] == "unsafe"
        tracked = await setup.next_settled()
        assert tracked.ledgers.stop.semantics == "fail"
        setup.assert_nothing_left()


async def test_a_broken_event_cannot_be_mended_and_is_cut() -> None:
    async with gateway() as setup:
        client, seen, _ = await start_stream(setup)
        seen.write(b'20\r\ndata: {"cut in the mid')
        await client.until(b"cut in")
        seen.close()
        received = await client.to_end()
        assert received.endswith((b"mid", b"<reset>"))
        await setup.next_settled()
        setup.assert_nothing_left()


async def test_an_engine_that_ends_without_done_is_not_complete() -> None:
    """A body that ends with its connection looks the same whole and cut; the API's end marker tells."""
    async with gateway() as setup:
        client = await setup.client()
        await client.ask(stream=True)
        seen = await setup.engine.next()
        seen.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {}\n\n")
        seen.close()
        received = await client.to_end()
        assert events(received)[-1]["error"]["code"] == "engine_lost"
        await setup.next_settled()
        setup.assert_nothing_left()


@pytest.mark.parametrize("way", ["close", "reset"])
async def test_an_engine_that_breaks_before_its_response_is_a_502(way: str) -> None:
    async with gateway() as setup:
        client = await setup.client()
        await client.ask()
        getattr(await setup.engine.next(), way)()
        status, headers, body = await client.response()
        assert status == 502
        assert headers["x-stopguard-retry"].startswith("unsafe")
        assert json.loads(body)["error"]["code"] == "engine_lost"
        await setup.next_settled()
        setup.assert_nothing_left()


@pytest.mark.parametrize(
    "response",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\nb\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
    ],
)
async def test_a_malformed_response_is_a_502(response: bytes) -> None:
    async with gateway() as setup:
        client = await setup.client()
        await client.ask()
        (await setup.engine.next()).write(response)
        assert (await client.response())[0] == 502
        await setup.next_settled()
        setup.assert_nothing_left()


async def test_bytes_after_a_response_reach_nobody() -> None:
    """What an engine sends too much would be read as the next response on the client's connection."""
    async with gateway() as setup:
        client = await setup.client()
        await client.ask()
        seen = await setup.engine.next()
        seen.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")
        assert (await client.response())[2] == b"ok"
        async with asyncio.timeout(LIMIT):
            await seen.closed.wait()
        await client.ask()
        (await setup.engine.next()).json({"good": 1})
        assert json.loads((await client.response())[2]) == {"good": 1}


@pytest.mark.parametrize(
    ("headers", "stream", "reason"),
    [
        ({"X-StopGuard-Timeout": "0.05"}, False, "total_deadline"),
        ({"X-StopGuard-Timeout": "0.05"}, True, "total_deadline"),
        ({"X-StopGuard-First-Token-Timeout": "0.05"}, False, "first_token_deadline"),
    ],
)
async def test_deadlines_by_header(headers: dict[str, str], stream: bool, reason: str) -> None:
    async with gateway() as setup:
        client = await setup.client()
        await client.ask(stream=stream, headers=headers)
        seen = await setup.engine.next()
        if stream:
            seen.begin_stream()
            received = await client.until(b"[DONE]")
            assert events(received)[-2]["stopguard"]["code"] == reason
        else:
            status, answer_headers, body = await client.response()
            assert (status, json.loads(body)["error"]["code"]) == (504, reason)
            assert answer_headers["x-should-retry"] == "false"
        async with asyncio.timeout(LIMIT):
            await seen.closed.wait()
        tracked = await setup.next_settled()
        assert tracked.ledgers.stop.source == "deadline"
        setup.assert_nothing_left()


async def test_deadlines_by_configuration() -> None:
    settings = GatewaySettings(timeouts=Timeouts(idle_stream_seconds=0.6, queue_seconds=0.05, longest_total_seconds=9))
    async with gateway(settings, engine_settings=EngineSettings(concurrent_requests=1)) as setup:
        first, _seen, _ = await start_stream(setup)
        second = await setup.client()
        await second.ask()
        status, headers, body = await second.response()
        assert (status, json.loads(body)["error"]["code"]) == (504, "queue_deadline")
        assert headers["x-stopguard-retry"] == "safe; reason=never dispatched"
        received = await first.until(b"[DONE]")
        assert events(received)[-2]["stopguard"]["code"] == "idle_deadline"
        await setup.next_settled()
        await setup.next_settled()
        setup.assert_nothing_left()


async def test_a_full_queue_is_refused_early() -> None:
    settings = GatewaySettings(limits=Limits(queued_requests=1))
    async with gateway(settings, engine_settings=EngineSettings(concurrent_requests=1)) as setup:
        clients = [await setup.client() for _ in range(3)]
        await clients[0].ask()
        seen = await setup.engine.next()
        await clients[1].ask()
        await eventually(lambda: setup.gateway.statistics().queued > 0)
        await clients[2].ask()
        status, headers, body = await clients[2].response()
        assert (status, json.loads(body)["error"]["code"]) == (429, "queue_full")
        assert headers["retry-after"] == "1"
        assert headers["x-stopguard-retry"].startswith("safe")
        seen.json({"first": 1})
        await clients[0].response()
        (await setup.engine.next()).json({"second": 1})
        assert json.loads((await clients[1].response())[2]) == {"second": 1}
        await setup.next_settled()
        await setup.next_settled()
        setup.assert_nothing_left()


async def test_a_retry_supersedes_the_first_try() -> None:
    async with gateway() as setup:
        key = {**KEY, "Idempotency-Key": "k1"}
        first, seen, _ = await start_stream(setup, key)
        other = await start_stream(setup, {**OTHER_KEY, "Idempotency-Key": "k1"})
        second = await setup.client()
        await second.ask(headers=key)
        received = await first.until(b"[DONE]")
        assert events(received)[-2]["stopguard"]["code"] == "superseded"
        again = await setup.engine.next()
        assert seen.closed.is_set()
        again.json({"retry": 1})
        assert json.loads((await second.response())[2]) == {"retry": 1}
        assert not other[1].closed.is_set()
        other[1].end_stream()
        for _ in range(3):
            await setup.next_settled()
        setup.assert_nothing_left()


async def test_a_retry_waits_until_the_first_try_is_confirmed_stopped() -> None:
    engine = _called_engine(AbortAnswer.ACCEPTED)
    async with gateway(engine_class=engine, profile=GAUGED, stop_config=StopConfig(tell_seconds=0.01)) as setup:
        key = {**KEY, "Idempotency-Key": "k1"}
        first, _seen, _ = await start_stream(setup, key)
        second = await setup.client()
        await second.ask(headers=key)
        await first.until(b"[DONE]")
        assert setup.engine.requests.empty()
        engine.released.set()
        (await setup.engine.next()).json({"retry": 1})
        assert (await second.response())[0] == 200
        await setup.next_settled()
        await setup.next_settled()
        setup.assert_nothing_left()


async def test_a_second_retry_waits_for_the_first_try_too() -> None:
    """The first retry was never sent; the second takes its place and waits for the one that was."""
    engine = _called_engine(AbortAnswer.ACCEPTED)
    async with gateway(engine_class=engine, profile=GAUGED, stop_config=StopConfig(tell_seconds=0.01)) as setup:
        key = {**KEY, "Idempotency-Key": "k1"}
        first, _seen, _ = await start_stream(setup, key)
        second, third = await setup.client(), await setup.client()
        await second.ask(headers=key)
        await first.until(b"[DONE]")
        await third.ask(headers=key)
        status, headers, _ = await second.response()
        assert status == 409
        assert headers["x-stopguard-retry"].startswith("safe")
        assert setup.engine.requests.empty()
        engine.released.set()
        (await setup.engine.next()).json({"retry": 2})
        assert json.loads((await third.response())[2]) == {"retry": 2}
        for _ in range(3):
            await setup.next_settled()
        assert setup.gateway.statistics().failed_effects == 0
        setup.assert_nothing_left()


async def test_a_retry_may_join_and_outlive_the_first_try() -> None:
    settings = GatewaySettings(idempotency=Idempotency.JOIN)
    async with gateway(settings) as setup:
        key = {**KEY, "Idempotency-Key": "k1"}
        first, seen, request_id = await start_stream(setup, key)
        second = await setup.client()
        await second.ask(stream=True, headers=key)
        received = await second.until(b"one")
        assert request_id.encode() in received
        first.close()
        await eventually(lambda: setup.gateway.statistics().connections == 1)
        assert not seen.closed.is_set()
        seen.event("two")
        seen.end_stream()
        received = await second.until(b"\r\n0\r\n\r\n")
        assert [
            event if isinstance(event, str) else event["choices"][0]["delta"]["content"] for event in events(received)
        ] == [
            "one",
            "two",
            "[DONE]",
        ]
        assert (await setup.next_settled()).ledgers.stop is None
        setup.assert_nothing_left()


async def test_joined_clients_are_all_told() -> None:
    settings = GatewaySettings(idempotency=Idempotency.JOIN)
    async with gateway(settings) as setup:
        key = {**KEY, "Idempotency-Key": "k1"}
        first, seen, request_id = await start_stream(setup, key)
        second = await setup.client()
        await second.ask(stream=True, headers=key)
        await second.until(b"one")
        await ask_api(setup, "DELETE", f"/v1/requests/{request_id}", KEY)
        for client in (first, second):
            assert events(await client.until(b"\r\n0\r\n\r\n"))[-1] == "[DONE]"
        await setup.next_settled()
        first.close()
        second.close()
        async with asyncio.timeout(LIMIT):
            await seen.closed.wait()
        setup.assert_nothing_left()


async def test_requests_go_to_the_engine_that_serves_their_model_and_to_the_least_loaded() -> None:
    async with gateway(engines=3, models=(("a",), ("b",), ("b",))) as setup:
        for model, expected in (("a", {0}), ("b", {1, 2})):
            clients = [await setup.client() for _ in range(2)]
            for client in clients:
                await client.ask(model=model)
            if expected == {0}:
                got = [await setup.engines[0].next() for _ in clients]
            else:
                got = [await setup.engines[number].next() for number in sorted(expected)]
            for seen in got:
                seen.json({})
            for client in clients:
                assert (await client.response())[0] == 200
        client = await setup.client()
        await client.ask(model="nobody's")
        status, _, body = await client.response()
        assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")
        await client.send(request(method="GET", path="/v1/models"))
        assert {entry["id"] for entry in json.loads((await client.response())[2])["data"]} == {"a", "b"}


async def test_another_engine_is_tried_when_nothing_was_sent() -> None:
    async with gateway(engines=2) as setup:
        dead, alive = setup.engines
        await dead.stop()
        client = await setup.client()
        for _ in range(4):
            await client.ask()
            (await alive.next()).json({})
            assert (await client.response())[0] == 200
        await alive.stop()
        await eventually(lambda: not (any(engine.open_connections for engine in setup.gateway.statistics().engines)))
        await client.ask()
        status, headers, _ = await client.response()
        assert status == 502
        assert headers["x-stopguard-retry"] == "safe; reason=never dispatched"
        assert headers["x-should-retry"] == "true"
        for _ in range(5):
            await setup.next_settled()
        setup.assert_nothing_left()


async def test_an_ejected_engine_returns() -> None:
    settings = EngineSettings(failures_to_eject=1, ejected_seconds=0.05, refresh_seconds=0.05)
    async with gateway(engines=2, engine_settings=settings) as setup:
        dead, alive = setup.engines
        port = dead.port
        await dead.stop()
        client = await setup.client()
        await client.ask()
        (await alive.next()).json({})
        await client.response()
        member = next(each for each in setup.gateway.fleet.members if each.engine.base_url.endswith(str(port)))
        member.eject(0.0)
        await dead.start(port)
        await eventually(lambda: member.healthy)


async def test_shutdown_drains_then_stops_and_tells() -> None:
    async with gateway() as setup:
        client, seen, _ = await start_stream(setup)
        idle = await setup.client()
        closing = asyncio.create_task(setup.gateway.shutdown(drain_seconds=0.05))
        received = await client.until(b"[DONE]")
        assert events(received)[-2]["stopguard"]["code"] == "shutdown"
        async with asyncio.timeout(LIMIT):
            await seen.closed.wait()
            assert await closing == 0
        assert await idle.to_end() == b""
        assert (await setup.next_settled()).ledgers.stop.semantics == "fail"
        setup.assert_nothing_left()


async def test_shutdown_lets_requests_finish() -> None:
    async with gateway() as setup:
        client, seen, _ = await start_stream(setup)
        closing = asyncio.create_task(setup.gateway.shutdown(drain_seconds=LIMIT))
        await client.send(request())
        await asyncio.sleep(0)
        seen.end_stream()
        received = await client.to_end()
        assert b"[DONE]" in received
        async with asyncio.timeout(LIMIT):
            assert await closing == 0
        setup.assert_nothing_left()


async def test_an_upgrade_is_refused_clearly() -> None:
    async with gateway() as setup:
        client = await setup.client()
        await client.send(
            request(method="GET", path="/v1/realtime", headers={"Connection": "Upgrade", "Upgrade": "websocket"})
        )
        status, _, body = await client.response()
        assert status == 501
        assert b"websockets" in body
        assert setup.engine.requests.empty()


async def test_an_offer_of_http_2_is_declined_silently() -> None:
    async with gateway() as setup:
        client = await setup.client()
        await client.ask(headers={"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMA"})
        seen = await setup.engine.next()
        assert json.loads(seen.body)["model"] == "tiny"
        assert seen.header("upgrade") == seen.header("http2-settings") == seen.header("connection") == ""
        seen.json({})
        assert (await client.response())[0] == 200
        await client.ask()
        (await setup.engine.next()).json({})
        assert (await client.response())[0] == 200


async def test_limits_of_time_and_size_on_uploads() -> None:
    settings = GatewaySettings(
        timeouts=Timeouts(head_seconds=0.1, body_seconds=0.1, keep_alive_seconds=0.1), limits=Limits(body_bytes=1000)
    )
    async with gateway(settings) as setup:
        slow_head, slow_body, too_large, idle, chunked = [await setup.client() for _ in range(5)]
        await slow_head.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n")
        await slow_body.send(request()[:-3])
        await too_large.send(request(body=b"x" * 1001))
        head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        await chunked.send(head + b"200\r\n" + b"x" * 512 + b"\r\n200\r\n" + b"x" * 512)
        assert (await slow_head.response())[0] == 408
        assert (await slow_body.response())[0] == 408
        assert (await too_large.response())[0] == 413
        assert (await chunked.response())[0] == 413
        assert await idle.to_end() == b""
        assert setup.engine.requests.empty()
        setup.assert_nothing_left()


async def test_an_engine_whose_connections_may_not_be_used_again() -> None:
    class Pinning(OpenAIEngine):
        def __init__(self, name: str, base_url: str) -> None:
            super().__init__(name, base_url)
            self.reuse_connections = False

    async with gateway(engine_class=Pinning) as setup:
        client = await setup.client()
        ports = set()
        for _ in range(3):
            await client.ask()
            seen = await setup.engine.next()
            assert seen.header("connection") == "close"
            ports.add(id(seen))
            seen.json({})
            await client.response()
            async with asyncio.timeout(LIMIT):
                await seen.closed.wait()
        assert setup.gateway.statistics().engines[0].open_connections == 0
