"""The conformance suite over every adapter, against the reference engine with the manners of the adapter's engine.

What an imitation shows is the adapter's part of the truth: ids in their place, doors, gauges, evidence. The real
engines are in tests/engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from stopguard.gateway.server import Gateway
from stopguard.testing.conformance import Conformance, Subject
from tests.conformance.imitations import imitation


async def has_run_once(gateway: Gateway) -> None:
    """What an engine that has never run shows is nothing: its adapter promises more once it has."""
    for member in gateway.fleet.members:
        engine: Any = member.engine
        (model, *_) = await engine.models()
        question = {"model": model.id, "prompt": "once", "max_tokens": 2}
        await engine.request("POST", "/v1/completions", json=question)
        await gateway.fleet.refresh(member)


OPTIONS: dict[str, dict[str, Any]] = {
    "deepinfer": {},
    # Its gauges may be read every two seconds only, and a stop takes several readings: time for a busy machine.
    "llamacpp": {"settle_seconds": 60.0},
    # The imitation has neither the tokenizer's route nor /generate.
    "sglang": {"resumes": False},
    "trtllm": {"prepare": has_run_once},
    "vllm": {},
}


@pytest.fixture(params=sorted(OPTIONS), scope="class")
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    with imitation(request.param) as engine:
        with Subject(request.param, engine.url, **OPTIONS[request.param]) as subject:
            yield subject
        assert engine.snapshot().settled


class TestImitated(Conformance):
    """Nothing may be left in the engine at the end, whatever the adapter believes."""
