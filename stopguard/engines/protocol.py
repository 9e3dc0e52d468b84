"""The `Engine` protocol: everything that the rest of StopGuard may know of an engine.

An engine has two sides. Its *data side* is described by plain attributes, so that the relay touches no
adapter code for a request: where it is, where our id goes, which headers, body fields and paths belong
to us, and whether its connections may be used again. Its *control side* are coroutines: identify it,
list its models, read its gauges, knock on one of its doors.

The profile (`stopguard.stops.EngineProfile`) says what a stop is worth there: doors in the order to try,
and the best evidence that can be had.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import msgspec

from stopguard.engines.capabilities import Capabilities
from stopguard.errors import EngineError
from stopguard.ledger import EngineGauges
from stopguard.stops import AbortAnswer, EngineProfile, StopCause

__all__ = ["AbortReply", "Engine", "EngineUnreachable", "IdPlacement", "Identity", "ModelEntry"]


class EngineUnreachable(EngineError):
    """The engine did not answer a control request, or not with what it should."""


class IdPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine wants a request's id: in a header, in a field of the JSON body, in both, or nowhere.

    `body_paths` are the routes whose bodies take the field; empty: all of them.
    """

    header: str = ""
    body_field: str = ""
    body_paths: frozenset[str] = frozenset()


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says it is. `version` is empty where it does not say."""

    kind: str
    version: str = ""


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model that an engine serves; `description` is the engine's own entry in `/v1/models`."""

    id: str
    description: dict[str, Any] = {}


class AbortReply(msgspec.Struct, frozen=True, kw_only=True):
    """What one of the engine's doors answered. `retry_after_seconds` is 0 where it did not say."""

    answer: AbortAnswer
    retry_after_seconds: float = 0.0


@runtime_checkable
class Engine(Protocol):
    """One engine behind StopGuard.

    `base_url` is absolute, without a trailing slash. `owned_headers` and `owned_body_fields` (lower case
    headers; top-level JSON fields) are removed from what clients send, since only StopGuard may set them.
    `control_paths` are the engine's own control routes, which clients may not call through the gateway.
    With `reuse_connections` False every request gets a connection of its own. `gauge_seconds` is the
    shortest safe time between two readings of the gauges (0: it has none).
    """

    name: str
    base_url: str
    profile: EngineProfile
    placement: IdPlacement
    owned_headers: frozenset[str]
    owned_body_fields: frozenset[str]
    control_paths: frozenset[str]
    reuse_connections: bool
    gauge_seconds: float
    capabilities: Capabilities

    async def identify(self) -> Identity:
        """What it is. `EngineUnreachable` when it does not answer."""
        ...

    async def models(self) -> tuple[ModelEntry, ...]:
        """The models that it serves now. `EngineUnreachable` when it does not answer."""
        ...

    async def gauges(self) -> EngineGauges | None:
        """Its own gauges now, or `None` where it has none. `EngineUnreachable` when it does not answer."""
        ...

    async def abort(self, request_id: str, door_name: str, cause: StopCause) -> AbortReply:
        """Knock on the door `door_name` (one of kind CALL). Idempotent; failures are answers, not errors."""
        ...

    async def aclose(self) -> None:
        """Close the control connections."""
        ...
