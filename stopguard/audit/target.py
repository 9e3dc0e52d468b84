"""How an audit looks at an engine from outside: the `Observer` protocol, and who makes one.

Everything that is particular to an engine is behind this: where an id goes, what its gauges are called, how
often they may be read without disturbing it, which features it has and in which words a body asks for them.
An adapter package offers its observer under its entry point in the group ``stopguard.adapters``: the loaded
class (or its module) has an attribute `observer`, called as `(control, clock, model)`. Two are built in: `ref`
(the reference engine's own truth, see `reference`) and `openai` (any server; it proves nothing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

import msgspec

from stopguard.audit.world import Answer
from stopguard.engines import AbortReply, EngineUnreachable, Identity, RouteAnswer
from stopguard.engines.recognition import recognise
from stopguard.engines.registry import AUTO, GROUP
from stopguard.errors import ConfigurationError
from stopguard.ledger import EngineGauges, Evidence
from stopguard.probe import wire
from stopguard.stops import AbortAnswer

__all__ = [
    "Control",
    "Facts",
    "Happening",
    "Observer",
    "PlainObserver",
    "Reading",
    "Row",
    "Submitted",
    "TargetModel",
    "make_observer",
    "observer_kinds",
]

OBSERVE_MODES = ("probe", "metrics", "log")


class Control(Protocol):
    """A way to the engine's own routes: `World.control`."""

    async def __call__(self, method: str, path: str, body: Any = None) -> Answer: ...


class TargetModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model that is asked. `context_tokens` is 0 where the engine does not say; `adapters` are LoRA names."""

    name: str
    context_tokens: int = 0
    adapters: tuple[str, ...] = ()


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What an observer can do, and what it knows about its engine.

    `features` maps a feature to the body fields that ask for it: `endless` (do not stop at the end token),
    `lora`, `structured`, `speculative`, `image` (empty fields: content parts are understood). What is not in it
    cannot be staged. `skips` are scenarios that make no sense here, each with the reason that is printed.
    """

    kind: str
    grade: Evidence
    safe_interval_seconds: float
    observed_by: str
    #: Events of single requests come (from a probe or a log): books are exact.
    sees_events: bool = False
    #: It can abort by id, other than by closing the connection.
    abort_door: bool = False
    #: Ids can be aborted here, though not those of requests as `place` sends them: what an unknown id is told
    #: can be asked.
    id_door: bool = False
    #: An abort also reaches live requests whose ids only begin like the given one.
    matches_by_prefix: bool = False
    features: Mapping[str, Mapping[str, Any]] = {}
    skips: Mapping[str, str] = {}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One live request in the engine's own list. Tokens in tokens, blocks in blocks."""

    request_id: str
    parent_id: str
    place: wire.Place
    blocks_held: int
    output_tokens: int
    prompt_tokens_left: int


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's totals at one moment; what it does not say is `None`.

    `gauges.waiting` counts whoever is in the engine and does not run. `beside` are further things that a
    request can leak, by name ("lora slots", "host blocks"). `blocks_missing` is what the engine's own sums
    lack: total less free, cached and used (negative: too many).
    """

    gauges: EngineGauges
    preempted: int | None = None
    beside: dict[str, int] = {}
    blocks_missing: int | None = None
    watchers: int | None = None
    steps_total: int | None = None
    generated_tokens_total: int | None = None
    aborts_total: int | None = None
    rows: tuple[Row, ...] | None = None

    @property
    def places(self) -> int | None:
        """Requests in the engine, running or not; `None` when a part of it is not known."""
        if self.gauges.running is None or self.gauges.waiting is None:
            return None
        return self.gauges.running + self.gauges.waiting


class Submitted(msgspec.Struct, frozen=True):
    """The engine's front end has taken a request under this id."""

    request_id: str
    at: float


Happening = Submitted | wire.Event


class Observer(Protocol):
    """One engine, seen from outside. Times are on the world's clock. Reading raises `TargetLost` when it is gone."""

    facts: Facts

    async def identify(self) -> Identity:
        """What it is; also the moment to compare clocks. Raises `TargetUnreachable` when it is not this kind."""
        ...

    async def read(self) -> Reading | None:
        """Its totals now, or `None` where it has none."""
        ...

    async def events(self) -> tuple[list[Happening], bool]:
        """What has happened since the last call, oldest first, and whether something is missing before it."""
        ...

    async def abort(self, engine_id: str) -> AbortReply:
        """Knock once on its best door. Failures are answers."""
        ...

    async def health(self) -> int:
        """The status of its health route; 0 when nobody answers."""
        ...

    def place(self, tag: str) -> tuple[dict[str, str], dict[str, Any]]:
        """The headers and body fields that give a request the id `tag`, as far as the engine lets a client choose."""
        ...

    def engine_id(self, tag: str, response_id: str) -> str:
        """The id to abort by, when no event has told it; empty when it cannot be known."""
        ...


class PlainObserver:
    """Any OpenAI-compatible server: it can be asked and left, and says nothing about what became of it."""

    def __init__(self, control: Control, clock: Callable[[], float], model: TargetModel) -> None:
        self._control = control
        features: dict[str, dict[str, Any]] = {"structured": {"response_format": {"type": "json_object"}}}
        if model.adapters:
            features["lora"] = {"model": model.adapters[0]}
        self.facts = Facts(
            kind="openai",
            grade=Evidence.SENT,
            safe_interval_seconds=1.0,
            observed_by="nothing: this engine shows no gauges",
            features=features,
        )

    async def identify(self) -> Identity:
        answer = await self._control("GET", "/v1/models")
        return Identity(kind="openai", version=answer.headers.get("server", ""))

    async def read(self) -> Reading | None:
        return None

    async def events(self) -> tuple[list[Happening], bool]:
        return [], False

    async def abort(self, engine_id: str) -> AbortReply:
        return AbortReply(answer=AbortAnswer.FAILED)

    async def health(self) -> int:
        return (await self._control("GET", "/health")).status

    def place(self, tag: str) -> tuple[dict[str, str], dict[str, Any]]:
        return {"X-Request-Id": tag}, {}

    def engine_id(self, tag: str, response_id: str) -> str:
        return response_id


Maker = Callable[[Control, Callable[[], float], TargetModel], Observer]


def _adapters(given: Iterable[EntryPoint] | None) -> dict[str, EntryPoint]:
    points = entry_points(group=GROUP) if given is None else given
    return {point.name: point for point in points}


def observer_kinds(adapters: Iterable[EntryPoint] | None = None) -> tuple[str, ...]:
    """The kinds that can be asked for: the built-in ones, and every adapter."""
    return ("openai", "ref", *sorted(set(_adapters(adapters)) - {"openai", "ref"}))


async def make_observer(
    kind: str,
    observe: str,
    control: Control,
    clock: Callable[[], float],
    model: TargetModel,
    adapters: Iterable[EntryPoint] | None = None,
) -> Observer:
    """The observer for `kind`; with `auto`, the one that recognises the engine (else the plain one).

    Who recognises it is decided as for the gateway (`stopguard.engines.recognition`). An adapter's `observer` may take
    `observe` (probe, metrics or log; empty: its best). Raises `ConfigurationError` for a kind that cannot be had.
    """
    from stopguard.audit.reference import ReferenceObserver  # noqa: PLC0415 (it needs this module)

    found = _adapters(adapters)
    if kind == AUTO:
        kind = await _recognised(control, found)
    if kind == "ref":
        return ReferenceObserver(control, clock, model, observe)
    if kind == "openai":
        if observe:
            raise ConfigurationError(f"--observe {observe}: nothing can be observed of an engine without an adapter")
        return PlainObserver(control, clock, model)
    if kind not in found:
        raise ConfigurationError(f"no engine kind {kind!r}; there are: auto, {', '.join(observer_kinds(adapters))}")
    maker = _load(found[kind])
    if maker is None:
        raise ConfigurationError(f"the adapter {kind} ({found[kind].value}) has no observer: use --engine openai")
    return _made(maker, observe, control, clock, model)


async def _recognised(control: Control, adapters: Mapping[str, EntryPoint]) -> str:
    """The kind of the engine, or the plain one where no adapter with an observer knows it."""

    async def ask(path: str) -> RouteAnswer:
        answer = await control("GET", path)
        headers = {name.lower(): value for name, value in answer.headers.items()}
        return RouteAnswer(status=answer.status, headers=headers, text=answer.body.decode("utf-8", "replace"))

    try:
        kind = (await recognise(ask, adapters.values())).kind
    except EngineUnreachable:
        return "openai"  # whose first question will say what is wrong
    return kind if kind == "ref" or (kind in adapters and _load(adapters[kind]) is not None) else "openai"


def _load(point: EntryPoint) -> Any:
    try:
        return getattr(point.load(), "observer", None)
    except Exception as error:
        raise ConfigurationError(
            f"the adapter {point.name} ({point.value}) cannot be used: {type(error).__name__}: {error}"
        ) from error


def _made(maker: Any, observe: str, control: Control, clock: Callable[[], float], model: TargetModel) -> Observer:
    made: Observer = maker(control, clock, model, observe) if observe else maker(control, clock, model)
    return made
