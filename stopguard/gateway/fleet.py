"""The engines behind the gateway: which one serves a model, how busy it is, and whether it is well.

**Routing.** Each engine's `/v1/models` says what it serves. A request goes to the least loaded of the
healthy engines that serve its model; load is read from the books (`Controller.in_engine`), never counted by
hand. A model that nobody lists is refused when several engines are there, and left to the engine to judge
when there is one.

**Health** is passive first: some connections in a row that cannot be made, or that break before a response,
eject an engine. It returns when it answers a control request, which is tried with growing pauses. If all
engines that serve a model are ejected the least recently ejected one is tried all the same: nothing is lost.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from stopguard.engines import Engine, EngineUnreachable, Identity, ModelEntry
from stopguard.errors import ConfigurationError
from stopguard.gateway.head import HeaderRules
from stopguard.gateway.settings import EngineSettings, GatewaySettings
from stopguard.gateway.statistics import MemberStatistics
from stopguard.gateway.upstream import Pool
from stopguard.stops import CLOSE_CONNECTION, DoorKind, EngineProfile

if TYPE_CHECKING:
    from stopguard.gateway.exchange import Exchange
    from stopguard.preemption import Claim
    from stopguard.stops import Controller

__all__ = ["Fleet", "Member", "place_in_body"]

logger = logging.getLogger(__name__)

OTHER_MODEL = "other"
_MODELS_LIMIT = 200
_encode = msgspec.json.Encoder().encode
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Member:
    """One engine as the gateway uses it."""

    __slots__ = (
        "_body_field",
        "_controller",
        "_extra",
        "_id_line",
        "_own_credentials",
        "_owned_fields",
        "_prefix",
        "authority",
        "ejected_until",
        "ejections",
        "engine",
        "failures",
        "identity",
        "inside",
        "models",
        "parent_profile",
        "places_kept",
        "pool",
        "preparing",
        "profile",
        "served",
        "settings",
        "unnamed_profile",
    )

    def __init__(
        self,
        engine: Engine,
        settings: EngineSettings,
        gateway: GatewaySettings,
        rules: HeaderRules,
        controller: Controller,
    ) -> None:
        parts = urlsplit(engine.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"engine {engine.name}: {engine.base_url!r} is not an HTTP address")
        if engine.profile.name != engine.name:
            raise ConfigurationError(f"engine {engine.name} has a profile with the name {engine.profile.name}")
        secure = parts.scheme == "https"
        self.engine = engine
        #: What a probe inside makes of the adapter's profile, while there is one.
        self.inside: Callable[[EngineProfile], EngineProfile] | None = None
        self.take_profile()
        self.settings = settings
        self._controller = controller
        self._prefix = parts.path.rstrip("/").encode("ascii")
        self.authority = parts.netloc.rpartition("@")[2].encode("ascii")
        placement = engine.placement
        self._id_line = placement.header.lower().encode("ascii") + b": " if placement.header else b""
        self._body_field = placement.body_field
        self._owned_fields = engine.owned_body_fields | ({placement.body_field} if placement.body_field else set())
        self._extra = b"".join(f"{name}: {value}\r\n".encode("latin-1") for name, value in settings.extra_headers)
        ours = {name.lower() for name, _ in settings.extra_headers}
        self._own_credentials = bool(ours & {"authorization", "x-api-key", "api-key"})
        self.pool = Pool(
            host=parts.hostname,
            port=parts.port or (443 if secure else 80),
            header_rules=rules,
            tls=(settings.tls or ssl.create_default_context()) if secure else None,
            reuse=engine.reuse_connections,
            idle_connections=settings.idle_connections,
            idle_seconds=settings.idle_seconds,
            connect_seconds=gateway.timeouts.connect_seconds,
            head_bytes=gateway.limits.response_head_bytes,
        )
        self.models: dict[str, ModelEntry] | None = None
        #: What it said it is, asked when it answers for the first time and whenever it was away.
        self.identity: Identity | None = None
        self.failures = 0
        self.ejections = 0
        self.ejected_until = 0.0
        self.served = 0
        # For requests that come back from a preemption; below zero for those that are held inside the engine.
        self.places_kept = 0
        # On their way to it, and not waiting for a connection yet.
        self.preparing: set[Exchange] = set()

    def take_profile(self) -> None:
        """Read the adapter's profile (again): what it knows of its engine may change when it has asked it."""
        base = self.engine.profile
        # Where an abort by our id finds nothing, no time is lost on the doors that are called with it.
        doors = tuple(door for door in base.doors if door.kind is not DoorKind.CALL)
        self.unnamed_profile = msgspec.structs.replace(base, doors=doors or (CLOSE_CONNECTION,))
        # A probe knows our id, and the children that belong to it; of a request without it it cannot speak.
        inside = self.inside
        self.profile = base if inside is None else inside(base)
        self.parent_profile = self.unnamed_profile if inside is None else inside(self.unnamed_profile)

    def profile_of(self, exchange: Exchange) -> EngineProfile:
        """What a stop of this very request is worth here, and which doors are of use for it."""
        engine = self.engine
        paths = engine.placement.body_paths
        one = exchange.facts.choices == 1 or engine.capabilities.aborts_children
        if paths and exchange.head.path not in paths:
            return self.unnamed_profile
        return self.profile if one else self.parent_profile

    @property
    def load(self) -> int:
        """Requests in the engine, by the books, and those that are prepared or wait for a connection to it."""
        in_engine = self._controller.in_engine.get(self.profile.name, ())
        return len(in_engine) + len(self.pool.waiting) + len(self.preparing)

    @property
    def has_room(self) -> bool:
        return self.load + self.places_kept < self.settings.concurrent_requests

    @property
    def has_room_for_returning(self) -> bool:
        """Whether a request that was preempted may come back: the places that are kept are kept for it."""
        return self.load < self.settings.concurrent_requests

    @property
    def places_free(self) -> int:
        """How many more requests it may be sent."""
        return self.settings.concurrent_requests - self.places_kept - self.load

    @property
    def healthy(self) -> bool:
        return self.ejected_until == 0.0

    def failed(self, at: float) -> None:
        """A connection could not be made, or broke before a response."""
        self.failures += 1
        if self.failures >= self.settings.failures_to_eject and self.healthy:
            self.eject(at)

    def eject(self, at: float) -> None:
        """Send it nothing until it answers again, and ask it first after a pause that grows."""
        pause = self.settings.ejected_seconds * 2.0 ** min(self.ejections, 16)
        self.ejections += 1
        self.ejected_until = at + min(pause, self.settings.ejected_longest_seconds)

    def answered(self) -> None:
        """It answered: it is well."""
        if self.failures or self.ejected_until:
            self.failures = 0
            self.ejections = 0
            self.ejected_until = 0.0

    def request_for(self, exchange: Exchange) -> tuple[bytes, bytes]:
        """Head and body of the request as this engine wants them, with our id in its place."""
        head, body = exchange.head, exchange.body
        openings = head.standing.openings
        opening = openings.get(self)
        if opening is None:
            extra = self._extra if self._own_credentials else head.credential_lines + self._extra
            opening = openings[self] = (
                head.opening(self.authority, self._prefix, extra, keep_alive=self.pool.reuse) + self._id_line
            )
        if self._owned_fields and body:
            paths = self.engine.placement.body_paths
            field = self._body_field if not paths or head.path in paths else ""
            body = place_in_body(body, self._owned_fields, field, exchange.request_id)
        if exchange.claim is not None and body:
            body = self._with_priority(body, exchange.claim)
        if self._id_line:
            return b"%b%b\r\n%b" % (opening, exchange.request_id.encode(), head.ending(len(body))), body
        return opening + head.ending(len(body)), body

    def _with_priority(self, body: bytes, claim: Claim) -> bytes:
        """`body` with the priority of the request's class in the place of what the client wrote."""
        can = self.engine.capabilities
        if not can.priority_field:
            return body
        priority = claim.engine_priority(lower_is_more_urgent=can.lower_is_more_urgent)
        return place_in_body(body, (can.priority_field,), can.priority_field, priority)

    def request_at(self, exchange: Exchange, path: str, body: bytes) -> tuple[bytes, bytes]:
        """Head and body of a request that is ours in wording: another path, another body, the client's headers."""
        head = exchange.head
        extra = self._extra if self._own_credentials else head.credential_lines + self._extra
        opening = head.opening(self.authority, self._prefix, extra, keep_alive=self.pool.reuse, target=path.encode())
        if self._owned_fields:
            paths = self.engine.placement.body_paths
            field = self._body_field if not paths or path in paths else ""
            body = place_in_body(body, self._owned_fields, field, exchange.engine_id)
        if exchange.claim is not None:
            body = self._with_priority(body, exchange.claim)
        if self._id_line:
            opening += b"%b%b\r\n" % (self._id_line, exchange.engine_id.encode())
        return opening + head.ending(len(body)), body

    def statistics(self) -> MemberStatistics:
        """This engine now."""
        return MemberStatistics(
            name=self.engine.name,
            base_url=self.engine.base_url,
            healthy=self.healthy,
            load=self.load,
            waiting_for_connection=len(self.pool.waiting),
            open_connections=len(self.pool.open),
            idle_connections=len(self.pool.idle),
            failures=self.failures,
            ejections=self.ejections,
            models=tuple(self.models or ()),
        )


def place_in_body(body: bytes, owned: Iterable[str], field: str, value: str | int) -> bytes:
    """`body` without the top-level fields that are ours, and with `value` (our id) in `field`, if it names one.

    The other fields stay as they are, byte for byte. A body that is no JSON object is left alone: no
    engine takes an id from it.
    """
    try:
        fields: dict[str, Any] = _fields_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body
    for name in owned:
        fields.pop(name, None)
    if field:
        fields[field] = value
    return _encode(fields)


class Fleet:
    """All engines, and the tasks that watch them (one an engine)."""

    def __init__(
        self,
        engines: Iterable[tuple[Engine, EngineSettings]],
        settings: GatewaySettings,
        controller: Controller,
    ) -> None:
        pairs = list(engines)
        if not pairs:
            raise ConfigurationError("no engine is configured: name one with --engine NAME=URL")
        names = [engine.name for engine, _ in pairs]
        if len(set(names)) != len(names):
            raise ConfigurationError("two engines have the same name")
        owned = {name for engine, _ in pairs for name in engine.owned_headers}
        owned |= {engine.placement.header for engine, _ in pairs if engine.placement.header}
        owned |= {name for _, each in pairs for name, _ in each.extra_headers}
        self.header_rules = HeaderRules(owned)
        self.members = [Member(engine, each, settings, self.header_rules, controller) for engine, each in pairs]
        self.control_paths = frozenset(path for engine, _ in pairs for path in engine.control_paths)
        self.on_identified: Callable[[Member, Identity], None] | None = None
        self._by_name = {member.engine.name: member for member in self.members}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to watch the engines."""
        loop = asyncio.get_running_loop()
        for member in self.members:
            self._tasks.add(loop.create_task(self._watch(member), name=f"watch {member.engine.name}"))

    async def close(self) -> None:
        """Stop watching and close every connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for member in self.members:
            member.pool.close()
            await member.engine.aclose()

    def named(self, name: str) -> Member | None:
        return self._by_name.get(name)

    def serving(self, model: str) -> list[Member]:
        """The engines that may serve `model`; without a name, all."""
        if not model or len(self.members) == 1:
            return self.members
        return [member for member in self.members if member.models is None or model in member.models]

    def choose_quietly(self, candidates: list[Member]) -> Member | None:
        """Some of `candidates` that has room, without sending anything there."""
        return next((member for member in candidates if member.has_room), None)

    def choose(self, candidates: list[Member], excluded: Sequence[Member] = ()) -> Member | None:
        """The best of `candidates` that has room; `None` when none has."""
        if len(candidates) == 1 and not excluded:
            only = candidates[0]
            return only if only.has_room else None
        best: Member | None = None
        for member in candidates:
            if member in excluded or not member.has_room:
                continue
            if best is None or _rank(member) < _rank(best):
                best = member
        if best is not None:
            best.served += 1
        return best

    def label(self, model: str) -> str:
        """`model` if some engine lists it, else ``other``: labels come from a closed set."""
        for member in self.members:
            if member.models is not None and model in member.models:
                return model
        return OTHER_MODEL

    def models(self) -> dict[str, ModelEntry]:
        """Every model that some engine serves, the first engine's description counting."""
        models: dict[str, ModelEntry] = {}
        for member in self.members:
            for name, entry in (member.models or {}).items():
                models.setdefault(name, entry)
        return models

    def close_rested(self, at: float) -> bool:
        """Close connections that have rested too long; returns whether any rest."""
        resting = [member.pool.close_rested(at) for member in self.members]
        return any(resting)

    async def refresh(self, member: Member) -> bool:
        """Ask one engine for its models; returns whether it answered."""
        try:
            entries = await member.engine.models()
        except EngineUnreachable:
            member.identity = None  # it may come back as another version
            return False
        member.models = {entry.id: entry for entry in entries[:_MODELS_LIMIT]}
        if member.identity is None:
            await self._identify(member)
        else:
            member.take_profile()  # what is worth what may turn out only when the engine has worked
        member.pool.reuse = member.engine.reuse_connections
        return True

    async def _identify(self, member: Member) -> None:
        try:
            identity = await member.engine.identify()
        except EngineUnreachable as error:
            logger.warning("engine %s serves models and does not say what it is: %s", member.engine.name, error)
            identity = Identity(kind="")
        member.identity = identity
        member.take_profile()
        if self.on_identified is not None:
            self.on_identified(member, identity)

    async def _watch(self, member: Member) -> None:
        while True:
            answers = await self.refresh(member)
            at = monotonic()
            member.pool.close_rested(at)
            if answers:
                if not member.healthy:
                    member.answered()
                pause = member.settings.refresh_seconds
            else:
                if at >= member.ejected_until > 0.0:
                    member.eject(at)
                # Until its models are known for the first time it is asked more often.
                known = member.models is not None and member.healthy
                pause = member.settings.refresh_seconds if known else member.settings.ejected_seconds
            if not member.healthy:
                pause = max(0.05, member.ejected_until - at)
            await asyncio.sleep(pause)


def _rank(member: Member) -> tuple[bool, float, int, int]:
    return (not member.healthy, member.ejected_until, member.load, member.served)
