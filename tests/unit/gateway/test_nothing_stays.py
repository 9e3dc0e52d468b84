"""The watcher may not leak: after a request nothing of it is left, not even garbage that only a collector finds."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from stopguard.gateway.settings import GatewaySettings, Idempotency
from tests.unit.gateway.bench import OK, Bench

ASK = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nIdempotency-Key: k\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n8\r\ndata: 1\n\r\n"


def served(bench: Bench) -> None:
    client, _ = bench.client()
    client.data_received(ASK)
    bench.engine.data_received(OK)
    client.connection_lost(None)


def left(bench: Bench) -> None:
    client, _ = bench.client()
    client.data_received(ASK)
    bench.engine.data_received(STREAM)
    client.connection_lost(ConnectionResetError())
    bench.engine.connection_lost(None)
    bench.new_engine()


def broken(bench: Bench) -> None:
    client, _ = bench.client()
    client.data_received(ASK)
    bench.engine.data_received(STREAM)
    bench.engine.connection_lost(ConnectionResetError())
    client.connection_lost(None)
    bench.new_engine()


def joined(bench: Bench) -> None:
    first, _ = bench.client()
    second, _ = bench.client()
    first.data_received(ASK)
    second.data_received(ASK)
    first.connection_lost(None)
    bench.engine.data_received(OK)
    second.connection_lost(None)


def refused(bench: Bench) -> None:
    client, _ = bench.client()
    client.data_received(b"nonsense\r\n\r\n")
    client.connection_lost(None)


def pipelined(bench: Bench) -> None:
    client, _ = bench.client()
    client.data_received(ASK * 3 + b"POST / HTTP/1.1\r\nHost")
    bench.engine.data_received(OK)
    client.connection_lost(None)
    bench.engine.connection_lost(None)
    bench.new_engine()


@pytest.mark.parametrize("life", [served, left, broken, joined, refused, pipelined])
def test_nothing_of_a_request_stays(life: Callable[[Bench], None]) -> None:
    bench = Bench(GatewaySettings(idempotency=Idempotency.JOIN))
    for _ in range(3):
        life(bench)
    gc.collect()
    gc.disable()
    try:
        for _ in range(50):
            life(bench)
        assert gc.collect() == 0, "a cycle of references was left behind"
    finally:
        gc.enable()
    statistics = bench.gateway.statistics()
    assert statistics.connections == statistics.requests == statistics.buffered_body_bytes == 0
    assert statistics.engines[0].open_connections == 1
    assert len(bench.gateway.book) == len(bench.gateway.controller.wheel) == len(bench.gateway._wheel) == 0
