"""Probes at the gateway: which engine each belongs to, what they say into the books, and orders the other way.

While every rank of an engine has a probe, new requests there are dispatched with a profile that is worth more: the
scheduler's own word is evidence, and one more door leads straight to it. When a probe goes away, requests are
dispatched as before; those that were counting on it wait a few seconds for its return, and are then judged from
outside (`stops.gaps`).

With `bystander` no request passes through us: the books are opened by what the probes say (`stops.bystander`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

import msgspec

from stopguard.errors import LimitReached
from stopguard.ledger import EngineGauges, Evidence
from stopguard.probe import wire
from stopguard.probe.collector import Collector, OrderResult, Source
from stopguard.probe.link import ProbeLimits
from stopguard.stops import AbortAnswer, Door, DoorKind, Effect, Engine, EngineProfile, Tracked, effects, observe_frame
from stopguard.stops.bystander import bystander_profile, lost_sight, stop_seen, take_in
from stopguard.stops.gaps import gap_began, observe_snapshot, probe_lost, unseen_everywhere
from stopguard.stops.machine import ENGINE_ENDED

if TYPE_CHECKING:
    from stopguard.gateway.fleet import Member
    from stopguard.gateway.server import Gateway

__all__ = ["PROBE_DOOR", "NamedDifference", "ProbeFacts", "ProbeSettings", "Probing"]

logger = logging.getLogger("stopguard.probe")

PROBE_DOOR: Final = Door(name="probe", kind=DoorKind.PROBE, worth=Evidence.PROBE)

_LOOK_SECONDS: Final = 0.5
#: Clocks that are nearer than this are one clock, read twice.
_ONE_CLOCK_SECONDS: Final = 0.001
_ID_CHARACTERS_MAX: Final = 256
_ANSWERS: Final[dict[wire.Answer, AbortAnswer]] = {
    "applied": AbortAnswer.ACCEPTED,
    "accepted": AbortAnswer.ACCEPTED,
    "refused": AbortAnswer.REFUSED,
    "gone": AbortAnswer.GONE,
    "unknown": AbortAnswer.UNKNOWN,
    "unsupported": AbortAnswer.FAILED,
    "failed": AbortAnswer.FAILED,
}


class ProbeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where to listen for probes, and how long one may be away before nothing is expected of it any more."""

    listen: tuple[str, ...]
    token: str
    gone_seconds: float = 5.0
    limits: ProbeLimits = ProbeLimits()


class ProbeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One connected probe, for people. Times in seconds; `clock_offset_seconds` is how far its clock is ahead."""

    engine: str
    kind: str
    version: str
    role: str
    rank: int
    host: str
    process: int
    connected_at: float
    frames: int
    gaps: int
    frames_missed: int
    frames_dropped: int
    in_gap: bool
    lag_seconds: float | None
    clock_offset_seconds: float | None
    clock_error_seconds: float | None
    blocks_total: int
    block_tokens: int
    commands: tuple[str, ...]
    hooks_attached: tuple[str, ...]
    hooks_missing: tuple[str, ...]


class NamedDifference(msgspec.Struct, frozen=True):
    """Who was in one side's list and not in the other's when a snapshot came."""

    at: float
    orphan_ids: tuple[str, ...]
    phantom_ids: tuple[str, ...]


class _EngineProbes:
    """What is known of one engine's probes, across their coming and going."""

    __slots__ = ("frames_dropped", "gaps", "gone_timer", "named", "raised", "said")

    def __init__(self) -> None:
        self.raised = False
        self.gaps = 0
        #: By sources that are gone; those that are here are asked.
        self.frames_dropped = 0
        self.gone_timer: asyncio.TimerHandle | None = None
        #: By source, so that two ranks do not take each other's words back.
        self.named: dict[Source, NamedDifference] = {}
        self.said = False


class Probing:
    """The collector's audience: made for a gateway, started after it, closed after its shutdown.

    `kinds` are the engines' kinds by name. `on_frame(engine, frame, lag_seconds)` and `on_gap(engine)` are metrics'.
    """

    def __init__(
        self,
        gateway: Gateway,
        settings: ProbeSettings,
        kinds: Mapping[str, str],
        *,
        bystander: bool = False,
        on_frame: Callable[[str, wire.Frame, float | None], None] | None = None,
        on_gap: Callable[[str], None] | None = None,
    ) -> None:
        self.collector = Collector(settings.listen, settings.token, self, settings.limits)
        self.on_frame = on_frame
        self.on_gap = on_gap
        #: Requests that a probe spoke of and that the book had no room for.
        self.turned_away = 0
        self._gateway = gateway
        self._settings = settings
        self._kinds = kinds
        #: Requests do not pass through us.
        self.bystander = bystander
        self._engines = {member.engine.name: _EngineProbes() for member in gateway.fleet.members}
        #: Which process has (or had) each part, by request: kept until its books are closed.
        self._homes: dict[str, dict[str, Source]] = {}
        #: Requests whose stop somebody else has carried out already.
        self._seen: set[str] = set()
        self._look_timer: asyncio.TimerHandle | None = None
        self._closing = False
        #: Made for whoever waits for the next frame, and gone with it.
        self._booked: asyncio.Event | None = None
        gateway.knock_probe = self.knock
        gateway.observers.append(self._observe)
        gateway.probing = self

    # ---- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen for probes. `ConfigurationError` when an address cannot be had."""
        await self.collector.start()
        self._look_timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    async def close(self) -> None:
        """Stop listening. Nothing is expected of any probe afterwards."""
        self._closing = True
        if self._look_timer is not None:
            self._look_timer.cancel()
        self._look_timer = None
        await self.collector.close()
        at = monotonic()
        for name, each in self._engines.items():
            if each.gone_timer is not None:
                each.gone_timer.cancel()
                each.gone_timer = None
            if self.bystander:
                self._carry_out(lost_sight(self._gateway.controller, name, at, "watch_ended"), at)

    # ---- for others --------------------------------------------------------------------------------

    def sources(self, engine: str) -> list[Source]:
        """The connected probes of one engine."""
        return [source for source in list(self.collector.sources) if source.engine == engine]

    def can(self, engine: str, action: wire.Action) -> bool:
        """Whether every process of the engine that sees a scheduler does `action`."""
        seeing = [source for source in self.sources(engine) if source.keeps_books]
        return bool(seeing) and all(action in source.hello.commands for source in seeing)

    async def order(
        self, engine: str, action: wire.Action, request_id: str, *, reason: str = "", priority: int = 0
    ) -> OrderResult:
        """Have `action` done to one request, by whichever process has it; in the gateway's loop."""
        future: asyncio.Future[OrderResult] = asyncio.get_running_loop().create_future()

        def done(result: OrderResult) -> None:
            if not future.done():
                future.set_result(result)

        self.collector.order(engine, action, request_id, done, reason=reason, priority=priority)
        return await future

    async def next_frame(self) -> None:
        """Wait until a frame with events, of any engine, has been booked; in the gateway's loop."""
        if self._booked is None:
            self._booked = asyncio.Event()
        await self._booked.wait()

    def facts(self) -> list[ProbeFacts]:
        """Every connected probe. May be called in any thread."""
        return [_facts(source) for source in list(self.collector.sources)]

    def numbers(self) -> dict[str, tuple[int, int, int, int]]:
        """By engine: probes connected, those in a gap, gaps so far, frames dropped so far. Any thread."""
        rows = {}
        for name, each in self._engines.items():
            here = self.sources(name)
            in_gap = sum(source.gap_since is not None for source in here)
            dropped = each.frames_dropped + sum(source.frames_dropped for source in here)
            rows[name] = (len(here), in_gap, each.gaps, dropped)
        return rows

    def gauges(self, engine: str, at: float) -> EngineGauges | None:
        """The engine's own totals, all ranks together; `None` when its probes do not say them all. Any thread."""
        seeing = [source for source in self.sources(engine) if source.keeps_books]
        frames = [source.frame for source in seeing if source.frame is not None and source.gap_since is None]
        if not seeing or len(frames) < len(seeing) or not self._engines[engine].raised:
            return None
        total = sum(source.hello.blocks_total for source in seeing)
        free = sum(frame.blocks_free_now + frame.blocks_cached_now for frame in frames)
        sized = all(source.hello.blocks_total for source in seeing)
        return EngineGauges(
            at=at,
            running=sum(frame.running_now for frame in frames),
            waiting=sum(frame.waiting_now for frame in frames),
            blocks_used=max(0, total - free) if sized else None,
            blocks_total=total if sized else None,
        )

    def named(self, engine: str, since: float) -> NamedDifference | None:
        """Who was named an orphan or a phantom after `since`. Any thread."""
        newest = [each for each in list(self._engines[engine].named.values()) if each.at >= since]
        if not newest:
            return None
        return NamedDifference(
            max(each.at for each in newest),
            tuple(name for each in newest for name in each.orphan_ids),
            tuple(name for each in newest for name in each.phantom_ids),
        )

    def want_names(self, engine: str) -> None:
        """The totals disagree: have every process list what it has. In the gateway's loop."""
        at = monotonic()
        for source in self.sources(engine):
            self.collector.want_snapshot(source, at)

    # ---- orders: the controller's knock ----------------------------------------------------------------

    def knock(self, knock: effects.Knock, at: float) -> None:
        """Carry an abort to the engine's schedulers and report what they say."""
        tracked, door = knock.tracked, knock.door
        if tracked.request_id in self._seen:
            self._abort_answered(tracked, door, OrderResult("accepted"))
            return
        engine = tracked.profile.name if tracked.profile is not None else ""
        reason = tracked.cause.reason if tracked.cause is not None else ""
        done = partial(self._abort_answered, tracked, door)
        self.collector.order(engine, "abort", tracked.request_id, done, reason=reason)

    def _abort_answered(self, tracked: Tracked, door: Door, result: OrderResult) -> None:
        profile = tracked.profile
        if profile is None or door not in profile.doors:
            return  # it was given up with the probe, and is being stopped by another door
        at = monotonic()
        answer = _ANSWERS[result.answer]
        controller = self._gateway.controller
        self._carry_out(controller.abort_answered(tracked, at, door.name, answer, result.retry_after_seconds), at)

    # ---- the collector's audience ----------------------------------------------------------------------

    def attached(self, source: Source) -> str:
        """A process of some engine has a probe: of which?"""
        member, reason = self._member_for(source.hello)
        if member is None:
            logger.warning("collector: a probe was refused: %s", reason)
            return reason
        source.engine = member.engine.name
        hello = source.hello
        missing = f"; not there: {', '.join(hello.hooks_missing)}" if hello.hooks_missing else ""
        logger.info(
            "engine %s: a probe inside %s %s (%s %d of %d, pid %d) is connected%s",
            *(source.engine, hello.engine, hello.engine_version, hello.role, hello.rank, hello.ranks, hello.process),
            missing,
        )
        # When the collector has it in its list.
        asyncio.get_running_loop().call_soon(self._weigh, member)
        return ""

    def described(self, source: Source) -> None:
        """What it can do may have changed."""
        member = self._gateway.fleet.named(source.engine)
        if member is not None:
            if source.hello.hooks_missing:
                logger.warning("engine %s: its probe has lost %s", source.engine, ", ".join(source.hello.hooks_missing))
            self._weigh(member)

    def detached(self, source: Source, at: float, why: str) -> None:
        """A probe is gone; it may come back."""
        each = self._engines[source.engine]
        each.frames_dropped += source.frames_dropped
        each.named.pop(source, None)
        if self._closing:
            return
        logger.warning("engine %s: the probe in process %d is gone: %s", source.engine, source.hello.process, why)
        member = self._gateway.fleet.named(source.engine)
        if member is None or not source.keeps_books:
            return
        gap_began(self._gateway.controller, source.engine, at, "its probe is gone")
        self._weigh(member)
        if not each.raised and each.gone_timer is None:
            wait = self._settings.gone_seconds
            each.gone_timer = asyncio.get_running_loop().call_later(wait, self._gone, member)

    def gap(self, source: Source, frames_missed: int, at: float) -> None:
        """Frames are missing."""
        self._engines[source.engine].gaps += 1
        gap_began(self._gateway.controller, source.engine, at, f"{frames_missed} frames are missing")
        if self.on_gap is not None:
            self.on_gap(source.engine)

    def frame(self, source: Source, frame: wire.Frame, at: float) -> None:
        """One step of one engine."""
        frame = _in_our_time(source, frame)
        if frame.events:
            if self.bystander:
                self._stand_by(source, frame, at)
            self._carry_out(observe_frame(self._gateway.controller, source.engine, at, frame), at)
            for event in frame.events:
                if isinstance(event, wire.Added):
                    self._settle_in(source, event.request_id)
            if self._booked is not None:
                self._booked.set()
                self._booked = None
        if self.on_frame is not None and source.keeps_books:
            self.on_frame(source.engine, frame, source.lag_seconds)
        preempting = self._gateway.preempting
        if preempting is not None and preempting.waits and (gauges := self.gauges(source.engine, at)) is not None:
            preempting.gauges_read(source.engine, gauges, at)

    def snapshot(self, source: Source, snapshot: wire.Snapshot, at: float, gap_since: float | None) -> None:
        """Everything that one process has now."""
        engine, controller = source.engine, self._gateway.controller
        if gap_since is not None:
            if self.bystander:
                for row in snapshot.requests:
                    if row.place != "gone":  # what is left of one that was over before we came
                        self._open(engine, row.parent_id or row.request_id, at)

            def mine(part: str) -> bool:
                tracked = controller.parts.get(part)
                home = self._homes.get(tracked.request_id, {}).get(part) if tracked is not None else None
                # A process that came back is another source, and the same instance.
                return home is not None and home.hello.instance == source.hello.instance

            unowned = _unowned(source, snapshot)
            self._carry_out(observe_snapshot(controller, engine, at, snapshot, mine, unowned=unowned), at)
            for row in snapshot.requests:
                self._settle_in(source, row.request_id)
        self._compare_names(source, snapshot, at)
        seeing = [each for each in self.sources(engine) if each.keeps_books]
        since = min((each.named_since for each in seeing), default=0.0)
        if seeing and all(each.named is not None and each.gap_since is None for each in seeing):
            has = {name for each in seeing for name in each.named or ()}
            self._carry_out(unseen_everywhere(controller, engine, at, has, since), at)

    # ---- inside ----------------------------------------------------------------------------------------

    def _carry_out(self, wanted: Sequence[Effect], at: float) -> None:
        if wanted:
            self._gateway.carry_out(wanted, at)
        # What was heard may have armed a timer without asking for anything.
        self._gateway.wake_soon(at)

    def _observe(self, effect: Effect, at: float) -> None:
        if type(effect) is effects.Settled:
            self._homes.pop(effect.tracked.request_id, None)
            self._seen.discard(effect.tracked.request_id)

    def _settle_in(self, source: Source, part: str) -> None:
        tracked = self._gateway.controller.parts.get(part)
        if tracked is not None:
            self._homes.setdefault(tracked.request_id, {})[part] = source

    def _member_for(self, hello: wire.Hello) -> tuple[Member | None, str]:
        members = self._gateway.fleet.members
        names = ", ".join(member.engine.name for member in members)
        if hello.name:
            member = self._gateway.fleet.named(hello.name)
            return member, f"no engine is called {hello.name!r} here (there are: {names}): set STOPGUARD_ENGINE_NAME"
        fitting = [member for member in members if self._kinds.get(member.engine.name) == hello.engine]
        if not fitting and len(members) == 1:
            fitting = list(members)
        if len(fitting) == 1:
            return fitting[0], ""
        which = "several engines are" if fitting else "no engine is"
        return None, f"{which} of the kind {hello.engine} here (there are: {names}): set STOPGUARD_ENGINE_NAME"

    def _weigh(self, member: Member) -> None:
        """Whether its probes see everything that its engine does; its profile follows."""
        name = member.engine.name
        each = self._engines[name]
        seeing = [source for source in self.sources(name) if source.keeps_books]
        ranks = {source.hello.rank for source in seeing}
        complete = bool(seeing) and ranks >= set(range(max(source.hello.ranks for source in seeing)))
        aborts = complete and self.can(name, "abort")
        member.inside = partial(_from_inside, aborts=aborts) if complete else None
        if self.bystander and complete:
            member.inside = lambda base: bystander_profile(base.name)
        member.take_profile()
        if complete and each.gone_timer is not None:
            each.gone_timer.cancel()
            each.gone_timer = None
        if complete != each.raised:
            each.raised = complete
            if complete and self.bystander:
                for source in seeing:  # what they said before was not booked
                    self.collector.doubt(source, monotonic())
            best = member.profile.best_evidence.label
            logger.info("engine %s: stops of new requests are proved up to %s", name, best)

    def _gone(self, member: Member) -> None:
        """It did not come back."""
        each = self._engines[member.engine.name]
        each.gone_timer = None
        if each.raised:
            return
        at, controller, name = monotonic(), self._gateway.controller, member.engine.name
        logger.warning("engine %s: its probe did not come back; its requests are judged without it", name)
        if self.bystander:
            self._carry_out(lost_sight(controller, name, at, "probe_lost"), at)
        else:
            self._carry_out(probe_lost(controller, name, at, member.profile), at)

    def _look(self) -> None:
        """Ask for a snapshot where a request has ended of which no scheduler has ever spoken."""
        loop = asyncio.get_running_loop()
        self._look_timer = loop.call_later(_LOOK_SECONDS, self._look)
        controller = self._gateway.controller
        self._gateway.wake_soon(monotonic())  # an end that waits for a scheduler's word has a deadline too
        for name, each in self._engines.items():
            if each.raised and any(_unspoken(tracked) for tracked in controller.in_engine.get(name, {}).values()):
                self.want_names(name)

    def _stand_by(self, source: Source, frame: wire.Frame, at: float) -> None:
        """Open books, and note the stops of others, before the events are booked."""
        controller = self._gateway.controller
        for event in frame.events:
            if isinstance(event, wire.Added):
                self._open(source.engine, event.parent_id or event.request_id, at)
            elif isinstance(event, wire.AbortArrived | wire.AbortApplied) or _is_abort(event):
                tracked = controller.parts.get(event.request_id) or controller.tracked.get(event.request_id)
                if tracked is not None and tracked.request_id not in self._seen and tracked.cause is None:
                    self._seen.add(tracked.request_id)
                    self._carry_out(stop_seen(controller, tracked, at, event.at), at)

    def _open(self, engine: str, root: str, at: float) -> None:
        gateway = self._gateway
        member = gateway.fleet.named(engine)
        if member is None or root in gateway.controller.tracked or len(root) > _ID_CHARACTERS_MAX:
            return
        if not self._engines[engine].raised:
            return  # what other ranks do is not seen: half a picture would be a wrong one
        model = next(iter(member.models)) if member.models and len(member.models) == 1 else gateway.fleet.label("")
        try:
            take_in(gateway.controller, root, at, member.profile, model)
        except LimitReached as error:
            self.turned_away += 1
            if self.turned_away == 1:
                logger.warning("requests are not watched: %s", error)

    def _compare_names(self, source: Source, snapshot: wire.Snapshot, at: float) -> None:
        """Who is in the engine and not in our books, and the other way round, as of this very frame."""
        if not snapshot.complete:
            return
        controller, engine = self._gateway.controller, source.engine
        has = {row.request_id for row in snapshot.requests if row.place != "gone"}
        ours = set()
        for tracked in controller.in_engine.get(engine, {}).values():
            homes = self._homes.get(tracked.request_id, {})
            for part in tracked.part_places or ():
                home = homes.get(part)
                if home is not None and home.hello.instance == source.hello.instance:
                    ours.add(part)
        orphans = [name for name in has - ours if (controller.parts.get(name) or controller.tracked.get(name)) is None]
        self._engines[engine].named[source] = NamedDifference(at, tuple(sorted(orphans)), tuple(sorted(ours - has)))


def _from_inside(base: EngineProfile, *, aborts: bool) -> EngineProfile:
    """The profile of an engine with a probe: its scheduler's word counts, and its own end of a stream does not."""
    doors = (PROBE_DOOR, *base.doors) if aborts else base.doors
    return msgspec.structs.replace(
        base, doors=doors, best_evidence=Evidence.PROBE, probed=True, stream_end_is_ack=False
    )


def _unspoken(tracked: Tracked) -> bool:
    """It is being stopped and no scheduler has anything of it, or it has ended and none has ever spoken of it."""
    if not tracked.probed or tracked.part_places:
        return False
    state = tracked.machine.engine
    stopping = state in (Engine.ABORTING, Engine.UNCONFIRMED)
    return stopping or (state in ENGINE_ENDED and tracked.part_places is None)


def _is_abort(event: wire.Event) -> bool:
    return isinstance(event, wire.Finished) and event.reason in ("abort", "cancelled")


def _unowned(source: Source, snapshot: wire.Snapshot) -> bool:
    """Whether blocks of the pool are in use that no request in the snapshot holds."""
    if not source.hello.blocks_total:
        return False
    used = source.hello.blocks_total - snapshot.blocks_free_now - snapshot.blocks_cached_now
    return used > sum(row.blocks_held + row.blocks_fenced for row in snapshot.requests)


def _in_our_time(source: Source, frame: wire.Frame) -> wire.Frame:
    """The frame with its events on our clock: the same, where both ends read one clock."""
    clock = source.link.clock
    offset = clock.seconds
    if offset is None or abs(offset) <= max(_ONE_CLOCK_SECONDS, 2 * clock.error_seconds):
        return frame
    return msgspec.structs.replace(
        frame, events=[msgspec.structs.replace(event, at=event.at - offset) for event in frame.events]
    )


def _facts(source: Source) -> ProbeFacts:
    hello, clock = source.hello, source.link.clock
    return ProbeFacts(
        engine=source.engine,
        kind=hello.engine,
        version=hello.engine_version,
        role=hello.role,
        rank=hello.rank,
        host=hello.host,
        process=hello.process,
        connected_at=source.connected_at,
        frames=source.frames,
        gaps=source.gaps,
        frames_missed=source.frames_missed,
        frames_dropped=source.frames_dropped,
        in_gap=source.gap_since is not None,
        lag_seconds=source.lag_seconds,
        clock_offset_seconds=clock.seconds,
        clock_error_seconds=clock.error_seconds if clock.seconds is not None else None,
        blocks_total=hello.blocks_total,
        block_tokens=hello.block_tokens,
        commands=hello.commands,
        hooks_attached=hello.hooks_attached,
        hooks_missing=hello.hooks_missing,
    )
