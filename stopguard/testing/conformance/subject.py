"""What is examined: one adapter in front of one engine, in a gateway of its own.

Gateway and clients live in one event loop in a thread, so that a test is plain code that asks and waits:
`Subject.run` carries a coroutine over. The clients are raw sockets, since leaving in a precise way is the point.
Everything that the adapter is asked (gauges, aborts) is written down on the way.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from time import monotonic
from types import TracebackType
from typing import Any, Final, Self, TypeVar, cast
from weakref import WeakKeyDictionary

import msgspec

from stopguard.audit.client import SocketExchange, SocketWorld
from stopguard.audit.world import Call, Exchange
from stopguard.engines import AbortReply, Capabilities, Engine, EngineUnreachable
from stopguard.engines.registry import create
from stopguard.errors import ConfigurationError
from stopguard.gateway.probing import ProbeSettings, Probing
from stopguard.gateway.server import Gateway
from stopguard.gateway.settings import EngineSettings, GatewaySettings, Listener
from stopguard.ledger import EngineGauges, Evidence, RequestLedgers, StopSummary
from stopguard.stops import Effect, Semantics, Source, StopCause, StopConfig, effects
from stopguard.testing.staging import Shape, Staged, stage

__all__ = ["Closed", "GaugeReading", "Subject"]

T = TypeVar("T")

_START_SECONDS: Final = 60.0
_RUN_SECONDS: Final = 600.0
_POLL_SECONDS: Final = 0.02
_ASKED = 4
_CLOSED_MAX: Final = 100_000
#: For requests that nobody stopped: their books have no stop.
_FINISH: Final = StopSummary(semantics="finish", source="model", reason="finish", observed_at=0.0, outcome="confirmed")


class GaugeReading(msgspec.Struct, frozen=True):
    """One call of the adapter's `gauges`: when it was made, and by whom (`suite`, or else the gateway)."""

    at: float
    by_suite: bool
    gauges: EngineGauges | None


class Closed(msgspec.Struct, frozen=True):
    """One request whose books are closed: its ledgers, and how it ended."""

    request_id: str
    ledgers: RequestLedgers
    stop: StopSummary

    @property
    def evidence(self) -> Evidence:
        return self.stop.evidence

    def __str__(self) -> str:
        stop = self.stop
        return f"{self.request_id}: {stop.semantics} {stop.outcome}, evidence {stop.evidence.label}, {self.ledgers!r}"


class _Watched:
    """The adapter, with a note of every call that costs the engine something."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.readings: list[GaugeReading] = []
        self.aborts: list[tuple[str, str, AbortReply]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def gauges(self, *, by_suite: bool = False) -> EngineGauges | None:
        at = monotonic()
        gauges = None
        try:
            gauges = await self._engine.gauges()
            return gauges
        finally:
            self.readings.append(GaugeReading(at, by_suite, gauges))

    async def abort(self, request_id: str, door_name: str, cause: StopCause) -> AbortReply:
        reply = await self._engine.abort(request_id, door_name, cause)
        self.aborts.append((request_id, door_name, reply))
        return reply


class _NamingWorld(SocketWorld):
    """Sends through the gateway, one request after another, and knows our id of each."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject.url, subject.engine_url)
        self.ids: WeakKeyDictionary[SocketExchange, str] = WeakKeyDictionary()
        self._subject = subject
        self._one_by_one = asyncio.Lock()

    async def open(self, call: Call, after: Exchange | None = None) -> SocketExchange:
        subject = self._subject
        async with self._one_by_one:
            before = subject.known_ids()
            exchange = await super().open(call, after)
            reply, new = exchange.reply, set[str]()
            while not new and not reply.ended:
                await asyncio.sleep(0.0005)
                new = subject.known_ids() - before
            new = new or subject.known_ids() - before
            if len(new) == 1:
                (self.ids[exchange],) = new
            return exchange


class Subject:
    """An adapter of the kind `kind` in front of the engine at `base_url`; a context manager.

    `model` is asked (empty: the first that the engine lists). `slots` is how many requests the engine runs at once,
    `long_tokens` an output long enough to be stopped in the middle, `prompt_words` a prompt long enough for its
    prefill to be met. `expected` promises less than the profile's best evidence for some states, by the names of
    `stopguard.testing.staging.STATES`: ``{"non_streaming": "none"}``, which is what is impossible there, to be said
    in the adapter's documentation too. `engine` is an adapter that has been made already, in the place of `kind`.
    `resumes` says whether streams can go on by token ids there; by default that is what the adapter says. With `probes`
    the gateway listens for the probe inside the engine, which was started with that address and token, and waits for
    it. `prepare` is called with the gateway before anything is examined.
    """

    def __init__(
        self,
        kind: str,
        base_url: str,
        *,
        model: str = "",
        long_tokens: int = 400,
        short_tokens: int = 24,
        neighbours: int = 4,
        settle_seconds: float = 20.0,
        chat: bool = True,
        prompt_words: int = 200,
        slots: int = 8,
        fields: Mapping[str, Any] | None = None,
        expected: Mapping[str, str] | None = None,
        engine: Engine | None = None,
        resumes: bool | None = None,
        probes: ProbeSettings | None = None,
        prepare: Callable[[Gateway], Awaitable[None]] | None = None,
    ) -> None:
        self.kind = kind
        self.engine_url = base_url.rstrip("/").removesuffix("/v1")
        self.neighbours = neighbours
        self.settle_seconds = settle_seconds
        self.expected = {state: _grade(label) for state, label in (expected or {}).items()}
        self.closed: dict[str, Closed] = {}
        self.shape = Shape(
            model=model,
            chat=chat,
            fields=fields or {},
            slots=slots,
            long_tokens=long_tokens,
            short_tokens=short_tokens,
            long_words=prompt_words,
        )
        self._made = engine
        self._resumes = resumes
        self._prepare = prepare
        self._probes = probes
        self._number = 0
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    # ---- life ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._main, name=f"conformance of {self.kind}")
        self._thread.start()
        if not self._ready.wait(_START_SECONDS):
            raise TimeoutError("the gateway of the conformance suite did not start")
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._thread is not None
        self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join(_START_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError("the gateway of the conformance suite did not end")

    def _main(self) -> None:
        try:
            with asyncio.Runner() as runner:  # the clients want asyncio's own transports
                runner.run(self._live())
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _live(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        engine = self._made if self._made is not None else create(self.kind, self.kind, self.engine_url)
        self._watched = _Watched(engine)
        self.engine = cast("Engine", self._watched)
        self.gateway = Gateway(
            [(self.engine, EngineSettings())],
            GatewaySettings(listeners=(Listener(port=0),)),
            stop_config=StopConfig(settle_seconds=self.settle_seconds, write_off_seconds=self.settle_seconds),
        )
        self.gateway.observers.append(self._on_effect)
        probing = Probing(self.gateway, self._probes, {self.kind: self.kind}) if self._probes is not None else None
        await self.gateway.start()
        host, port = self.gateway.addresses[0]
        self.url = f"http://{host}:{port}"
        self.through = _NamingWorld(self)
        self.direct = SocketWorld(self.engine_url)
        try:
            if probing is not None:
                await probing.start()
            await self._meet()
            if self._prepare is not None:
                await self._prepare(self.gateway)
            self._ready.set()
            await self._over.wait()
        finally:
            await self.through.aclose()
            await self.direct.aclose()
            if probing is not None:
                await probing.close()
            await self.gateway.shutdown(drain_seconds=0.0)

    async def _meet(self) -> None:
        """Wait until the gateway knows the engine, as a load balancer would for readiness."""
        member = self.gateway.fleet.members[0]
        due_at = monotonic() + _START_SECONDS / 2
        while member.models is None or member.identity is None:
            if monotonic() > due_at:
                raise EngineUnreachable(f"{self.kind} at {self.engine_url} lists no models")
            await asyncio.sleep(_POLL_SECONDS)
        while self._probes is not None and not member.profile.probed:
            if monotonic() > due_at:
                raise EngineUnreachable(f"no probe of {self.kind} has connected to {', '.join(self._probes.listen)}")
            await asyncio.sleep(_POLL_SECONDS)
        models = list(member.models)
        if not self.shape.model:
            if not models:
                raise ConfigurationError(f"{self.kind} at {self.engine_url} serves no model")
            self.shape = msgspec.structs.replace(self.shape, model=models[0])
        fields = {**self.capabilities.endless_fields, **self.shape.fields}
        self.shape = msgspec.structs.replace(self.shape, fields=fields)

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], seconds: float = _RUN_SECONDS) -> T:
        """Carry out `work` in the loop of gateway and clients, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(seconds)

    # ---- what is known ---------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    @property
    def best_evidence(self) -> Evidence:
        """What the gateway can have there: the adapter's best, or more while a probe is inside."""
        return self.gateway.fleet.members[0].profile.best_evidence

    @property
    def resumes(self) -> bool:
        """Whether a stream that was cut can go on there by token ids."""
        return getattr(self.engine, "resumption", None) is not None if self._resumes is None else self._resumes

    @property
    def readings(self) -> list[GaugeReading]:
        """Every reading of the gauges so far."""
        return self._watched.readings

    @property
    def aborts(self) -> list[tuple[str, str, AbortReply]]:
        """Every knock on one of the adapter's own doors so far: id, door, answer."""
        return self._watched.aborts

    def promised(self, state: str) -> Evidence:
        """The least evidence that a stop in `state` must end with.

        By default the best that the profile has; where the end of the stream is an ack, that, as it comes sooner.
        """
        best = self.best_evidence
        ends = self.gateway.fleet.members[0].profile.stream_end_is_ack
        sooner = min(best, Evidence.STREAM_CLOSED) if ends else best
        return self.expected.get(state, sooner)

    def number(self) -> int:
        """A number that no request had before."""
        self._number += 1
        return self._number

    def _on_effect(self, effect: Effect, at: float) -> None:
        if isinstance(effect, effects.Settled) and len(self.closed) < _CLOSED_MAX:
            ledgers = effect.tracked.ledgers
            self.closed[ledgers.request_id] = Closed(ledgers.request_id, ledgers, ledgers.stop or _FINISH)

    # ---- in the loop -----------------------------------------------------------------------------

    def known_ids(self) -> set[str]:
        """The requests whose books are open or were closed here."""
        return self.gateway.controller.tracked.keys() | self.closed.keys()

    def id_of(self, exchange: SocketExchange) -> str:
        """Our id of a request that was sent through the gateway."""
        return self.through.ids[exchange]

    async def stage(self, state: str) -> tuple[Staged, str]:
        """A request in `state`, through the gateway, and our id of it."""
        staged = await stage(self.through, self.shape, state, self.number())
        return staged, self.id_of(staged.victim)

    async def leave_in(self, state: str) -> Closed:
        """A client of the gateway leaves while its request is in `state`; its books, when nothing is left of it."""
        staged, request_id = await self.stage(state)
        await staged.victim.leave()
        closed = await self.closed_book(request_id)
        await staged.release()
        await self.idle()
        return closed

    async def ask(
        self,
        prompt: str,
        *,
        tokens: int = 0,
        headers: Mapping[str, str] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> SocketExchange:
        """Send a streaming request through the gateway, for a short output if `tokens` is 0."""
        wanted = tokens or self.shape.short_tokens
        return await self.through.open(self.shape.call(prompt, tokens=wanted, headers=headers, **(fields or {})))

    async def complete(self, prompt: str) -> str:
        """The whole text of a short request; `AssertionError` when it does not end as it should."""
        return await self.text_of(await self.ask(prompt))

    async def text_of(self, exchange: SocketExchange) -> str:
        """Wait for the end of a reply and give its text."""
        reply = exchange.reply
        ended = await self.through.wait(lambda: reply.ended, self.shape.patience_seconds)
        assert ended, f"a request did not end within {self.shape.patience_seconds:g} s ({reply.events} events)"
        said = "; ".join(reply.errors) or reply.failure
        assert reply.status == 200 and reply.complete and not reply.errors, f"status {reply.status}: {said}"  # noqa: PT018
        return reply.text

    async def closed_book(self, request_id: str) -> Closed:
        """Wait until the books of `request_id` are closed."""
        due_at = monotonic() + self.settle_seconds * 2 + 5.0
        while request_id not in self.closed:
            tracked = self.gateway.controller.tracked.get(request_id)
            assert monotonic() < due_at, f"the books of {request_id} stay open: {tracked and tracked.ledgers!r}"
            await asyncio.sleep(_POLL_SECONDS)
        return self.closed[request_id]

    async def gauges(self) -> EngineGauges | None:
        """The engine's gauges, read no faster than the adapter allows; asked again when it was too busy to answer."""
        engine = self.engine
        if engine.gauge_seconds <= 0:
            return None
        for left in reversed(range(_ASKED)):
            last = self.readings[-1].at if self.readings else 0.0
            await asyncio.sleep(max(0.0, last + engine.gauge_seconds - monotonic()))
            try:
                return await self._watched.gauges(by_suite=True)
            except EngineUnreachable:
                if not left:
                    raise
        return None

    async def idle(self) -> EngineGauges | None:
        """Wait until no book is open and nothing is in the engine; its gauges then, or `None` where it has none."""
        due_at = monotonic() + 2 * self.settle_seconds + 3 * self.engine.gauge_seconds
        while self.gateway.controller.tracked:
            assert monotonic() < due_at, f"books stay open: {', '.join(self.gateway.controller.tracked)}"
            await asyncio.sleep(_POLL_SECONDS)
        while True:
            gauges = await self.gauges()
            if gauges is None or gauges.running is None or gauges.waiting is None:
                return gauges
            if gauges.running + gauges.waiting == 0:
                return gauges
            assert monotonic() < due_at, f"the engine is not idle in good time: {gauges}"

    def cause(self) -> StopCause:
        """Why the suite stops something."""
        return StopCause(
            semantics=Semantics.CANCEL, source=Source.API, reason="conformance", observed_at=monotonic(), actor="suite"
        )


def _grade(label: str) -> Evidence:
    for grade in Evidence:
        if grade.label == label:
            return grade
    raise ConfigurationError(f"{label!r} is no grade of evidence: {', '.join(grade.label for grade in Evidence)}")
