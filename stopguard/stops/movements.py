"""Which entries each step of a request's life makes: the bridge from the machines to the ledgers.

Pure functions over one request's books. They are the only callers of `post`, `pend` and `leave` in
the stops package, so that "what does a cancel book" is answered in one place.
"""

from __future__ import annotations

from stopguard.ledger.accounts import Account, Ledger
from stopguard.ledger.entries import Evidence
from stopguard.ledger.request import RequestLedgers
from stopguard.ledger.vouchers import Voucher
from stopguard.stops.tracked import Tracked

__all__ = [
    "admit",
    "close_connection",
    "discard_output",
    "dispatch",
    "expect_connection_end",
    "expect_release",
    "fold",
    "give_up_engine_side",
    "move_places",
    "note_abort",
    "note_steps",
    "release_engine_side",
    "release_engine_side_but_output",
    "resolve_notices",
    "shelve",
    "start_output",
    "withdraw",
]

PLACES_IN_ENGINE = (
    Account.QUEUE_WAITING,
    Account.QUEUE_RUNNING,
    Account.QUEUE_PREEMPTED,
    Account.QUEUE_PAUSED,
    Account.QUEUE_TRANSFERRING,
)
SLOT_ACCOUNTS = (Account.KV_LORA, Account.KV_ENCODER, Account.KV_GRAMMAR, Account.KV_SPECULATIVE)
_ADMISSION = Account.QUEUE_ADMISSION
_WAITING = Account.QUEUE_WAITING
_RUNNING = Account.QUEUE_RUNNING
_PREEMPTED = Account.QUEUE_PREEMPTED
_GONE = Account.QUEUE_GONE
_CLAIMED = Account.KV_CLAIMED
_CLAIMABLE = Account.KV_CLAIMABLE
_IN_FLIGHT = Account.OUTPUT_IN_FLIGHT
_DISCARDED = Account.OUTPUT_DISCARDED
_CONNECTED = Account.STREAM_CONNECTED
_CLOSED = Account.STREAM_CLOSED
_BUFFERED = Account.STREAM_BUFFERED
_DROPPED = Account.STREAM_DROPPED

#: Where each open account of the engine's side must end.
_DUE_TO: dict[Account, Account] = {
    **dict.fromkeys(PLACES_IN_ENGINE, _GONE),
    **dict.fromkeys(SLOT_ACCOUNTS, Account.KV_SLOT_POOL),
    _CLAIMED: _CLAIMABLE,
    Account.KV_HELD: Account.KV_POOL,
    Account.KV_FENCED: Account.KV_POOL,
    Account.KV_HOST: Account.KV_POOL,
    _IN_FLIGHT: _DISCARDED,
}

_ADMITTED = Voucher(
    (Account.STREAM_CLIENTS, _CONNECTED, Evidence.NONE),
    (Account.QUEUE_ARRIVALS, _ADMISSION, Evidence.NONE),
)
_DISPATCHED = Voucher((_ADMISSION, _WAITING, Evidence.SENT), (_CLAIMABLE, _CLAIMED, Evidence.SENT))
_DISPATCHED_AGAIN = Voucher((_PREEMPTED, _WAITING, Evidence.SENT), (_CLAIMABLE, _CLAIMED, Evidence.SENT))
_STARTED = Voucher((_WAITING, _RUNNING, Evidence.STREAM_CLOSED))

_BLOCKS_AND_SLOTS = (Account.KV_HELD, Account.KV_FENCED, Account.KV_HOST, *SLOT_ACCOUNTS)


def admit(ledgers: RequestLedgers, at: float) -> None:
    """The client is connected and its request waits in StopGuard."""
    ledgers.post_all(_ADMITTED, at)


def dispatch(ledgers: RequestLedgers, at: float) -> None:
    """The request was sent to an engine, which may hold KV for it from now on."""
    ledgers.post_all(_DISPATCHED if ledgers.balances[_ADMISSION] else _DISPATCHED_AGAIN, at)


def start_output(ledgers: RequestLedgers, at: float) -> None:
    """The engine's first byte proves that the request runs."""
    if ledgers.balances[_WAITING]:
        ledgers.post_all(_STARTED, at)


def fold(tracked: Tracked, at: float) -> None:
    """Book what the hot path has counted since the last transition.

    Without a probe a piece of output that passed is one token, computed and delivered at once; once
    nobody listens it is computed and discarded.
    """
    ledgers = tracked.ledgers
    new = tracked.events - tracked.folded_events
    if new and not tracked.probed:
        tracked.folded_events = tracked.events
        ledgers.tokens_computed += new
        if not tracked.discarding:
            ledgers.tokens_delivered += new
    ledgers.fold(at)
    if tracked.discarding and not tracked.probed:
        discard_output(ledgers, at)


def close_connection(ledgers: RequestLedgers, at: float, note: str) -> None:
    """The client's connection carries nothing for this request any more; what was buffered is dropped."""
    if ledgers.balances[_BUFFERED]:
        ledgers.leave(_BUFFERED, _DROPPED, ledgers.balances[_BUFFERED], at, note=note)
    if ledgers.balances[_CONNECTED]:
        ledgers.leave(_CONNECTED, _CLOSED, 1, at, note=note)


def discard_output(ledgers: RequestLedgers, at: float, evidence: Evidence = Evidence.NONE) -> None:
    """Nobody will get what is in flight."""
    amount = ledgers.balances[_IN_FLIGHT]
    if amount:
        ledgers.leave(_IN_FLIGHT, _DISCARDED, amount, at, evidence)


def withdraw(ledgers: RequestLedgers, at: float) -> None:
    """It never was in an engine, or is not any more: its place in our own queue is given up.

    The queue is ours, so this is known as surely as anything can be.
    """
    for account in (_ADMISSION, _PREEMPTED):
        if ledgers.balances[account]:
            ledgers.leave(account, _GONE, ledgers.balances[account], at, Evidence.PROBE, "withdrawn")
    discard_output(ledgers, at, Evidence.PROBE)


def note_abort(ledgers: RequestLedgers, at: float, due_at: float, hop: str) -> None:
    """An abort leaves for `hop`, which must acknowledge it."""
    ledgers.post(Account.LINK_STOPS, Account.LINK_AWAITING, 1, at, Evidence.SENT, hop)
    ledgers.pend(Account.LINK_AWAITING, Account.LINK_ACKNOWLEDGED, 1, at, due_at, Evidence.SENT, hop)


def resolve_notices(ledgers: RequestLedgers, at: float, evidence: Evidence, *, moot: bool = False) -> None:
    """Every notice that still awaits an ack has it, or needs none any more (`moot`: it ended by itself)."""
    amount = ledgers.balances[Account.LINK_AWAITING]
    if amount:
        target = Account.LINK_MOOT if moot else Account.LINK_ACKNOWLEDGED
        ledgers.leave(Account.LINK_AWAITING, target, amount, at, evidence)


def expect_release(ledgers: RequestLedgers, at: float, due_at: float) -> None:
    """Whatever the engine still has of this request must come back before `due_at`."""
    reserved = ledgers.reserved or {}
    for account, target in _DUE_TO.items():
        amount = ledgers.balances[account] - reserved.get(account, 0)
        if amount:
            ledgers.pend(account, target, amount, at, due_at)


def release_engine_side(ledgers: RequestLedgers, at: float, evidence: Evidence, note: str = "") -> None:
    """The engine has nothing of this request any more, by `evidence`: every account of its side closes."""
    for account, target in _DUE_TO.items():
        amount = ledgers.balances[account]
        if amount:
            ledgers.leave(account, target, amount, at, evidence, note)


def release_engine_side_but_output(ledgers: RequestLedgers, at: float, evidence: Evidence) -> None:
    """As `release_engine_side`, for a request whose client still gets what is in flight."""
    balances = ledgers.balances
    for account in PLACES_IN_ENGINE:
        if balances[account]:
            ledgers.leave(account, _GONE, balances[account], at, evidence)
    if balances[_CLAIMED]:
        ledgers.leave(_CLAIMED, _CLAIMABLE, balances[_CLAIMED], at, evidence)
    if any(balances[Account.KV_HELD : Account.KV_SPECULATIVE + 1]):
        for account in _BLOCKS_AND_SLOTS:
            if balances[account]:
                ledgers.leave(account, _DUE_TO[account], balances[account], at, evidence)


def expect_connection_end(ledgers: RequestLedgers, at: float, due_at: float) -> None:
    """A connection that should have been closed by now must be, before `due_at`."""
    reserved = ledgers.reserved or {}
    for account, target in ((_CONNECTED, _CLOSED), (_BUFFERED, _DROPPED)):
        amount = ledgers.balances[account] - reserved.get(account, 0)
        if amount:
            ledgers.pend(account, target, amount, at, due_at)


def move_places(ledgers: RequestLedgers, at: float, target: Account) -> None:
    """Whatever place the request has in its engine, it is `target` now."""
    for account in PLACES_IN_ENGINE:
        amount = ledgers.balances[account]
        if amount and account is not target:
            ledgers.leave(account, target, amount, at)


def shelve(ledgers: RequestLedgers, at: float, evidence: Evidence) -> None:
    """The engine was stopped for a preemption and the gateway keeps the request: its place waits with us."""
    for account in PLACES_IN_ENGINE:
        amount = ledgers.balances[account]
        if amount and account is not _PREEMPTED:
            ledgers.leave(account, _PREEMPTED, amount, at, evidence, "shelved")
    for account in (_CLAIMED, Account.KV_HELD, Account.KV_FENCED, *SLOT_ACCOUNTS):
        amount = ledgers.balances[account]
        if amount:
            ledgers.leave(account, _DUE_TO[account], amount, at, evidence)


def give_up_engine_side(ledgers: RequestLedgers, at: float, reason: str) -> None:
    """Nothing more can be learnt about the engine's side: every account of it is written off, and says so."""
    for account in (Account.LINK_AWAITING, *_DUE_TO):
        ledgers.give_up(account, at, reason)


def note_steps(ledgers: RequestLedgers) -> None:
    """Fill in which steps of the stop have been reached, and when: at the last movement of a ledger that is closed.

    A step can be undone (a token that was in flight is computed after the stop), so it is derived
    from the entries each time and not remembered from the first moment at which it looked done.
    """
    stop = ledgers.stop
    if stop is not None:
        stop.output_settled_at = _closed_at(ledgers, Ledger.OUTPUT, stop.observed_at)
        stop.released_at = _closed_at(ledgers, Ledger.KV, stop.observed_at)


def _closed_at(ledgers: RequestLedgers, ledger: Ledger, observed_at: float) -> float | None:
    if not ledgers.ledger_closed(ledger):
        return None
    for entry in reversed(ledgers.entries):
        if entry.debit.ledger is ledger and entry.state.moves:
            return max(observed_at, entry.at)
    return observed_at
