"""A real gateway before the reference engine, a seeded storm of clients, a real Prometheus, a real OTLP receiver.

What Prometheus says at the end equals the gateway's book; each client's trace goes on to the engine untouched and
comes out as spans under the client's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from stopguard.engines.openai import OpenAIEngine
from stopguard.gateway.downstream import Downstream
from stopguard.gateway.exchange import Exchange
from stopguard.gateway.head import RequestHead
from stopguard.gateway.server import Gateway, loop_factory
from stopguard.gateway.settings import EngineSettings, GatewaySettings, Listener
from stopguard.ledger import Account
from stopguard.telemetry import Telemetry, create_telemetry, create_tracer
from tests.dashboards.test_prometheus import number
from tests.dashboards.tools import needs
from tests.dashboards.world import metrics_server, prometheus
from tests.integration.serving import chat, engine
from tests.unit.telemetry.otlp import Receiver, attributes, receiver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

REQUESTS = 120
SECONDS = 6.0
SEED = 7


class WatchedGateway(Gateway):
    """A gateway with telemetry at its observers, and at its admission."""

    def __init__(self, url: str, received: Receiver) -> None:
        listener = Listener(host="127.0.0.1", port=0)
        super().__init__([(OpenAIEngine("local", url), EngineSettings())], GatewaySettings(listeners=(listener,)))
        members = {member.engine.name: member for member in self.fleet.members}
        self.tracer = create_tracer(received.url)
        self.telemetry: Telemetry = create_telemetry(
            self.book,
            self.controller,
            [member.profile for member in members.values()],
            lambda name: tuple(members[name].models or ()),
            healthy=lambda name: members[name].healthy,
            tracer=self.tracer,
        )
        self.observers.append(self.telemetry)

    def begin(self, client: Downstream, head: RequestHead, body: bytes) -> None:
        super().begin(client, head, body)
        exchange = client.serving
        if isinstance(exchange, Exchange) and exchange.head is head:
            self.telemetry.admitted(exchange.tracked, head.forward, exchange.kind.value)


class Outcome:
    """What the clients saw."""

    def __init__(self) -> None:
        self.ended = 0
        self.left = 0
        self.traces: set[str] = set()


async def _client(base: str, seen: Outcome, rng: random.Random, wait: float) -> None:
    await asyncio.sleep(wait)
    trace_id = f"{rng.getrandbits(128) | 1:032x}"
    seen.traces.add(trace_id)
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01", "tracestate": "vendor=1"}
    leave_after = rng.randrange(1, 10) if rng.random() < 0.5 else None
    # Without TLS: making its context takes longer than a request here, and holds up the gateway in the same loop.
    async with httpx.AsyncClient(trust_env=False, timeout=30.0, verify=False) as client:
        body = {**chat(rng.randrange(4, 24)), "model": "base" if rng.random() < 0.7 else f"invented-{rng.random()}"}
        if leave_after is not None:
            body["max_tokens"] = 1000
        async with client.stream("POST", f"{base}/v1/chat/completions", json=body, headers=headers) as response:
            # The engine refuses what it does not serve; for the gateway that is a request that ran to its end.
            assert response.status_code == (200 if body["model"] == "base" else 404)
            lines = 0
            async for line in response.aiter_lines():
                lines += line.startswith("data: ")
                if leave_after is not None and lines >= leave_after:
                    seen.left += 1
                    return
            seen.ended += 1


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WatchedGateway, Outcome, Receiver, Any]]:
    program = needs("prometheus", "prometheus")
    folder = tmp_path_factory.mktemp("gateway")
    seen = Outcome()
    with engine("--step-seconds", "0.01") as url, receiver() as received:
        gateway = WatchedGateway(url, received)
        assert gateway.tracer is not None
        with (
            contextlib.closing(gateway.tracer),
            metrics_server({"gateway": gateway.telemetry.render}) as port,
            prometheus(program, folder, {"gateway": "/gateway/metrics"}, f"127.0.0.1:{port}") as address,
        ):
            _play(gateway, seen)
            gateway.tracer.close()
            time.sleep(2.5)  # the last scrape sees the books at rest
            yield gateway, seen, received, type("At", (), {"address": address})


def _play(gateway: WatchedGateway, seen: Outcome) -> None:
    async def play() -> None:
        await gateway.start()
        try:
            assert await gateway.fleet.refresh(gateway.fleet.members[0])
            await asyncio.sleep(1.2)  # one scrape that sees every series at zero
            rng = random.Random(SEED)
            base = f"http://127.0.0.1:{gateway.addresses[0][1]}"
            async with asyncio.TaskGroup() as clients:
                for _ in range(REQUESTS):
                    own = random.Random(rng.getrandbits(64))
                    clients.create_task(_client(base, seen, own, own.uniform(0, SECONDS)))
        finally:
            assert await gateway.shutdown() == 0

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(play())


def test_the_numbers_equal_the_books(played: tuple[WatchedGateway, Outcome, Receiver, Any]) -> None:
    gateway, seen, _, scraped = played
    counts = gateway.book.statistics()
    assert (counts.open_requests, counts.opened) == (0, REQUESTS)
    assert number(scraped, "sum(stopguard_requests)") == 0
    assert number(scraped, "sum(stopguard_ledger_open)") == 0
    assert number(scraped, "sum(stopguard_stops_total)") == REQUESTS
    assert number(scraped, 'sum(stopguard_stops_total{semantics="finish"})') == seen.ended > 20
    # This engine can prove nothing, so every client that left is a stop without evidence, and none was observed.
    assert number(scraped, 'sum(stopguard_stops_total{outcome="unconfirmed"})') == seen.left > 20
    assert number(scraped, "sum(stopguard_stop_to_abort_sent_seconds_count)") == seen.left
    assert number(scraped, "sum(stopguard_stop_to_settled_seconds_count)") == 0
    for disposition, account in (("delivered", Account.OUTPUT_DELIVERED), ("discarded", Account.OUTPUT_DISCARDED)):
        shown = number(scraped, f'sum(stopguard_tokens_total{{disposition="{disposition}"}})')
        assert shown == gateway.book.total(account)
    assert number(scraped, "sum(stopguard_engine_up)") == 1
    # Without a probe the step time is the pace of the streams that ran to their end: about 10 ms here.
    assert 0.005 < number(scraped, "stopguard_engine_step_seconds") < 0.1


def test_invented_models_are_one_label(played: tuple[WatchedGateway, Outcome, Receiver, Any]) -> None:
    _, _, _, scraped = played
    shown = {
        series["metric"]["model"]
        for series in httpx.get(
            f"{scraped.address}/api/v1/query",
            params={"query": "count by (model) (stopguard_requests)"},
            trust_env=False,
        ).json()["data"]["result"]
    }
    assert "other" in shown
    assert not [model for model in shown if model.startswith("invented")]


def test_every_client_finds_its_trace(played: tuple[WatchedGateway, Outcome, Receiver, Any]) -> None:
    gateway, seen, received, _ = played
    servers = [span for span in received.spans if span.kind == 2]
    stops = [span for span in received.spans if span.name == "stopguard.stop"]
    assert {span.trace_id.hex() for span in servers} == seen.traces
    assert {span.parent_span_id.hex() for span in servers} == {"00f067aa0ba902b7"}
    assert len(stops) == seen.left
    assert Counter(attributes(span)["error.type"] for span in stops) == {"stop_unconfirmed": seen.left}
    assert gateway.tracer is not None
    assert gateway.tracer.dropped == 0
    # Nothing of a request's trace outlives it.
    assert not gateway.controller.tracked
    assert not [thread for thread in threading.enumerate() if thread.name == "tracing"]


@pytest.mark.parametrize("spelling", ["traceparent", "Traceparent"])
def test_the_context_goes_on_to_the_engine_as_it_came(spelling: str) -> None:
    heads: list[bytes] = []

    async def engine_side(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        heads.append(head)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async def play(received: Receiver) -> None:
        server = await asyncio.start_server(engine_side, "127.0.0.1", 0)
        gateway = WatchedGateway(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", received)
        await gateway.start()
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.post(
                f"http://127.0.0.1:{gateway.addresses[0][1]}/v1/chat/completions",
                json=chat(1, stream=False),
                headers={
                    spelling: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
                    "tracestate": "congo=t61rcWkgMzE",
                },
            )
        await gateway.shutdown()
        assert gateway.tracer is not None
        gateway.tracer.close()
        server.close()
        await server.wait_closed()

    with receiver() as received, asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(play(received))
    (head,) = [head for head in heads if head.startswith(b"POST")]
    assert b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n" in head.replace(b"Tr", b"tr")
    assert b"tracestate: congo=t61rcWkgMzE\r\n" in head
    assert [span.parent_span_id.hex() for span in received.spans] == ["b7ad6b7169203331"]
