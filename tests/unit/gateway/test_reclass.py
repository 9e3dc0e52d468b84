"""Another class for a request that lives: by its client up to the ceiling, in the queue, and at an engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from stopguard.gateway.class_api import give_class
from stopguard.preemption import ChangedTooOften, Mode, UnknownClass
from stopguard.probe.collector import OrderResult
from tests.unit.gateway.bench import Bench, Transport, parse
from tests.unit.gateway.test_classes import ask, bench, request


def reclass(made: Bench, key: str, name: str, wanted: Any) -> tuple[int, dict[str, Any]]:
    """Status and answer of the route."""
    body = wanted if isinstance(wanted, bytes) else json.dumps({"class": wanted}).encode()
    client, transport = made.client()
    client.data_received(
        f"POST /v1/requests/{name}/class HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return answered(transport)


def answered(transport: Transport) -> tuple[int, dict[str, Any]]:
    head, _, body = transport.sent.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def waiting(made: Bench, key: str, user: str) -> str:
    """Our id of a request that waits in the queue."""
    before = set(made.gateway.registry.alive)
    ask(made, request(key, {"user": user}))
    (name,) = set(made.gateway.registry.alive) - before
    return name


def test_it_waits_at_its_new_rank() -> None:
    made = bench(places=1)
    ask(made, request("other", {"user": "running"}))
    waiting(made, "trusted", "first")
    second = waiting(made, "trusted", "second")
    status, body = reclass(made, "trusted", second, "urgent")
    assert (status, body["class"], body["changed"], body["status"]) == (200, "urgent", True, "active")
    assert reclass(made, "trusted", second, "URGENT")[1]["changed"] is False
    made.answer_all()
    assert [json.loads(parse(raw)[1])["user"] for raw in made.upstream_bytes] == ["running", "second", "first"]
    assert json.loads(parse(made.upstream_bytes[1])[1])["priority"] == -10
    assert not len(made.gateway.book)


def test_nobody_raises_themselves_or_others() -> None:
    made = bench(places=1)
    ask(made, request("other", {"user": "running"}))
    own, foreign = waiting(made, "other", "own"), waiting(made, "trusted", "foreign")
    status, body = reclass(made, "other", own, "urgent")
    assert (status, body["class"], body["changed"], body["lowered_from"]) == (200, "standard", False, "urgent")
    assert reclass(made, "other", foreign, "background")[0] == 404
    assert reclass(made, "other", own, "background")[1]["changed"] is True
    made.answer_all()
    assert [json.loads(parse(raw)[1])["user"] for raw in made.upstream_bytes] == ["running", "foreign", "own"]


@pytest.mark.parametrize(
    ("wanted", "status", "said"),
    [
        ("princely", 400, "no class here; there are: background, standard, urgent"),
        (b"{}", 400, "the body must be"),
        (b'{"class": 3}', 400, "the body must be"),
        (b'{"class": "urgent", "more": 1}', 400, "the body must be"),
        (b"\xff", 400, "the body must be"),
    ],
)
def test_what_is_no_class_changes_nothing(wanted: Any, status: int, said: str) -> None:
    made = bench(places=1)
    ask(made, request("other"))
    name = waiting(made, "trusted", "x")
    got, body = reclass(made, "trusted", name, wanted)
    assert (got, said in json.dumps(body)) == (status, True), body
    assert made.gateway.registry.alive[name].claim.priority_class.name == "standard"  # type: ignore[union-attr]


def test_without_classes_there_is_nothing_to_change() -> None:
    made = bench(Mode.OFF, places=1)
    ask(made, request("other"))
    name = waiting(made, "other", "x")
    status, body = reclass(made, "other", name, "urgent")
    assert (status, "preemption.mode is off" in json.dumps(body)) == (400, True)


def test_a_request_that_has_ended_keeps_its_class() -> None:
    made = bench()
    ask(made, request("trusted", {"user": "x"}))
    (name,) = made.gateway.registry.alive
    made.answer_all()
    status, body = reclass(made, "trusted", name, "urgent")
    assert (status, body["changed"], body["already"]) == (200, False, True)


def test_flapping_has_a_limit() -> None:
    made = bench(places=1)
    ask(made, request("other"))
    name = waiting(made, "trusted", "x")
    exchange = made.gateway.registry.alive[name]
    for number in range(16):
        assert give_class(made.gateway, exchange, ("urgent", "background")[number % 2], "a test")
    with pytest.raises(ChangedTooOften, match="16 times"):
        give_class(made.gateway, exchange, "urgent", "a test")
    assert reclass(made, "trusted", name, "urgent")[0] == 429
    assert not give_class(made.gateway, exchange, "background", "a test"), "what it is already costs nothing"
    with pytest.raises(UnknownClass):
        give_class(made.gateway, exchange, "princely", "a test")
    made.gateway.admission.queue.verify()


class Probing:
    """A probe whose scheduler sorts, or does not."""

    bystander = False

    def __init__(self, *, sorts: bool) -> None:
        self.sorts = sorts
        self.orders: list[tuple[str, str, str, int]] = []

    def can(self, engine: str, action: str) -> bool:
        return self.sorts and action == "prioritise"

    def sources(self, engine: str) -> list[Any]:
        return []

    async def order(self, engine: str, action: str, request_id: str, *, priority: int) -> OrderResult:
        self.orders.append((engine, action, request_id, priority))
        return OrderResult("applied", 0.0, "")


@pytest.mark.parametrize(("sorts", "lower"), [(True, True), (True, False), (False, True)])
def test_an_engine_that_has_it_already_is_told(sorts: bool, lower: bool) -> None:
    asyncio.run(_told(sorts=sorts, lower=lower))


async def _told(*, sorts: bool, lower: bool) -> None:
    made = bench(lower=lower)
    made.gateway._loop = asyncio.get_running_loop()
    probing: Any = Probing(sorts=sorts)
    made.gateway.probing = probing
    ask(made, request("trusted", {"user": "x"}))
    (exchange,) = made.gateway.registry.alive.values()
    assert give_class(made.gateway, exchange, "urgent", "a test")
    preempting = made.gateway.preempting
    assert preempting is not None
    await asyncio.gather(*preempting._tasks)
    told = [("engine", "prioritise", exchange.request_id, -10 if lower else 10)] if sorts else []
    assert probing.orders == told
    marks = [text for _, text in exchange.tracked.ledgers.marks]
    assert "class urgent, was standard: a test" in marks
    assert any(text.startswith("its engine was told priority") for text in marks) is sorts
    made.gateway.probing = None
    made.answer_all()
