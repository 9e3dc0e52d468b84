"""An engine is asked what it is when it first answers, and again when it was away; its newest profile counts."""

from __future__ import annotations

from time import monotonic
from typing import Any

import msgspec
import pytest

from stopguard.engines import EngineUnreachable, Identity, ModelEntry, OpenAIEngine
from stopguard.gateway.fleet import Fleet, Member
from stopguard.gateway.settings import EngineSettings, GatewaySettings
from stopguard.ledger import Book, Evidence
from stopguard.stops import Controller, StopConfig

pytestmark = pytest.mark.anyio


class Upgraded(OpenAIEngine):
    """Becomes another version, that proves more, whenever it is asked."""

    def __init__(self) -> None:
        super().__init__("e", "http://127.0.0.1:1")
        self.versions = 0
        self.silent = False

    async def models(self) -> tuple[ModelEntry, ...]:
        if self.silent:
            raise EngineUnreachable("away")
        return (ModelEntry(id="m"),)

    async def identify(self) -> Identity:
        self.versions += 1
        self.profile = msgspec.structs.replace(self.profile, best_evidence=Evidence(self.versions))
        return Identity(kind="openai", version=str(self.versions))


class Nameless(Upgraded):
    async def identify(self) -> Identity:
        raise EngineUnreachable("no such route")


def fleet_of(engine: Any) -> Fleet:
    controller = Controller(Book(), StopConfig(), at=monotonic())
    return Fleet([(engine, EngineSettings())], GatewaySettings(), controller)


async def test_it_is_asked_once_and_again_after_it_was_away() -> None:
    engine = Upgraded()
    fleet = fleet_of(engine)
    (member,) = fleet.members
    heard: list[tuple[str, str]] = []
    fleet.on_identified = lambda member, identity: heard.append((member.engine.name, identity.version))
    assert heard == []
    assert await fleet.refresh(member)
    assert await fleet.refresh(member)
    assert member.identity == Identity(kind="openai", version="1")
    assert member.profile.best_evidence is Evidence(1)
    engine.silent = True
    assert not await fleet.refresh(member)
    engine.silent = False
    assert await fleet.refresh(member)
    assert member.profile.best_evidence is Evidence(2)
    assert heard == [("e", "1"), ("e", "2")]


async def test_one_that_does_not_say_serves_all_the_same() -> None:
    fleet = fleet_of(Nameless())
    heard: list[Member] = []
    fleet.on_identified = lambda member, identity: heard.append(member)
    (member,) = fleet.members
    assert await fleet.refresh(member)
    assert member.identity == Identity(kind="")
    assert list(member.models or ()) == ["m"]
    assert heard == [member]
