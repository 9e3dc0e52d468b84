"""Observers: which one is made, what an adapter has to offer, and a client of an engine that says nothing."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from stopguard.audit.reference import ReferenceObserver
from stopguard.audit.runner import find_model
from stopguard.audit.target import PlainObserver, TargetModel, make_observer, observer_kinds
from stopguard.audit.world import Answer
from stopguard.engines import EngineFacts
from stopguard.engines.registry import GROUP
from stopguard.errors import ConfigurationError
from stopguard.ledger import Evidence

pytestmark = pytest.mark.anyio

MODEL = TargetModel(name="m")


class Recognised(PlainObserver):
    """An adapter's observer."""


class Adapter:
    observer = Recognised
    fingerprint_paths = ("/mine",)

    @staticmethod
    def recognises(facts: EngineFacts) -> bool:
        return facts.status("/mine") == 200


class Blind:
    """An adapter without an observer."""


class RecognisedAndBlind(Blind):
    fingerprint_paths = ("/mine",)

    @staticmethod
    def recognises(facts: EngineFacts) -> bool:
        return facts.status("/mine") == 200


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name=name, value=f"{__name__}:{value}", group=GROUP)


class Control:
    def __init__(self, **answers: Answer) -> None:
        self.answers = answers

    async def __call__(self, method: str, path: str, body: Any = None) -> Answer:
        return self.answers.get(path.strip("/").replace("/", "_"), Answer(status=404))


async def made(kind: str, control: Control, *points: EntryPoint) -> object:
    return await make_observer(kind, "", control, lambda: 0.0, MODEL, points)


async def test_auto_asks_who_recognises_the_engine() -> None:
    adapters = (point("blind", "Blind"), point("broken", "Nothing"), point("mine", "Adapter"))
    assert type(await made("auto", Control(mine=Answer(status=200)), *adapters)) is Recognised
    assert type(await made("auto", Control(), *adapters)) is PlainObserver
    reference = Answer(status=200, headers={"X-Reference-Engine": "any"})
    ref = EntryPoint(name="ref", value="stopguard_refengine.adapter:ReferenceEngineAdapter", group=GROUP)
    control = Control(v1_models=reference, ref_gauges=reference)
    assert type(await made("auto", control, *adapters, ref)) is ReferenceObserver
    blind = (point("blind", "RecognisedAndBlind"),)
    assert type(await made("auto", Control(mine=Answer(status=200)), *blind)) is PlainObserver


async def test_a_kind_by_name_or_what_is_wrong_with_it() -> None:
    assert type(await made("mine", Control(), point("mine", "Adapter"))) is Recognised
    assert type(await made("openai", Control())) is PlainObserver
    with pytest.raises(ConfigurationError, match="no engine kind 'other'; there are: auto, openai, ref, mine"):
        await made("other", Control(), point("mine", "Adapter"))
    with pytest.raises(ConfigurationError, match="has no observer"):
        await made("blind", Control(), point("blind", "Blind"))
    with pytest.raises(ConfigurationError, match="cannot be used"):
        await made("broken", Control(), point("broken", "Nothing"))
    assert observer_kinds([point("ref", "Adapter")]) == ("openai", "ref")


async def test_evidence_that_cannot_be_had_is_refused() -> None:
    for kind in ("openai", "auto"):
        with pytest.raises(ConfigurationError, match="nothing can be observed"):
            await make_observer(kind, "metrics", Control(), lambda: 0.0, MODEL, ())


async def test_an_engine_that_shows_nothing_proves_nothing() -> None:
    plain = PlainObserver(Control(), lambda: 0.0, TargetModel(name="m", adapters=("m-lora",)))
    assert await plain.read() is None
    assert plain.facts.grade is Evidence.SENT
    assert plain.facts.features["lora"] == {"model": "m-lora"}


async def test_the_model_its_context_and_its_adapters() -> None:
    class World:
        async def control(self, method: str, path: str, body: Any = None) -> Answer:
            return Answer(
                status=200,
                body=b'{"data":[{"id":"m","max_model_len":4096},{"id":"m-lora","parent":"m"}]}',
            )

    world: Any = World()
    assert await find_model(world, "") == TargetModel(name="m", context_tokens=4096, adapters=("m-lora",))
    assert (await find_model(world, "m-lora")).name == "m-lora"
