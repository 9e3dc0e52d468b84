"""The coordinator: who makes room for whom, and when they come back. Events in, decisions out.

Theory
------
The edge reports what happens to requests (queued, sent, started, parked, running again, ended) and what engines say
of their room; after each report it calls `decide` and carries out what that returns. Nothing polls: where only the
passing of time can change the answer `next_due` says when to ask again.

*Taking off.* A needy request (its class preempts, and it has no output) is under pressure for one of the reasons of
`pressure`. For each missing place, or until the missing blocks are covered, a victim is chosen among the requests of
lower class at its engines. While a preemption that was ordered for it is under way no further one is ordered, beyond
`victims_at_once` for blocks that are known to be missing; after one took effect the needy request is given its
patience again before the next.

*Bringing back.* A parked request goes on when no needy request of a higher class waits for the same engine, after
`hold_seconds`, and when there is room for it below the low mark (`pressure.fits`); where the engine does not say,
when the one that it made room for has ended. It rises one rank each `promote_seconds` like everybody who waits, and
after `longest_parked_seconds` nothing but a missing place keeps it: nobody stays parked for ever. One request at a
time returns to an engine that says how full it is, since its return changes what the engine says.

*Guarding.* The guard hears of every token that was computed and of every one that will be computed again.

The machine of each request (`stops`) stays the judge of what is possible: a cancel that comes at any moment moves
the machine, and `eligible` looks at it last.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from stopguard.preemption.classes import Claim
from stopguard.preemption.guard import Guard
from stopguard.preemption.pressure import Pressure, Room, at_engine, fits, in_queue
from stopguard.preemption.seats import Seat, SeatState
from stopguard.preemption.settings import PreemptionSettings
from stopguard.preemption.victims import Candidate, candidate_of, choose, eligible, output_tokens, policy_named
from stopguard.preemption.ways import Exactness, Verdict, Way
from stopguard.stops import Engine, Tracked

__all__ = ["BringBack", "Coordinator", "Decision", "Look", "TakeOff"]

_GONE = (Engine.WITHDRAWN, Engine.FINISHED, Engine.STOPPED, Engine.LOST)
_NO_WAY = Verdict(Exactness.NEVER, "no_way")
_AGAIN_SECONDS = 0.05


def _nobody_waits(_engine: str) -> int:
    return -1


class TakeOff(msgspec.Struct, frozen=True, gc=False):
    """Preempt `seat` by its `way`, for `for_whom`. `candidate` is what was known of it at that moment."""

    seat: Seat
    way: Way
    for_whom: Seat
    pressure: Pressure
    candidate: Candidate


class BringBack(msgspec.Struct, frozen=True, gc=False):
    """Let `seat` go on. `level` is the rank to which it has risen by waiting."""

    seat: Seat
    way: Way
    level: int


class Look(msgspec.Struct, frozen=True, gc=False):
    """Read the gauges of `engine`: a decision hangs on them."""

    engine: str


Decision = TakeOff | BringBack | Look


class Coordinator:
    """All decisions of one process.

    `room` answers for an engine at this moment, by its name; `queue_level` says at which level somebody waits for
    a place at it, -1 when nobody does.
    """

    def __init__(
        self,
        settings: PreemptionSettings,
        room: Callable[[str], Room],
        top_rank: int,
        queue_level: Callable[[str], int] = _nobody_waits,
    ) -> None:
        self.settings = settings
        self.guard = Guard(settings)
        self.ways: list[Way] = []
        # Why somebody was not preempted although room was wanted: requests, each counted once a reason.
        self.refusals: Counter[str] = Counter()
        self.taken = 0
        self.returned = 0
        # Who made room: requests by class, and why room was wanted.
        self.victims: Counter[tuple[str, str]] = Counter()
        # How long requests were away from each engine, those that are away now left out.
        self.away_seconds: dict[str, float] = {}
        self._policy = policy_named(settings.policy)
        self._room = room
        self._top = top_rank
        self._queue_level = queue_level
        self._seats: dict[str, Seat] = {}
        self._at_engine: dict[str, dict[str, Seat]] = {}
        self._needy: dict[str, Seat] = {}
        self._parked: dict[str, Seat] = {}
        self._due = math.inf

    # ---- what happened -------------------------------------------------------------------------

    def queued(self, tracked: Tracked, claim: Claim, engines: Iterable[str], at: float) -> None:
        """It waits with us for one of `engines`."""
        seat = self._seats.get(tracked.request_id)
        if seat is None:
            seat = self._seats[tracked.request_id] = Seat(tracked, claim)
        elif seat.state is SeatState.SENT:
            # An engine was chosen and could not be reached.
            seat.state = SeatState.QUEUED
            self._move(seat, "")
        elif seat.state is not SeatState.QUEUED:
            return
        seat.engines = tuple(engines)
        self._note_need(seat)

    def sent(self, tracked: Tracked, claim: Claim, engine: str, at: float) -> None:
        """It was sent to `engine`; for one that returns, `running` follows."""
        seat = self._seats.get(tracked.request_id)
        if seat is None:
            seat = self._seats[tracked.request_id] = Seat(tracked, claim)
        self._move(seat, engine)
        if seat.state is SeatState.QUEUED:
            seat.state, seat.sent_at = SeatState.SENT, at
        self._note_need(seat)

    def reclassed(self, tracked: Tracked) -> None:
        """Its class has changed. A preemption that was ordered for it is not taken back."""
        seat = self._seats.get(tracked.request_id)
        if seat is not None:
            self._note_need(seat)

    def started(self, tracked: Tracked, at: float) -> None:
        """Its first output has come."""
        seat = self._seats.get(tracked.request_id)
        if seat is not None and seat.started_at is None:
            seat.started_at = at
            if seat.state is SeatState.SENT:
                seat.state = SeatState.RUNNING
            self._note_need(seat)

    def ended(self, tracked: Tracked, at: float) -> None:
        """It needs no room any more: it finished, was stopped, or was lost."""
        seat = self._seats.pop(tracked.request_id, None)
        if seat is None:
            return
        self._count(seat, at)
        if seat.state in (SeatState.PARKED, SeatState.RETURNING):
            self._count_away(seat, at)
        seat.state = SeatState.ENDED
        self._move(seat, "")
        self._needy.pop(tracked.request_id, None)
        self._parked.pop(tracked.request_id, None)
        self._let_go(seat, at)
        # Those that made room for it keep pointing to it, to see that it has ended.
        seat.relief.clear()

    def parked(self, tracked: Tracked, at: float) -> None:
        """It was taken off its engine and waits."""
        seat = self._seats.get(tracked.request_id)
        if seat is None or seat.state not in (SeatState.TAKING, SeatState.RETURNING):
            return
        first = seat.state is SeatState.TAKING
        seat.state, seat.parked_at = SeatState.PARKED, at if first else seat.parked_at
        seat.rooms_made += first
        self._parked[tracked.request_id] = seat
        self._let_go(seat, at)

    def refused(self, tracked: Tracked, at: float, reason: str, retry_after_seconds: float = 0.0) -> None:
        """It could not be taken off, or not let go on: it stays where it was."""
        seat = self._seats.get(tracked.request_id)
        if seat is None:
            return
        self._note(seat, reason)
        seat.retry_at = at + max(retry_after_seconds, _AGAIN_SECONDS)
        if seat.state is SeatState.TAKING:
            seat.state = SeatState.RUNNING if seat.started_at is not None else SeatState.SENT
            self._let_go(seat, at)
            seat.for_whom = None
        elif seat.state is SeatState.RETURNING:
            seat.state = SeatState.PARKED
            self._parked[tracked.request_id] = seat

    def running(self, tracked: Tracked, at: float) -> None:
        """A request that was parked goes on."""
        seat = self._seats.get(tracked.request_id)
        if seat is None or seat.state is SeatState.RUNNING:
            return
        self._parked.pop(tracked.request_id, None)
        self._count_away(seat, at)
        seat.state, seat.resumed_at, seat.for_whom = SeatState.RUNNING, at, None
        self.returned += 1

    # ---- what is to be done --------------------------------------------------------------------

    def decide(self, at: float) -> Sequence[Decision]:
        """Everything that should happen now."""
        self._due = math.inf
        if not self.ways or not (self._needy or self._parked):
            return ()
        decisions: list[Decision] = []
        looks: dict[str, None] = {}
        # The engines at which somebody as urgent as this found nobody to make room: nobody less urgent need look.
        barren: dict[str, int] = {}
        for seat in sorted(self._needy.values(), key=lambda each: (-each.claim.rank, each.claim.arrived_at)):
            decisions += self._relieve(seat, at, looks, barren)
        decisions += self._bring_back(at, looks)
        decisions += [Look(engine) for engine in looks]
        return decisions

    @property
    def waits(self) -> bool:
        """Whether anybody needs room or waits to come back."""
        return bool(self._needy or self._parked)

    def next_due(self) -> float:
        """When to call `decide` again although nothing has happened; infinity when only an event can matter."""
        return self._due

    def is_parked(self, tracked: Tracked) -> bool:
        """Whether it waits to go on."""
        return tracked.request_id in self._parked

    def seat_of(self, tracked: Tracked) -> Seat | None:
        """Its seat, until it has ended."""
        return self._seats.get(tracked.request_id)

    def away(self) -> list[Seat]:
        """Those that are parked or about to go on."""
        return [*self._parked.values(), *(seat for seat in self._seats.values() if seat.state is SeatState.RETURNING)]

    def parked_seats(self) -> list[Seat]:
        """Those that wait to go on."""
        return list(self._parked.values())

    def unstarted(self, engine: str) -> int:
        """Requests at `engine` that have no output yet."""
        return sum(seat.state is SeatState.SENT for seat in self._at_engine.get(engine, {}).values())

    def __len__(self) -> int:
        return len(self._seats)

    def __repr__(self) -> str:
        states = Counter(seat.state.value for seat in self._seats.values())
        counts = " ".join(f"{state} {number}" for state, number in sorted(states.items()))
        return f"<Coordinator {counts or 'empty'} {self.guard!r}>"

    def verify(self) -> None:
        """Each seat is in exactly the maps that its state says."""
        for request_id, seat in self._seats.items():
            assert seat.tracked.request_id == request_id
            assert seat.state is not SeatState.ENDED
            assert (request_id in self._parked) == (seat.state is SeatState.PARKED), seat
            assert (request_id in self._needy) == seat.needy, seat
            assert (request_id in self._at_engine.get(seat.engine, {})) == bool(seat.engine), seat
            assert all(each.state is SeatState.TAKING for each in seat.relief), seat
        assert set(self._parked) <= set(self._seats)
        assert set(self._needy) <= set(self._seats)
        assert sum(map(len, self._at_engine.values())) == sum(bool(seat.engine) for seat in self._seats.values())

    # ---- private: taking off -------------------------------------------------------------------

    def _relieve(self, seat: Seat, at: float, looks: dict[str, None], barren: dict[str, int]) -> list[Decision]:
        """Order what `seat` needs, if it is under pressure."""
        if all(barren.get(engine, -1) >= seat.claim.rank for engine in seat.engines or (seat.engine,)):
            return []
        found = self._pressure(seat, at, looks)
        if found is None:
            return []
        pressure, engines = found
        decisions: list[Decision] = []
        # What those give that make room for it already.
        covered = sum(self._freed(each) for each in seat.relief)
        wanted_more = pressure.blocks_needed > covered and len(seat.relief) < self.settings.victims_at_once
        while not seat.relief or wanted_more:
            if not self.guard.allows(at):
                self._note(seat, "guard")
                self._ask_again(at + _AGAIN_SECONDS * 4)
                barren.update(dict.fromkeys(engines, self._top))
                break
            chosen = self._victim(seat, engines, pressure, max(0, pressure.blocks_needed - covered), at)
            if chosen is None:
                barren.update(dict.fromkeys(engines, seat.claim.rank))
                break
            victim, way, candidate = chosen
            victim.state, victim.way, victim.for_whom = SeatState.TAKING, way, seat
            seat.relief.append(victim)
            self.taken += 1
            self.victims[victim.claim.priority_class.name, pressure.reason] += 1
            self.guard.recomputing(candidate.recompute_tokens, at)
            decisions.append(TakeOff(victim, way, seat, pressure, candidate))
            covered += candidate.blocks_freed
            wanted_more = pressure.blocks_needed > covered and len(seat.relief) < self.settings.victims_at_once
        return decisions

    def _pressure(self, seat: Seat, at: float, looks: dict[str, None]) -> tuple[Pressure, tuple[str, ...]] | None:
        """Whether `seat` is held up, and at which engines something can be done about it."""
        settings = self.settings
        if seat.state is SeatState.QUEUED:
            rooms = [(engine, self._room(engine)) for engine in seat.engines]
            if not rooms or any(in_queue(room) is None for _, room in rooms):
                return None  # a place is free: it is only a moment away
            return Pressure("places"), seat.engines
        since = seat.sent_at if seat.relieved_at is None else max(seat.sent_at, seat.relieved_at)
        room = self._room(seat.engine)
        pressure, again_at = at_engine(room, seat.claim, since, at, settings)
        if room.read_at < since and room.slots_free is None:
            looks[seat.engine] = None
        if again_at is not None:
            self._ask_again(again_at)
        elif pressure is None and room.slots_free is None:
            # The engine has room and says so; it will start, unless something changes meanwhile.
            looks[seat.engine] = None
            self._ask_again(at + settings.blind_patience_seconds)
        return None if pressure is None else (pressure, (seat.engine,))

    def _victim(
        self, seat: Seat, engines: tuple[str, ...], pressure: Pressure, blocks_needed: int, at: float
    ) -> tuple[Seat, Way, Candidate] | None:
        """The best victim for `seat`, and the way to preempt it."""
        found: dict[str, tuple[Seat, Way, Candidate]] = {}
        for engine in engines:
            room = self._room(engine)
            for other in self._at_engine.get(engine, {}).values():
                if other.state not in (SeatState.RUNNING, SeatState.SENT):
                    continue
                if other.claim.rank >= seat.claim.rank:
                    continue
                if pressure.reason != "places" and not _holds_room(other):
                    continue
                self._count(other, at)
                candidate = candidate_of(
                    other.tracked,
                    other.claim,
                    rooms_made=other.rooms_made,
                    settings=self.settings,
                    block_tokens=room.block_tokens,
                    blocks_needed=blocks_needed,
                    prefix_cache=room.prefix_cache,
                    resumed_at=other.resumed_at,
                )
                # What is cheap to know first: a way may have to look closer.
                why_not = eligible(candidate, other.tracked, _EXACT_FOR_NOW, seat.claim.rank, self.settings, at)
                way = None
                if not why_not and at < other.retry_at:
                    why_not = "cool_down"
                if not why_not:
                    way, why_not = self._way_for(other)
                if way is not None and not why_not:
                    found[candidate.request_id] = (other, way, candidate)
                    continue
                if why_not not in ("class", "not_running"):
                    self._note(other, why_not)
                if why_not == "cool_down":
                    ready_at = (other.resumed_at or 0.0) + self.settings.cool_down_seconds
                    self._ask_again(max(at + _AGAIN_SECONDS, ready_at, other.retry_at))
        chosen = choose(self._policy, (each[2] for each in found.values()))
        return None if chosen is None else found[chosen.request_id]

    def _way_for(self, seat: Seat) -> tuple[Way | None, str]:
        """The first way that can, or why none does."""
        verdict = _NO_WAY
        for way in self.ways:
            verdict = way.can(seat.tracked)
            if verdict.exactness is not Exactness.NEVER:
                return way, ""
        return None, verdict.reason or "inexact"

    def _freed(self, seat: Seat) -> int:
        room = self._room(seat.engine)
        return seat.claim.blocks(room.block_tokens, output_tokens(seat.tracked))

    # ---- private: bringing back ----------------------------------------------------------------

    def _bring_back(self, at: float, looks: dict[str, None]) -> list[Decision]:
        settings = self.settings
        decisions: list[Decision] = []
        returning = {seat.engine for seat in self._seats.values() if seat.state is SeatState.RETURNING and seat.engine}
        for seat in sorted(self._parked.values(), key=lambda each: (-self._level(each, at), each.parked_at)):
            if seat.way is None or seat.tracked.muted or seat.tracked.machine.engine in _GONE:
                continue
            due_at = max(seat.parked_at + settings.hold_seconds, seat.retry_at)
            if at < due_at:
                self._ask_again(due_at)
                continue
            overdue = at >= seat.parked_at + settings.longest_parked_seconds
            if not overdue:
                self._ask_again(seat.parked_at + settings.longest_parked_seconds)
                if self._held_up(seat, at):
                    continue
            room = self._room(seat.engine)
            if room.places_free <= 0:
                continue
            if not overdue:
                if seat.engine in returning:
                    continue
                here = [
                    each
                    for each in self._at_engine.get(seat.engine, {}).values()
                    if each.state in (SeatState.RUNNING, SeatState.SENT, SeatState.RETURNING)
                ]
                others = bool(here)
                needed = seat.claim.blocks(room.block_tokens, output_tokens(seat.tracked))
                room_for_it = fits(room, needed, settings, alone=not others)
                whom = seat.for_whom
                last_change = max(seat.parked_at, (whom.started_at if whom is not None else None) or 0.0)
                if -math.inf < room.read_at < last_change and room.slots_free is None:
                    # What the engine said was said before it left, or before the other came: look first.
                    looks[seat.engine] = None
                    self._ask_again(at + settings.blind_patience_seconds)
                    if others:
                        continue
                if room_for_it is None:
                    room_for_it = whom is None or whom.state is SeatState.ENDED
                if not room_for_it:
                    # Those of its own class that wait in the engine would fill it just the same, and came later.
                    level = self._level(seat, at)
                    room_for_it = any(each.state is SeatState.SENT and each.claim.rank <= level for each in here)
                if not room_for_it:
                    looks[seat.engine] = None
                    self._ask_again(at + settings.blind_patience_seconds)
                    continue
            returning.add(seat.engine)
            del self._parked[seat.tracked.request_id]
            seat.state = SeatState.RETURNING
            seat.claim.returned = True
            decisions.append(BringBack(seat, seat.way, self._level(seat, at)))
        return decisions

    def _held_up(self, seat: Seat, at: float) -> bool:
        """Whether somebody more urgent waits for the same engine."""
        level = self._level(seat, at)
        if self._queue_level(seat.engine) > level:
            return True
        return any(
            each.claim.rank > level and (seat.engine == each.engine or seat.engine in each.engines)
            for each in self._needy.values()
        )

    def _level(self, seat: Seat, at: float) -> int:
        risen = int(max(0.0, at - seat.parked_at) / self.settings.promote_seconds)
        return min(self._top, seat.claim.rank + risen)

    # ---- private: small things -----------------------------------------------------------------

    def _note_need(self, seat: Seat) -> None:
        if seat.needy:
            self._needy[seat.tracked.request_id] = seat
        else:
            self._needy.pop(seat.tracked.request_id, None)

    def _move(self, seat: Seat, engine: str) -> None:
        if seat.engine == engine:
            return
        if seat.engine:
            members = self._at_engine[seat.engine]
            del members[seat.tracked.request_id]
            if not members:
                del self._at_engine[seat.engine]
        seat.engine = engine
        if engine:
            self._at_engine.setdefault(engine, {})[seat.tracked.request_id] = seat

    def _let_go(self, seat: Seat, at: float) -> None:
        """Its preemption is no longer under way: the one that waits for it counts from here."""
        whom = seat.for_whom
        if whom is not None and seat in whom.relief:
            whom.relief.remove(seat)
            whom.relieved_at = at

    def _count(self, seat: Seat, at: float) -> None:
        """Tell the guard what was computed since the last time."""
        tokens = output_tokens(seat.tracked)
        if seat.started_at is not None:
            tokens += seat.claim.prompt_tokens
        if tokens > seat.counted_tokens:
            self.guard.computed(tokens - seat.counted_tokens, at)
            seat.counted_tokens = tokens

    def _count_away(self, seat: Seat, at: float) -> None:
        away = max(0.0, at - seat.parked_at)
        self.away_seconds[seat.engine] = self.away_seconds.get(seat.engine, 0.0) + away

    def _note(self, seat: Seat, reason: str) -> None:
        if seat.reasons is None:
            seat.reasons = set()
        if reason not in seat.reasons:
            seat.reasons.add(reason)
            self.refusals[reason] += 1

    def _ask_again(self, due_at: float) -> None:
        self._due = min(self._due, due_at)


def _holds_room(seat: Seat) -> bool:
    """Whether it has KV at its engine, as far as is known: one that waits there itself would give up nothing."""
    tracked = seat.tracked
    return tracked.ledgers.blocks_held > 0 if tracked.probed else seat.started_at is not None


_EXACT_FOR_NOW = Verdict(Exactness.EXACT)
