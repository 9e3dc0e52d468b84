"""After a scenario's stops: watch until everything is back, find out who did not stop and why, clean up.

The order matters. First the victims are watched, until they hold nothing or are overdue. One that went on
is then knocked for by another door: if that stops it, the first door was deaf (the *stream* ledger, when the
client had left); if nothing stops it, the abort was lost (*link*). Then the companions end, the engine must
come back to what it held before, and a fresh request must be served, since health pages lie.
"""

from __future__ import annotations

import msgspec

from stopguard.audit.stage import Stage, Ticket, why
from stopguard.audit.target import Reading
from stopguard.audit.watch import Trace

__all__ = ["Observation", "Survivor", "afterlife", "settle"]

_POLL_SECONDS_MAX = 0.5
_POLL_GROWTH = 1.25
#: When to knock for a request that goes on, of the time that it takes by itself.
_KNOCK_SHARE = 0.6
_FRESH_TOKENS = 4
#: How long an engine without any evidence is given before the next scenario.
_BLIND_SECONDS = 0.5


class Survivor(msgspec.Struct, kw_only=True):
    """A victim that was not stopped by its stop; `ledger` is the one to blame."""

    ticket: Ticket
    ledger: str
    amount: int
    unit: str
    age_seconds: float
    detail: str


class Observation(msgspec.Struct, kw_only=True):
    """What was seen. `before` and `after` are idle readings around the scenario, `None` where there are none."""

    before: Reading | None
    after: Reading | None = None
    idle: bool = False
    idle_after_seconds: float | None = None
    survivors: list[Survivor] = []
    #: Victims that reached their own end before it could be told whether the stop works.
    outran: list[Ticket] = []
    #: Companions that never reached their end.
    unfinished: list[Ticket] = []
    #: Why a fresh request was not served; empty when it was.
    sick: str = ""
    fresh_seconds: float = 0.0
    health_status: int = 0
    #: No step was taken and no token made while requests were waiting for them.
    stuck: bool = False
    #: What has leaked fills the pool: nothing more can be staged.
    exhausted: bool = False
    steps: dict[str, list[float]] = {}
    tokens_wasted: int | None = None
    aborts_done: int = 0


async def settle(stage: Stage, before: Reading | None) -> Observation:
    """Watch, explain and clean up; see the module."""
    seen = Observation(before=before)
    if stage.observer.facts.sees_events or before is not None:
        await _watch_victims(stage, seen)
        await _explain(stage, seen)
    else:
        await stage.world.sleep(_BLIND_SECONDS)
    await _end_companions(stage, seen)
    await _clean_up(stage, seen)
    if before is not None:
        await _idle(stage, seen)
    seen.after = stage.watch.reading
    _measure(stage, seen)
    await afterlife(stage, seen)
    return seen


# Victims --------------------------------------------------------------------------------------------


async def _watch_victims(stage: Stage, seen: Observation) -> None:
    waiting = [ticket for ticket in stage.victims() if ticket.stopped_at is not None]
    if not waiting:
        return
    last = max(ticket.stopped_at or 0.0 for ticket in waiting)
    # What a reading shows later than that says nothing about when it happened.
    fresh = stage.world.now() - max(0.1, 2 * stage.watch.interval_seconds)
    pause = stage.watch.interval_seconds
    while waiting:
        await stage.watch.poll()
        now = stage.world.now()
        if stage.events:
            waiting = [ticket for ticket in waiting if not _closed(stage, ticket)]
        elif _places_over(stage, seen.before) <= 0:
            spans = [now - at for ticket in waiting if (at := ticket.stopped_at) is not None and at >= fresh]
            if spans:
                seen.steps["stop"] = spans
            return
        if not waiting or now - last > stage.plan.leak_seconds:
            return
        if any(_about_to_end(stage, ticket, now) for ticket in waiting):
            return
        await stage.world.sleep(pause)
        pause = min(_POLL_SECONDS_MAX, pause * _POLL_GROWTH)


def _about_to_end(stage: Stage, ticket: Ticket, now: float) -> bool:
    """An unnoticed stop is overdue, and the request will soon end by itself: then no knock could tell any more."""
    overdue = now - (ticket.stopped_at or now) > 1.1 * stage.plan.deadline_seconds
    natural = ticket.tokens * stage.measured.token_seconds
    traces = stage.traces(ticket)
    unnoticed = any(trace.live and trace.arrived_at is None for trace in traces)
    return overdue and unnoticed and now - ticket.opened_at > _KNOCK_SHARE * natural


def _closed(stage: Stage, ticket: Ticket) -> bool:
    traces = stage.traces(ticket)
    if not traces:
        # Never submitted as far as we know: then no row may be there either.
        return not ticket.engine_ids
    return all(trace.closed for trace in traces)


def _places_over(stage: Stage, before: Reading | None) -> int:
    """How many more requests are in the engine than before and than our open companions explain."""
    reading = stage.watch.reading
    if reading is None or reading.places is None or before is None or before.places is None:
        return 0
    ours = sum(ticket.sequences for ticket in stage.tickets if ticket.stopped_at is None and not ticket.reply.ended)
    return reading.places - before.places - ours


def _went_on(stage: Stage, ticket: Ticket, trace: Trace, applied_at: float | None) -> bool:
    """The stop did nothing to this sequence (or it was undone). `applied_at`: when it took effect on a sibling."""
    if trace.resurrected or trace.live:
        return True
    if not trace.ended_by_itself:
        return False
    gone_at, deadline = trace.gone_at or 0.0, stage.plan.deadline_seconds
    if gone_at - (ticket.stopped_at or 0.0) > deadline:
        return True
    # Sooner, its end may have come before its stop; not so when the stop was there long before.
    known = [at for at in (trace.arrived_at, applied_at) if at is not None]
    return bool(known) and gone_at - min(known) > deadline / 4


async def _explain(stage: Stage, seen: Observation) -> None:
    victims = [ticket for ticket in stage.victims() if ticket.stopped_at is not None]
    if stage.events:
        for ticket in victims:
            traces = stage.traces(ticket)
            applied = [trace.applied_at for trace in traces if trace.applied_at is not None]
            on = [trace for trace in traces if _went_on(stage, ticket, trace, min(applied, default=None))]
            if on:
                seen.survivors.append(await _blame(stage, ticket, traces, on))
            elif any(trace.ended_by_itself and not trace.noops for trace in traces):
                seen.outran.append(ticket)
    elif victims and (over := _places_over(stage, seen.before)) > 0 and await progressing(stage, patient=True):
        seen.survivors.append(await _blame_by_gauge(stage, victims, over))


async def _blame(stage: Stage, ticket: Ticket, traces: list[Trace], on: list[Trace]) -> Survivor:
    stopped_at = ticket.stopped_at or 0.0
    age = stage.world.now() - stopped_at
    tokens = sum(
        tokens for trace in on for at, tokens in stage.watch.token_log.get(trace.request_id, ()) if at > stopped_at
    )
    amount, unit = (tokens, "tokens") if tokens else (len(on), "requests")

    def survivor(ledger: str, detail: str, amount: int = amount, unit: str = unit) -> Survivor:
        return Survivor(ticket=ticket, ledger=ledger, amount=amount, unit=unit, age_seconds=age, detail=detail)

    applied = [trace for trace in traces if trace.applied_at is not None]
    if any(trace.resurrected for trace in on):
        return survivor("queue", "its abort was applied, and it came back into a queue", len(on), "places")
    if any(trace.applied_at is not None for trace in on):
        return survivor("queue", "its abort was applied, and it never left the scheduler", len(on), "places")
    if applied:
        return survivor(
            "queue",
            f"{len(on)} of {len(traces)} sequences of one request went on when it was stopped",
            len(on),
            "places",
        )
    if any(trace.arrived_at is not None for trace in on):
        return survivor("link", "the scheduler read the abort, and the request went on")
    if ticket.how == "abort":
        return survivor("link", "the abort was accepted and never reached the scheduler")
    if not any(trace.live for trace in on):
        return survivor("stream", f"the client had left ({ticket.how}), and the request ran to its end")
    if not stage.observer.facts.abort_door:
        return survivor("stream", f"the client had left ({ticket.how}), nobody has noticed, and there is no other door")
    if await _knock_stops(stage, ticket, on):
        return survivor("stream", f"the client had left ({ticket.how}), nobody noticed; an abort by id then stopped it")
    return survivor("link", "neither the closed connection nor an abort by id stopped it")


async def _knock_stops(stage: Stage, ticket: Ticket, on: list[Trace]) -> bool:
    """Whether an abort by id gets through where the closed connection did not (or comes too late to tell)."""
    knocked_at = stage.world.now()
    await stage.abort(ticket, quietly=True)
    until = knocked_at + stage.plan.deadline_seconds
    while stage.world.now() < until:
        await stage.watch.poll()
        if any(trace.arrived_at is not None for trace in on):
            return True
        if not any(trace.live for trace in on):
            return stage.world.now() - knocked_at < stage.plan.deadline_seconds / 4
        await stage.world.sleep(stage.watch.interval_seconds)
    return False


async def _blame_by_gauge(stage: Stage, victims: list[Ticket], over: int) -> Survivor:
    ticket = victims[-1]
    age = stage.world.now() - (ticket.stopped_at or 0.0)
    sequences = sum(victim.sequences for victim in victims)

    def survivor(ledger: str, detail: str) -> Survivor:
        return Survivor(ticket=ticket, ledger=ledger, amount=over, unit="places", age_seconds=age, detail=detail)

    if over < sequences and any(victim.sequences > 1 for victim in victims):
        return survivor("queue", f"{over} of {sequences} sequences are still in the engine")
    if ticket.how == "abort":
        return survivor("link", "the abort was accepted, and the engine's gauges do not go down")
    if stage.observer.facts.abort_door:
        await stage.abort(ticket, quietly=True)
        until = stage.world.now() + stage.plan.deadline_seconds
        while stage.world.now() < until:
            await stage.watch.poll()
            if not ticket.reply.ended and _places_over(stage, None) < over:
                break
            await stage.world.sleep(stage.watch.interval_seconds)
    return survivor("stream", f"the client had left ({ticket.how}), and the engine's gauges do not go down")


# Companions and clean-up ----------------------------------------------------------------------------


async def _end_companions(stage: Stage, seen: Observation) -> None:
    must = [ticket for ticket in stage.companions() if ticket.must_finish and ticket.stopped_at is None]
    seconds = stage.plan.leak_seconds + 4 * sum(ticket.tokens for ticket in must) * stage.measured.token_seconds
    until = stage.world.now() + seconds
    while not all(ticket.reply.ended for ticket in must) and stage.world.now() < until:
        if await stage.all_ended(must, stage.plan.deadline_seconds):
            break
        if not await progressing(stage):
            break
    seen.unfinished = [ticket for ticket in must if not ticket.reply.ended]
    for ticket in stage.companions():
        if ticket.stopped_at is None and not ticket.reply.ended:
            ticket.dismissed = True
            if stage.observer.facts.abort_door and ticket.engine_ids:
                await stage.abort(ticket)
            await stage.leave(ticket)
    for ticket in stage.tickets:  # whatever is left of victims that were stopped by an abort, or not at all
        await stage.leave(ticket)
    await stage.watch.events()


async def _clean_up(stage: Stage, seen: Observation) -> None:
    """No load may be left behind: what cannot be stopped is waited for."""
    if not seen.survivors:
        return
    for survivor in seen.survivors:
        if stage.observer.facts.abort_door:
            await stage.abort(survivor.ticket, quietly=True)
    tokens = max(survivor.ticket.tokens for survivor in seen.survivors)
    until = stage.world.now() + 3 * tokens * stage.measured.token_seconds + stage.plan.deadline_seconds
    while stage.world.now() < until:
        reading = await stage.watch.poll()
        if stage.events:
            if not any(trace.live for survivor in seen.survivors for trace in stage.traces(survivor.ticket)):
                return
        elif reading is None or seen.before is None or (reading.places or 0) <= (seen.before.places or 0):
            return
        if not await progressing(stage):
            return
        await stage.world.sleep(_POLL_SECONDS_MAX)


async def progressing(stage: Stage, *, patient: bool = False) -> bool:
    """Whether the engine does anything: steps, tokens, or (without totals) hope."""
    first = await stage.watch.poll()
    if first is None:
        return True
    for _ in range(3 if patient else 2):
        await stage.world.sleep(max(_POLL_SECONDS_MAX / 2, 12 * stage.measured.token_seconds))
        second = await stage.watch.poll()
        if second is None or _moved(first, second):
            return True
    return False


def _moved(first: Reading, second: Reading) -> bool:
    if second.steps_total is None and second.generated_tokens_total is None:
        return True
    return first.steps_total != second.steps_total or first.generated_tokens_total != second.generated_tokens_total


async def _idle(stage: Stage, seen: Observation) -> None:
    """Wait until the engine holds no more than before."""
    started = stage.world.now()
    pause = stage.watch.interval_seconds
    while True:
        reading = await stage.watch.poll()
        if reading is not None and seen.before is not None and holds_no_more(seen.before, reading):
            seen.idle = True
            seen.idle_after_seconds = stage.world.now() - started
            return
        if stage.world.now() - started > stage.plan.leak_seconds:
            break
        await stage.world.sleep(pause)
        pause = min(_POLL_SECONDS_MAX, pause * _POLL_GROWTH)
    after = stage.watch.reading
    if after is not None and seen.before is not None and somebody_is_there(stage, seen.before, after):
        seen.stuck = not await progressing(stage, patient=True)


def somebody_is_there(stage: Stage, before: Reading, after: Reading) -> bool:
    """Whether more requests are in the engine than before, and not only in its gauges."""
    if after.places is None or before.places is None or after.places <= before.places:
        return False
    if after.rows is not None:
        return bool({row.request_id for row in after.rows} - {row.request_id for row in before.rows or ()})
    if stage.events:
        return any(trace.live for trace in stage.watch.traces.values())
    # Who runs holds blocks; who waits for nothing on an idle engine is none.
    blocks, blocks_before = after.gauges.blocks_used, before.gauges.blocks_used
    return blocks is None or blocks_before is None or blocks > blocks_before


def holds_no_more(before: Reading, now: Reading) -> bool:
    """Whether nothing is held that was not held before."""
    pairs = [
        (before.places, now.places),
        (before.gauges.blocks_used, now.gauges.blocks_used),
        (before.watchers, now.watchers),
        *((before.beside.get(name, 0), amount) for name, amount in now.beside.items()),
    ]
    return all(new is None or old is None or new <= old for old, new in pairs)


# A fresh request ------------------------------------------------------------------------------------


async def afterlife(stage: Stage, seen: Observation) -> None:
    """A fresh request must be served: `/health` is no proof."""
    limit = max(stage.plan.deadline_seconds * 2, stage.measured.short_seconds * 20)
    ticket = await stage.open("companion", stream=False, tokens=_FRESH_TOKENS, bind=False)
    for _ in range(20):
        if await stage.all_ended([ticket], limit) or seen.stuck or not await progressing(stage):
            break
    seen.fresh_seconds = (ticket.reply.ended_at or stage.world.now()) - ticket.opened_at
    if not (ticket.reply.complete and ticket.reply.status == 200):
        seen.sick = f"a fresh request is not served ({why(ticket.reply)})"
        seen.health_status = await stage.observer.health()
    await stage.leave(ticket)
    stage.tickets.remove(ticket)


# Measures -------------------------------------------------------------------------------------------


def _measure(stage: Stage, seen: Observation) -> None:
    if not stage.events:
        if seen.idle and "stop" in seen.steps and not stage.companions():
            since = max(ticket.stopped_at or 0.0 for ticket in stage.victims())
            seen.steps["settle"] = [stage.world.now() - since]
        return
    wasted = 0
    for ticket in stage.victims():
        stopped_at = ticket.stopped_at
        traces = stage.traces(ticket)
        if stopped_at is None or not traces:
            continue
        wasted += sum(
            tokens
            for trace in traces
            for at, tokens in stage.watch.token_log.get(trace.request_id, ())
            if at > stopped_at
        )
        if any(trace.applied_at is None or trace.live for trace in traces):
            continue
        moments: dict[str, list[float | None]] = {
            "notify": [trace.arrived_at for trace in traces],
            "stop": [trace.applied_at for trace in traces],
            "release": [trace.returned_at or trace.gone_at for trace in traces],
            "settle": [max(trace.last_at, trace.gone_at or 0.0) for trace in traces],
        }
        for step, times in moments.items():
            known = [at for at in times if at is not None]
            if known:
                seen.steps.setdefault(step, []).append(max(0.0, max(known) - stopped_at))
    seen.tokens_wasted = wasted
