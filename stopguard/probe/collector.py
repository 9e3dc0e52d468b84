"""The collector: listens for probes, keeps their numbers honest, and carries orders to them.

Theory
------
Every process of an engine that has a probe is one *source*. Its frames are numbered; a hole in the numbers, or a
source that comes back after it was away, is a *gap*: from there on what the books say of its requests may be wrong,
until a snapshot has come. The collector asks for one, once at a time, and again when it does not come.

An *order* goes to every source that can carry it out, since only the engine knows which of its processes has the
request; the answers are combined into one. Nothing waits for ever, and there is a limit on everything that a peer
can make grow: connections, orders, snapshots on their way (one a source), names remembered.

This module knows no books. What it hears goes to an `Audience`, in order, in the loop that it runs in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Final, Protocol

import msgspec

from stopguard.errors import ConfigurationError
from stopguard.listening import open_listener
from stopguard.probe import wire
from stopguard.probe.link import Link, ProbeLimits
from stopguard.probe.sender import parse_address

__all__ = ["Audience", "Collector", "OrderResult", "Source"]

logger = logging.getLogger("stopguard.probe")

_SNAPSHOT_APART_SECONDS: Final = 0.5
_SNAPSHOT_WAIT_SECONDS: Final = 3.0
_ORDER_SECONDS: Final = 2.0
_REMEMBERED: Final = 1024
_SAY_AGAIN_SECONDS: Final = 30.0
_NAME_CHARACTERS_MAX: Final = 128
#: The best first: what one source says decides when it is better than what the others say. All but `unknown` are said
#: by whoever has the request.
_RANKS: Final[tuple[wire.Answer, ...]] = ("applied", "accepted", "refused", "gone", "failed", "unsupported", "unknown")


class OrderResult(msgspec.Struct, frozen=True):
    """What came of an order, all sources together."""

    answer: wire.Answer
    retry_after_seconds: float = 0.0
    detail: str = ""


class Source:
    """One connected process of an engine. Read by anyone, changed only by the collector."""

    def __init__(self, link: Link, hello: wire.Hello, at: float, last_sequence: int | None) -> None:
        self.link = link
        self.hello = hello
        self.connected_at = at
        #: The number of its last frame; `None` when it has never been heard of.
        self.last_sequence = last_sequence
        self.frames = 0
        self.gaps = 0
        self.frames_missed = 0
        #: What it says it dropped, in all.
        self.frames_dropped = hello.frames_dropped
        #: Its requests may be other than the books say, since this moment; `None` when they are not.
        self.gap_since: float | None = at if self.keeps_books else None
        #: The newest frame and when it came.
        self.frame: wire.Frame | None = None
        self.frame_at = 0.0
        #: The ids of the newest complete snapshot and when it came.
        self.named: frozenset[str] | None = None
        self.named_at = 0.0
        #: When that snapshot was asked for.
        self.named_since = 0.0
        self.snapshot_asked_at: float | None = None
        self.snapshot_wanted = False
        #: The audience's own.
        self.engine = ""

    @property
    def keeps_books(self) -> bool:
        """Whether it sees a scheduler (and is not, say, a front end that only takes orders)."""
        return "snapshot" in self.hello.commands

    @property
    def lag_seconds(self) -> float | None:
        """How long the newest frame took to come, by both clocks."""
        offset = self.link.clock.seconds
        return None if self.frame is None or offset is None else max(0.0, self.frame_at - (self.frame.at - offset))

    def __repr__(self) -> str:
        hello = self.hello
        return f"<Source {hello.name or hello.engine}/{hello.role}{hello.rank} pid {hello.process}>"


class Audience(Protocol):
    """Who the collector tells. Called in its loop; must not wait."""

    def attached(self, source: Source) -> str:
        """A source has proved itself. A reason not to take it, or nothing (and `source.engine` set)."""

    def described(self, source: Source) -> None:
        """It said something new about itself."""

    def frame(self, source: Source, frame: wire.Frame, at: float) -> None:
        """Its next frame."""

    def gap(self, source: Source, frames_missed: int, at: float) -> None:
        """Frames are missing before the next one."""

    def snapshot(self, source: Source, snapshot: wire.Snapshot, at: float, gap_since: float | None) -> None:
        """Everything that it has now; `gap_since` is the beginning of the gap that this closes."""

    def detached(self, source: Source, at: float, why: str) -> None:
        """It is not connected any more."""


class _Order:
    """One command on its way to several sources."""

    __slots__ = ("best", "done", "outstanding", "timer")

    def __init__(self, outstanding: set[Source], done: Callable[[OrderResult], None]) -> None:
        self.outstanding = outstanding
        self.done = done
        self.best: OrderResult | None = None
        self.timer: asyncio.TimerHandle | None = None


class Collector:
    """Listens on `addresses` (tcp://HOST:PORT or a Unix socket's path) for probes that know `token`."""

    def __init__(
        self, addresses: Iterable[str], token: str, audience: Audience, limits: ProbeLimits | None = None
    ) -> None:
        if len(token) < wire.TOKEN_CHARACTERS_MIN:
            raise ConfigurationError(
                f"the probes' token must have at least {wire.TOKEN_CHARACTERS_MIN} characters: "
                "try `openssl rand -hex 32`"
            )
        self.token = token
        self.limits = limits or ProbeLimits()
        self.sources: set[Source] = set()
        #: How many peers were sent away, and frames that we have seen before.
        self.refusals = 0
        self.repeated_frames = 0
        #: Exceptions of the audience: bugs of ours, each in the log.
        self.failures = 0
        self.addresses: list[str] = []
        self._wanted = [parse_address(address) for address in addresses]
        self._audience = audience
        self._links: dict[Link, Source | None] = {}
        self._servers: list[asyncio.Server] = []
        self._paths: list[tuple[str, int]] = []
        self._orders: dict[int, _Order] = {}
        #: Not from one: an answer that is late, to a collector that was here before this one, answers nothing.
        self._command_id = secrets.randbits(48)
        self._last_sequences: OrderedDict[str, int] = OrderedDict()
        self._said: dict[str, float] = {}

    # ---- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen. `addresses` has the real addresses afterwards. `ConfigurationError` when one cannot be had."""
        loop = asyncio.get_running_loop()
        try:
            for address in self._wanted:
                if isinstance(address, str):
                    opened = _bind_path(address)
                    self._paths.append((address, os.stat(address).st_ino))
                    server = await loop.create_unix_server(self._link, sock=opened)
                    self.addresses.append(address)
                else:
                    server = await loop.create_server(self._link, sock=open_listener(*address, whose="probe: "))
                    host, port = server.sockets[0].getsockname()[:2]
                    self.addresses.append(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
                self._servers.append(server)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close every connection and stop listening. Orders that wait have failed."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for link in list(self._links):
            link.close("the collector is shutting down")
        for order in list(self._orders.values()):
            self._finish(order, OrderResult("failed", 0.0, "the collector is shutting down"))
        self._orders.clear()
        for path, inode in self._paths:
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino == inode:
                    os.unlink(path)
        self._paths.clear()
        await asyncio.sleep(0)

    # ---- orders --------------------------------------------------------------------------------------

    def order(
        self,
        engine: str,
        action: wire.Action,
        request_id: str,
        done: Callable[[OrderResult], None],
        *,
        reason: str = "",
        priority: int = 0,
        seconds: float = _ORDER_SECONDS,
    ) -> None:
        """Have `action` done by whichever source of `engine` has the request; `done` is called once, maybe at once."""
        able = {source for source in self.sources if source.engine == engine and action in source.hello.commands}
        if not able:
            done(OrderResult("unsupported", 0.0, f"no probe of engine {engine} does {action}"))
            return
        if len(self._orders) >= self.limits.orders:
            done(OrderResult("failed", 0.0, f"{self.limits.orders} orders are on their way already"))
            return
        self._command_id += 1
        command = wire.Command(self._command_id, action, request_id, reason, priority)
        reached = {source for source in able if source.link.send(command)}
        if not reached:
            done(OrderResult("failed", 0.0, "the probe's connection is closed"))
            return
        order = self._orders[command.command_id] = _Order(reached, done)
        order.timer = asyncio.get_running_loop().call_later(seconds, self._order_overdue, command.command_id)

    def want_snapshot(self, source: Source, at: float) -> None:
        """Ask for a snapshot, unless one is on its way; not more often than twice a second."""
        if not source.keeps_books or source.link.closed:
            return
        asked_at = source.snapshot_asked_at
        if asked_at is not None and at - asked_at < _SNAPSHOT_APART_SECONDS:
            if not source.snapshot_wanted:
                source.snapshot_wanted = True
                wait = asked_at + _SNAPSHOT_APART_SECONDS - at
                asyncio.get_running_loop().call_later(wait, self._ask_again, source)
            return
        self._command_id += 1
        source.snapshot_asked_at = at
        source.link.send(wire.Command(self._command_id, "snapshot"))
        asyncio.get_running_loop().call_later(_SNAPSHOT_WAIT_SECONDS, self._missed_snapshot, source, at)

    def doubt(self, source: Source, at: float) -> None:
        """What it said until now was not booked: begin again with a snapshot."""
        if source.keeps_books:
            source.gap_since = source.gap_since or at
            self.want_snapshot(source, at)

    def _ask_again(self, source: Source) -> None:
        source.snapshot_wanted = False
        self.want_snapshot(source, monotonic())

    def _missed_snapshot(self, source: Source, asked_at: float) -> None:
        # Frames that were dropped may have taken it along.
        if source.gap_since is not None and source.snapshot_asked_at == asked_at:
            self.want_snapshot(source, monotonic())

    def _order_overdue(self, command_id: int) -> None:
        order = self._orders.pop(command_id, None)
        if order is not None:
            self._finish(order, order.best or OrderResult("failed", 0.0, "the probe does not answer"))

    def _answered(self, source: Source, answer: wire.CommandAnswer) -> None:
        order = self._orders.get(answer.command_id)
        if order is None or source not in order.outstanding:
            return
        order.outstanding.discard(source)
        given = OrderResult(answer.answer, answer.retry_after_seconds, answer.detail[:500])
        if order.best is None or _RANKS.index(given.answer) < _RANKS.index(order.best.answer):
            order.best = given
        if not order.outstanding or given.answer in ("applied", "accepted"):
            del self._orders[answer.command_id]
            self._finish(order, order.best)

    def _finish(self, order: _Order, result: OrderResult) -> None:
        if order.timer is not None:
            order.timer.cancel()
        self._safely(order.done, result)

    # ---- the links' owner ----------------------------------------------------------------------------

    def _link(self) -> Link:
        return Link(self, admit=self._admit)

    def _admit(self, link: Link) -> bool:
        unproved = len(self._links) - len(self.sources)
        if len(self._links) >= self.limits.connections or unproved >= self.limits.unproved:
            self.refusals += 1
            self._say("full", "too many connections: one from %s was closed", link.peer)
            return False
        self._links[link] = None
        return True

    def refused(self, link: Link, refusal: wire.Refusal, detail: str) -> None:
        """A peer was sent away."""
        self.refusals += 1
        self._say(refusal, "a probe at %s was refused: %s", link.peer, detail)

    def proved(self, link: Link, hello: wire.Hello) -> str:
        """A peer knows the token."""
        if max(len(text) for text in (hello.name, hello.engine, hello.instance, hello.role)) > _NAME_CHARACTERS_MAX:
            return "its names are too long"
        if not hello.instance:
            return "it has no instance"
        for other in [each for each in self.sources if each.hello.instance == hello.instance]:
            # The same process on a new connection: the old one is dead and does not know it.
            other.link.close("it connected again")
            self._forget(other, "it connected again")
        source = Source(link, hello, monotonic(), self._last_sequences.get(hello.instance))
        reason = self._audience.attached(source)
        if reason:
            return reason
        self._links[link] = source
        self.sources.add(source)
        # Asked in the next turn, when it has been welcomed.
        asyncio.get_running_loop().call_soon(self.want_snapshot, source, source.connected_at)
        return ""

    def heard(self, link: Link, message: wire.FromEngine, at: float) -> None:
        """What a source says."""
        source = self._links.get(link)
        if source is None:
            return
        if isinstance(message, wire.Frame):
            self._frame(source, message, at)
        elif isinstance(message, wire.CommandAnswer):
            self._answered(source, message)
        elif isinstance(message, wire.Snapshot):
            self._snapshot(source, message, at)
        elif isinstance(message, wire.Gap):
            source.frames_dropped = max(source.frames_dropped, message.frames_dropped)
        elif isinstance(message, wire.Hello):
            fixed = {"instance": source.hello.instance, "engine": source.hello.engine, "name": source.hello.name}
            source.hello = msgspec.structs.replace(message, proof=b"", **fixed)
            self._safely(self._audience.described, source)

    def lost(self, link: Link, why: str) -> None:
        """A connection has ended."""
        source = self._links.pop(link, None)
        if source is not None:
            self._forget(source, why)

    # ---- inside --------------------------------------------------------------------------------------

    def _frame(self, source: Source, frame: wire.Frame, at: float) -> None:
        last = source.last_sequence
        if last is not None and frame.sequence <= last:
            self.repeated_frames += 1
            return
        missed = frame.sequence - 1 - (last or 0)
        source.last_sequence = frame.sequence
        if missed:
            source.gaps += 1
            source.frames_missed += missed
            if source.gap_since is None and source.keeps_books:
                source.gap_since = at
            self._safely(self._audience.gap, source, missed, at)
            self.want_snapshot(source, at)
        source.frames += 1
        source.frame, source.frame_at = frame, at
        self._safely(self._audience.frame, source, frame, at)

    def _snapshot(self, source: Source, snapshot: wire.Snapshot, at: float) -> None:
        last = source.last_sequence
        if last is not None and snapshot.sequence < last:
            return  # a frame that is newer has been booked: it would be undone
        missed = snapshot.sequence - (last or 0)
        if missed > 0:
            source.gaps += 1
            source.frames_missed += missed
            self._safely(self._audience.gap, source, missed, at)
            source.gap_since = source.gap_since or at
        source.last_sequence = snapshot.sequence
        since, source.gap_since = source.gap_since, None
        if snapshot.complete:
            source.named, source.named_at = _in_scheduler(snapshot), at
            source.named_since = source.snapshot_asked_at or 0.0
        totals = (snapshot.running_now, snapshot.waiting_now, snapshot.blocks_free_now, snapshot.blocks_cached_now)
        source.frame = wire.Frame(snapshot.sequence, snapshot.step, snapshot.at, [], *totals)
        source.frame_at = at
        self._safely(self._audience.snapshot, source, snapshot, at, since)

    def _forget(self, source: Source, why: str) -> None:
        if source not in self.sources:
            return
        self.sources.discard(source)
        if source.last_sequence is not None:
            self._last_sequences[source.hello.instance] = source.last_sequence
            self._last_sequences.move_to_end(source.hello.instance)
            while len(self._last_sequences) > _REMEMBERED:
                self._last_sequences.popitem(last=False)
        for command_id, order in list(self._orders.items()):
            if source in order.outstanding:
                order.outstanding.discard(source)
                if not order.outstanding:
                    del self._orders[command_id]
                    self._finish(order, order.best or OrderResult("failed", 0.0, "the probe is gone"))
        self._safely(self._audience.detached, source, monotonic(), why)

    def _safely(self, tell: Callable[..., None], *arguments: object) -> None:
        try:
            tell(*arguments)
        except Exception:
            # A bug of ours, shown in full; the connection, and whatever else comes on it, lives on.
            self.failures += 1
            if self.failures <= 10:
                logger.exception("could not book what a probe said")

    def _say(self, kind: str, text: str, *arguments: object) -> None:
        """One line of a kind, and not again soon: peers must not fill the log."""
        at = monotonic()
        if at - self._said.get(kind, -_SAY_AGAIN_SECONDS) >= _SAY_AGAIN_SECONDS:
            self._said[kind] = at
            logger.warning("collector: %s", text % arguments)


def _in_scheduler(snapshot: wire.Snapshot) -> frozenset[str]:
    return frozenset(each.request_id for each in snapshot.requests if each.place != "gone")


def _bind_path(path: str) -> socket.socket:
    """A Unix socket that only this user can open. One that a dead process left is replaced."""
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise ConfigurationError(f"probe: {path} exists and is no socket")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked, contextlib.suppress(ConnectionError):
                asked.connect(path)
                raise ConfigurationError(f"probe: another process listens on {path}")
            os.unlink(path)
        before = os.umask(0o177)
        try:
            opened.bind(path)
        finally:
            os.umask(before)
    except OSError as error:
        opened.close()
        raise ConfigurationError(f"probe: cannot listen on {path}: {error.strerror or error}") from error
    except ConfigurationError:
        opened.close()
        raise
    return opened
