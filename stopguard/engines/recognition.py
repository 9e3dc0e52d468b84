"""Which engine is this? Asked, not guessed: one bounded set of harmless GETs, and each adapter's own judgement.

An adapter class may have two attributes. `fingerprint_paths` are the routes whose answers it wants to see, at most
`PATHS_MAX`. `recognises(facts)` is a static function that says how sure it is from those answers: 0 (or False) is
"not mine", `CERTAIN` and more is "nobody else's", in between is "fits, and so may others"; True is `CERTAIN`.
`/v1/models` is always asked. The paths are asked once each, one after another, and no further ones as soon as
somebody is certain while everybody else says no. More than 1 is for a server that imitates others and owns up.

The same judgement serves the gateway (`--engine auto=URL`) and the audit (`--engine auto`).
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint
from typing import Any, Final

import httpx
import msgspec

from stopguard.engines.protocol import EngineUnreachable
from stopguard.engines.registry import BUILT_IN, adapters_of
from stopguard.errors import ConfigurationError

__all__ = ["CERTAIN", "PATHS_MAX", "Ask", "EngineFacts", "Recognised", "RouteAnswer", "ask_over_http", "recognise"]

CERTAIN: Final = 0.9
PATHS_MAX: Final = 6
_FIRST_PATHS: Final = ("/v1/models", "/version")
_PATHS_IN_ALL_MAX: Final = 24
_ANSWER_SECONDS: Final = 2.0
_ANSWER_BYTES: Final = 256 * 1024
_METRIC_NAME: Final = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)[ {]", re.MULTILINE)


class RouteAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What one GET came to. `status` 0: it was not asked, or nothing came. Header names are in lower case."""

    status: int = 0
    headers: Mapping[str, str] = {}
    text: str = ""


Ask = Callable[[str], Awaitable[RouteAnswer]]
"""GET one path of the engine. Never raises for what a server does or fails to do: that is a status."""


class EngineFacts:
    """The answers so far, by path."""

    def __init__(self, answers: Mapping[str, RouteAnswer]) -> None:
        self.answers = answers

    def status(self, path: str) -> int:
        """The status of GET `path`; 0 when it was not asked or did not answer."""
        return self.answers.get(path, _NOTHING).status

    def text(self, path: str) -> str:
        """The body of a 200; else empty."""
        answer = self.answers.get(path, _NOTHING)
        return answer.text if answer.status == httpx.codes.OK else ""

    def json(self, path: str) -> Any:
        """The body of a 200 as JSON; `None` when it is none."""
        try:
            return json.loads(self.text(path))
        except ValueError:
            return None

    def header(self, path: str, name: str) -> str:
        """A header of the answer, whatever its status; empty when it is not there."""
        return self.answers.get(path, _NOTHING).headers.get(name.lower(), "")

    @cached_property
    def metric_names(self) -> frozenset[str]:
        """The names of the samples in `/metrics`, when that is in Prometheus' text format."""
        return frozenset(_METRIC_NAME.findall(self.text("/metrics")))

    @cached_property
    def models(self) -> list[dict[str, Any]]:
        """The entries of `/v1/models` (`data`) that are objects."""
        listed = self.json("/v1/models")
        entries = listed.get("data") if isinstance(listed, dict) else None
        return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


_NOTHING: Final = RouteAnswer()


class Recognised(msgspec.Struct, frozen=True, kw_only=True):
    """What was found: the `kind` (`openai` when no adapter knows the server), how sure, and the answers."""

    kind: str
    sureness: float
    facts: EngineFacts


async def recognise(ask: Ask, adapters: Iterable[EntryPoint] | None = None) -> Recognised:
    """The kind of the engine that `ask` asks.

    An adapter package that cannot be loaded, or whose judgement fails, has no say. Raises `EngineUnreachable` when
    nothing answers at all.
    """
    judges = _judges(adapters)
    answers: dict[str, RouteAnswer] = {}
    wanted = dict.fromkeys(_FIRST_PATHS)
    for _, adapter in judges:
        wanted.update(dict.fromkeys(tuple(getattr(adapter, "fingerprint_paths", ()))[:PATHS_MAX]))
    votes: list[tuple[float, str]] = []
    for path in list(wanted)[:_PATHS_IN_ALL_MAX]:
        answers[path] = await ask(path)
        votes = _votes(judges, EngineFacts(answers))
        if len(votes) == 1 and votes[0][0] >= CERTAIN:
            break
        if len(answers) == len(_FIRST_PATHS) and not any(answer.status for answer in answers.values()):
            raise EngineUnreachable("nothing answers there")
    sureness, kind = votes[0] if votes else (0.0, BUILT_IN)
    return Recognised(kind=kind, sureness=sureness, facts=EngineFacts(answers))


def _judges(adapters: Iterable[EntryPoint] | None) -> list[tuple[str, Any]]:
    judges = []
    for name, point in sorted(adapters_of(adapters).items()):
        try:
            adapter = point.load()
        except Exception:
            continue
        if callable(getattr(adapter, "recognises", None)):
            judges.append((name, adapter))
    return judges


def _votes(judges: list[tuple[str, Any]], facts: EngineFacts) -> list[tuple[float, str]]:
    """Who does not say no, the surest first."""
    votes = []
    for name, adapter in judges:
        try:
            sureness = adapter.recognises(facts)
            sureness = CERTAIN if sureness is True else float(sureness)
        except Exception:
            continue
        if sureness > 0.0:
            votes.append((sureness, name))
    return sorted(votes, key=lambda vote: -vote[0])


def ask_over_http(
    base_url: str, *, headers: Mapping[str, str] | None = None, tls: ssl.SSLContext | None = None
) -> tuple[httpx.AsyncClient, Ask]:
    """A client for `base_url`, which the caller closes, and the `Ask` that uses it."""
    base = base_url.rstrip("/").removesuffix("/v1")
    try:
        client = httpx.AsyncClient(
            headers=dict(headers or {}),
            timeout=_ANSWER_SECONDS,
            verify=tls if tls is not None else True,
            trust_env=False,
        )
        httpx.URL(base)
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigurationError(f"{base_url!r} is not a base URL: {error}") from None

    async def ask(path: str) -> RouteAnswer:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS), client.stream("GET", base + path) as response:
                body = bytearray()
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > _ANSWER_BYTES:
                        break
                return RouteAnswer(
                    status=response.status_code,
                    headers={name.lower(): value for name, value in response.headers.items()},
                    text=bytes(body[:_ANSWER_BYTES]).decode("utf-8", "replace"),
                )
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError):
            return _NOTHING

    return client, ask
