"""Any server that speaks OpenAI's API: the engine about which nothing else is known.

Its only door is closing the connection, and nothing proves that a stop happened, so stops end as
`unconfirmed` here. Models come from `/v1/models`. Control requests go over httpx; the data path never
passes through this module.
"""

from __future__ import annotations

import ssl
from typing import Any, ClassVar, TypedDict, Unpack
from urllib.parse import urlsplit

import httpx

from stopguard.engines.capabilities import Capabilities, LaunchNeeds
from stopguard.engines.protocol import AbortReply, EngineUnreachable, Identity, IdPlacement, ModelEntry
from stopguard.errors import ConfigurationError
from stopguard.ledger import EngineGauges
from stopguard.stops import AbortAnswer, EngineProfile, StopCause

__all__ = ["Connection", "OpenAIEngine"]

_MODELS_LIMIT = 1000
_CONTROL_SECONDS = 5.0
_REST_SECONDS = 2.0


class Connection(TypedDict, total=False):
    """How an engine's control routes are reached; adapters pass it on as they get it."""

    headers: dict[str, str] | None
    tls: ssl.SSLContext | None
    transport: httpx.AsyncBaseTransport | None


class OpenAIEngine:
    """An engine behind `base_url`, known only by OpenAI's API. Also the base class of closer acquaintances."""

    fingerprint_paths: ClassVar[tuple[str, ...]] = ()
    launch_needs: ClassVar[LaunchNeeds] = LaunchNeeds()

    def __init__(self, name: str, base_url: str, **connection: Unpack[Connection]) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigurationError(
                f"engine {name}: {base_url!r} is not a base URL (write it like http://127.0.0.1:8000)"
            )
        self.name = name
        # People write the address of the API as often as that of the server.
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.profile = EngineProfile(name=name)
        self.placement = IdPlacement(header="X-Request-Id")
        self.owned_headers: frozenset[str] = frozenset()
        self.owned_body_fields: frozenset[str] = frozenset()
        self.control_paths: frozenset[str] = frozenset()
        self.reuse_connections = True
        self.gauge_seconds = 0.0
        self.capabilities = Capabilities()
        self._client: httpx.AsyncClient | None = None
        self._headers = connection.get("headers") or {}
        self._tls = connection.get("tls")
        self._transport = connection.get("transport")

    async def identify(self) -> Identity:
        response = await self.get("/v1/models")
        return Identity(kind="openai", version=response.headers.get("server", ""))

    async def models(self) -> tuple[ModelEntry, ...]:
        response = await self.get("/v1/models")
        try:
            entries = response.json()["data"]
            models = [ModelEntry(id=str(entry["id"]), description=dict(entry)) for entry in entries[:_MODELS_LIMIT]]
        except (ValueError, KeyError, TypeError):
            raise EngineUnreachable(f"engine {self.name}: /v1/models did not answer with a list of models") from None
        return tuple(model for model in models if model.id)

    async def gauges(self) -> EngineGauges | None:
        return None

    async def abort(self, request_id: str, door_name: str, cause: StopCause) -> AbortReply:
        return AbortReply(answer=AbortAnswer.FAILED)

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def get(self, path: str) -> httpx.Response:
        """GET a control route; `EngineUnreachable` unless it answers 200."""
        return await self.request("GET", path)

    async def request(
        self, method: str, path: str, json: Any = None, expected: tuple[int, ...] = (200,)
    ) -> httpx.Response:
        """Call a control route; `EngineUnreachable` unless the status is one of `expected`."""
        try:
            response = await self._control().request(method, self.base_url + path, json=json)
        except httpx.HTTPError as error:
            raise EngineUnreachable(f"engine {self.name} at {self.base_url} does not answer: {error}") from error
        if response.status_code not in expected:
            raise EngineUnreachable(f"engine {self.name}: {method} {path} answered {response.status_code}")
        return response

    def _control(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(
                headers=self._headers,
                timeout=_CONTROL_SECONDS,
                verify=self._tls if self._tls is not None else True,
                transport=self._transport,
                # Control traffic goes where the operator said, whatever a proxy variable says.
                trust_env=False,
                # Servers close what has rested for five seconds (uvicorn); not to be on the way in that very moment.
                limits=httpx.Limits(max_connections=8, max_keepalive_connections=2, keepalive_expiry=_REST_SECONDS),
            )
        return self._client
