"""The straight way through: the end of almost every request, in one call instead of two.

A request that ran and is delivered whole needs none of the machinery for stops. `serve_whole` is
`Controller.engine_finished` and `client_served`: it makes the same entries and reaches the same states
(a test compares the records of both ways, and the machine's step with its tables), and gives way to
the long one whenever anything is unusual. A gateway spends about a third of its CPU on the books of
such requests; that is why.
"""

from __future__ import annotations

from collections.abc import Sequence

from stopguard.ledger import Account, Evidence
from stopguard.ledger.vouchers import Voucher
from stopguard.stops import movements
from stopguard.stops.controller import Controller
from stopguard.stops.effects import Effect
from stopguard.stops.machine import Books, BooksEvent
from stopguard.stops.tracked import Tracked

__all__ = ["serve_whole"]

_RUNNING = Account.QUEUE_RUNNING
_STREAM_CLOSED = Evidence.STREAM_CLOSED
_ENDED = Voucher(
    (_RUNNING, Account.QUEUE_GONE, _STREAM_CLOSED),
    (Account.KV_CLAIMED, Account.KV_CLAIMABLE, _STREAM_CLOSED),
    (Account.STREAM_CONNECTED, Account.STREAM_CLOSED, Evidence.NONE),
)


def serve_whole(controller: Controller, tracked: Tracked, at: float) -> Sequence[Effect]:
    """The engine ended the request completely, and the last byte was handed to the client's connection."""
    ledgers = tracked.ledgers
    machine = tracked.machine
    if (
        tracked.probed
        or tracked.parts_over is not None
        or tracked.cause is not None
        or ledgers.obligations
        or not ledgers.balances[_RUNNING]
        or not at >= ledgers.last_at
        or not machine.end_normally()
    ):
        finished = controller.engine_finished(tracked, at)
        served = controller.client_served(tracked, at)
        return (*finished, *served)
    movements.fold(tracked, at)
    ledgers.post_all(_ENDED, at)
    if not controller.book.settle(ledgers, at):
        return controller.try_settle(tracked, at)
    machine.on_books(BooksEvent.CLOSED)
    assert machine.books is Books.SETTLED
    return (controller.detach(tracked),)
