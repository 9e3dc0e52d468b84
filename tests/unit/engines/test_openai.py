"""The generic engine: what it asks over HTTP, and one clear error for everything that can go wrong."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from stopguard.engines import Engine, EngineUnreachable, OpenAIEngine
from stopguard.stops import AbortAnswer, Semantics, Source, StopCause

pytestmark = pytest.mark.anyio


def engine(handler: Callable[[httpx.Request], httpx.Response]) -> OpenAIEngine:
    return OpenAIEngine("e", "http://engine.test/base/v1", transport=httpx.MockTransport(handler))


async def test_models_and_identity() -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(200, json={"data": [{"id": "m", "owned_by": "x"}]}, headers={"server": "uvicorn"})

    made = engine(answer)
    assert isinstance(made, Engine)
    (model,) = await made.models()
    assert (model.id, model.description["owned_by"]) == ("m", "x")
    identity = await made.identify()
    assert (identity.kind, identity.version) == ("openai", "uvicorn")
    assert set(asked) == {"http://engine.test/base/v1/models"}
    assert await made.gauges() is None
    await made.aclose()


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(500),
        httpx.Response(200, text="no json"),
        httpx.Response(200, json={"data": [{"name": "m"}]}),
        httpx.Response(200, json=[]),
    ],
)
async def test_a_wrong_answer_is_one_clear_error(response: httpx.Response) -> None:
    made = engine(lambda request: response)
    with pytest.raises(EngineUnreachable, match="engine e"):
        await made.models()
    await made.aclose()


async def test_no_answer_is_the_same_error() -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    made = engine(fail)
    with pytest.raises(EngineUnreachable, match="does not answer"):
        await made.identify()
    await made.aclose()


async def test_it_has_no_door_of_its_own() -> None:
    cause = StopCause(semantics=Semantics.CANCEL, source=Source.API, reason="api", observed_at=0.0)
    reply = await engine(lambda request: httpx.Response(200)).abort("sg-1", "none", cause)
    assert reply.answer is AbortAnswer.FAILED
