"""What becomes of a request that did not settle in time: reported as leaked, kept for a late end, given up on.

A deadline settles nothing. When it passes, everything still open is pended to that moment and expires, which
makes it a leak; the books stay open, so that a late release is recorded as late. Only after
`StopConfig.write_off_seconds` are they written off, so that a leaking engine cannot fill the book; when so many
are overdue that the book takes no more, the one that has been overdue for the longest time goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from stopguard.errors import LimitReached
from stopguard.ledger import Evidence
from stopguard.stops import movements
from stopguard.stops.effects import Effect, Leaked
from stopguard.stops.machine import CLIENT_ENDED, Books, BooksEvent, Client, Engine, EngineEvent
from stopguard.stops.patience import TimerKind
from stopguard.stops.tracked import Tracked

if TYPE_CHECKING:
    from stopguard.stops.controller import Controller

__all__ = ["settle_deadline", "write_off"]


def settle_deadline(controller: Controller, tracked: Tracked, at: float) -> Sequence[Effect]:
    """The time for five closed ledgers has passed: what is open is a leak."""
    ledgers, machine = tracked.ledgers, tracked.machine
    effects: list[Effect] = []
    # First of all, so that whatever else fails, the request is looked at again.
    controller.arm(tracked, TimerKind.WRITE_OFF, at + controller.config.write_off_seconds)
    if machine.engine is Engine.ABORTING:
        machine.on_engine(EngineEvent.OVERDUE)
        controller.conclude(tracked, "unconfirmed", ledgers.stop.evidence if ledgers.stop else Evidence.NONE)
    movements.fold(tracked, at)
    if controller.book.overdue_full:
        effects += _make_room(controller, at)
    movements.expect_release(ledgers, at, at)
    if machine.client in CLIENT_ENDED:
        movements.expect_connection_end(ledgers, at, at)
    leaks = controller.book.expire(ledgers, at)
    if leaks:
        machine.on_books(BooksEvent.EXPIRED)
    effects += [Leaked(tracked, leak) for leak in leaks]
    if machine.client is Client.DISMISSED:
        effects += controller.tell_now(tracked, at)
    return effects


def write_off(controller: Controller, tracked: Tracked, at: float, reason: str = "") -> Sequence[Effect]:
    """Give up on what is still open, unless its client is still there to be served."""
    machine, patience = tracked.machine, controller.config.write_off_seconds
    if machine.client not in CLIENT_ENDED:
        controller.arm(tracked, TimerKind.WRITE_OFF, at + patience)
        return ()
    if machine.books not in (Books.SETTLING, Books.OVERDUE):
        return ()
    with suppress(LimitReached):  # a write-off has room of its own, and takes what the counters have
        movements.fold(tracked, at)
    controller.book.write_off(tracked.ledgers, at, reason or f"given up after {patience:.0f} s overdue")
    machine.on_books(BooksEvent.GIVEN_UP)
    return (controller.detach(tracked),)


def _make_room(controller: Controller, at: float) -> Sequence[Effect]:
    """The book takes no more overdue requests: the longest overdue of those that nobody waits for is given up."""
    limit = controller.book.limits.overdue
    for ledgers in controller.book.overdue():
        tracked = controller.tracked.get(ledgers.request_id)
        if tracked is not None and tracked.machine.client in CLIENT_ENDED:
            text = f"written off early: {limit} requests are overdue, the engine leaks faster than it heals"
            controller.anomalies.record(at, tracked.request_id, text)
            return write_off(controller, tracked, at, "given up to make room for newer leaks")
    return ()
