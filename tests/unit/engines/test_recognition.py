"""Which engine is this: the judgement of adapters over one bounded set of questions."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import httpx
import pytest

from stopguard.engines import EngineFacts, EngineUnreachable, RouteAnswer
from stopguard.engines.recognition import ask_over_http, recognise
from stopguard.engines.registry import GROUP
from stopguard.errors import ConfigurationError

pytestmark = pytest.mark.anyio


class Alpha:
    fingerprint_paths = ("/alpha",)

    @staticmethod
    def recognises(facts: EngineFacts) -> bool:
        return any(entry.get("owned_by") == "alpha" for entry in facts.models)


class Beta:
    """Half sure from the version, sure from its metrics."""

    fingerprint_paths = ("/metrics",)

    @staticmethod
    def recognises(facts: EngineFacts) -> float:
        if "beta_requests" in facts.metric_names:
            return 0.95
        return 0.4 if isinstance(facts.json("/version"), dict) else 0.0


class Imitator:
    """Owns up on a route of its own, whatever it imitates."""

    fingerprint_paths = ("/truth",)

    @staticmethod
    def recognises(facts: EngineFacts) -> float:
        if facts.status("/truth"):
            return float(facts.status("/truth") == 200)
        return 0.5 if facts.header("/v1/models", "X-Imitator") else 0.0


class Careless:
    fingerprint_paths = tuple(f"/careless/{number}" for number in range(50))

    @staticmethod
    def recognises(facts: EngineFacts) -> float:
        return float(facts.json("/v1/models")["no"]["such"])


def point(name: str, attribute: str) -> EntryPoint:
    return EntryPoint(name=name, value=f"{__name__}:{attribute}", group=GROUP)


ALPHA, BETA, IMITATOR, CARELESS = (point(name.lower(), name) for name in ("Alpha", "Beta", "Imitator", "Careless"))
BROKEN = EntryPoint(name="broken", value="package_that_nobody_has.adapter:Engine", group=GROUP)

ALPHAS_MODELS = RouteAnswer(status=200, text='{"data": [{"id": "m", "owned_by": "alpha"}]}')
VERSION = RouteAnswer(status=200, text='{"version": "1"}')


class Server:
    """Answers from a table, and remembers what it was asked."""

    def __init__(self, answers: dict[str, RouteAnswer], *, otherwise: int = 404) -> None:
        self.answers = answers
        self.otherwise = otherwise
        self.asked: list[str] = []

    async def __call__(self, path: str) -> RouteAnswer:
        self.asked.append(path)
        return self.answers.get(path, RouteAnswer(status=self.otherwise))


async def test_nothing_more_is_asked_when_one_is_certain() -> None:
    server = Server({"/v1/models": ALPHAS_MODELS})
    found = await recognise(server, [ALPHA, BETA, CARELESS, BROKEN])
    assert (found.kind, found.sureness) == ("alpha", 0.9)
    assert server.asked == ["/v1/models"]


async def test_a_half_sure_one_is_asked_out() -> None:
    metrics = RouteAnswer(status=200, text='# HELP beta_requests x\nbeta_requests{a="b"} 1\n')
    server = Server({"/version": VERSION, "/metrics": metrics})
    found = await recognise(server, [ALPHA, BETA])
    assert (found.kind, found.sureness) == ("beta", 0.95)
    assert server.asked == ["/v1/models", "/version", "/alpha", "/metrics"]
    assert (await recognise(Server({"/version": VERSION}), [ALPHA, BETA])).kind == "beta"


async def test_whoever_imitates_owns_up() -> None:
    models = RouteAnswer(status=200, headers={"x-imitator": "1"}, text=ALPHAS_MODELS.text)
    truthful = Server({"/v1/models": models, "/truth": RouteAnswer(status=200)})
    assert (await recognise(truthful, [ALPHA, BETA, IMITATOR])).kind == "imitator"
    assert (await recognise(Server({"/v1/models": models}), [ALPHA, BETA, IMITATOR])).kind == "alpha"


async def test_an_unknown_server_is_the_built_in_kind_and_is_asked_little() -> None:
    server = Server({"/v1/models": RouteAnswer(status=200, text="[]")})
    found = await recognise(server, [ALPHA, BETA, CARELESS, BROKEN])
    assert (found.kind, found.sureness) == ("openai", 0.0)
    assert len(server.asked) == len(set(server.asked)) == 2 + 1 + 1 + 6


async def test_silence_is_no_engine() -> None:
    server = Server({}, otherwise=0)
    with pytest.raises(EngineUnreachable):
        await recognise(server, [ALPHA, CARELESS])
    assert server.asked == ["/v1/models", "/version"]


async def test_facts_are_calm_about_nonsense() -> None:
    facts = EngineFacts(
        {"/a": RouteAnswer(status=200, text="{"), "/v1/models": RouteAnswer(status=200, text='{"data": 1}')}
    )
    assert facts.json("/a") is None
    assert facts.models == []
    assert facts.metric_names == frozenset()
    assert (facts.text("/b"), facts.status("/b"), facts.header("/b", "x")) == ("", 0, "")
    assert EngineFacts({"/a": RouteAnswer(status=503, text="starting")}).text("/a") == ""


async def test_over_http_every_failure_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/base/down":
            raise httpx.ConnectError("refused")
        return httpx.Response(200, headers={"X-Any": "1"}, content=b"x" * 1_000_000)

    client, ask = ask_over_http("http://engine.test/base/v1/", headers={"Authorization": "Bearer k"})
    assert client.headers["authorization"] == "Bearer k"
    monkeypatch.setattr(client, "_transport", httpx.MockTransport(handler))
    answer = await ask("/up")
    assert (answer.status, answer.headers["x-any"], len(answer.text)) == (200, "1", 256 * 1024)
    assert (await ask("/down")).status == 0
    await client.aclose()
    with pytest.raises(ConfigurationError, match="is not a base URL"):
        ask_over_http("http://[::1")
