"""The world around a controller: clients, an honest engine, and everything that can come between them.

The engine has a truth of its own (`Peer`): whether it still works on a request, what it holds, which abort is
on its way. An event of the walk changes the truth and tells the controller what the edge would tell it; an
event is possible only where the truth allows it (a late ack only after an abort was sent, output only from
what runs, a block comes back only once). After each event `check` compares books and machines with the truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stopguard.ledger import Account, Book, EngineGauges, Evidence
from stopguard.ledger.accounts import OPEN_ACCOUNT_COUNT
from stopguard.probe import wire
from stopguard.stops import (
    CLOSE_CONNECTION,
    AbortAnswer,
    Client,
    ClientPolicy,
    Controller,
    DeadlineKind,
    Door,
    DoorKind,
    Engine,
    EngineProfile,
    RetryPolicy,
    Semantics,
    Source,
    StopCause,
    StopConfig,
    Tracked,
    effects,
    engine_died,
    observe_frame,
    observe_gauges,
    preemptions,
)
from stopguard.stops.machine import CLIENT_ENDED, ENGINE_ENDED
from stopguard.stops.patience import TimerKind
from tests.explorer.clone import clone, small_wheel

A = Account
TICK_SECONDS = 0.25
RETRY = RetryPolicy(tries_per_door=1, first_wait_seconds=1.0, factor=1.0, longest_wait_seconds=1.0, tries=2)
CONFIG = StopConfig(
    settle_seconds=4.0, tell_seconds=1.5, preempt_seconds=2.0, write_off_seconds=8.0, gauge_apart_seconds=TICK_SECONDS
)
TOTAL_SECONDS = 6.0
UNLIMITED = math.inf

PROBED = EngineProfile(
    name="probed",
    doors=(Door(name="probe", kind=DoorKind.PROBE, worth=Evidence.PROBE),),
    best_evidence=Evidence.PROBE,
    probed=True,
    retry=RETRY,
)
STREAM = EngineProfile(
    name="stream",
    doors=(Door(name="call", kind=DoorKind.CALL, worth=Evidence.STREAM_CLOSED),),
    best_evidence=Evidence.STREAM_CLOSED,
    retry=RETRY,
)
GAUGED = EngineProfile(
    name="gauged",
    doors=(Door(name="call", kind=DoorKind.CALL, worth=Evidence.ACCEPTED),),
    best_evidence=Evidence.GAUGE,
    retry=RETRY,
)
SILENT = EngineProfile(name="silent", doors=(CLOSE_CONNECTION,), best_evidence=Evidence.SENT, retry=RETRY)
PROFILES = (PROBED, STREAM, GAUGED, SILENT)

_STOPPING = (Engine.ABORTING, Engine.UNCONFIRMED)
_WORKING = (Engine.DISPATCHED, Engine.PREEMPTING, Engine.PARKED, Engine.RESUMING)
_FINISHED, _ABORTED, _CRASHED = "finished", "aborted", "crashed"


class Peer:
    """The truth about one request: its client's, and its engine's."""

    __slots__ = (
        *("name", "left", "told", "end", "engine", "ended", "blocks", "fenced", "in_flight", "knocked"),
        *(
            "preempt_ordered",
            "resume_ordered",
            "outputs_left",
            "preempts_left",
            "delivered",
            "client",
            "machine_engine",
        ),
        *("stream", "deaf", "losses_left", "leaked"),
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.left = self.told = False
        self.end = ""  # how its books were closed: settled, late, written off
        self.engine = "none"  # none, running, parked, over
        self.ended = ""
        self.blocks = self.fenced = self.in_flight = 0
        self.knocked = self.preempt_ordered = self.resume_ordered = False
        self.outputs_left = self.preempts_left = self.losses_left = 1
        self.delivered: int | None = None  # by the time the client was muted
        self.client: Client = Client.LISTENING
        self.machine_engine: Engine = Engine.UNDISPATCHED
        self.stream = False  # our upstream connection is open
        self.deaf = False  # the engine said yes to an abort and did not do it
        self.leaked = 0

    @property
    def settled(self) -> bool:
        return self.end != ""

    @property
    def alive(self) -> bool:
        return self.engine in ("running", "parked")

    def copy(self) -> Peer:
        new = object.__new__(Peer)
        for name in Peer.__slots__:
            setattr(new, name, getattr(self, name))
        return new

    def key(self) -> tuple[Any, ...]:
        if self.end:
            return (self.end,)
        return (
            *(self.left, self.told, self.engine, self.ended, self.blocks, self.fenced),
            *(self.in_flight, self.knocked, self.preempt_ordered, self.resume_ordered, self.outputs_left),
            *(self.preempts_left, self.stream, self.deaf, self.losses_left, self.leaked > 0),
        )


class World:
    """One controller, its requests, and their truth at one moment."""

    __slots__ = ("controller", "crashed", "now", "peers", "profile", "sequence", "time_left")

    def __init__(self, profile: EngineProfile, names: Sequence[str], *, dispatched: bool) -> None:
        self.profile = profile
        self.now = 0.0
        self.sequence = 0
        self.crashed = False
        self.time_left = UNLIMITED
        self.controller = Controller(Book(), CONFIG)
        small_wheel(self.controller, tick_seconds=TICK_SECONDS, slots=32)
        self.peers = {name: Peer(name) for name in names}
        for peer in self.peers.values():
            tracked = self.controller.admit(peer.name, 0.0, model="m")
            self.controller.set_deadline(tracked, DeadlineKind.TOTAL, TOTAL_SECONDS)
            if dispatched:
                dispatch(self, peer)
        self.check()

    def copy(self) -> World:
        new = object.__new__(World)
        new.profile, new.now, new.sequence, new.crashed = self.profile, self.now, self.sequence, self.crashed
        new.time_left = self.time_left
        new.controller = clone(self.controller)
        new.peers = {name: peer.copy() for name, peer in self.peers.items()}
        return new

    def dispose(self) -> None:
        """Break the cycles of a world that is not needed any more, so that it goes without the garbage collector."""
        for tracked in self.controller.tracked.values():
            tracked.timers = tracked.deadlines = None
        vars(self.controller).clear()

    def tracked(self, peer: Peer) -> Tracked | None:
        return self.controller.tracked.get(peer.name)

    # ---- what the edge does ---------------------------------------------------------------------

    def frame(self, peer: Peer, *events: Any) -> None:
        """The engine's scheduler speaks."""
        self.sequence += 1
        frame = wire.Frame(self.sequence, self.sequence, self.now, list(events), 0, 0, 0, 0)
        self.perform(observe_frame(self.controller, self.profile.name, self.now, frame))

    def perform(self, wanted: Iterable[effects.Effect]) -> None:
        for effect in wanted:
            if isinstance(effect, effects.Observe):
                continue  # reading the gauges is an event of its own
            peer = self.peers[effect.tracked.request_id]
            machine = effect.tracked.machine
            assert not peer.settled, f"{effect} after the books were closed"
            match effect:
                case effects.Knock():
                    assert machine.engine in _STOPPING, f"an abort was sent in {machine}"
                    peer.knocked = True
                case effects.Preempt():
                    assert machine.engine is Engine.PREEMPTING
                    peer.preempt_ordered = True
                case effects.Resume():
                    assert machine.engine is Engine.RESUMING
                    peer.resume_ordered = True
                case effects.TellClient():
                    assert machine.client is Client.DISMISSED
                    assert not peer.told, "told twice"
                    assert not peer.left, "told although it had left"
                    assert not (effect.advice.safe and peer.alive), "a retry is called safe and it still runs"
                    peer.told = True
                    self.perform(self.controller.client_told(effect.tracked, self.now))
                case effects.Leaked():
                    self.check_accusation(peer, effect)
                    peer.leaked += 1
                case effects.Settled():
                    ledgers = effect.tracked.ledgers
                    peer.end = "written off" if ledgers.written_off else "late" if ledgers.leaks else "settled"
                    self.check_end(peer, effect.tracked)

    # ---- what must hold --------------------------------------------------------------------------

    def check_accusation(self, peer: Peer, effect: effects.Leaked) -> None:
        """Nobody is accused of what is not so."""
        leak = effect.leak
        truth = {
            A.KV_HELD: peer.blocks > 0,
            A.KV_FENCED: peer.fenced > 0,
            A.KV_CLAIMED: peer.alive or not self.profile.probed,
            A.OUTPUT_IN_FLIGHT: peer.in_flight > 0,
            A.LINK_AWAITING: peer.alive or not self.profile.probed,
            A.STREAM_CONNECTED: not peer.left and not peer.told,
        }
        assert truth.get(leak.account, peer.alive or not self.profile.probed), leak.describe(self.now)

    def check_end(self, peer: Peer, tracked: Tracked) -> None:
        """The books of one request have just been closed."""
        ledgers = tracked.ledgers
        ledgers.verify()
        assert ledgers.closed_at is not None
        assert not any(ledgers.balances[:OPEN_ACCOUNT_COUNT])
        outcome = ledgers.stop.outcome if ledgers.stop else ""
        if ledgers.written_off:
            assert ledgers.leaks or outcome == "unconfirmed", "written off without a report"
        else:
            assert outcome not in ("pending", "unconfirmed"), f"settled as {outcome}"
            assert not peer.alive, "settled, and the engine still works"
            assert not peer.blocks + peer.fenced, "settled, and the engine still holds blocks"
            assert tracked.machine.ended
        self.check_claims(peer, tracked)

    def check_claims(self, peer: Peer, tracked: Tracked) -> None:
        """No success is claimed that did not happen."""
        stop = tracked.ledgers.stop
        if stop is not None:
            if stop.outcome == "confirmed":
                assert not peer.alive, f"confirmed ({stop.evidence.label}), and the engine still works"
            if stop.outcome == "raced_finish":
                assert peer.ended == _FINISHED

    def check(self) -> None:
        """Everything that must hold at every moment."""
        controller = self.controller
        controller.book.verify()
        assert not controller.anomalies.book_error_count, list(controller.anomalies.book_errors)
        timers = 0
        for peer in self.peers.values():
            tracked = controller.tracked.get(peer.name)
            assert (tracked is None) == peer.settled
            if tracked is None:
                continue
            self._check_one(peer, tracked)
            timers += len(tracked.timers or ()) + len(tracked.deadlines or ())
        assert len(controller.wheel) == timers
        for members in (*controller.in_engine.values(), controller.parts):
            assert all(one.request_id in controller.tracked for one in members.values())

    def _check_one(self, peer: Peer, tracked: Tracked) -> None:
        machine, ledgers = tracked.machine, tracked.ledgers
        assert not machine.owes_abort, machine
        if machine.client in (Client.LEFT, Client.DISMISSED):
            assert machine.engine in _STOPPING or machine.engine in ENGINE_ENDED, machine
            assert tracked.muted
        if peer.client in CLIENT_ENDED:
            assert machine.client is peer.client, "an ended client changed"
        if peer.machine_engine in ENGINE_ENDED:
            assert machine.engine is peer.machine_engine, "an ended engine changed"
        peer.client, peer.machine_engine = machine.client, machine.engine
        if tracked.muted:
            if peer.delivered is None:
                peer.delivered = ledgers.tokens_delivered
            assert ledgers.tokens_delivered == peer.delivered, "delivered to a client that was muted"
        self.check_claims(peer, tracked)
        if self.profile.probed and not self.crashed and machine.engine is not Engine.UNDISPATCHED:
            folded, balances = ledgers._folded, ledgers.balances
            held = balances[A.KV_HELD] + ledgers.blocks_taken - folded[4]
            assert (held, balances[A.KV_FENCED]) == (peer.blocks, peer.fenced), repr(ledgers)
            in_flight = balances[A.OUTPUT_IN_FLIGHT] + ledgers.tokens_computed - folded[0]
            assert in_flight - (ledgers.tokens_delivered - folded[1]) == peer.in_flight, repr(ledgers)

    # ---- identity --------------------------------------------------------------------------------

    def key(self) -> tuple[Any, ...]:
        """What decides the future of this world: neither names, nor absolute times, nor who of two equals is first."""
        ones = [(peer.key(), self._tracked_key(self.controller.tracked.get(name))) for name, peer in self.peers.items()]
        ones.sort(key=hash)
        return (self.crashed, self.time_left, *ones)

    def _tracked_key(self, tracked: Tracked | None) -> tuple[Any, ...]:
        if tracked is None:
            return ()
        now, machine, ledgers, stop = self.now, tracked.machine, tracked.ledgers, tracked.ledgers.stop
        folded, cause, timers = ledgers._folded, tracked.cause, tracked.timers
        return (
            *(int(machine.client), int(machine.engine), int(machine.books)),
            *(tracked.muted, tracked.discarding, tracked.output_started, tracked.told, tracked.attempts),
            tracked.cleared_at is not None,
            *(tracked.door_index, tracked.tries_at_door, tracked.events - tracked.folded_events),
            cause and (cause.semantics.value, cause.source.value),
            tracked.settle_due and tracked.settle_due - now,
            tuple((kind, timers[kind].due_at - now) for kind in TimerKind if kind in timers) if timers else None,
            tuple((kind, entry[0].due_at - now) for kind, entry in tracked.deadlines.items())
            if tracked.deadlines
            else None,
            tuple(tracked.part_places.values()) if tracked.part_places else None,
            tuple(tracked.parts_over.values()) if tracked.parts_over else None,
            len(tracked.part_ids or ()),
            tuple(ledgers.balances[:OPEN_ACCOUNT_COUNT]),
            (
                ledgers.tokens_computed - folded[0],
                ledgers.tokens_delivered - folded[1],
                ledgers.blocks_taken - folded[4],
            ),
            tuple((int(o.entry.debit), o.remaining, o.expired, (o.entry.due_at or 0) - now) for o in ledgers.due()),
            stop and (stop.outcome, int(stop.evidence), stop.semantics, stop.acked_at is None),
            stop and stop.notified_at is not None and stop.notified_at < now,
        )


# ---- events: (name, possible?, do) -------------------------------------------------------------------

Event = tuple[str, Callable[[World, Peer], bool], Callable[[World, Peer], None]]


def _machine(world: World, peer: Peer) -> Any:
    tracked = world.controller.tracked.get(peer.name)
    return None if tracked is None else tracked.machine


def _engine_is(world: World, peer: Peer, *states: Engine) -> bool:
    machine = _machine(world, peer)
    return machine is not None and machine.engine in states


def _there(world: World, peer: Peer) -> Tracked:
    return world.controller.tracked[peer.name]


def dispatch(world: World, peer: Peer) -> None:
    world.controller.dispatch(_there(world, peer), world.now, world.profile)
    peer.engine, peer.stream, peer.deaf, peer.knocked = "running", True, False, False
    if world.profile.probed:
        peer.blocks += 2
        world.frame(
            peer,
            wire.Added(peer.name, world.now, 5),
            wire.Moved(peer.name, world.now, "running"),
            wire.BlocksHeld(peer.name, world.now, 2),
        )
    else:
        world.controller.output_started(_there(world, peer), world.now)


def _cancel(world: World, peer: Peer) -> None:
    peer.left = True
    world.perform(world.controller.client_left(_there(world, peer), world.now, "eof"))


def _cancel_draining(world: World, peer: Peer) -> None:
    peer.left = True
    policy = ClientPolicy(grace_seconds=2.0)
    world.perform(world.controller.client_left(_there(world, peer), world.now, "eof", policy))


def _stream_broken(world: World, peer: Peer) -> None:
    peer.engine, peer.ended, peer.stream = "over", _CRASHED, False
    world.perform(world.controller.engine_lost(_there(world, peer), world.now, "reset"))


def _second_cancel(world: World, peer: Peer) -> None:
    cause = StopCause(semantics=Semantics.CANCEL, source=Source.API, reason="api", observed_at=world.now)
    world.perform(world.controller.stop(_there(world, peer), world.now, cause))


def _preempt(world: World, peer: Peer) -> None:
    for one in world.peers.values():
        one.preempts_left -= 1
    cause = StopCause(semantics=Semantics.PREEMPT, source=Source.PREEMPTION, reason="room", observed_at=world.now)
    world.perform(preemptions.preempt(world.controller, _there(world, peer), world.now, cause))


def _preempted(world: World, peer: Peer) -> None:
    """The engine (inside) or the gateway (shelved) has carried a preemption out."""
    peer.preempt_ordered = False
    if world.profile.probed:
        blocks, peer.blocks, peer.engine = peer.blocks, 0, "parked"
        world.frame(
            peer,
            wire.Preempted(peer.name, world.now, 3),
            wire.Moved(peer.name, world.now, "preempted"),
            wire.BlocksReturned(peer.name, world.now, blocks),
        )
    else:
        peer.engine, peer.ended, peer.stream = "over", _ABORTED, False
        world.perform(preemptions.preempted(world.controller, _there(world, peer), world.now, shelved=True))
        if _engine_is(world, peer, Engine.SHELVED):
            peer.engine, peer.ended = "none", ""


def _resume(world: World, peer: Peer) -> None:
    if world.profile.probed:
        world.perform(preemptions.resume(world.controller, _there(world, peer), world.now))
    else:
        dispatch(world, peer)


def _resumed(world: World, peer: Peer) -> None:
    peer.resume_ordered, peer.engine = False, "running"
    peer.blocks += 2
    world.frame(
        peer,
        wire.Resumed(peer.name, world.now),
        wire.Moved(peer.name, world.now, "running"),
        wire.BlocksHeld(peer.name, world.now, 2),
    )


def _finish(world: World, peer: Peer) -> None:
    peer.engine, peer.ended = "over", _FINISHED
    if world.profile.probed:
        blocks, peer.blocks = peer.blocks, 0
        world.frame(
            peer,
            wire.Finished(peer.name, world.now, "stop"),
            wire.Moved(peer.name, world.now, "gone"),
            wire.BlocksReturned(peer.name, world.now, blocks),
        )
    else:
        peer.stream = False
        world.perform(world.controller.engine_finished(_there(world, peer), world.now))


def _served(world: World, peer: Peer) -> None:
    world.perform(world.controller.client_served(_there(world, peer), world.now))


def _acknowledged(world: World, peer: Peer) -> None:
    """The abort that was on its way takes effect, and the engine says so in its own manner."""
    peer.knocked = False
    peer.engine, peer.ended = "over", _ABORTED
    if world.profile.probed:
        blocks, peer.blocks, peer.fenced = peer.blocks, 0, peer.fenced + peer.blocks
        said: list[Any] = [
            wire.AbortArrived(peer.name, world.now),
            wire.AbortApplied(peer.name, world.now),
            wire.Moved(peer.name, world.now, "gone"),
        ]
        if blocks:
            said.append(wire.BlocksFenced(peer.name, world.now, blocks, 9))
        world.frame(peer, *said)
    elif world.profile is STREAM:
        peer.stream = False
        tracked = _there(world, peer)
        world.perform(world.controller.abort_answered(tracked, world.now, "call", AbortAnswer.ACCEPTED))
        world.perform(world.controller.stream_ended_by_engine(tracked, world.now))
    else:
        door = world.profile.doors[0].name
        answer = AbortAnswer.SENT if world.profile is SILENT else AbortAnswer.ACCEPTED
        world.perform(world.controller.abort_answered(_there(world, peer), world.now, door, answer))


def _found_nothing(world: World, peer: Peer) -> None:
    """A second abort, or one that came too late."""
    peer.knocked = False
    if world.profile.probed:
        world.frame(peer, wire.AbortNoop(peer.name, world.now))
    else:
        answer = AbortAnswer.GONE if world.profile is STREAM else AbortAnswer.UNKNOWN
        door = world.profile.doors[0].name
        world.perform(world.controller.abort_answered(_there(world, peer), world.now, door, answer))


def _lost(world: World, peer: Peer) -> None:
    """The abort is lost: nobody says anything, or (worse) a front end says yes and the core never hears."""
    peer.knocked = False
    for one in world.peers.values():
        one.losses_left -= 1
    if not world.profile.probed:
        door = world.profile.doors[0].name
        answer = AbortAnswer.SENT if world.profile is SILENT else AbortAnswer.ACCEPTED
        world.perform(world.controller.abort_answered(_there(world, peer), world.now, door, answer))


def _refused(world: World, peer: Peer) -> None:
    peer.knocked = False
    for one in world.peers.values():
        one.losses_left -= 1
    if world.profile.probed:
        world.frame(peer, wire.AbortRefused(peer.name, world.now, 1.0))
    else:
        tracked = _there(world, peer)
        door = world.profile.doors[0].name
        world.perform(world.controller.abort_answered(tracked, world.now, door, AbortAnswer.REFUSED, 1.0))


def _answer_lost(world: World, peer: Peer) -> None:
    """The engine has done it, and its answer did not arrive; nor does it end the stream."""
    peer.knocked = False
    for one in world.peers.values():
        one.losses_left -= 1
    peer.engine, peer.ended = "over", _ABORTED
    door = world.profile.doors[0].name
    world.perform(world.controller.abort_answered(_there(world, peer), world.now, door, AbortAnswer.FAILED))


def _released(world: World, peer: Peer) -> None:
    blocks, peer.fenced = peer.fenced, 0
    world.frame(peer, wire.BlocksReturned(peer.name, world.now, blocks, fenced=True))


def _computed(world: World, peer: Peer) -> None:
    peer.outputs_left -= 1
    if world.profile.probed:
        peer.in_flight += 1
        world.frame(peer, wire.TokensComputed(peer.name, world.now, 1))
    else:
        _there(world, peer).events += 1


def _output_left(world: World, peer: Peer) -> None:
    """What was in flight is emitted, or dropped as stale when the abort came first."""
    amount, peer.in_flight = peer.in_flight, 0
    if peer.ended == _ABORTED:
        world.frame(peer, wire.TokensDropped(peer.name, world.now, amount, stale=True))
    else:
        world.frame(peer, wire.TokensEmitted(peer.name, world.now, amount))


def _crash(world: World, peer: Peer) -> None:
    world.crashed = True
    for one in world.peers.values():
        if one.engine != "none":
            one.engine, one.ended = "over", one.ended or _CRASHED
        one.blocks = one.fenced = one.in_flight = 0
        one.knocked = one.preempt_ordered = one.resume_ordered = one.stream = False
    world.perform(engine_died(world.controller, world.profile.name, world.now, "process died"))


def _gauges(world: World, peer: Peer) -> None:
    world.now += TICK_SECONDS
    running = sum(one.alive for one in world.peers.values())
    gauges = EngineGauges(at=world.now, running=running, waiting=0)
    world.perform(observe_gauges(world.controller, world.profile.name, world.now, gauges))


def time_passes(world: World, peer: Peer) -> None:
    """Until the next timer is due: a deadline, a retry, a settlement, a write-off."""
    due = world.controller.next_due()
    assert due is not None
    world.now = max(world.now, due)
    world.time_left -= 1
    world.perform(world.controller.advance(world.now))


def _speaks(world: World, peer: Peer) -> bool:
    return not world.crashed and world.tracked(peer) is not None


#: One event for each thing that can happen to one request. The engine speaks only about what its truth allows.
EVENTS: tuple[Event, ...] = (
    ("dispatch", lambda w, p: _speaks(w, p) and _engine_is(w, p, Engine.UNDISPATCHED), dispatch),
    ("cancel", lambda w, p: w.tracked(p) is not None and not p.left and not p.told, _cancel),
    ("cancel with grace", lambda w, p: w.tracked(p) is not None and not p.left and not p.told, _cancel_draining),
    ("stream broken", lambda w, p: _speaks(w, p) and not w.profile.probed and p.alive, _stream_broken),
    ("second cancel", lambda w, p: w.tracked(p) is not None, _second_cancel),
    ("preempt", lambda w, p: p.preempts_left > 0 and _engine_is(w, p, Engine.DISPATCHED), _preempt),
    ("preempted", lambda w, p: _speaks(w, p) and p.preempt_ordered and p.engine == "running", _preempted),
    (
        "resume",
        lambda w, p: not w.crashed and _engine_is(w, p, Engine.PARKED if w.profile.probed else Engine.SHELVED),
        _resume,
    ),
    (
        "resumed",
        lambda w, p: _speaks(w, p) and p.engine == "parked" and (p.resume_ordered or _engine_is(w, p, *_STOPPING)),
        _resumed,
    ),
    ("finish", lambda w, p: _speaks(w, p) and p.engine == "running", _finish),
    (
        "served",
        lambda w, p: _engine_is(w, p, Engine.FINISHED) and _machine(w, p).client is Client.LISTENING and not p.left,
        _served,
    ),
    ("ack", lambda w, p: _speaks(w, p) and p.knocked and p.alive, _acknowledged),
    ("abort found nothing", lambda w, p: _speaks(w, p) and p.knocked and not p.alive, _found_nothing),
    ("abort lost", lambda w, p: _speaks(w, p) and p.knocked and p.alive and p.losses_left > 0, _lost),
    ("abort refused", lambda w, p: _speaks(w, p) and p.knocked and p.alive and p.losses_left > 0, _refused),
    (
        "answer lost",
        lambda w, p: w.profile in (STREAM, GAUGED) and _speaks(w, p) and p.knocked and p.alive and p.losses_left > 0,
        _answer_lost,
    ),
    ("release", lambda w, p: _speaks(w, p) and p.fenced > 0, _released),
    ("output computed", lambda w, p: _speaks(w, p) and p.engine == "running" and p.outputs_left > 0, _computed),
    ("output leaves", lambda w, p: _speaks(w, p) and p.in_flight > 0, _output_left),
    (
        "late output",
        lambda w, p: (
            _speaks(w, p)
            and (p.in_flight > 0 if w.profile.probed else p.alive and p.outputs_left > 0)
            and (p.ended != "" or _there(w, p).muted)
        ),
        lambda w, p: _output_left(w, p) if w.profile.probed else _computed(w, p),
    ),
)
#: What happens to all of them at once.
SHARED_EVENTS: tuple[Event, ...] = (
    (
        "engine crash",
        lambda w, p: not w.crashed and any(one.engine != "none" and not one.end for one in w.peers.values()),
        _crash,
    ),
    ("time passes", lambda w, p: w.time_left > 0 and w.controller.next_due() is not None, time_passes),
    (
        "gauges",
        lambda w, p: (
            w.profile is GAUGED and not w.crashed and any(_engine_is(w, one, *_STOPPING) for one in w.peers.values())
        ),
        _gauges,
    ),
)


def enabled(world: World, alphabet: frozenset[str]) -> list[tuple[str, str, Callable[[World, Peer], None]]]:
    """Every event of `alphabet` that is possible now: (name of the event, of the request, what it does)."""
    found = [
        (name, peer.name, do)
        for name, possible, do in EVENTS
        if name in alphabet
        for peer in world.peers.values()
        if possible(world, peer)
    ]
    anyone = next(iter(world.peers.values()))
    return found + [
        (name, "", do) for name, possible, do in SHARED_EVENTS if name in alphabet and possible(world, anyone)
    ]


def apply(world: World, peer_name: str, do: Callable[[World, Peer], None]) -> None:
    """Let one event happen, and check everything."""
    do(world, world.peers[peer_name] if peer_name else next(iter(world.peers.values())))
    world.check()
