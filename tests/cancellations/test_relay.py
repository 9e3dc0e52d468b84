"""The relay as clients see it, over real sockets: what passes, and what is left afterwards."""

from __future__ import annotations

import json

import pytest

from tests.cancellations.peers import gateway, request

pytestmark = pytest.mark.anyio


async def test_a_small_request_passes_and_settles() -> None:
    async with gateway() as setup:
        client = await setup.client()
        await client.ask(headers={"X-Custom": "kept", "Connection": "keep-alive"})
        seen = await setup.engine.next()
        assert seen.head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
        assert seen.header("x-custom") == "kept"
        assert seen.header("connection") == ""
        assert json.loads(seen.body) == {"model": "tiny", "messages": []}
        seen.json({"choices": [], "usage": {"completion_tokens": 7}}, extra=b"x-engine: yes\r\nkeep-alive: 5\r\n")
        status, headers, body = await client.response()
        assert status == 200
        assert headers["x-engine"] == "yes"
        assert "keep-alive" not in headers
        assert headers["x-stopguard-id"] == headers["x-request-id"] == seen.header("x-request-id")
        assert json.loads(body) == {"choices": [], "usage": {"completion_tokens": 7}}
        tracked = await setup.next_settled()
        assert tracked.ledgers.tokens_delivered == 7
        assert tracked.ledgers.stop is None
        setup.assert_nothing_left()
        client.close()


async def test_a_stream_passes_byte_for_byte_and_its_events_are_counted() -> None:
    async with gateway() as setup:
        client = await setup.client()
        await client.ask(stream=True)
        seen = await setup.engine.next()
        seen.begin_stream()
        for text in ("a", "b", "data: c"):
            seen.event(text)
        seen.end_stream()
        received = await client.until(b"\r\n0\r\n\r\n")
        body = received.partition(b"\r\n\r\n")[2]
        assert body.startswith(b'32\r\ndata: {"choices": [{"delta": {"content": "a"}}]}\n\n\r\n')
        assert body.endswith(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        tracked = await setup.next_settled()
        assert tracked.ledgers.tokens_delivered == 3
        setup.assert_nothing_left()
        client.close()


async def test_connections_are_used_again_on_both_sides() -> None:
    async with gateway() as setup:
        client = await setup.client()
        before = setup.engine.accepted
        for _ in range(3):
            await client.ask()
            (await setup.engine.next()).json({})
            assert (await client.response())[0] == 200
        assert setup.engine.accepted == before + 1
        client.close()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with gateway() as setup:
        client = await setup.client()
        await client.send(request(user="1") + request(user="2") + request(user="3"))
        for number in "123":
            seen = await setup.engine.next()
            assert json.loads(seen.body)["user"] == number
            assert setup.engine.requests.empty()
            seen.json({"answer": number})
            assert json.loads((await client.response())[2]) == {"answer": number}
        setup.assert_nothing_left()
        client.close()


async def test_an_http_1_0_client_gets_a_stream_without_chunks() -> None:
    async with gateway() as setup:
        client = await setup.client()
        await client.ask(stream=True, version="1.0")
        seen = await setup.engine.next()
        seen.begin_stream()
        seen.event("a")
        seen.end_stream()
        received = await client.to_end()
        head, _, body = received.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert body == b'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: [DONE]\n\n'
        client.close()


async def test_the_client_is_asked_to_go_on_with_its_upload() -> None:
    async with gateway() as setup:
        client = await setup.client()
        whole = request(headers={"Expect": "100-continue"})
        head, _, body = whole.partition(b"\r\n\r\n")
        await client.send(head + b"\r\n\r\n")
        await client.until(b"HTTP/1.1 100 Continue\r\n\r\n")
        client.received = b""
        await client.send(body)
        (await setup.engine.next()).json({})
        assert (await client.response())[0] == 200
        client.close()


async def test_a_chunked_upload_reaches_the_engine_with_its_length() -> None:
    async with gateway() as setup:
        client = await setup.client()
        head = request(headers={"Transfer-Encoding": "chunked"}).partition(b"\r\n\r\n")[0]
        head = b"\r\n".join(line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length"))
        await client.send(head + b'\r\n\r\n8\r\n{"model"\r\n8;x=y\r\n:"tiny"}\r\n0\r\nX-Trailer: a\r\n\r\n')
        seen = await setup.engine.next()
        assert seen.body == b'{"model":"tiny"}'
        assert seen.header("x-trailer") == ""
        seen.json({})
        assert (await client.response())[0] == 200
        client.close()


async def test_head_options_and_unknown_routes_pass() -> None:
    async with gateway() as setup:
        client = await setup.client()
        await client.send(request(method="HEAD", path="/docs"))
        seen = await setup.engine.next()
        seen.write(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n")
        assert b"content-length: 500" in await client.until(b"\r\n\r\n")
        client.received = b""
        await client.send(
            request(method="OPTIONS", path="/v1/chat/completions", headers={"Origin": "https://a.example"})
        )
        seen = await setup.engine.next()
        assert seen.header("origin") == "https://a.example"
        seen.write(b"HTTP/1.1 204 No Content\r\naccess-control-allow-origin: *\r\n\r\n")
        assert b"access-control-allow-origin: *" in await client.until(b"\r\n\r\n")
        await setup.next_settled()
        await setup.next_settled()
        setup.assert_nothing_left()
        client.close()
