"""When the probe cannot be relied on: a hole in what it said, the snapshot that closes it, and its loss.

While there is a hole, what the books say of the requests there may be wrong, and they say so. A snapshot is what
the scheduler has *now*; the difference to the books is turned into the events that must have been missed, which are
booked like any others. What cannot be known (how many tokens a request made before it ended unseen) is not made up.

A probe that stays away is given up: from then on its requests are judged from outside, by what their engine shows
to everybody, as if it had never had one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from stopguard.ledger import Account, Evidence, Ledger
from stopguard.probe import wire
from stopguard.stops import movements
from stopguard.stops.controller import NOTHING, STOPPING, Controller
from stopguard.stops.doors import EngineProfile
from stopguard.stops.effects import Effect
from stopguard.stops.machine import ENGINE_ENDED, Engine
from stopguard.stops.observations import PLACES, SLOTS, observe_frame
from stopguard.stops.tracked import Tracked

__all__ = ["gap_began", "observe_snapshot", "probe_lost", "unseen_everywhere"]

ARRIVAL_SECONDS = 5.0
"""A request that an engine's scheduler still does not have so long after its abort will not come any more."""

_IN_FLIGHT = Account.OUTPUT_IN_FLIGHT


def gap_began(controller: Controller, engine: str, at: float, text: str) -> None:
    """Note in the books of every request there that something may be missing from here on."""
    for tracked in controller.in_engine.get(engine, {}).values():
        if tracked.probed:
            tracked.ledgers.mark(at, f"gap: {text}")


def observe_snapshot(
    controller: Controller,
    engine: str,
    at: float,
    snapshot: wire.Snapshot,
    mine: Callable[[str], bool],
    *,
    unowned: bool = False,
) -> Sequence[Effect]:
    """Bring the books to what one process of an engine has, after a gap.

    `mine` says of a request's part whether it is that process which has it (or had): what other processes have
    is not in this snapshot, and is left alone. `unowned`: more blocks of the pool are in use than the requests in
    the snapshot hold. Then nothing is concluded about the blocks of those that are over: they may be among these.
    """
    rows: dict[str, list[wire.RequestNow]] = {}
    for row in snapshot.requests:
        owner = _owner(controller, row)
        if owner is not None:
            rows.setdefault(owner.request_id, []).append(row)
    events: list[wire.Event] = []
    for tracked in list(controller.in_engine.get(engine, {}).values()):
        if tracked.probed:
            own = rows.get(tracked.request_id, [])
            missed = _missed(tracked, own, snapshot, at, mine, unowned=unowned)
            if missed:
                tracked.ledgers.mark(at, "gap: the books were brought to the engine's snapshot")
                events += missed
    totals = (snapshot.running_now, snapshot.waiting_now, snapshot.blocks_free_now, snapshot.blocks_cached_now)
    return observe_frame(controller, engine, at, wire.Frame(snapshot.sequence, snapshot.step, at, events, *totals))


def unseen_everywhere(
    controller: Controller, engine: str, at: float, has: Collection[str], since: float
) -> Sequence[Effect]:
    """Close what came and went in a gap: requests that no process of the engine has now, and of which none spoke.

    So is one that is being stopped and whose parts are all gone without having ended it: an engine may compute a prompt
    once for children that it then never sends (SGLang, `n` > 1, a client that leaves in between).

    `has` is everything that all of them had when they were asked, which was not before `since` (book seconds).
    """
    effects: list[Effect] = []
    for tracked in list(controller.in_engine.get(engine, {}).values()):
        if not tracked.probed or tracked.part_places or tracked.request_id in has:
            continue
        more_may_come = tracked.part_places is not None
        if more_may_come and not tracked.ledgers.ledger_closed(Ledger.KV):
            continue  # what its parts have kept is a leak, and not to be called released
        state, stop = tracked.machine.engine, tracked.ledgers.stop
        evidence = Evidence.PROBE
        if state in STOPPING:
            notified_at = stop.notified_at if stop is not None else None
            if notified_at is None or notified_at > since:
                continue
            unsent = not tracked.output_started and stop is not None and stop.evidence < Evidence.STREAM_CLOSED
            if unsent or more_may_come:
                if since - notified_at < ARRIVAL_SECONDS:
                    continue  # it may be on its way to the scheduler
                evidence = Evidence.GAUGE
            effects += controller.acknowledged(tracked, at, evidence)
        elif more_may_come or state not in ENGINE_ENDED or tracked.ledgers.last_at > since:
            continue  # what the scheduler says of it may be on its way
        if tracked.request_id in controller.tracked:
            movements.release_engine_side(tracked.ledgers, at, evidence, "not in the snapshot")
            controller.leave_engine(tracked)
            effects += controller.try_settle(tracked, at)
    return effects


def probe_lost(controller: Controller, engine: str, at: float, profile: EngineProfile) -> Sequence[Effect]:
    """The probe stays away: judge its requests by `profile`, which is the engine's without it."""
    effects: list[Effect] = []
    for tracked in list(controller.in_engine.get(engine, {}).values()):
        if not tracked.probed:
            continue
        ledgers = tracked.ledgers
        movements.fold(tracked, at)
        ledgers.mark(at, f"gap: the probe is gone; from here on by {profile.best_evidence.label}")
        tracked.profile = profile
        # What passed until now was counted by the probe.
        tracked.folded_events = tracked.events
        controller.forget_parts(tracked)
        tracked.parts_over = {}  # a mark that its books were a probe's
        in_flight = ledgers.balances[_IN_FLIGHT]
        if in_flight and not tracked.muted:
            ledgers.tokens_delivered += in_flight  # on its way to the client, by the last that was heard
            movements.fold(tracked, at)
        effects += _from_outside(controller, tracked, at, profile)
    return effects


def _from_outside(controller: Controller, tracked: Tracked, at: float, profile: EngineProfile) -> Sequence[Effect]:
    state, stop = tracked.machine.engine, tracked.ledgers.stop
    if state in ENGINE_ENDED:
        movements.release_engine_side(tracked.ledgers, at, Evidence.STREAM_CLOSED, "the probe is gone")
        controller.leave_engine(tracked)
        return controller.try_settle(tracked, at)
    if state not in STOPPING:
        return NOTHING
    closed = stop is not None and stop.evidence >= Evidence.STREAM_CLOSED
    if closed and (profile.stream_end_is_ack or profile.best_evidence is Evidence.STREAM_CLOSED):
        return controller.acknowledged(tracked, at, Evidence.STREAM_CLOSED)
    tracked.door_index = tracked.tries_at_door = tracked.attempts = 0
    return controller.knock_again(tracked, at)


def _owner(controller: Controller, row: wire.RequestNow) -> Tracked | None:
    found = controller.parts.get(row.request_id) or controller.tracked.get(row.request_id)
    if found is None and row.parent_id:
        return controller.tracked.get(row.parent_id)
    return found


def _missed(
    tracked: Tracked,
    rows: list[wire.RequestNow],
    snapshot: wire.Snapshot,
    at: float,
    mine: Callable[[str], bool],
    *,
    unowned: bool,
) -> list[wire.Event]:
    """The events that must have been missed, so that the books come to `rows`."""
    places = tracked.part_places or {}
    listed = {row.request_id for row in rows}
    has = {row.request_id for row in rows if row.place != "gone"}
    lost = [part for part in places if part not in has and mine(part)] if snapshot.complete else []
    elsewhere = any(part not in listed and not mine(part) for part in tracked.part_ids or ())
    if not rows and not tracked.part_ids:
        return []
    movements.fold(tracked, at)
    when = snapshot.at
    events: list[wire.Event] = []
    for row in rows:
        events += _row_events(tracked, row, when)
    if not elsewhere and snapshot.complete:
        events += _amounts(tracked, rows, when, gives=bool(has) or not unowned)
    over = bool(lost) and len(lost) == len(places) and not has
    if over and tracked.ledgers.balances[_IN_FLIGHT]:
        # It was made, and its request is over: it went to the client, or nowhere.
        tokens, name = tracked.ledgers.balances[_IN_FLIGHT], lost[0]
        stopping = tracked.machine.engine in STOPPING
        events.append(wire.TokensDropped(name, when, tokens) if stopping else wire.TokensEmitted(name, when, tokens))
    for part in lost:
        stopped = tracked.machine.engine in STOPPING
        events.append(wire.AbortApplied(part, when) if stopped else wire.Finished(part, when, "unseen"))
        events.append(wire.Moved(part, when, "gone"))
    return events


def _row_events(tracked: Tracked, row: wire.RequestNow, when: float) -> list[wire.Event]:
    events: list[wire.Event] = []
    name = row.request_id
    booked = (tracked.part_places or {}).get(name)
    if row.place == "gone":
        return []
    if booked is None:
        if name in (tracked.part_ids or ()):
            return []  # the books had it gone: a difference that reconciliation names
        events.append(wire.Added(name, when, row.prompt_tokens, row.parent_id))
        booked = Account.QUEUE_WAITING
    aside = row.place in ("preempted", "paused")
    if aside and tracked.machine.engine is Engine.DISPATCHED:
        events.append(wire.Preempted(name, when, 0))
    elif not aside and tracked.machine.engine in (Engine.PARKED, Engine.RESUMING):
        events.append(wire.Resumed(name, when))
    if PLACES[row.place] is not booked:
        events.append(wire.Moved(name, when, row.place))
    return events


def _amounts(tracked: Tracked, rows: list[wire.RequestNow], when: float, *, gives: bool) -> list[wire.Event]:
    balances, name = tracked.ledgers.balances, (rows[0].request_id if rows else tracked.request_id)
    events: list[wire.Event] = []
    fenced = sum(row.blocks_fenced for row in rows) - balances[Account.KV_FENCED]
    held = sum(row.blocks_held for row in rows) - balances[Account.KV_HELD]
    if fenced < 0 and gives:
        events.append(wire.BlocksReturned(name, when, -fenced, fenced=True))
    elif fenced > 0:
        taken = max(0, fenced + min(0, held))
        if taken:
            events.append(wire.BlocksHeld(name, when, taken))
        events.append(wire.BlocksFenced(name, when, fenced, 0))
        held += fenced - taken
    if held > 0:
        events.append(wire.BlocksHeld(name, when, held))
    elif held < 0 and gives:
        events.append(wire.BlocksReturned(name, when, -held))
    host = sum(row.host_blocks for row in rows) - balances[Account.KV_HOST]
    if host:
        events.append(wire.HostHeld(name, when, host) if host > 0 else wire.HostReturned(name, when, -host))
    for kind, account in SLOTS.items():
        slots = sum(row.slots.get(kind, 0) for row in rows) - balances[account]
        if slots:
            events.append(
                wire.SlotTaken(name, when, kind, slots) if slots > 0 else wire.SlotReturned(name, when, kind, -slots)
            )
    if any(row.place != "gone" for row in rows):
        events += _tokens(tracked, rows, name, when)
    return events


def _tokens(tracked: Tracked, rows: list[wire.RequestNow], name: str, when: float) -> list[wire.Event]:
    """Tokens that were missed: only where the engine knows its totals, and never fewer than are booked."""
    if any(min(row.tokens_computed, row.tokens_emitted, row.tokens_dropped) < 0 for row in rows):
        return []
    balances = tracked.ledgers.balances
    gone = (Account.OUTPUT_DELIVERED, Account.OUTPUT_DISCARDED, Account.OUTPUT_STALE)
    booked_gone = sum(balances[account] for account in gone)
    booked = booked_gone + balances[_IN_FLIGHT]
    computed = sum(row.tokens_computed for row in rows) - booked
    dropped = sum(row.tokens_dropped for row in rows) - balances[gone[1]] - balances[gone[2]]
    emitted = sum(row.tokens_emitted for row in rows) - balances[gone[0]]
    events: list[wire.Event] = []
    if computed > 0:
        events.append(wire.TokensComputed(name, when, computed))
    left = balances[_IN_FLIGHT] + max(0, computed)
    dropped = min(dropped, left)
    if dropped > 0:
        events.append(wire.TokensDropped(name, when, dropped))
        left -= dropped
    emitted = min(emitted, left)
    if emitted > 0:  # of one that is muted it goes nowhere, which is booked so
        events.append(wire.TokensEmitted(name, when, emitted))
    return events
