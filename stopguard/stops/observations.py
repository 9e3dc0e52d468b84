"""What an engine's scheduler says, turned into movements.

A frame (`stopguard.probe.wire`) is one step of one engine. Each event is a fact about one request or
about one *part* of it: with `n` > 1 an engine runs several children, each with its own place, blocks
and end. The request keeps one set of books for all its parts; a part is known by the engine's own
id, and belongs to the request that its `parent_id` names.

An engine may be wrong: return a block twice, speak of a request that is over, deliver after the end.
What the books cannot hold is recorded as a `BookError` or counted as a late event, and never raised
into the edge: one broken engine must not stop the gateway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stopguard.errors import BookkeepingError, LimitReached
from stopguard.ledger import Account, Evidence, InvalidAmount
from stopguard.probe import wire
from stopguard.stops import movements, preemptions
from stopguard.stops.cause import Semantics, Source, StopCause
from stopguard.stops.controller import NOTHING, Controller
from stopguard.stops.effects import Effect
from stopguard.stops.machine import ENGINE_ENDED, Books, Engine
from stopguard.stops.tracked import Tracked

__all__ = ["PLACES", "SLOTS", "observe_frame"]

_PROBE = Evidence.PROBE
PLACES: dict[str, Account] = {
    "waiting": Account.QUEUE_WAITING,
    "running": Account.QUEUE_RUNNING,
    "preempted": Account.QUEUE_PREEMPTED,
    "paused": Account.QUEUE_PAUSED,
    "transferring": Account.QUEUE_TRANSFERRING,
}
SLOTS: dict[wire.SlotKind, Account] = {
    "lora": Account.KV_LORA,
    "encoder": Account.KV_ENCODER,
    "grammar": Account.KV_GRAMMAR,
    "speculative": Account.KV_SPECULATIVE,
}
_SET_ASIDE = (Account.QUEUE_PREEMPTED, Account.QUEUE_PAUSED)
#: Events that may rightly come after a request was settled: the engine's second word about a thing that is over.
_HARMLESS_LATE = (wire.AbortArrived, wire.AbortNoop, wire.AbortApplied, wire.Finished)


def observe_frame(controller: Controller, engine: str, at: float, frame: wire.Frame) -> Sequence[Effect]:
    """Book everything that one frame says. `at` is when it was received, in the controller's time."""
    effects: list[Effect] = []
    touched: dict[str, Tracked] = {}
    for event in frame.events:
        tracked = _owner(controller, event)
        if tracked is None:
            _nobody(controller, engine, at, event)
            continue
        if not tracked.probed:
            continue  # it left before its engine had a probe, and is judged from outside to its end
        touched[tracked.request_id] = tracked
        try:
            if tracked.ledgers.nearly_full:
                effects += _endless(controller, tracked, at)
            effects += _HANDLERS[type(event)](controller, tracked, event, at)
        except (BookkeepingError, LimitReached) as error:
            controller.anomalies.record(at, tracked.request_id, f"{type(event).__name__} from {engine}: {error}")
    for tracked in touched.values():
        machine = tracked.machine
        if machine.books is not Books.OPEN or machine.engine is Engine.FINISHED:
            try:
                movements.fold(tracked, at)
            except (BookkeepingError, LimitReached) as error:
                controller.anomalies.record(at, tracked.request_id, f"frame {frame.sequence} from {engine}: {error}")
                continue
            effects += controller.try_settle(tracked, at)
    return effects


def _owner(controller: Controller, event: wire.Event) -> Tracked | None:
    tracked = controller.parts.get(event.request_id) or controller.tracked.get(event.request_id)
    if tracked is None and isinstance(event, wire.Added) and event.parent_id:
        return controller.tracked.get(event.parent_id)
    return tracked


def _nobody(controller: Controller, engine: str, at: float, event: wire.Event) -> None:
    """An event about a request that we do not have (any more)."""
    name = type(event).__name__
    controller.anomalies.late_events[name] += 1
    if not isinstance(event, _HARMLESS_LATE) and controller.book.find(event.request_id) is not None:
        controller.anomalies.record(at, event.request_id, f"{name} from {engine} after its books were closed")


def _endless(controller: Controller, tracked: Tracked, at: float) -> Sequence[Effect]:
    """Its books are nearly full (a request that is preempted without end): stop it while there is room to."""
    if tracked.machine.books is not Books.OPEN or tracked.machine.engine in ENGINE_ENDED:
        return NOTHING
    text = f"stopped at {len(tracked.ledgers.entries)} entries: its engine moves it without end"
    controller.anomalies.record(at, tracked.request_id, text)
    cause = StopCause(semantics=Semantics.FAIL, source=Source.GATEWAY, reason="entry_limit", observed_at=at)
    return controller.stop(tracked, at, cause)


def _above_zero(amount: int, what: str) -> int:
    """`amount`, before a hot-path counter takes it: a counter that ran wrong could never be folded again."""
    if amount <= 0:
        raise InvalidAmount(f"{what} must be above zero, not {amount}")
    return amount


# ---- one handler an event ---------------------------------------------------------------------


def _added(controller: Controller, tracked: Tracked, event: wire.Added, at: float) -> Sequence[Effect]:
    if tracked.part_places is None or tracked.part_ids is None:
        tracked.part_places, tracked.part_ids = {}, []
    if event.request_id in tracked.part_ids:
        controller.anomalies.record(at, tracked.request_id, f"{event.request_id} was added twice")
        return NOTHING
    ledgers = tracked.ledgers
    # The first part takes the place that was booked at dispatch; each further one needs its own.
    if tracked.part_ids or not ledgers.balances[Account.QUEUE_WAITING]:
        ledgers.post(Account.QUEUE_ARRIVALS, Account.QUEUE_WAITING, 1, at, _PROBE, event.request_id)
    tracked.part_places[event.request_id] = Account.QUEUE_WAITING
    tracked.part_ids.append(event.request_id)
    controller.parts[event.request_id] = tracked
    ledgers.mark(at, f"the scheduler has {event.request_id} ({event.prompt_tokens} prompt tokens)")
    if tracked.machine.engine in (Engine.ABORTING, Engine.UNCONFIRMED):
        # The abort came first and found nothing: knock again, now that there is something to stop.
        return controller.knock_again(tracked, at)
    return NOTHING


def _moved(controller: Controller, tracked: Tracked, event: wire.Moved, at: float) -> Sequence[Effect]:
    places = tracked.part_places or {}
    source = places.get(event.request_id)
    if source is None:
        controller.anomalies.record(
            at, tracked.request_id, f"{event.request_id} moved to {event.place} without a place"
        )
        return NOTHING
    ledgers = tracked.ledgers
    if event.place == "gone":
        ledgers.leave(source, Account.QUEUE_GONE, 1, at, _PROBE, "", event.at)
        del places[event.request_id]
        if not places:
            claims = ledgers.balances[Account.KV_CLAIMED]
            if claims:
                ledgers.leave(Account.KV_CLAIMED, Account.KV_CLAIMABLE, claims, at, _PROBE, "", event.at)
        return NOTHING
    target = PLACES[event.place]
    if target is not source:
        ledgers.leave(source, target, 1, at, _PROBE, "", event.at)
        places[event.request_id] = target
        if tracked.settle_due is not None and ledgers.balances[target]:
            movements.expect_release(ledgers, at, max(at, tracked.settle_due))
    return NOTHING


def _blocks_held(controller: Controller, tracked: Tracked, event: wire.BlocksHeld, at: float) -> Sequence[Effect]:
    tracked.ledgers.blocks_taken += _above_zero(event.blocks, "blocks held")
    if tracked.settle_due is not None:
        # Blocks taken during a stop are owed back like the rest.
        movements.fold(tracked, at)
        movements.expect_release(tracked.ledgers, at, max(at, tracked.settle_due))
    return NOTHING


def _blocks_fenced(controller: Controller, tracked: Tracked, event: wire.BlocksFenced, at: float) -> Sequence[Effect]:
    ledgers = tracked.ledgers
    movements.fold(tracked, at)
    note = f"behind step {event.fence}"
    ledgers.leave(Account.KV_HELD, Account.KV_FENCED, event.blocks, at, _PROBE, note, event.at)
    if tracked.settle_due is not None:
        movements.expect_release(ledgers, at, max(at, tracked.settle_due))
    return NOTHING


def _blocks_returned(
    controller: Controller, tracked: Tracked, event: wire.BlocksReturned, at: float
) -> Sequence[Effect]:
    ledgers = tracked.ledgers
    movements.fold(tracked, at)
    source = Account.KV_FENCED if event.fenced else Account.KV_HELD
    ledgers.leave(source, Account.KV_POOL, event.blocks, at, _PROBE, "", event.at)
    return NOTHING


def _host_held(controller: Controller, tracked: Tracked, event: wire.HostHeld, at: float) -> Sequence[Effect]:
    tracked.ledgers.post(Account.KV_POOL, Account.KV_HOST, event.blocks, at, _PROBE, "backup", event.at)
    if tracked.settle_due is not None:
        movements.expect_release(tracked.ledgers, at, max(at, tracked.settle_due))
    return NOTHING


def _host_returned(controller: Controller, tracked: Tracked, event: wire.HostReturned, at: float) -> Sequence[Effect]:
    tracked.ledgers.leave(Account.KV_HOST, Account.KV_POOL, event.blocks, at, _PROBE, "", event.at)
    return NOTHING


def _slot_taken(controller: Controller, tracked: Tracked, event: wire.SlotTaken, at: float) -> Sequence[Effect]:
    tracked.ledgers.post(Account.KV_SLOT_POOL, SLOTS[event.kind], event.slots, at, _PROBE)
    if tracked.settle_due is not None:
        movements.expect_release(tracked.ledgers, at, max(at, tracked.settle_due))
    return NOTHING


def _slot_returned(controller: Controller, tracked: Tracked, event: wire.SlotReturned, at: float) -> Sequence[Effect]:
    tracked.ledgers.leave(SLOTS[event.kind], Account.KV_SLOT_POOL, event.slots, at, _PROBE, "", event.at)
    return NOTHING


def _tokens_computed(
    controller: Controller, tracked: Tracked, event: wire.TokensComputed, at: float
) -> Sequence[Effect]:
    tracked.ledgers.tokens_computed += _above_zero(event.tokens, "tokens computed")
    if tracked.settle_due is not None:
        movements.fold(tracked, at)
        movements.expect_release(tracked.ledgers, at, max(at, tracked.settle_due))
    return NOTHING


def _tokens_emitted(controller: Controller, tracked: Tracked, event: wire.TokensEmitted, at: float) -> Sequence[Effect]:
    ledgers = tracked.ledgers
    tokens = min(_above_zero(event.tokens, "tokens emitted"), ledgers.tokens_in_flight)
    if tokens < event.tokens:
        twice = event.tokens - tokens
        controller.anomalies.record(at, tracked.request_id, f"{twice} tokens were emitted that were not in flight")
    if not tokens:
        return NOTHING
    if tracked.muted:
        # The engine let them go, but nobody listens: they were computed for nothing.
        movements.fold(tracked, at)
        ledgers.leave(Account.OUTPUT_IN_FLIGHT, Account.OUTPUT_DISCARDED, tokens, at, _PROBE)
    else:
        ledgers.tokens_delivered += tokens
    return NOTHING


def _tokens_dropped(controller: Controller, tracked: Tracked, event: wire.TokensDropped, at: float) -> Sequence[Effect]:
    movements.fold(tracked, at)
    target = Account.OUTPUT_STALE if event.stale else Account.OUTPUT_DISCARDED
    tracked.ledgers.leave(Account.OUTPUT_IN_FLIGHT, target, event.tokens, at, _PROBE, "", event.at)
    return NOTHING


def _abort_arrived(controller: Controller, tracked: Tracked, event: wire.AbortArrived, at: float) -> Sequence[Effect]:
    tracked.ledgers.mark(at, f"abort of {event.request_id} arrived")
    return NOTHING


def _abort_applied(controller: Controller, tracked: Tracked, event: wire.AbortApplied, at: float) -> Sequence[Effect]:
    tracked.ledgers.mark(at, f"abort of {event.request_id} applied")
    return _part_over(controller, tracked, event.request_id, at, aborted=True)


def _abort_noop(controller: Controller, tracked: Tracked, event: wire.AbortNoop, at: float) -> Sequence[Effect]:
    tracked.ledgers.mark(at, f"abort of {event.request_id} found nothing")
    if tracked.machine.engine in (Engine.ABORTING, Engine.UNCONFIRMED) and tracked.part_places:
        # It is there under a name that this abort did not hit.
        return controller.knock_later(tracked, at, 0.0)
    return NOTHING


def _abort_refused(controller: Controller, tracked: Tracked, event: wire.AbortRefused, at: float) -> Sequence[Effect]:
    tracked.ledgers.mark(at, f"abort of {event.request_id} refused")
    return controller.knock_later(tracked, at, event.retry_after_seconds)


def _preempted(controller: Controller, tracked: Tracked, event: wire.Preempted, at: float) -> Sequence[Effect]:
    tracked.ledgers.tokens_recomputed += max(0, event.recompute_tokens)
    siblings = [place for part, place in (tracked.part_places or {}).items() if part != event.request_id]
    if any(place not in _SET_ASIDE for place in siblings):
        return NOTHING  # one child waits, the request goes on
    return preemptions.preempted(controller, tracked, at)


def _resumed(controller: Controller, tracked: Tracked, event: wire.Resumed, at: float) -> Sequence[Effect]:
    if tracked.machine.engine is Engine.DISPATCHED:
        return NOTHING  # a child came back; the request never went away
    return preemptions.resumed(controller, tracked, at)


def _finished(controller: Controller, tracked: Tracked, event: wire.Finished, at: float) -> Sequence[Effect]:
    return _part_over(
        controller, tracked, event.request_id, at, aborted=event.reason in ("abort", "cancelled"), reason=event.reason
    )


def _part_over(
    controller: Controller, tracked: Tracked, part: str, at: float, *, aborted: bool, reason: str = "abort"
) -> Sequence[Effect]:
    """One part has ended. The request has when all its parts have; any abort among them makes it a stop."""
    finished = tracked.parts_over
    if finished is None:
        finished = tracked.parts_over = {}
    if part not in finished:
        finished[part] = aborted
    alive = [name for name in (tracked.part_places or ()) if name not in finished]
    if alive:
        return NOTHING
    if any(finished.values()):
        return controller.acknowledged(tracked, at, _PROBE)
    return controller.engine_finished(tracked, at, reason, _PROBE)


_HANDLERS: dict[type, Callable[[Controller, Tracked, Any, float], Sequence[Effect]]] = {
    wire.Added: _added,
    wire.Moved: _moved,
    wire.BlocksHeld: _blocks_held,
    wire.BlocksFenced: _blocks_fenced,
    wire.BlocksReturned: _blocks_returned,
    wire.HostHeld: _host_held,
    wire.HostReturned: _host_returned,
    wire.SlotTaken: _slot_taken,
    wire.SlotReturned: _slot_returned,
    wire.TokensComputed: _tokens_computed,
    wire.TokensEmitted: _tokens_emitted,
    wire.TokensDropped: _tokens_dropped,
    wire.AbortArrived: _abort_arrived,
    wire.AbortApplied: _abort_applied,
    wire.AbortNoop: _abort_noop,
    wire.AbortRefused: _abort_refused,
    wire.Preempted: _preempted,
    wire.Resumed: _resumed,
    wire.Finished: _finished,
}
