"""One peer for each window in which a client can leave, and for each way of leaving.

In every window the engine must see our connection close, the books must settle, and nothing may be left.
What a window is: the last thing that happened before the client left.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from stopguard.engines import OpenAIEngine
from stopguard.gateway.server import Gateway
from stopguard.gateway.settings import (
    EngineSettings,
    GatewaySettings,
    HalfClose,
    Listener,
    Liveness,
    Policies,
    Timeouts,
)
from stopguard.ledger import Book, Evidence
from stopguard.stops import ClientPolicy
from tests.cancellations.peers import LIMIT, Client, Seen, Setup, eventually, gateway, request

pytestmark = pytest.mark.anyio

WAYS = ["fin", "rst", "half-close"]
METHODS = {"fin": "eof", "half-close": "eof", "rst": "reset"}
STREAMING = [True, False]


async def assert_stopped(setup: Setup, seen: Seen | None, way: str) -> None:
    """The engine saw the end, the stop has the right cause, and nothing is left."""
    tracked = await setup.next_settled()
    stop = tracked.ledgers.stop
    assert (stop.semantics, stop.source, stop.reason) == ("cancel", "client", METHODS[way])
    if seen is not None:
        async with asyncio.timeout(LIMIT):
            await seen.closed.wait()
        assert stop.outcome == "unconfirmed"
        assert stop.evidence is Evidence.SENT
    else:
        assert stop.outcome == "confirmed"
        assert stop.attempts == 0
    setup.assert_nothing_left()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", STREAMING)
async def test_before_the_engines_response(way: str, stream: bool) -> None:
    async with gateway() as setup:
        client = await setup.client()
        await client.ask(stream=stream)
        seen = await setup.engine.next()
        client.leave(way)
        await assert_stopped(setup, seen, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", STREAMING)
async def test_after_the_response_head(way: str, stream: bool) -> None:
    async with gateway() as setup:
        client = await setup.client()
        await client.ask(stream=stream)
        seen = await setup.engine.next()
        if stream:
            seen.begin_stream()
        else:
            seen.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n")
        await client.until(b"\r\n\r\n")
        client.leave(way)
        await assert_stopped(setup, seen, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", STREAMING)
async def test_in_the_middle_of_the_body(way: str, stream: bool) -> None:
    async with gateway() as setup:
        client = await setup.client()
        await client.ask(stream=stream)
        seen = await setup.engine.next()
        if stream:
            seen.begin_stream()
            seen.event("half")
        else:
            seen.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
        await client.until(b"half")
        client.leave(way)
        await assert_stopped(setup, seen, way)


@pytest.mark.parametrize("way", WAYS)
async def test_while_it_still_uploads(way: str) -> None:
    async with gateway() as setup:
        client = await setup.client()
        await client.send(request()[:-5])
        other = await setup.client()
        # The other request comes after the cut one, so that the gateway has read both when it answers.
        await other.ask()
        (await setup.engine.next()).json({})
        await other.response()
        assert setup.gateway.statistics().buffered_body_bytes > 0
        client.leave(way)
        await eventually(lambda: setup.gateway.statistics().connections == 1)
        assert setup.engine.requests.empty()
        await setup.next_settled()
        setup.assert_nothing_left()
        other.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", STREAMING)
async def test_in_our_queue(way: str, stream: bool) -> None:
    async with gateway(engine_settings=EngineSettings(concurrent_requests=1)) as setup:
        first = await setup.client()
        await first.ask(stream=stream)
        running = await setup.engine.next()
        second = await setup.client()
        await second.ask(stream=stream)
        await eventually(lambda: setup.gateway.statistics().queued > 0)
        second.leave(way)
        tracked = await setup.next_settled()
        assert tracked.ledgers.stop.reason == METHODS[way]
        assert tracked.ledgers.stop.outcome == "confirmed"
        running.json({})
        assert (await first.response())[0] == 200
        await setup.next_settled()
        assert setup.engine.requests.empty()
        setup.assert_nothing_left()
        first.close()


@contextlib.asynccontextmanager
async def unreachable_engine() -> AsyncIterator[int]:
    """A port that accepts no connection and refuses none: its backlog is full."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(0)
    port: int = listening.getsockname()[1]
    fillers = []
    for _ in range(4):
        filler = socket.socket()
        filler.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            filler.connect(("127.0.0.1", port))
        fillers.append(filler)
    try:
        yield port
    finally:
        for filler in fillers:
            filler.close()
        listening.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", STREAMING)
async def test_while_we_connect_to_the_engine(way: str, stream: bool) -> None:
    async with unreachable_engine() as port:
        engine = OpenAIEngine("far", f"http://127.0.0.1:{port}")
        running = Gateway([(engine, EngineSettings())], GatewaySettings(listeners=(Listener(port=0),)), book=Book())
        await running.start()
        setup = Setup(running, [None])  # type: ignore[list-item]
        client = await setup.client()
        await client.ask(stream=stream)
        await eventually(lambda: running.statistics().engines[0].waiting_for_connection == 1)
        client.leave(way)
        await assert_stopped(setup, None, way)
        setup.close_clients()
        await running.shutdown(drain_seconds=0.01)


@pytest.mark.parametrize("way", WAYS)
async def test_between_two_requests_is_no_stop(way: str) -> None:
    async with gateway() as setup:
        client = await setup.client()
        await client.ask()
        (await setup.engine.next()).json({})
        await client.response()
        client.leave(way)
        await eventually(lambda: setup.gateway.statistics().connections == 0)
        assert (await setup.next_settled()).ledgers.stop is None
        assert not any(type(effect).__name__ == "StopBegan" for effect in setup.effects)
        setup.assert_nothing_left()


@pytest.mark.parametrize("way", WAYS)
async def test_after_the_last_byte_is_no_stop(way: str) -> None:
    """Finished beats gone: the client leaves without reading the response, which is complete."""
    async with gateway() as setup:
        client = await setup.client()
        await client.ask(stream=True)
        seen = await setup.engine.next()
        seen.begin_stream()
        seen.event("all")
        seen.end_stream()
        tracked = await setup.next_settled()
        client.leave(way)
        assert tracked.ledgers.stop is None
        assert not any(type(effect).__name__ == "StopBegan" for effect in setup.effects)
        setup.assert_nothing_left()


@pytest.mark.parametrize("way", WAYS)
async def test_with_requests_pipelined_behind(way: str) -> None:
    """The one in progress is stopped, those behind it never begin."""
    async with gateway() as setup:
        client = await setup.client()
        await client.send(request(user="1") + request(user="2"))
        seen = await setup.engine.next()
        client.leave(way)
        await assert_stopped(setup, seen, way)
        assert setup.engine.requests.empty()


async def test_more_requests_than_may_wait_do_not_hide_the_end() -> None:
    """A client that floods its connection is still read, so that its end is seen."""
    async with gateway() as setup:
        client = await setup.client()
        await client.send(request() * 40 + b"garbage" * 10_000)
        seen = await setup.engine.next()
        client.close()
        async with asyncio.timeout(LIMIT):
            await seen.closed.wait()
        await setup.next_settled()
        setup.assert_nothing_left()


async def test_a_half_close_may_mean_that_the_client_waits() -> None:
    settings = GatewaySettings(liveness=Liveness(half_close=HalfClose.ALLOW))
    async with gateway(settings) as setup:
        client = await setup.client()
        await client.ask()
        seen = await setup.engine.next()
        client.half_close()
        seen.json({"late": True})
        assert b'{"late": true}' in await client.to_end()
        assert (await setup.next_settled()).ledgers.stop is None
        setup.assert_nothing_left()
        client.close()


async def test_a_client_that_stops_reading_is_found_by_the_stall_deadline() -> None:
    settings = GatewaySettings(timeouts=Timeouts(stall_seconds=0.05))
    async with gateway(settings) as setup:
        client = await setup.client(receive_buffer=4096)
        await client.ask(stream=True)
        seen = await setup.engine.next()
        seen.begin_stream()
        piece = b"x" * 65_536
        chunk = b"%x\r\n%b\r\n" % (len(piece), piece)
        async with asyncio.timeout(LIMIT):
            while not seen.closed.is_set():
                seen.write(chunk)
                await asyncio.sleep(0)
        tracked = await setup.next_settled()
        assert tracked.ledgers.stop.reason == "stall"
        setup.assert_nothing_left()
        client.close()


async def test_a_slow_reader_slows_the_engine_down_and_loses_nothing() -> None:
    async with gateway() as setup:
        client = await setup.client(receive_buffer=4096)
        await client.ask(stream=True)
        seen = await setup.engine.next()
        seen.begin_stream()
        size = 32 * 1024 * 1024
        seen.write(b"%x\r\n" % size + b"y" * size + b"\r\n0\r\n\r\n")
        seen.transport.set_write_buffer_limits(0)
        member = setup.gateway.fleet.members[0]
        async with asyncio.timeout(LIMIT):
            exchange = None
            while exchange is None or not exchange._paused:
                await asyncio.sleep(0)
                exchange = next(iter(setup.gateway.registry.alive.values()), None)
        assert member.load == 1
        await client.until(b"\r\n\r\n")
        got = len(client.received.partition(b"\r\n\r\n")[2])
        async with asyncio.timeout(30):
            loop = asyncio.get_running_loop()
            while got < size + 10 + len(b"%x\r\n" % size) - 3:
                data = await loop.sock_recv(client.connection, 1 << 20)
                assert data
                got += len(data)
        assert (await setup.next_settled()).ledgers.stop is None
        setup.assert_nothing_left()
        client.close()


@pytest.mark.parametrize(
    ("policy", "outcome"),
    [(ClientPolicy(grace_seconds=None), "raced_finish"), (ClientPolicy(grace_seconds=5.0), "raced_finish")],
)
async def test_a_drained_request_may_finish_for_nobody(policy: ClientPolicy, outcome: str) -> None:
    settings = GatewaySettings(policies=Policies(by_route={"chat": policy}))
    async with gateway(settings) as setup:
        client = await setup.client()
        await client.ask(stream=True)
        seen = await setup.engine.next()
        seen.begin_stream()
        seen.event("seen")
        await client.until(b"seen")
        client.close()
        await eventually(lambda: setup.gateway.statistics().connections == 0)
        assert not seen.closed.is_set()
        seen.event("for nobody")
        seen.end_stream()
        tracked = await setup.next_settled()
        assert tracked.ledgers.stop is None or tracked.ledgers.stop.outcome == outcome
        assert tracked.ledgers.tokens_delivered == 1
        assert tracked.ledgers.tokens_computed == 2
        setup.assert_nothing_left()


async def test_grace_ends() -> None:
    settings = GatewaySettings(policies=Policies(default=ClientPolicy(grace_seconds=0.02)))
    async with gateway(settings) as setup:
        client = await setup.client()
        await client.ask(stream=True)
        seen = await setup.engine.next()
        client.close()
        tracked = await setup.next_settled()
        assert tracked.ledgers.stop.reason == "grace_ended"
        async with asyncio.timeout(LIMIT):
            await seen.closed.wait()
        setup.assert_nothing_left()


async def test_sixty_four_clients_leave_at_once() -> None:
    async with gateway() as setup:
        clients = [await setup.client() for _ in range(64)]
        for client in clients:
            await client.ask(stream=True)
        seen = [await setup.engine.next() for _ in clients]
        for one in seen:
            one.begin_stream()
            one.event("x")
        for client in clients:
            await client.until(b"data:")
        for number, client in enumerate(clients):
            client.leave(WAYS[number % 3])
        async with asyncio.timeout(LIMIT):
            for one in seen:
                await one.closed.wait()
        for _ in clients:
            await setup.next_settled()
        setup.assert_nothing_left()


def test_the_helper_client_really_sends_what_its_name_says() -> None:
    """A fin and a rst must differ on the wire, or half of this file tests nothing."""
    results = {}
    for way in ("fin", "rst"):
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        connection = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
        Client(connection).leave(way)
        try:
            results[way] = accepted.recv(1)
        except ConnectionResetError:
            results[way] = "reset"  # type: ignore[assignment]
        accepted.close()
        listening.close()
    assert results == {"fin": b"", "rst": "reset"}
