"""Identifiers, routes, terminal events, names, and how a connection's end is called."""

from __future__ import annotations

import errno
import json
from typing import Any

import pytest

from stopguard.engines import OpenAIEngine
from stopguard.errors import ConfigurationError
from stopguard.gateway import terminal
from stopguard.gateway.fleet import Fleet, place_in_body
from stopguard.gateway.identifiers import ID_LENGTH, IdSource, is_request_id
from stopguard.gateway.liveness import loss_method
from stopguard.gateway.registry import Registry
from stopguard.gateway.routes import RouteKind, key_digest, kind_of, policy_for, read_facts
from stopguard.gateway.settings import EngineSettings, GatewaySettings, Limits, Policies
from stopguard.ledger import Book
from stopguard.stops import ClientPolicy, Controller, RetryAdvice, Semantics, Source, StopCause
from tests.unit.gateway.bench import OK, Bench


def test_ids_are_ours_unguessable_and_prefix_free() -> None:
    source = IdSource()
    ids = [source.next() for _ in range(2000)]
    assert len(set(ids)) == 2000
    assert {len(each) for each in ids} == {ID_LENGTH}
    assert all(is_request_id(each) for each in ids)
    assert not is_request_id("sg-" + "x" * 32)
    assert not is_request_id(ids[0] + "0")


# ---- routes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/chat/completions", RouteKind.CHAT), ("/v1/messages", RouteKind.MESSAGES), ("/nothing", RouteKind.OTHER)],
)
def test_a_path_has_a_kind(path: str, kind: RouteKind) -> None:
    assert kind_of(path) is kind


@pytest.mark.parametrize(
    ("body", "model", "stream", "choices"),
    [
        (b'{"model":"m","stream":true,"n":3,"messages":[{"model":"inner"}]}', "m", True, 3),
        (b'{"model":"m","stream":null,"n":null}', "m", None, 1),
        (b'{"model":"m","stream":"yes","n":"2"}', "m", None, 1),
        (b'{"model":7,"stream":true}', None, True, 1),
        (b'{"model":"a","model":"b"}', "b", None, 1),
        (b'{"n":100000}', None, None, 128),
        *((raw, None, None, 1) for raw in (b"[]", b"", b"{", b"\xff\xfe", b'"x"', b'{"model":"\xff"}', b"null")),
    ],
)
def test_a_body_is_read_leniently(body: bytes, model: str | None, stream: bool | None, choices: int) -> None:
    facts = read_facts(body, b"application/json")
    assert (facts.model, facts.stream, facts.choices) == (model, stream, choices)


def test_the_model_of_an_upload_is_found() -> None:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
        b'RIFF\x00\xff\r\n--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--b--\r\n'
    )
    assert read_facts(body, b"multipart/form-data; boundary=b").model == "whisper"
    assert read_facts(b"--b--", b"multipart/form-data; boundary=b").model is None


def test_the_most_particular_policy_counts() -> None:
    drain, grace = ClientPolicy(grace_seconds=None), ClientPolicy(grace_seconds=3)
    policies = Policies(by_route={"/v1/completions": drain, "embeddings": grace}, by_key={key_digest(b"vip"): drain})

    def of(path: str, key: bytes = b"") -> ClientPolicy:
        return policy_for(policies, path, kind_of(path), key_digest(key))

    assert of("/v1/completions") is drain
    assert of("/v1/embeddings") is grace
    assert of("/v1/embeddings", b"vip") is drain
    assert of("/v1/chat/completions").stops_at_once


# ---- terminal ------------------------------------------------------------------------------------

UNSAFE = RetryAdvice(False, "not confirmed stopped")


def cause(source: Source = Source.API, reason: str = "api", semantics: Semantics = Semantics.CANCEL) -> StopCause:
    return StopCause(semantics=semantics, source=source, reason=reason, observed_at=1.0)


@pytest.mark.parametrize(
    ("why", "status", "code"),
    [
        (cause(), 499, "cancelled"),
        (cause(Source.DEADLINE, "queue_deadline"), 504, "queue_deadline"),
        (cause(Source.SUPERSEDED, "superseded"), 409, "superseded"),
        (cause(Source.ENGINE, "it fell over", Semantics.FAIL), 502, "engine_lost"),
        (cause(Source.GATEWAY, "shutdown", Semantics.FAIL), 503, "shutdown"),
    ],
)
def test_a_stop_has_a_status_and_a_code(why: StopCause, status: int, code: str) -> None:
    notice = terminal.notice_of_stop(why, UNSAFE)
    assert (notice.status, notice.code) == (status, code)
    assert notice.should_retry is False
    response = terminal.error_response(RouteKind.CHAT, notice, request_id="sg-1", alias="mine", keep_alive=True)
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"x-stopguard-retry: unsafe; reason=not confirmed stopped" in head
    assert b"x-should-retry: false" in head
    assert b"x-request-id: mine" in head
    assert b"content-length: %d\r\n" % len(body) in head
    assert (b"connection: close" in head) == (status == 503)


@pytest.mark.parametrize("kind", list(RouteKind))
def test_every_api_gets_its_own_shape(kind: RouteKind) -> None:
    notice = terminal.notice_of_stop(cause(), UNSAFE)
    error: Any = json.loads(terminal.error_body(kind, notice, "sg-1"))
    assert error["error"]["message"] == "stopped: this request was cancelled"
    assert error["stopguard"] == {"code": "cancelled", "id": "sg-1", "retry": "unsafe", "retry_reason": UNSAFE.reason}
    assert (error.get("type") == "error") == (kind is RouteKind.MESSAGES)
    for stream in (
        terminal.stream_stopped(kind, notice, "sg-1", "m", 2, 7),
        terminal.stream_error(kind, notice, "sg-1"),
    ):
        assert stream.endswith(b"\n\n")
        for line in stream.split(b"\n"):
            if line.startswith(b"data: {"):
                json.loads(line[6:])
    assert b"[DONE]" not in terminal.stream_error(kind, notice, "sg-1")


def test_the_ends_of_streams_in_the_four_great_apis() -> None:
    notice = terminal.notice_of_stop(cause(), UNSAFE)

    def ended(kind: RouteKind) -> list[Any]:
        raw = terminal.stream_stopped(kind, notice, "sg-1", "m", 2, 7)
        lines = [line.partition(b": ") for line in raw.split(b"\n") if line]
        return [
            value.decode() if value == b"[DONE]" or name == b"event" else json.loads(value) for name, _, value in lines
        ]

    chat, done = ended(RouteKind.CHAT)
    assert done == "[DONE]"
    assert [(choice["index"], choice["delta"], choice["finish_reason"]) for choice in chat["choices"]] == [
        (0, {}, "abort"),
        (1, {}, "abort"),
    ]
    completion, done = ended(RouteKind.COMPLETIONS)
    assert (completion["object"], completion["choices"][1]["text"], done) == ("text_completion", "", "[DONE]")
    name, event = ended(RouteKind.RESPONSES)
    assert name == event["type"] == "response.incomplete"
    names = [each for each in ended(RouteKind.MESSAGES) if isinstance(each, str)]
    assert names == ["message_delta", "message_stop"]


# ---- liveness, names, fleets ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "method"),
    [
        (None, "eof"),
        (ConnectionResetError(), "reset"),
        (ConnectionAbortedError(), "reset"),
        (BrokenPipeError(), "write_error"),
        (TimeoutError(errno.ETIMEDOUT, "x"), "keepalive"),
        (OSError(errno.EHOSTUNREACH, "x"), "keepalive"),
        (OSError(errno.EBADF, "x"), "reset"),
    ],
)
def test_every_end_has_a_name(error: OSError | None, method: str) -> None:
    assert loss_method(error) == method


def test_names_live_as_long_as_their_request() -> None:
    bench = Bench(GatewaySettings(limits=Limits(recent_requests=2)))
    client, _ = bench.client()
    raw = b"GET /x HTTP/1.1\r\nHost: a\r\nX-Request-Id: mine\r\nX-StopGuard-Group: g\r\nIdempotency-Key: k\r\n\r\n"
    registry: Registry = bench.gateway.registry
    digest = key_digest(b"")
    ids = []
    for _ in range(3):
        client.data_received(raw)
        (exchange,) = registry.named(digest, "mine")
        ids.append(exchange.request_id)
        assert registry.named(digest, exchange.request_id) == registry.grouped(digest, "g") == [exchange]
        assert registry.named(key_digest(b"other"), exchange.request_id) == []
        assert registry.named(key_digest(b"other"), "mine") == []
        bench.engine.data_received(OK)
    assert not registry.alive
    assert not registry._aliases
    assert not registry._groups
    assert not registry._keys
    assert [registry.has_finished(digest, each) for each in ids] == [False, True, True]
    assert not registry.has_finished(key_digest(b"other"), ids[2])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"m"}', b'{"model":"m","rid":"sg-1"}'),
        (b'{"rid":"evil","x":1.10,"rid":"again"}', b'{"x":1.10,"rid":"sg-1"}'),
        (b'{"\\u0072id":"evil"}', b'{"rid":"sg-1"}'),
        (b"[1]", b"[1]"),
        (b"\xff", b"\xff"),
    ],
)
def test_our_id_in_a_body_is_the_only_one(body: bytes, expected: bytes) -> None:
    assert place_in_body(body, {"rid"}, "rid", "sg-1") == expected


def engines(*names: str) -> Fleet:
    controller = Controller(Book(), at=0.0)
    pairs = [(OpenAIEngine(name, f"http://{name}:1/v1/"), EngineSettings()) for name in names]
    return Fleet(pairs, GatewaySettings(), controller)


def test_a_fleet_needs_engines_with_names_of_their_own() -> None:
    with pytest.raises(ConfigurationError, match="no engine"):
        engines()
    with pytest.raises(ConfigurationError, match="same name"):
        engines("a", "a")
    with pytest.raises(ConfigurationError, match="http://127"):
        OpenAIEngine("a", "localhost:8000")
    assert engines("a").members[0].engine.base_url == "http://a:1"


def test_the_healthy_come_first_then_the_idle_then_the_rested() -> None:
    fleet = engines("a", "b", "c")
    a, b, c = fleet.members
    first = [fleet.choose(fleet.members, []) for _ in range(3)]
    assert {id(each) for each in first} == {id(a), id(b), id(c)}
    a.eject(10.0)
    assert all(fleet.choose(fleet.members, []) is not a for _ in range(4))
    b.eject(5.0)
    c.eject(20.0)
    # All are ejected: the one whose pause ends first.
    assert fleet.choose(fleet.members, []) is b
    assert fleet.choose(fleet.members, [b]) is a
    b.answered()
    assert b.healthy
    assert fleet.choose(fleet.members, [b, a, c]) is None


def test_the_pause_of_an_ejected_engine_grows_to_a_limit() -> None:
    member = engines("a").members[0]
    pauses = []
    for _ in range(8):
        member.eject(100.0)
        pauses.append(member.ejected_until - 100.0)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_settings_refuse_what_cannot_be() -> None:
    with pytest.raises(ConfigurationError, match="body_bytes"):
        GatewaySettings(limits=Limits(body_bytes=0))
