"""The controller: events in, effects out.

Theory of operation
-------------------
The edge (a gateway, an audit, a test) reports what happened to a request; the controller moves its
machine, books the movements, arms the timers, and returns what must be done. It knows no clock, no
socket and no engine: time is an argument, an engine is an `EngineProfile`.

A stop runs through four steps, whatever its cause:

1. *notify*: the machine says that an abort is owed; a notice is booked on the link ledger, and the
   first door is knocked on. The knock is repeated with backoff, then at the next door, until
2. *in-flight output* is settled: from the moment the stop is observed the client gets no further
   byte (`Tracked.muted`), and what was computed is discarded or stale, and counted;
3. *release*: the KV ledger closes, by the evidence that this engine can give;
4. *settle*: all five ledgers are closed, and the request leaves the book.

Everything the engine still owes is pending from the first step on, with one deadline. When it
passes, what is still open is a leak; nothing is ever closed because time has passed. Two things are
closed without being proved, and are recorded as such: an engine of which nothing can be proved
(`EngineProfile.best_evidence`) ends as `unconfirmed` with its claim written off as unprovable, and an
overdue request is written off after `StopConfig.write_off_seconds`, so that a leaking engine cannot
fill the book.

Functions over a controller stand beside it: `observations` (what the engine's own scheduler says),
`gauges` (what follows from aggregate numbers, or from an engine's death), and `preemptions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from stopguard.errors import BookkeepingError, StopGuardError
from stopguard.ledger import Account, Book, Evidence, StopSummary, TimeWentBackwards
from stopguard.stops import movements, overdue
from stopguard.stops.advice import retry_advice
from stopguard.stops.anomalies import Anomalies
from stopguard.stops.cause import Semantics, Source, StopCause, prevails
from stopguard.stops.doors import AbortAnswer, EngineProfile
from stopguard.stops.effects import Effect, Knock, Observe, Settled, StopBegan, TellClient
from stopguard.stops.machine import (
    CLIENT_ENDED,
    ENGINE_ENDED,
    ENGINE_TABLE,
    Books,
    BooksEvent,
    Client,
    ClientEvent,
    Engine,
    EngineEvent,
)
from stopguard.stops.patience import ClientPolicy, DeadlineKind, StopConfig, TimerKind
from stopguard.stops.timers import TimerWheel
from stopguard.stops.tracked import Tracked

__all__ = ["Controller"]

NOTHING: tuple[Effect, ...] = ()
_STOP_AT_ONCE = ClientPolicy()
STOPPING = (Engine.ABORTING, Engine.UNCONFIRMED)


def _check_time(tracked: Tracked, at: float) -> None:
    """Before anything of the machine is changed: the books would refuse an entry from the past."""
    if not tracked.ledgers.last_at <= at < math.inf:
        raise TimeWentBackwards(
            f"{tracked.request_id}: an event of {at} is older than {tracked.ledgers.last_at}: two clocks were mixed"
        )


class Controller:
    """All requests of one process, their stops and their timers."""

    def __init__(self, book: Book, config: StopConfig | None = None, *, at: float = 0.0) -> None:
        self.book = book
        self.config = config or StopConfig()
        # Room for every timer that the open requests can have: a stop must not fail for want of one.
        timers = book.limits.open_requests * (len(TimerKind) + len(DeadlineKind))
        self.wheel: TimerWheel[tuple[Tracked, TimerKind | DeadlineKind]] = TimerWheel(at, limit=timers)
        self.tracked: dict[str, Tracked] = {}
        self.parts: dict[str, Tracked] = {}
        self.anomalies = Anomalies(self.config.book_errors)
        self.in_engine: dict[str, dict[str, Tracked]] = {}
        self._timer_handlers: dict[TimerKind, Callable[[Tracked, float], Sequence[Effect]]] = {
            TimerKind.RETRY: self._retry,
            TimerKind.SETTLE: self._settle_deadline,
            TimerKind.GRACE: self._grace_ended,
            TimerKind.TELL: self._tell,
            TimerKind.PREEMPT: self.preempt_refused,
            TimerKind.WRITE_OFF: self._write_off,
        }

    # ---- the normal life of a request ---------------------------------------------------------

    def admit(self, request_id: str, at: float, *, model: str, engine: str = "none") -> Tracked:
        """A client's request has arrived. Raises `LimitReached` when the book is full."""
        ledgers = self.book.open(request_id, at, engine=engine, model=model)
        tracked = Tracked(ledgers, at)
        movements.admit(ledgers, at)
        self.tracked[request_id] = tracked
        return tracked

    def dispatch(self, tracked: Tracked, at: float, profile: EngineProfile) -> None:
        """The request leaves for an engine. Illegal once a stop was observed."""
        ledgers = tracked.ledgers
        _check_time(tracked, at)
        # The one step that can be refused for a limit comes first.
        if ledgers.engine != profile.name and EngineEvent.DISPATCHED in ENGINE_TABLE[tracked.machine.engine]:
            self.book.assign(ledgers, engine=profile.name, model=ledgers.model)
        tracked.machine.on_engine(EngineEvent.DISPATCHED)
        tracked.profile = profile
        movements.dispatch(ledgers, at)
        tracked.last_activity_at = at
        members = self.in_engine.get(profile.name)
        if members is None:
            members = self.in_engine[profile.name] = {}
        members[tracked.request_id] = tracked
        if tracked.deadlines:
            self.clear_deadline(tracked, DeadlineKind.QUEUE)

    def output_started(self, tracked: Tracked, at: float) -> None:
        """The engine's first byte of output has come."""
        if tracked.output_started:
            return
        tracked.output_started = True
        tracked.last_activity_at = at
        if not tracked.probed and not tracked.muted:
            movements.start_output(tracked.ledgers, at)
        if tracked.deadlines:
            self.clear_deadline(tracked, DeadlineKind.FIRST_TOKEN)

    def engine_finished(
        self, tracked: Tracked, at: float, reason: str = "stop", evidence: Evidence = Evidence.STREAM_CLOSED
    ) -> Sequence[Effect]:
        """The engine ended the request by itself, completely and well-formed."""
        _check_time(tracked, at)
        machine = tracked.machine
        before = machine.engine
        machine.on_engine(EngineEvent.FINISHED)
        if machine.engine is not Engine.FINISHED or before is Engine.FINISHED:
            return NOTHING
        if before in STOPPING:
            self.conclude(tracked, "raced_finish", evidence)
            movements.resolve_notices(tracked.ledgers, at, evidence, moot=True)
            tracked.ledgers.mark(at, f"engine finished by itself ({reason}) before the abort mattered")
        return self.engine_side_over(tracked, at, evidence)

    def client_served(self, tracked: Tracked, at: float) -> Sequence[Effect]:
        """The last byte was handed to the client's connection: from now on a disconnect means nothing."""
        _check_time(tracked, at)
        tracked.machine.on_client(ClientEvent.SERVED)
        movements.fold(tracked, at)
        movements.close_connection(tracked.ledgers, at, "")
        return self.try_settle(tracked, at)

    # ---- stops --------------------------------------------------------------------------------

    def client_left(
        self,
        tracked: Tracked,
        at: float,
        method: str,
        policy: ClientPolicy = _STOP_AT_ONCE,
        occurred_at: float | None = None,
    ) -> Sequence[Effect]:
        """The client's connection ended by `method` (eof, reset, write_error, keepalive, stall)."""
        _check_time(tracked, at)
        machine = tracked.machine
        before = machine.client
        if before is Client.DRAINING:
            return NOTHING
        dispatched = machine.engine not in ENGINE_ENDED and machine.engine not in (Engine.UNDISPATCHED, Engine.SHELVED)
        drains = not policy.stops_at_once and dispatched
        machine.on_client(ClientEvent.GONE_DRAINING if drains else ClientEvent.GONE)
        if before is Client.DISMISSED:
            movements.close_connection(tracked.ledgers, at, method)
            return self.try_settle(tracked, at)
        if before is not Client.LISTENING:
            return NOTHING
        movements.fold(tracked, at)
        movements.close_connection(tracked.ledgers, at, method)
        tracked.discarding = tracked.muted = True
        if machine.client is Client.DRAINING:
            tracked.ledgers.mark(at, f"client left ({method}); the engine may finish")
            if policy.grace_seconds is not None:
                self.arm(tracked, TimerKind.GRACE, at + policy.grace_seconds)
            return NOTHING
        cause = StopCause(
            semantics=Semantics.CANCEL, source=Source.CLIENT, reason=method, observed_at=at, occurred_at=occurred_at
        )
        return self.begin_stop(tracked, at, cause)

    def stop(self, tracked: Tracked, at: float, cause: StopCause) -> Sequence[Effect]:
        """Somebody other than the client's connection ends the request. Harmless after the end, and twice."""
        _check_time(tracked, at)
        before = tracked.machine.client
        if tracked.machine.engine is Engine.FINISHED and cause.semantics is not Semantics.FAIL:
            return NOTHING  # finished beats stopped: the rest is only being handed over
        tracked.machine.on_client(ClientEvent.DISMISSED)
        if before not in (Client.LISTENING, Client.DRAINING):
            return NOTHING
        movements.fold(tracked, at)
        tracked.discarding = tracked.muted = True
        return self.begin_stop(tracked, at, cause)

    def client_told(self, tracked: Tracked, at: float) -> Sequence[Effect]:
        """A dismissed client has been handed its terminal event."""
        _check_time(tracked, at)
        tracked.told = True
        movements.close_connection(tracked.ledgers, at, "told")
        return self.try_settle(tracked, at)

    def engine_lost(self, tracked: Tracked, at: float, reason: str) -> Sequence[Effect]:
        """The upstream connection broke before its end, or the engine is gone."""
        _check_time(tracked, at)
        machine = tracked.machine
        before, client_before = machine.engine, machine.client
        machine.on_engine(EngineEvent.LOST)
        if machine.engine is not Engine.LOST or before is Engine.LOST:
            return NOTHING
        movements.fold(tracked, at)
        tracked.discarding = tracked.muted = True
        if before in STOPPING:
            # It ended, and the stop had been asked for: that the stream closed is what we know.
            self.conclude(tracked, "confirmed", Evidence.STREAM_CLOSED)
            movements.resolve_notices(tracked.ledgers, at, Evidence.STREAM_CLOSED, moot=True)
        effects: list[Effect] = []
        if client_before is Client.LISTENING or tracked.cause is None:
            cause = StopCause(semantics=Semantics.FAIL, source=Source.ENGINE, reason=reason, observed_at=at)
            effects += self.open_stop(tracked, at, cause)
            self.conclude(tracked, "failed", Evidence.STREAM_CLOSED)
        effects += self.engine_side_over(tracked, at, Evidence.STREAM_CLOSED)
        return effects

    def abort_answered(
        self, tracked: Tracked, at: float, door_name: str, answer: AbortAnswer, retry_after_seconds: float = 0.0
    ) -> Sequence[Effect]:
        """What a door said to a knock. Anything said after the end is ignored."""
        _check_time(tracked, at)
        if tracked.machine.engine not in STOPPING or tracked.profile is None:
            return NOTHING
        profile = tracked.profile
        door = next((door for door in profile.doors if door.name == door_name), None)
        if door is None:
            raise BookkeepingError(f"{tracked.request_id}: engine {profile.name} has no door {door_name!r}")
        tracked.ledgers.mark(at, f"door {door_name}: {answer.value}")
        if answer is AbortAnswer.GONE and door.worth > Evidence.ACCEPTED:
            return self.acknowledged(tracked, at, door.worth)
        # Whatever the door said: the request may be gone all the same, and the gauges are who knows.
        observing = (Observe(profile.name),) if profile.best_evidence is Evidence.GAUGE else NOTHING
        if answer in (AbortAnswer.REFUSED, AbortAnswer.UNKNOWN, AbortAnswer.FAILED):
            return (*self.knock_later(tracked, at, retry_after_seconds), *observing)
        self.grade(tracked, Evidence.SENT if answer is AbortAnswer.SENT else Evidence.ACCEPTED)
        if profile.best_evidence <= Evidence.ACCEPTED:
            if tracked.door_index + 1 < len(profile.doors):
                tracked.door_index += 1
                return self._knock(tracked, at)
            return self._unprovable(tracked, at)
        return observing

    def stream_ended_by_engine(self, tracked: Tracked, at: float) -> Sequence[Effect]:
        """After an abort the engine itself closed our upstream stream."""
        if tracked.machine.engine not in STOPPING or tracked.profile is None:
            return NOTHING
        self.grade(tracked, Evidence.STREAM_CLOSED)
        tracked.ledgers.mark(at, "the engine ended the stream")
        if tracked.profile.stream_end_is_ack or tracked.profile.best_evidence is Evidence.STREAM_CLOSED:
            return self.acknowledged(tracked, at, Evidence.STREAM_CLOSED)
        return NOTHING

    def acknowledged(self, tracked: Tracked, at: float, evidence: Evidence) -> Sequence[Effect]:
        """The engine's own word that the request left its scheduler: the ack."""
        _check_time(tracked, at)
        machine = tracked.machine
        before, client_before = machine.engine, machine.client
        machine.on_engine(EngineEvent.ABORT_ACKED)
        if machine.engine is not Engine.STOPPED or before is Engine.STOPPED:
            return NOTHING
        movements.fold(tracked, at)
        tracked.discarding = tracked.muted = True
        effects: list[Effect] = []
        if client_before is Client.LISTENING or tracked.cause is None:
            # Nobody of ours asked for it: the engine, or somebody at its door, stopped it.
            cause = StopCause(semantics=Semantics.FAIL, source=Source.ENGINE, reason="aborted", observed_at=at)
            effects += self.open_stop(tracked, at, cause)
        movements.resolve_notices(tracked.ledgers, at, evidence)
        self.conclude(tracked, "confirmed", evidence)
        stop = tracked.ledgers.stop
        if stop is not None and stop.acked_at is None:
            stop.acked_at = at
        self.disarm(tracked, TimerKind.RETRY)
        effects += self.engine_side_over(tracked, at, evidence)
        return effects

    # ---- preemption (the rest is in `preemptions`) ----------------------------------------------

    def preempt_refused(self, tracked: Tracked, at: float) -> Sequence[Effect]:
        """The preemption did not happen (refused, or not confirmed in time)."""
        if tracked.machine.engine is Engine.PREEMPTING:
            tracked.machine.on_engine(EngineEvent.PREEMPT_REFUSED)
            self.disarm(tracked, TimerKind.PREEMPT)
            if tracked.cause is not None and tracked.cause.semantics is Semantics.PREEMPT:
                tracked.cause = None
            tracked.ledgers.mark(at, "not preempted")
        return NOTHING

    # ---- time -------------------------------------------------------------------------------------

    def set_deadline(self, tracked: Tracked, kind: DeadlineKind, due_at: float) -> None:
        """Bound a phase of the request; when it passes the request is stopped as a cancel by deadline.

        An idle deadline moves with `Tracked.last_activity_at`, which the hot path sets; the timer is
        only looked at when it fires.
        """
        self.clear_deadline(tracked, kind)
        if tracked.deadlines is None:
            tracked.deadlines = {}
        patience = due_at - tracked.last_activity_at
        tracked.deadlines[kind] = (self.wheel.set((tracked, kind), due_at), patience)

    def clear_deadline(self, tracked: Tracked, kind: DeadlineKind) -> None:
        """That phase is over."""
        if tracked.deadlines and (entry := tracked.deadlines.pop(kind, None)) is not None:
            self.wheel.cancel(entry[0])

    def next_due(self) -> float | None:
        """When to call `advance` next, at the latest."""
        return self.wheel.next_due()

    def advance(self, at: float) -> Sequence[Effect]:
        """Let time pass: fire every timer that is due."""
        due = self.wheel.advance(at)
        if not due:
            return NOTHING
        effects: list[Effect] = []
        for tracked, kind in due:
            if tracked.request_id not in self.tracked:
                continue  # settled by an earlier timer of the same turn
            if isinstance(kind, TimerKind) and tracked.timers:
                tracked.timers.pop(kind, None)
            try:
                if isinstance(kind, TimerKind):
                    effects += self._timer_handlers[kind](tracked, at)
                else:
                    effects += self._deadline_passed(tracked, kind, at)
            except StopGuardError as error:
                # The timers that fired together belong to many requests: one that fails must not take the others along.
                self.anomalies.record(at, tracked.request_id, f"its {kind.value} timer failed: {error}")
                if not tracked.timers or TimerKind.WRITE_OFF not in tracked.timers:
                    self.arm(tracked, TimerKind.WRITE_OFF, at + self.config.write_off_seconds)
        return effects

    # ---- shared steps, also used by `observations` --------------------------------------------------

    def try_settle(self, tracked: Tracked, at: float) -> Sequence[Effect]:
        """Close the books if nothing is open any more."""
        machine = tracked.machine
        ledgers = tracked.ledgers
        if ledgers.stop is not None:
            movements.note_steps(ledgers)
        if machine.books not in (Books.SETTLING, Books.OVERDUE):
            return NOTHING
        if machine.engine is Engine.UNCONFIRMED and machine.client in CLIENT_ENDED and ledgers.all_closed:
            # Closed only because its engine's side was given up: that is not settled.
            self.book.write_off(ledgers, at, "unconfirmed")
            machine.on_books(BooksEvent.GIVEN_UP)
            return (self.detach(tracked),)
        if not machine.ended:
            return NOTHING
        if not self.book.settle(ledgers, at):
            if tracked.settle_due is None:
                self._expect(tracked, at)
            return NOTHING
        machine.on_books(BooksEvent.CLOSED)
        if ledgers.stop is not None:
            ledgers.stop.settled_at = at
        return (*self.tell_now(tracked, at), self.detach(tracked))

    def knock_again(self, tracked: Tracked, at: float) -> Sequence[Effect]:
        """Repeat an abort at once: what it is to stop is there only now."""
        if tracked.machine.engine not in STOPPING or tracked.profile is None:
            return NOTHING
        if tracked.attempts >= tracked.profile.retry.tries:
            return NOTHING
        return self._knock(tracked, at)

    def knock_later(self, tracked: Tracked, at: float, wait_seconds: float) -> Sequence[Effect]:
        """Repeat an abort that was refused or found nothing, after `wait_seconds` or the usual backoff."""
        if tracked.machine.engine in STOPPING and tracked.profile is not None:
            wait = max(wait_seconds, tracked.profile.retry.wait_seconds(max(1, tracked.attempts)))
            self.arm(tracked, TimerKind.RETRY, at + wait)
        return NOTHING

    # ---- private: a stop's steps --------------------------------------------------------------------

    def open_stop(self, tracked: Tracked, at: float, cause: StopCause) -> Sequence[Effect]:
        """Write down that there is a stop, why, and that everything has a deadline from now on."""
        if prevails(cause, tracked.cause):
            tracked.cause = cause
        for kind in (TimerKind.PREEMPT, TimerKind.GRACE):
            self.disarm(tracked, kind)
        for deadline in list(tracked.deadlines or ()):
            self.clear_deadline(tracked, deadline)
        tracked.ledgers.stop = StopSummary(
            semantics=cause.semantics.value,
            source=cause.source.value,
            reason=cause.reason,
            observed_at=cause.observed_at,
            occurred_at=cause.occurred_at,
            actor=cause.actor,
        )
        self._expect(tracked, at)
        return (StopBegan(tracked),)

    def begin_stop(self, tracked: Tracked, at: float, cause: StopCause) -> Sequence[Effect]:
        """A stop that we order: carry it out as far as it goes at once."""
        ledgers, machine = tracked.ledgers, tracked.machine
        effects: list[Effect] = list(self.open_stop(tracked, at, cause))
        if machine.engine is Engine.WITHDRAWN:
            movements.withdraw(ledgers, at)
            self.conclude(tracked, "confirmed", Evidence.PROBE)
        elif machine.engine is Engine.FINISHED:
            self.conclude(tracked, "raced_finish", Evidence.STREAM_CLOSED)
            movements.discard_output(ledgers, at)
        elif machine.owes_abort:
            assert tracked.profile is not None
            assert tracked.settle_due is not None
            movements.note_abort(ledgers, at, tracked.settle_due, tracked.profile.name)
            movements.expect_release(ledgers, at, tracked.settle_due)
            tracked.door_index = tracked.tries_at_door = 0
            effects += self._knock(tracked, at)
        if machine.client is Client.DISMISSED:
            if machine.engine in ENGINE_ENDED:
                effects += self.tell_now(tracked, at)
            else:
                self.arm(tracked, TimerKind.TELL, at + self.config.tell_seconds)
        effects += self.try_settle(tracked, at)
        return effects

    def _knock(self, tracked: Tracked, at: float) -> Sequence[Effect]:
        """Send the abort through the present door and be ready to do it again."""
        profile = tracked.profile
        assert profile is not None
        tracked.machine.on_engine(EngineEvent.ABORT_SENT)
        tracked.attempts += 1
        tracked.tries_at_door += 1
        door = profile.doors[tracked.door_index]
        stop = tracked.ledgers.stop
        if stop is not None:
            stop.attempts = tracked.attempts
            if stop.notified_at is None:
                stop.notified_at = at
        self.grade(tracked, Evidence.SENT)
        tracked.ledgers.mark(at, f"knock {tracked.attempts} at door {door.name}")
        self.arm(tracked, TimerKind.RETRY, at + profile.retry.wait_seconds(tracked.attempts))
        return (Knock(tracked, door, tracked.attempts),)

    def _retry(self, tracked: Tracked, at: float) -> Sequence[Effect]:
        profile = tracked.profile
        if tracked.machine.engine not in STOPPING or profile is None or tracked.attempts >= profile.retry.tries:
            return NOTHING
        if tracked.tries_at_door >= profile.retry.tries_per_door and tracked.door_index + 1 < len(profile.doors):
            tracked.door_index += 1
            tracked.tries_at_door = 0
        return self._knock(tracked, at)

    def engine_side_over(self, tracked: Tracked, at: float, evidence: Evidence) -> Sequence[Effect]:
        """The engine has ended: close its side by this evidence, or wait for the scheduler's own word."""
        movements.fold(tracked, at)
        self.disarm(tracked, TimerKind.RETRY)
        if not tracked.probed:
            if tracked.machine.client is Client.LISTENING:
                # What is in flight may still be delivered; the rest of its side is closed.
                movements.release_engine_side_but_output(tracked.ledgers, at, evidence)
            else:
                movements.release_engine_side(tracked.ledgers, at, evidence)
            self.leave_engine(tracked)
        elif tracked.part_places is not None and not tracked.part_places:
            self.leave_engine(tracked)
        else:
            self._expect(tracked, at)
        effects: list[Effect] = []
        if tracked.machine.client is Client.DISMISSED:
            effects += self.tell_now(tracked, at)
        effects += self.try_settle(tracked, at)
        return effects

    def _unprovable(self, tracked: Tracked, at: float) -> Sequence[Effect]:
        """Every door was knocked on and nothing more can ever be known: `unconfirmed`, and not a leak."""
        tracked.machine.on_engine(EngineEvent.OVERDUE)
        self.conclude(tracked, "unconfirmed", Evidence.SENT)
        self.disarm(tracked, TimerKind.RETRY)
        movements.fold(tracked, at)
        movements.give_up_engine_side(tracked.ledgers, at, "unprovable: this engine gives no evidence")
        self.leave_engine(tracked)
        return (*self.tell_now(tracked, at), *self.try_settle(tracked, at))

    def _settle_deadline(self, tracked: Tracked, at: float) -> Sequence[Effect]:
        return overdue.settle_deadline(self, tracked, at)

    def _write_off(self, tracked: Tracked, at: float) -> Sequence[Effect]:
        return overdue.write_off(self, tracked, at)

    def _grace_ended(self, tracked: Tracked, at: float) -> Sequence[Effect]:
        if tracked.machine.client is not Client.DRAINING:
            return NOTHING
        tracked.machine.on_client(ClientEvent.GRACE_ENDED)
        movements.fold(tracked, at)
        cause = StopCause(semantics=Semantics.CANCEL, source=Source.CLIENT, reason="grace_ended", observed_at=at)
        return self.begin_stop(tracked, at, cause)

    def _deadline_passed(self, tracked: Tracked, kind: DeadlineKind, at: float) -> Sequence[Effect]:
        entry = (tracked.deadlines or {}).pop(kind, None)
        if entry is None:
            return NOTHING
        if kind is DeadlineKind.IDLE:
            patience = entry[1]
            if tracked.last_activity_at + patience > at:
                self.set_deadline(tracked, kind, tracked.last_activity_at + patience)
                return NOTHING
        cause = StopCause(
            semantics=Semantics.CANCEL, source=Source.DEADLINE, reason=f"{kind.value}_deadline", observed_at=at
        )
        return self.stop(tracked, at, cause)

    def _tell(self, tracked: Tracked, at: float) -> Sequence[Effect]:
        return self.tell_now(tracked, at)

    def tell_now(self, tracked: Tracked, at: float) -> Sequence[Effect]:
        """Tell a dismissed client, once."""
        if tracked.told or tracked.machine.client is not Client.DISMISSED or tracked.cause is None:
            return NOTHING
        if not tracked.ledgers.balances[Account.STREAM_CONNECTED]:
            return NOTHING
        tracked.told = True
        self.disarm(tracked, TimerKind.TELL)
        advice = retry_advice(tracked)
        if tracked.ledgers.stop is not None:
            tracked.ledgers.stop.retry = advice.header()
        return (TellClient(tracked, tracked.cause, advice),)

    # ---- private: small things ------------------------------------------------------------------

    def _expect(self, tracked: Tracked, at: float) -> None:
        """From now on everything still open has a deadline."""
        if tracked.settle_due is None:
            tracked.settle_due = at + self.config.settle_seconds
            self.arm(tracked, TimerKind.SETTLE, tracked.settle_due)
        if tracked.machine.engine in ENGINE_ENDED:
            movements.expect_release(tracked.ledgers, at, max(at, tracked.settle_due))

    def grade(self, tracked: Tracked, evidence: Evidence) -> None:
        stop = tracked.ledgers.stop
        if stop is not None and evidence > stop.evidence:
            stop.evidence = evidence

    def conclude(self, tracked: Tracked, outcome: str, evidence: Evidence) -> None:
        """Set the outcome. A later, better one may replace `unconfirmed`; nothing else is replaced."""
        stop = tracked.ledgers.stop
        if stop is not None:
            self.grade(tracked, evidence)
            if stop.outcome in ("pending", "unconfirmed"):
                stop.outcome = outcome

    def leave_engine(self, tracked: Tracked) -> None:
        if tracked.profile is not None:
            self.in_engine.get(tracked.profile.name, {}).pop(tracked.request_id, None)

    def forget_parts(self, tracked: Tracked) -> None:
        for part in tracked.part_ids or ():
            self.parts.pop(part, None)
        tracked.part_places = tracked.part_ids = None

    def arm(self, tracked: Tracked, kind: TimerKind, due_at: float) -> None:
        self.disarm(tracked, kind)
        if tracked.timers is None:
            tracked.timers = {}
        tracked.timers[kind] = self.wheel.set((tracked, kind), due_at)

    def disarm(self, tracked: Tracked, kind: TimerKind) -> None:
        if tracked.timers and (timer := tracked.timers.pop(kind, None)) is not None:
            self.wheel.cancel(timer)

    def detach(self, tracked: Tracked) -> Settled:
        """Nothing of the controller's refers to the request any more."""
        for kind in list(tracked.timers or ()):
            self.disarm(tracked, kind)
        for deadline in list(tracked.deadlines or ()):
            self.clear_deadline(tracked, deadline)
        self.forget_parts(tracked)
        self.leave_engine(tracked)
        del self.tracked[tracked.request_id]
        return Settled(tracked)
