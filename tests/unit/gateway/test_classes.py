"""Classes at the gateway's door, without sockets: what engines are told, who waits, and who is turned away."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from stopguard.engines import Capabilities
from stopguard.gateway.routes import key_digest
from stopguard.gateway.settings import EngineSettings, GatewaySettings, Limits
from stopguard.preemption import Mode, PreemptionSettings, TenantStanding
from tests.unit.gateway.bench import Bench, Transport, parse

KEYS = {"trusted": TenantStanding(ceiling="urgent"), "other": TenantStanding()}


def bench(mode: Mode = Mode.QUEUE, *, places: int = 16, queued: int = 8, lower: bool = True) -> Bench:
    tenants = {key_digest(key.encode()): standing for key, standing in KEYS.items()}
    made = Bench(
        GatewaySettings(
            limits=Limits(queued_requests=queued), preemption=PreemptionSettings(mode=mode, tenants=tenants)
        )
    )
    member = made.gateway.fleet.members[0]
    member.settings = msgspec.structs.replace(member.settings, concurrent_requests=places)
    member.engine.capabilities = Capabilities(priority_field="priority", lower_is_more_urgent=lower)
    return made


def request(key: str = "other", body: dict[str, Any] | None = None, **headers: str) -> bytes:
    data = json.dumps({"model": "m", **(body or {})}).encode()
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n{lines}"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def sent(made: Bench, raw: bytes) -> dict[str, Any]:
    """The body that the engine got for `raw`."""
    got, _ = made.feed([raw])
    assert len(got) == 1
    decoded: dict[str, Any] = json.loads(parse(got[0])[1])
    return decoded


@pytest.mark.parametrize(
    ("key", "body", "headers", "expected"),
    [
        ("other", {}, {}, 0),
        ("trusted", {}, {"X_StopGuard_Class": "urgent"}, -10),
        ("other", {}, {"X_StopGuard_Class": "urgent"}, 0),
        ("other", {"priority": -99}, {}, 0),
        ("trusted", {"priority": -99}, {}, -10),
        ("other", {"priority": 5}, {}, 10),
        ("trusted", {"service_tier": "priority"}, {}, -10),
        ("other", {"service_tier": "flex"}, {}, 10),
        ("other", {"service_tier": ["odd"], "priority": "odd"}, {}, 0),
    ],
)
def test_the_engine_is_told_the_class_and_never_the_clients_number(
    key: str, body: dict[str, Any], headers: dict[str, str], expected: int
) -> None:
    got = sent(bench(), request(key, body, **headers))
    assert got["priority"] == expected
    assert {name: value for name, value in got.items() if name != "priority"} == {
        "model": "m",
        **{name: value for name, value in body.items() if name != "priority"},
    }


def test_an_engine_for_which_more_is_more_urgent_gets_the_other_sign() -> None:
    made = bench(lower=False)
    assert sent(made, request("trusted", {"priority": 99}))["priority"] == 10
    assert sent(made, request("trusted", {"priority": -99}))["priority"] == -10


def test_without_classes_nothing_is_touched() -> None:
    made = bench(Mode.OFF)
    assert sent(made, request("trusted", {"priority": -99}, X_StopGuard_Class="urgent")) == {
        "model": "m",
        "priority": -99,
    }
    assert made.gateway.preempting is None
    assert made.gateway.parking is None


def test_a_class_that_does_not_exist_is_the_clients_error() -> None:
    made = bench()
    got, transport = made.feed([request("trusted", X_StopGuard_Class="vip")])
    assert not got
    assert b"400 Bad Request" in transport.sent
    assert b"unknown_class" in transport.sent
    got, transport = made.feed([request("trusted", X_StopGuard_Class="not a name")])
    assert not got
    assert b"must be the name of a class" in transport.sent


def test_with_the_queue_only_nobody_is_ever_preempted() -> None:
    made = bench(Mode.QUEUE)
    assert made.gateway.preempting is not None
    assert not made.gateway.preempting.ways


def ask(made: Bench, raw: bytes) -> tuple[Any, Transport]:
    client, transport = made.client()
    client.data_received(raw)
    return client, transport


def test_the_urgent_go_first_and_the_queue_makes_room_for_them() -> None:
    made = bench(places=1, queued=2)
    first = ask(made, request("other", {"user": "running"}))
    waiting = [ask(made, request("other", {"user": f"waits{number}"})) for number in range(2)]
    assert len(made.gateway.admission.queue) == 2
    # One more of the same tenant and class has no room; one of another tenant takes its share; the urgent go before.
    _, turned_away = ask(made, request("other", {"user": "late"}))
    assert b"429 Too Many Requests" in turned_away.sent
    assert b"x-stopguard-retry: safe" in turned_away.sent
    _, urgent = ask(made, request("trusted", {"user": "urgent"}, X_StopGuard_Class="urgent"))
    assert not urgent.sent
    displaced = waiting[1][1]
    assert b"429 Too Many Requests" in displaced.sent
    assert b"x-stopguard-retry: safe" in displaced.sent
    assert b"retry-after: 1" in displaced.sent
    assert len(made.gateway.admission.queue) == 2
    made.answer_all()
    order = [json.loads(parse(raw)[1])["user"] for raw in made.upstream_bytes]
    assert order == ["running", "urgent", "waits0"]
    assert b"200 OK" in urgent.sent
    assert b"200 OK" in first[1].sent
    assert not len(made.gateway.admission.queue)
    assert not len(made.gateway.book)
    assert made.gateway.preempting is not None
    assert not len(made.gateway.preempting.coordinator)
    assert made.gateway.failed_effects == 0


def test_a_client_that_leaves_the_queue_is_forgotten() -> None:
    made = bench(places=1)
    ask(made, request("other"))
    client, _ = ask(made, request("other"))
    assert len(made.gateway.admission.queue) == 1
    client.eof_received()
    client.connection_lost(None)
    assert not len(made.gateway.admission.queue)
    made.answer_all()
    assert not len(made.gateway.book)
    assert made.gateway.preempting is not None
    assert not len(made.gateway.preempting.coordinator)


def test_numbers_for_the_metrics() -> None:
    made = bench(places=1)
    for _ in range(3):
        ask(made, request("other", X_StopGuard_Class="urgent"))
    preempting = made.gateway.preempting
    assert preempting is not None
    numbers = preempting.numbers()
    assert numbers.queued == {"background": 0, "standard": 2, "urgent": 0}
    assert numbers.lowered == 3
    assert not numbers.guard_closed
    made.answer_all()
    assert preempting.numbers().queued["standard"] == 0
    assert isinstance(made.gateway.fleet.members[0].settings, EngineSettings)
