"""The two protocol classes without sockets: deadlines, limits, flow control, and what is counted."""

from __future__ import annotations

import errno
import itertools
import struct
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stopguard.gateway.settings import GatewaySettings, HalfClose, Limits, Liveness, Policies, Timeouts
from stopguard.gateway.upstream import Upstream
from stopguard.stops import ClientPolicy, Effect, effects
from tests.unit.gateway.bench import OK, Bench, Transport, parse

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
ASK = HEAD % 2 + b"{}"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def the_tracked(bench: Bench) -> Any:
    return next(iter(bench.gateway.controller.tracked.values()))


# ---- the client's side -------------------------------------------------------------------------


def test_requests_beyond_the_pipelining_limit_are_dropped_and_the_connection_ends() -> None:
    bench = Bench(GatewaySettings(limits=Limits(pipelined_requests=3)))
    client, transport = bench.client()
    client.data_received(ASK * 10)
    assert bench.answer_all() == 4
    assert transport.ended == "close"
    assert transport.sent.count(b"HTTP/1.1 200") == 4
    assert transport.sent.count(b"connection: close") == 1
    assert bench.gateway.statistics().buffered_body_bytes == 0


def test_the_body_budget_is_shared_and_given_back() -> None:
    bench = Bench(GatewaySettings(limits=Limits(buffered_body_bytes=100)))
    first, _ = bench.client()
    first.data_received(HEAD % 90 + b"x" * 80)
    second, transport = bench.client()
    second.data_received(HEAD % 30 + b"y" * 30)
    assert transport.sent.startswith(b"HTTP/1.1 503")
    first.data_received(b"x" * 10)
    assert parse(bench.engine_transport.sent)[1] == b"x" * 90
    bench.answer_all()
    assert bench.gateway.statistics().buffered_body_bytes == 0


def test_a_slow_trickle_does_not_extend_a_deadline() -> None:
    bench = Bench(GatewaySettings(timeouts=Timeouts(head_seconds=5, body_seconds=7)))
    client, transport = bench.client()
    client.data_received(b"POST / HTTP/1.1\r\n")
    due = client.upload_due
    client.data_received(b"Host: a\r\n")
    assert client.upload_due == due
    client.data_received(b"Content-Length: 9\r\n\r\n")
    assert client.upload_due > due
    due = client.upload_due
    client.data_received(b"x")
    assert client.upload_due == due
    client.deadline_passed(due)
    assert transport.sent.startswith(b"HTTP/1.1 408")
    assert transport.ended == "eof"


def test_after_a_refusal_the_upload_is_read_on_for_a_moment() -> None:
    bench = Bench()
    client, transport = bench.client()
    client.data_received(b"nonsense\r\n\r\n")
    assert transport.sent.startswith(b"HTTP/1.1 400")
    assert transport.ended == "eof"
    client.data_received(b"more" * 1000)
    client.deadline_passed(client.deadline_at)
    assert transport.ended == "abort"


def test_an_idle_connection_is_closed_a_busy_one_is_not() -> None:
    bench = Bench()
    client, transport = bench.client()
    client.data_received(ASK)
    client.deadline_passed(1e9)
    assert transport.ended == ""
    bench.answer_all()
    client.deadline_passed(client.deadline_at)
    assert transport.ended == "close"


def test_the_client_is_asked_for_its_body_only_when_its_turn_has_come() -> None:
    bench = Bench()
    client, transport = bench.client()
    expecting = b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    client.data_received(ASK + expecting)
    assert b"100 Continue" not in transport.sent
    bench.answer_all()
    assert transport.sent.endswith(b"HTTP/1.1 100 Continue\r\n\r\n")
    client.data_received(b"{}")
    assert bench.answer_all() == 1


def test_too_large_an_expectation_is_refused_before_the_body_comes() -> None:
    bench = Bench(GatewaySettings(limits=Limits(body_bytes=10)))
    client, transport = bench.client()
    client.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 11\r\n\r\n")
    assert transport.sent.startswith(b"HTTP/1.1 413")


def test_no_new_request_begins_while_the_client_does_not_read() -> None:
    bench = Bench()
    client, _ = bench.client()
    client.pause_writing()
    client.data_received(ASK)
    assert bench.engine.exchange is None
    client.resume_writing()
    assert bench.answer_all() == 1


def test_a_full_client_pauses_its_engine_and_only_that() -> None:
    bench = Bench()
    client, _ = bench.client()
    client.data_received(ASK)
    client.pause_writing()
    assert not bench.engine_transport.reading
    client.resume_writing()
    assert bench.engine_transport.reading


def test_a_client_that_was_paused_when_its_request_began_keeps_its_engine_paused() -> None:
    bench = Bench()
    bench.engine.abort()
    bench.pool.idle.clear()
    client, _ = bench.client()
    exchanges = bench.pool.waiting
    bench.pool._making = {bench.engine} | {Upstream(bench.pool)}
    client.data_received(ASK)
    assert len(exchanges) == 1
    client.pause_writing()
    bench.new_engine()
    assert not bench.engine_transport.reading


def test_half_close_allow_answers_and_then_closes() -> None:
    bench = Bench(GatewaySettings(liveness=Liveness(half_close=HalfClose.ALLOW)))
    client, transport = bench.client()
    client.data_received(ASK)
    assert client.eof_received() is True
    bench.answer_all()
    assert transport.sent.startswith(b"HTTP/1.1 200")
    assert transport.ended == "close"
    idle, _ = bench.client()
    assert idle.eof_received() is False


def test_too_many_connections_are_told_so() -> None:
    bench = Bench(GatewaySettings(limits=Limits(connections=1)))
    bench.client()
    _, transport = bench.client()
    assert transport.sent.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in transport.sent


def test_a_bug_in_a_callback_is_not_taken_for_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    client, transport = bench.client()
    monkeypatch.setattr("stopguard.gateway.downstream.read_request", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        client.data_received(ASK)
    assert transport.sent == b""


def test_engine_control_routes_are_closed_to_clients() -> None:
    bench = Bench()
    bench.gateway.fleet.control_paths = frozenset({"/abort_everything"})
    client, transport = bench.client()
    client.data_received(b"POST /abort_everything HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}")
    assert transport.sent.startswith(b"HTTP/1.1 403")
    assert bench.engine.exchange is None
    bench.gateway.settings = msgspec.structs.replace(bench.gateway.settings, allow_engine_control=True)
    client.data_received(b"POST /abort_everything HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}")
    assert bench.answer_all() == 1


# ---- the engine's side --------------------------------------------------------------------------


def test_a_resting_connection_that_speaks_is_closed() -> None:
    bench = Bench()
    bench.engine.data_received(OK)
    assert bench.engine_transport.ended == "abort"


def test_a_connection_that_rested_too_long_is_not_used_again() -> None:
    bench = Bench()
    bench.new_engine()
    old, fresh = bench.pool.idle
    bench.pool.idle_seconds = 4.0
    fresh.idle_since -= 5.0
    client, _ = bench.client()
    client.data_received(ASK)
    assert fresh.exchange is None
    assert bench.engine_transport.ended == "abort"
    assert old.exchange is not None
    assert not bench.pool.close_rested(1e9)


def test_interim_responses_end_here() -> None:
    bench = Bench()
    client, transport = bench.client()
    client.data_received(ASK)
    bench.engine.data_received(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK)
    assert transport.sent.startswith(b"HTTP/1.1 200 OK\r\n")
    assert transport.sent.endswith(b"ok")
    assert bench.engine in bench.pool.idle


@pytest.mark.parametrize(
    ("response", "reused"),
    [
        (OK, True),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", False),
        (OK + b"x", False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
        (b"HTTP/1.1 204 No Content\r\n\r\nx", False),
    ],
)
def test_a_connection_is_used_again_only_without_any_doubt(response: bytes, reused: bool) -> None:
    bench = Bench()
    client, transport = bench.client()
    client.data_received(ASK)
    bench.engine.data_received(response)
    assert (bench.engine in bench.pool.idle) == reused
    assert (bench.engine_transport.ended == "abort") == (not reused)
    assert not transport.sent.endswith(b"x")


def test_a_response_to_head_has_no_body_whatever_it_says() -> None:
    bench = Bench()
    client, transport = bench.client()
    client.data_received(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n")
    bench.engine.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    assert bench.engine.exchange is None
    assert transport.sent.endswith(b"\r\n\r\n")


def test_bytes_too_many_in_a_later_read_reach_nobody() -> None:
    bench = Bench()
    client, transport = bench.client()
    client.data_received(ASK)
    bench.engine.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")
    bench.engine.data_received(b"okHTTP/1.1 200 OK\r\n")
    assert transport.sent.endswith(b"\r\n\r\nok")
    assert bench.engine_transport.ended == "abort"


def test_the_engine_is_told_in_the_same_moment() -> None:
    """Not when the event loop gets round to closing the client's socket."""
    bench = Bench()
    client, _ = bench.client()
    client.data_received(ASK)
    client.eof_received()
    assert bench.engine_transport.ended == "abort"
    assert len(bench.gateway.book) == 0


class KernelSocket:
    """Heard of its peer 52 ms ago, or has no TCP to say so of."""

    def __init__(self, *, tcp: bool) -> None:
        self._tcp = tcp

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        if not self._tcp:
            raise OSError(errno.EOPNOTSUPP, "not TCP")
        return struct.pack("=56xI", 52)[:size]


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO as Linux gives it")
@pytest.mark.parametrize(
    ("socket", "error", "late_seconds"),
    [
        (KernelSocket(tcp=True), None, 0.052),
        (KernelSocket(tcp=True), TimeoutError(errno.ETIMEDOUT, "x"), 0.052),
        (KernelSocket(tcp=True), ConnectionResetError(), None),
        (KernelSocket(tcp=False), None, None),
        (None, None, None),
    ],
    ids=["end of file", "vanished", "reset", "not TCP", "no socket"],
)
def test_the_books_say_how_late_we_knew(socket: Any, error: OSError | None, late_seconds: float | None) -> None:
    bench = Bench()
    stops: list[Any] = []

    def keep(effect: Effect, at: float) -> None:
        if isinstance(effect, effects.Settled):
            stops.append(effect.tracked.ledgers.stop)

    bench.gateway.observers.append(keep)
    client, _ = bench.client(socket)
    client.data_received(ASK)
    if error is None:
        client.eof_received()
    client.connection_lost(error)
    (stop,) = stops
    known = None if stop.occurred_at is None else round(stop.observed_at - stop.occurred_at, 6)
    assert known == late_seconds


@pytest.mark.parametrize("data", [chunk(b"data: 2\n\n"), chunk(b"data: 2\n\n") * 2], ids=["one chunk", "two chunks"])
def test_after_the_client_left_nothing_is_written_although_the_engine_goes_on(data: bytes) -> None:
    drain = ClientPolicy(grace_seconds=None)
    bench = Bench(GatewaySettings(policies=Policies(default=drain)))
    client, transport = bench.client()
    client.data_received(ASK)
    for piece in (STREAM, chunk(b"data: 1\n\n"), chunk(b"data: 1\n\n")):
        bench.engine.data_received(piece)
    tracked = the_tracked(bench)
    client.eof_received()
    sent, counted = len(transport.sent), tracked.ledgers.bytes_sent
    bench.engine.data_received(data)
    bench.engine.data_received(b"0\r\n\r\n")
    assert (len(transport.sent), tracked.ledgers.bytes_sent) == (sent, counted)
    assert tracked.ledgers.tokens_delivered == 2
    assert tracked.ledgers.tokens_computed == 2 + data.count(b"data:")
    assert len(bench.gateway.book) == 0


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (chunk(b"data: 1\n\n"), True),
        (chunk(b"data: 1\r\n\r\n"), True),
        (b"", True),
        (chunk(b"data: a whole chunk, but half an event"), False),
        (chunk(b"data: one line of two, as long as it may be\n"), False),
        (b"20\r\ndata: half a chunk", False),
    ],
)
def test_an_error_event_is_only_put_between_whole_events(last: bytes, told: bool) -> None:
    bench = Bench()
    client, transport = bench.client()
    client.data_received(ASK)
    bench.engine.data_received(STREAM)
    for piece in (chunk(b"data: an event of the usual length\n\n"), last):
        if piece:
            bench.engine.data_received(piece)
    bench.engine.connection_lost(ConnectionResetError())
    assert (b"engine_lost" in transport.sent) == told
    assert transport.ended == ("close" if told else "abort")
    assert not transport.sent.endswith(b"0\r\n\r\n")
    assert len(bench.gateway.book) == 0


@given(st.lists(st.integers(0, 400), max_size=30))
def test_a_response_passes_unchanged_and_its_events_are_counted_however_it_is_cut(cuts: list[int]) -> None:
    bench = Bench()
    client, transport = bench.client()
    client.data_received(ASK)
    events = [b'data: {"x":"data: \\ndata: y"}\n\n', b"event: a\ndata: 2\n\n", b": comment\n\n", b"data: 3\r\n\r\n"]
    body = b"".join(chunk(event) for event in events) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    raw = STREAM + body
    tracked = the_tracked(bench)
    edges = [0, *sorted(at % len(raw) for at in cuts), len(raw)]
    for start, end in itertools.pairwise(edges):
        if start != end:
            bench.engine.data_received(raw[start:end])
    assert transport.sent.partition(b"\r\n\r\n")[2] == body
    assert tracked.ledgers.tokens_delivered == 3
    assert tracked.ledgers.bytes_sent == len(transport.sent)
    assert len(bench.gateway.book) == 0


def test_a_pool_makes_a_connection_for_everybody_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that makes a connection goes on for a moment after that connection has served somebody."""
    import asyncio

    async def scenario() -> int:
        bench = Bench()
        bench.pool.idle.clear()
        loop = asyncio.get_running_loop()
        made: list[Upstream] = []
        hold = asyncio.Event()

        async def create_connection(factory: Any, *_: Any, **__: Any) -> None:
            made.append(factory())
            made[-1].connection_made(Transport())  # type: ignore[arg-type]
            await hold.wait()

        monkeypatch.setattr(loop, "create_connection", create_connection)
        first, _ = bench.client()
        first.data_received(ASK)
        while not made:  # noqa: ASYNC110  (the loop has to turn, nothing else)
            await asyncio.sleep(0)
        second, _ = bench.client()
        second.data_received(ASK)
        while len(made) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        hold.set()
        waiting = len(bench.pool.waiting)
        bench.pool.close()
        await asyncio.sleep(0)
        return waiting

    assert asyncio.run(asyncio.wait_for(scenario(), 5)) == 0
