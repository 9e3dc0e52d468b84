"""The gateway: listeners, one timer, and the hands of the controller.

Theory
------
Everything about a request happens in the calls of its two connections and in the effects that the
controller returns; the gateway carries these out, in order. There is one timer for everything: it stands at
the earliest moment that any deadline may need, is only ever moved forward in time when it fires, and both
wheels (the controller's for requests, ours for connections) are looked at then. No task belongs to a
request. Tasks belong to engines (health, one reading of gauges at a time), to connections that are being
made, and to aborts on their way through an engine's own interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from stopguard.engines import Engine, EngineUnreachable
from stopguard.errors import ConfigurationError
from stopguard.gateway.admission import Admission
from stopguard.gateway.cancel_api import CancelApi
from stopguard.gateway.downstream import Downstream
from stopguard.gateway.exchange import Exchange
from stopguard.gateway.fleet import Fleet
from stopguard.gateway.head import RequestHead
from stopguard.gateway.inside_way import InsideWay
from stopguard.gateway.liveness import set_listener_options
from stopguard.gateway.parking import GatewayWay
from stopguard.gateway.preempting import Preempting
from stopguard.gateway.registry import Registry
from stopguard.gateway.seen_heads import SeenHeads
from stopguard.gateway.settings import EngineSettings, GatewaySettings, Listener
from stopguard.gateway.statistics import GatewayStatistics
from stopguard.ledger import Book
from stopguard.listening import open_listeners
from stopguard.preemption import Mode
from stopguard.stops import (
    AbortAnswer,
    Controller,
    DoorKind,
    Effect,
    Semantics,
    Source,
    StopCause,
    StopConfig,
    TimerWheel,
    Tracked,
    effects,
    observe_gauges,
)

if TYPE_CHECKING:
    from stopguard.gateway.probing import Probing

__all__ = ["Gateway", "loop_factory"]

logger = logging.getLogger("stopguard.gateway")

_NEVER = float("inf")
_SOON_SECONDS = 0.02
_CONNECTION_TICK_SECONDS = 0.05
_ABORTS_AT_ONCE = 64
_GAUGE_FLOOR_SECONDS = 0.02


class Gateway:
    """The data plane of one process.

    `observers` are called with every effect and the moment, after it was carried out: the journal,
    metrics and traces hang there. They must not raise and must not wait.
    """

    def __init__(
        self,
        engines: Iterable[tuple[Engine, EngineSettings]],
        settings: GatewaySettings | None = None,
        *,
        book: Book | None = None,
        stop_config: StopConfig | None = None,
    ) -> None:
        self.settings = settings or GatewaySettings()
        self.limits = self.settings.limits
        self.timeouts = self.settings.timeouts
        self.book = book if book is not None else Book()
        self.controller = Controller(self.book, stop_config or StopConfig(), at=monotonic())
        self.fleet = Fleet(engines, self.settings, self.controller)
        self.header_rules = self.fleet.header_rules
        self.seen_heads: SeenHeads[RequestHead] = SeenHeads()
        self.registry = Registry(self.limits.recent_requests)
        wanted = self.settings.preemption
        self.preempting = None if wanted.mode is Mode.OFF else Preempting(self)
        # Streams that may be cut and go on; without it every stream is passed through.
        self.parking: GatewayWay | None = None
        if wanted.mode is Mode.PREEMPT or self.settings.resume.failover:
            self.parking = GatewayWay(self)
        if self.preempting is not None:
            self.preempting.add_way(InsideWay(self))
            if self.parking is not None:
                self.preempting.add_way(self.parking)
        self.admission = Admission(self)
        self.cancel_api = CancelApi(self)
        self.observers: list[Callable[[Effect, float], None]] = []
        # How to knock on a door of kind PROBE, set by whoever has the channel; without it the knock has failed.
        self.knock_probe: Callable[[effects.Knock, float], None] | None = None
        # The probes inside engines, when somebody listens for them.
        self.probing: Probing | None = None
        self.failed_effects = 0
        # Called with each request that was taken in, before it is sent anywhere (a tracer wants its parent).
        self.on_admitted: Callable[[Exchange], None] | None = None
        self.draining = False
        self.addresses: list[tuple[str, int]] = []
        self._connections: set[Downstream] = set()
        self._accepted = 0
        self._body_bytes = 0
        self._wheel: TimerWheel[Downstream] = TimerWheel(monotonic(), tick_seconds=_CONNECTION_TICK_SECONDS)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = _NEVER
        self._servers: list[asyncio.Server] = []
        self._aborts: set[asyncio.Task[None]] = set()
        self._abort_slots = asyncio.Semaphore(_ABORTS_AT_ONCE)
        self._gauge_readers: dict[str, asyncio.Task[None]] = {}
        self._gauges_read_at: dict[str, float] = {}
        self._no_requests = asyncio.Event()
        self._no_connections = asyncio.Event()
        self._loop: Any = None

    # ---- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen. `addresses` has the real addresses afterwards (port 0 gets one from the system)."""
        self._loop = asyncio.get_running_loop()
        try:
            for listener in self.settings.listeners:
                for opened in self._listen(listener):
                    server = await self._loop.create_server(
                        lambda: Downstream(self), sock=opened, ssl=listener.tls, backlog=listener.backlog
                    )
                    self._servers.append(server)
                    self.addresses.append(opened.getsockname()[:2])
        except ConfigurationError:
            for server in self._servers:
                server.close()
            raise
        self.fleet.start()

    async def shutdown(self, drain_seconds: float | None = None) -> int:
        """Let requests end, stop the rest, wait for their acks, close. Returns how many were never settled.

        New requests are refused with 503 from the first moment.
        """
        self.draining = True
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.shut()
        await self._until_empty(self.timeouts.drain_seconds if drain_seconds is None else drain_seconds)
        at = monotonic()
        for exchange in self.registry.exchanges():
            cause = StopCause(semantics=Semantics.FAIL, source=Source.GATEWAY, reason="shutdown", observed_at=at)
            self.stop(exchange.tracked, cause)
        await self._until_empty(self.controller.config.settle_seconds)
        open_requests = len(self.registry)
        for task in [*self._aborts, *self._gauge_readers.values()]:
            task.cancel()
        await asyncio.gather(*self._aborts, *self._gauge_readers.values(), return_exceptions=True)
        if self.preempting is not None:
            await self.preempting.close()
        if self.parking is not None:
            await self.parking.close()
        await self.fleet.close()
        for connection in list(self._connections):
            # What was written is flushed first, for a moment.
            connection.close()
        if self._connections:
            await _wait(self._no_connections, self.timeouts.linger_seconds)
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_due = _NEVER
        return open_requests

    # ---- requests ------------------------------------------------------------------------------

    def begin(self, client: Downstream, head: RequestHead, body: bytes) -> None:
        """A complete request is at the front of its connection."""
        if head.standing.ours:
            if head.path == "/v1/models":
                self.give_body_room(len(body))
                self.cancel_api.answer(client, head, 200, self._models())
                return
            if self.cancel_api.handle(client, head, body):
                return
        self.admission.admit(client, head, body)

    def stop(self, tracked: Tracked, cause: StopCause) -> None:
        """Stop a request for a reason other than its client's leaving. Harmless when it has ended."""
        at = cause.observed_at
        self.carry_out(self.controller.stop(tracked, at, cause), at)
        self.wake_soon(at)

    def withdraw(self, exchange: Exchange) -> None:
        """It waits in no queue any more."""
        if not exchange.dispatched:
            self.admission.withdraw(exchange)

    def connect_failed(self, exchange: Exchange, reason: str) -> None:
        """No connection to its engine could be made."""
        self.admission.connect_failed(exchange, reason)

    def take_body_room(self, size: int) -> bool:
        """Reserve room for a piece of a request's body; False when all of it is taken."""
        if self._body_bytes + size > self.limits.buffered_body_bytes:
            return False
        self._body_bytes += size
        return True

    def give_body_room(self, size: int) -> None:
        """Give back what `take_body_room` reserved."""
        self._body_bytes -= size
        assert self._body_bytes >= 0

    # ---- effects -------------------------------------------------------------------------------

    def carry_out(self, wanted: Sequence[Effect], at: float) -> None:
        """Do what the controller wants, in order. What goes wrong with one effect does not stop the next."""
        for effect in wanted:
            try:
                if type(effect) is effects.Settled:
                    self._settled(effect.tracked, at)
                elif type(effect) is effects.Knock:
                    self._knock(effect, at)
                elif type(effect) is effects.TellClient:
                    exchange = effect.tracked.owner
                    if exchange is not None:
                        exchange.tell(effect.cause, effect.advice)
                elif type(effect) is effects.StopBegan:
                    exchange = effect.tracked.owner
                    if exchange is not None:
                        exchange.stop_began()
                    if self.preempting is not None:
                        self.preempting.ended(effect.tracked, at)
                    self.wake_soon(at)
                elif type(effect) is effects.Observe:
                    self.look(effect.engine)
                for observer in self.observers:
                    observer(effect, at)
            except Exception:
                # A bug of ours, shown in full; the effects of other requests may follow in the same sequence.
                logger.exception("could not carry out %r", effect)
                self.failed_effects += 1

    def _settled(self, tracked: Tracked, at: float) -> None:
        exchange = tracked.owner
        if exchange is None:
            return
        tracked.owner = None
        self.registry.remove(exchange)
        exchange.settled()
        if self.cancel_api.waiting:
            self.cancel_api.settled(tracked)
        follower = exchange.follower
        if follower is not None:
            exchange.follower = follower.predecessor = None
            self.admission.follow(follower, at)
        if self.preempting is not None:
            self.preempting.settled(tracked, at)
        if self.admission.queue:
            self.admission.pump(at)
        if self.draining and not len(self.registry):
            self._no_requests.set()

    def _knock(self, knock: effects.Knock, at: float) -> None:
        door, tracked = knock.door, knock.tracked
        if door.kind is DoorKind.CLOSE:
            exchange = tracked.owner
            if exchange is not None:
                exchange.close_upstream()
            self.carry_out(self.controller.abort_answered(tracked, at, door.name, AbortAnswer.SENT), at)
        elif door.kind is DoorKind.CALL:
            task = self._loop.create_task(self._call_door(knock))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
        elif self.knock_probe is not None:
            self.knock_probe(knock, at)
        else:
            self.carry_out(self.controller.abort_answered(tracked, at, door.name, AbortAnswer.FAILED), at)
        self.wake_soon(at)

    async def _call_door(self, knock: effects.Knock) -> None:
        """Knock on a door of an engine's own interface and report what it says."""
        tracked, door = knock.tracked, knock.door
        member = self.fleet.named(tracked.profile.name) if tracked.profile is not None else None
        answer, retry_after = AbortAnswer.FAILED, 0.0
        async with self._abort_slots:
            if member is not None and tracked.cause is not None:
                try:
                    async with asyncio.timeout(self.timeouts.abort_seconds):
                        known_as = tracked.request_id if tracked.owner is None else tracked.owner.engine_id
                        reply = await member.engine.abort(known_as, door.name, tracked.cause)
                    answer, retry_after = reply.answer, reply.retry_after_seconds
                except (EngineUnreachable, TimeoutError) as error:
                    logger.warning("%s: door %s does not answer: %s", tracked.request_id, door.name, error)
        at = monotonic()
        self.carry_out(self.controller.abort_answered(tracked, at, door.name, answer, retry_after), at)
        self.wake_soon(at)

    def look(self, engine: str) -> None:
        """Read an engine's gauges as soon as its adapter allows; one reading at a time."""
        member = self.fleet.named(engine)
        if member is not None and engine not in self._gauge_readers and member.engine.gauge_seconds > 0:
            self._gauge_readers[engine] = self._loop.create_task(self._read_gauges(engine, member.engine))

    async def _read_gauges(self, name: str, engine: Engine) -> None:
        gauges = None
        try:
            pause = max(engine.gauge_seconds, _GAUGE_FLOOR_SECONDS)
            wait = self._gauges_read_at.get(name, 0.0) + pause - monotonic()
            await asyncio.sleep(max(wait, 0.0))
            self._gauges_read_at[name] = monotonic()
            gauges = await engine.gauges()
        except EngineUnreachable as error:
            logger.warning("the gauges of engine %s cannot be read: %s", name, error)
        finally:
            # Before the effects, which may want the gauges again.
            del self._gauge_readers[name]
        if gauges is not None:
            at = monotonic()
            self.carry_out(observe_gauges(self.controller, name, at, gauges), at)
            if self.preempting is not None:
                self.preempting.gauges_read(name, gauges, at)
            self.wake_soon(at)

    # ---- time ----------------------------------------------------------------------------------

    def wake_soon(self, at: float) -> None:
        """A stop is under way: look at the controller's wheel within a few milliseconds, if it has anything."""
        if len(self.controller.wheel):
            self.wake_at(at + _SOON_SECONDS)

    def wake_at(self, due_at: float) -> None:
        """Have the timer fire at `due_at` or earlier."""
        if due_at < self._timer_due and self._loop is not None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_due = due_at
            self._timer = self._loop.call_later(max(0.0, due_at - monotonic()), self._tick)

    def watch(self, connection: Downstream) -> None:
        """Look at `connection` when the earlier of its two deadlines passes."""
        due_at = min(connection.deadline_at, connection.upload_due)
        timer = connection.timer
        if timer is not None:
            if timer.due_at <= due_at:
                return
            self._wheel.cancel(timer)
            connection.timer = None
        if due_at < _NEVER:
            connection.timer = self._wheel.set(connection, due_at)
            self.wake_at(due_at)

    def _tick(self) -> None:
        at = monotonic()
        self._timer = None
        self._timer_due = _NEVER
        try:
            self.carry_out(self.controller.advance(at), at)
            for connection in self._wheel.advance(at):
                connection.timer = None
                if min(connection.deadline_at, connection.upload_due) <= at:
                    connection.deadline_passed(at)
                self.watch(connection)
            self.cancel_api.advance(at)
            if self.preempting is not None:
                self.preempting.advance(at)
            rested = self.fleet.close_rested(at)
        finally:
            # Whatever went wrong in one request must not stop the clock of the others.
            decides_at = None if self.preempting is None else self.preempting.next_due()
            for due_at in (self.controller.next_due(), self._wheel.next_due(), decides_at):
                if due_at is not None and due_at < _NEVER:
                    self.wake_at(max(due_at, at + 0.001))
        if rested:
            self.wake_at(at + 1.0)

    # ---- connections ---------------------------------------------------------------------------

    def connection_opened(self, connection: Downstream) -> None:
        """A client has connected."""
        self._accepted += 1
        self._connections.add(connection)
        if len(self._connections) > self.limits.connections or self.draining:
            connection.refuse(self.admission.too_many_connections())
        else:
            connection.arm(monotonic() + self.timeouts.keep_alive_seconds)

    def connection_closed(self, connection: Downstream) -> None:
        """A client's connection is closed: nothing of it stays."""
        self._connections.discard(connection)
        if self.draining and not self._connections:
            self._no_connections.set()
        if connection.timer is not None:
            self._wheel.cancel(connection.timer)
            connection.timer = None

    # ---- questions -----------------------------------------------------------------------------

    def statistics(self) -> GatewayStatistics:
        """The gateway now."""
        return GatewayStatistics(
            connections=len(self._connections),
            connections_accepted=self._accepted,
            requests=len(self.registry),
            queued=len(self.admission.queue),
            refused=self.admission.refused,
            buffered_body_bytes=self._body_bytes,
            aborts_in_flight=len(self._aborts),
            cancel_waiters=self.cancel_api.waiting,
            failed_effects=self.failed_effects,
            draining=self.draining,
            engines=tuple(member.statistics() for member in self.fleet.members),
        )

    # ---- private -------------------------------------------------------------------------------

    def _listen(self, listener: Listener) -> list[socket.socket]:
        def prepare(listening: socket.socket) -> None:
            if listening.family == socket.AF_INET6:
                # A listener of its own may serve the same port of IPv4.
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if listener.reuse_port:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listening.setblocking(False)
            set_listener_options(listening, self.settings.liveness)

        return open_listeners(listener.host, listener.port, prepare=prepare)

    async def _until_empty(self, seconds: float) -> None:
        if len(self.registry):
            self._no_requests.clear()
            await _wait(self._no_requests, seconds)

    def _models(self) -> object:
        models = self.fleet.models()
        entries = [{"object": "model", **entry.description, "id": name} for name, entry in models.items()]
        return {"object": "list", "data": entries}


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """The fastest event loop there is (uvloop, else asyncio's own), for `asyncio.Runner(loop_factory=…)`."""
    try:
        import uvloop  # noqa: PLC0415  (an optional speed-up)
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
