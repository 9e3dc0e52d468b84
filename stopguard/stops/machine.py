"""The three machines of a request, as tables.

Rule 1: everything that decides which state a request may enter is in this file.
Rule 2: this file knows no clock, no socket, no ledger and no engine. It says what is legal and what
is owed; the controller does it.

Theory of operation
-------------------
A request has a *client* who may or may not still want it, an *engine* that may or may not still
work on it, and *books* that may or may not be closed. Each is a small machine; they are coupled.

**The client** is LISTENING until one of four things happens: the last byte was handed to it
(SERVED), it left (LEFT), it was told that its request has been stopped (DISMISSED), or it left
under a policy that lets the engine finish for nobody (DRAINING; a grace period may end that). The
first of these wins. *Finished beats gone*: in SERVED a disconnect changes nothing.

**The engine** (more exactly: what we may believe of it) is UNDISPATCHED, then DISPATCHED. From there
it ends by itself (FINISHED), by our stop (ABORTING, then STOPPED when some evidence says so), or
because we lost it (LOST). If no evidence comes in time the state is UNCONFIRMED: not an end, since a
late ack still counts, and never a success. A request that was never sent is WITHDRAWN.
A preemption is a detour: PREEMPTING, then PARKED (held inside the engine, or preempted by the
engine's own scheduler) or SHELVED (stopped at the engine, kept by the gateway); RESUMING leads back.

**The books** are OPEN, then SETTLING once the client's side has ended, and SETTLED when all five
ledgers are closed. A deadline that passes before makes them OVERDUE (a leak); they may still settle,
late. WRITTEN_OFF means that somebody gave up on them, and is not a success.

There are two kinds of transition. An *event* moves the machine that it belongs to, by
`CLIENT_TABLE`, `ENGINE_TABLE` or `BOOKS_TABLE`; a pair of state and event that is not in the table
is illegal, raises, and changes nothing. After each event the *joint rules* of `JOINT_RULES` are
applied until none fires: they couple the machines (a client that left withdraws what was never
dispatched; an engine that was lost dismisses a client that still listens).

`OWES_ABORT` lists the joint states in which the engine works for nobody: whoever drives the machine
must send an abort and report it as `ABORT_SENT`. Rule 4 of the design, *a cancel outlives a
preemption*, is in these tables: in ABORTING the engine's "preempted" or "resumed" changes nothing,
and from no ended state does an event lead back to work.

Late events are normal, not errors: a second ack, a finish after the stop, a preemption that
completes after the cancel. They are in the tables as self-loops, so that leaving one out is seen.
What is *not* there is what we ourselves must never do: send an abort after the end, dispatch twice,
resume what was cancelled.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from stopguard.errors import BookkeepingError

__all__ = [
    "BOOKS_TABLE",
    "CLIENT_ENDED",
    "CLIENT_TABLE",
    "ENGINE_ENDED",
    "ENGINE_TABLE",
    "JOINT_RULES",
    "OWES_ABORT",
    "Books",
    "BooksEvent",
    "Client",
    "ClientEvent",
    "Engine",
    "EngineEvent",
    "IllegalTransition",
    "Machine",
]


class IllegalTransition(BookkeepingError):
    """An event that the table does not know for this state. Nothing was changed."""


# IntEnum, since its hash is C and these are dictionary keys in the path of every request.


class Client(enum.IntEnum):
    """What the client wants."""

    LISTENING = 0
    DRAINING = 1
    LEFT = 2
    DISMISSED = 3
    SERVED = 4


class Engine(enum.IntEnum):
    """What we may believe of the engine's work on the request."""

    UNDISPATCHED = 0
    DISPATCHED = 1
    PREEMPTING = 2
    PARKED = 3
    SHELVED = 4
    RESUMING = 5
    ABORTING = 6
    UNCONFIRMED = 7
    WITHDRAWN = 8
    FINISHED = 9
    STOPPED = 10
    LOST = 11


class Books(enum.IntEnum):
    """Whether the five ledgers are closed."""

    OPEN = 0
    SETTLING = 1
    OVERDUE = 2
    SETTLED = 3
    WRITTEN_OFF = 4


class ClientEvent(enum.IntEnum):
    """What can happen on the client's side."""

    GONE = 0
    """The connection ended (by eof, reset, silence or stall) and the policy says stop."""
    GONE_DRAINING = 1
    """The connection ended and the policy lets the engine finish."""
    GRACE_ENDED = 2
    DISMISSED = 3
    """A stop was ordered by somebody else; the client is told."""
    SERVED = 4
    """The last byte was handed to its connection."""


class EngineEvent(enum.IntEnum):
    """What we do to the engine, and what it tells us."""

    DISPATCHED = 0
    PREEMPT_SENT = 1
    PREEMPTED = 2
    """It is preempted and the engine keeps it."""
    SHELVED = 3
    """It is stopped at the engine and the gateway keeps it."""
    PREEMPT_REFUSED = 4
    RESUME_SENT = 5
    RESUMED = 6
    ABORT_SENT = 7
    ABORT_ACKED = 8
    FINISHED = 9
    LOST = 10
    OVERDUE = 11
    """The deadline for the ack has passed."""
    WITHDRAWN = 12


class BooksEvent(enum.IntEnum):
    """What happens to the books."""

    SETTLING = 0
    CLOSED = 1
    EXPIRED = 2
    GIVEN_UP = 3


CLIENT_TABLE: Mapping[Client, Mapping[ClientEvent, Client]] = {
    Client.LISTENING: {
        ClientEvent.GONE: Client.LEFT,
        ClientEvent.GONE_DRAINING: Client.DRAINING,
        ClientEvent.DISMISSED: Client.DISMISSED,
        ClientEvent.SERVED: Client.SERVED,
    },
    Client.DRAINING: {
        ClientEvent.GONE: Client.LEFT,
        ClientEvent.GONE_DRAINING: Client.DRAINING,
        ClientEvent.GRACE_ENDED: Client.LEFT,
        ClientEvent.DISMISSED: Client.LEFT,
    },
    Client.LEFT: {
        ClientEvent.GONE: Client.LEFT,
        ClientEvent.GONE_DRAINING: Client.LEFT,
        ClientEvent.GRACE_ENDED: Client.LEFT,
        ClientEvent.DISMISSED: Client.LEFT,
    },
    Client.DISMISSED: {
        ClientEvent.GONE: Client.DISMISSED,
        ClientEvent.GONE_DRAINING: Client.DISMISSED,
        ClientEvent.DISMISSED: Client.DISMISSED,
    },
    Client.SERVED: {
        # Finished beats gone: uvicorn, too, reports `http.disconnect` after a normal end.
        ClientEvent.GONE: Client.SERVED,
        ClientEvent.GONE_DRAINING: Client.SERVED,
        ClientEvent.DISMISSED: Client.SERVED,
    },
}

#: What an engine may still say of a request whose work has ended, without any effect.
_LATE = (
    EngineEvent.PREEMPTED,
    EngineEvent.SHELVED,
    EngineEvent.PREEMPT_REFUSED,
    EngineEvent.RESUMED,
    EngineEvent.ABORT_ACKED,
    EngineEvent.FINISHED,
    EngineEvent.LOST,
    EngineEvent.OVERDUE,
)


def _ended(state: Engine) -> Mapping[EngineEvent, Engine]:
    return dict.fromkeys(_LATE, state)


ENGINE_TABLE: Mapping[Engine, Mapping[EngineEvent, Engine]] = {
    Engine.UNDISPATCHED: {
        EngineEvent.DISPATCHED: Engine.DISPATCHED,
        EngineEvent.WITHDRAWN: Engine.WITHDRAWN,
    },
    Engine.DISPATCHED: {
        EngineEvent.PREEMPT_SENT: Engine.PREEMPTING,
        EngineEvent.PREEMPTED: Engine.PARKED,  # by the engine's own scheduler
        EngineEvent.SHELVED: Engine.SHELVED,  # its preemption was given up on, and came after all
        EngineEvent.PREEMPT_REFUSED: Engine.DISPATCHED,
        EngineEvent.RESUMED: Engine.DISPATCHED,
        EngineEvent.ABORT_SENT: Engine.ABORTING,
        EngineEvent.ABORT_ACKED: Engine.STOPPED,  # somebody else stopped it
        EngineEvent.FINISHED: Engine.FINISHED,
        EngineEvent.LOST: Engine.LOST,
    },
    Engine.PREEMPTING: {
        EngineEvent.PREEMPTED: Engine.PARKED,
        EngineEvent.SHELVED: Engine.SHELVED,
        EngineEvent.PREEMPT_REFUSED: Engine.DISPATCHED,
        EngineEvent.RESUMED: Engine.PREEMPTING,
        EngineEvent.ABORT_SENT: Engine.ABORTING,
        EngineEvent.ABORT_ACKED: Engine.STOPPED,
        EngineEvent.FINISHED: Engine.FINISHED,
        EngineEvent.LOST: Engine.LOST,
    },
    Engine.PARKED: {
        EngineEvent.PREEMPTED: Engine.PARKED,
        EngineEvent.RESUME_SENT: Engine.RESUMING,
        EngineEvent.RESUMED: Engine.DISPATCHED,  # by the engine's own scheduler
        EngineEvent.ABORT_SENT: Engine.ABORTING,
        EngineEvent.ABORT_ACKED: Engine.STOPPED,
        EngineEvent.FINISHED: Engine.FINISHED,  # a token that was in flight ended it
        EngineEvent.LOST: Engine.LOST,
    },
    Engine.SHELVED: {
        EngineEvent.DISPATCHED: Engine.DISPATCHED,
        EngineEvent.WITHDRAWN: Engine.WITHDRAWN,
        # What the engine still says belongs to the incarnation that was stopped.
        EngineEvent.SHELVED: Engine.SHELVED,
        EngineEvent.PREEMPTED: Engine.SHELVED,
        EngineEvent.PREEMPT_REFUSED: Engine.SHELVED,
        EngineEvent.RESUMED: Engine.SHELVED,
        EngineEvent.ABORT_ACKED: Engine.SHELVED,
        EngineEvent.FINISHED: Engine.SHELVED,
        EngineEvent.LOST: Engine.SHELVED,
    },
    Engine.RESUMING: {
        EngineEvent.RESUMED: Engine.DISPATCHED,
        EngineEvent.PREEMPTED: Engine.PARKED,
        EngineEvent.ABORT_SENT: Engine.ABORTING,
        EngineEvent.ABORT_ACKED: Engine.STOPPED,
        EngineEvent.FINISHED: Engine.FINISHED,
        EngineEvent.LOST: Engine.LOST,
    },
    Engine.ABORTING: {
        EngineEvent.ABORT_SENT: Engine.ABORTING,
        EngineEvent.ABORT_ACKED: Engine.STOPPED,
        EngineEvent.FINISHED: Engine.FINISHED,
        EngineEvent.LOST: Engine.LOST,
        EngineEvent.OVERDUE: Engine.UNCONFIRMED,
        # A cancel outlives a preemption that is under way.
        EngineEvent.PREEMPTED: Engine.ABORTING,
        EngineEvent.SHELVED: Engine.STOPPED,
        EngineEvent.PREEMPT_REFUSED: Engine.ABORTING,
        EngineEvent.RESUMED: Engine.ABORTING,
    },
    Engine.UNCONFIRMED: {
        EngineEvent.ABORT_SENT: Engine.UNCONFIRMED,
        EngineEvent.ABORT_ACKED: Engine.STOPPED,
        EngineEvent.FINISHED: Engine.FINISHED,
        EngineEvent.LOST: Engine.LOST,
        EngineEvent.OVERDUE: Engine.UNCONFIRMED,
        EngineEvent.PREEMPTED: Engine.UNCONFIRMED,
        EngineEvent.SHELVED: Engine.STOPPED,
        EngineEvent.PREEMPT_REFUSED: Engine.UNCONFIRMED,
        EngineEvent.RESUMED: Engine.UNCONFIRMED,
    },
    Engine.WITHDRAWN: _ended(Engine.WITHDRAWN),
    Engine.FINISHED: _ended(Engine.FINISHED),
    Engine.STOPPED: _ended(Engine.STOPPED),
    Engine.LOST: _ended(Engine.LOST),
}

BOOKS_TABLE: Mapping[Books, Mapping[BooksEvent, Books]] = {
    Books.OPEN: {
        BooksEvent.SETTLING: Books.SETTLING,
        BooksEvent.EXPIRED: Books.OVERDUE,  # the engine kept something although a slow client still reads
    },
    Books.SETTLING: {
        BooksEvent.SETTLING: Books.SETTLING,
        BooksEvent.CLOSED: Books.SETTLED,
        BooksEvent.EXPIRED: Books.OVERDUE,
        BooksEvent.GIVEN_UP: Books.WRITTEN_OFF,
    },
    Books.OVERDUE: {
        BooksEvent.SETTLING: Books.OVERDUE,
        BooksEvent.CLOSED: Books.SETTLED,
        BooksEvent.EXPIRED: Books.OVERDUE,
        BooksEvent.GIVEN_UP: Books.WRITTEN_OFF,
    },
    Books.SETTLED: {},
    Books.WRITTEN_OFF: {},
}

#: The client's side has ended: it will get nothing more.
CLIENT_ENDED = frozenset({Client.LEFT, Client.DISMISSED, Client.SERVED})
#: The engine's work has ended.
ENGINE_ENDED = frozenset({Engine.WITHDRAWN, Engine.FINISHED, Engine.STOPPED, Engine.LOST})
_UNWANTED = (Client.LEFT, Client.DISMISSED)

#: Joint states in which the engine works for nobody: an abort is owed.
OWES_ABORT = frozenset(
    (client, engine)
    for client in _UNWANTED
    for engine in (Engine.DISPATCHED, Engine.PREEMPTING, Engine.PARKED, Engine.RESUMING)
)


def _joint_rules() -> Mapping[tuple[Client, Engine], tuple[Client, Engine]]:
    rules: dict[tuple[Client, Engine], tuple[Client, Engine]] = {}
    for client in _UNWANTED:
        # What the engine does not have need not be stopped there.
        for engine in (Engine.UNDISPATCHED, Engine.SHELVED):
            rules[client, engine] = (client, Engine.WITHDRAWN)
    for engine in (Engine.STOPPED, Engine.LOST):
        # Nothing more will come: whoever still listens must be told so.
        rules[Client.LISTENING, engine] = (Client.DISMISSED, engine)
    for engine in (Engine.FINISHED, Engine.STOPPED, Engine.LOST, Engine.WITHDRAWN):
        rules[Client.DRAINING, engine] = (Client.LEFT, engine)
    for engine in (Engine.UNDISPATCHED, Engine.SHELVED):
        # Draining is for work that has begun; nothing has.
        rules[Client.DRAINING, engine] = (Client.LEFT, engine)
    return rules


JOINT_RULES: Mapping[tuple[Client, Engine], tuple[Client, Engine]] = _joint_rules()


class Machine:
    """One request's three states.

    `client`, `engine` and `books` are read by anyone and set only here.
    """

    __slots__ = ("books", "client", "engine")

    def __init__(self) -> None:
        self.client = Client.LISTENING
        self.engine = Engine.UNDISPATCHED
        self.books = Books.OPEN

    def on_client(self, event: ClientEvent) -> None:
        """Apply an event of the client, then the joint rules."""
        if event is ClientEvent.SERVED and self.engine is not Engine.FINISHED:
            # The one guard that needs two machines: nobody can have been served what is not finished.
            raise self._illegal("client", event)
        state = CLIENT_TABLE[self.client].get(event)
        if state is None:
            raise self._illegal("client", event)
        self.client = state
        self._apply_joint_rules()

    def on_engine(self, event: EngineEvent) -> None:
        """Apply an event of the engine, then the joint rules."""
        state = ENGINE_TABLE[self.engine].get(event)
        if state is None:
            raise self._illegal("engine", event)
        self.engine = state
        self._apply_joint_rules()

    def end_normally(self) -> bool:
        """FINISHED and SERVED in one step, for a request that nobody stopped; False (and no change) for any other.

        The end of almost every request: the tables are not asked, and a test proves that they say the same.
        """
        if self.engine is not Engine.DISPATCHED or self.client is not Client.LISTENING or self.books is not Books.OPEN:
            return False
        self.engine, self.client, self.books = Engine.FINISHED, Client.SERVED, Books.SETTLING
        return True

    def on_books(self, event: BooksEvent) -> None:
        """Apply an event of the books. They close only when client and engine have ended."""
        state = BOOKS_TABLE[self.books].get(event)
        if state is None or (event is BooksEvent.CLOSED and not self.ended):
            raise self._illegal("books", event)
        self.books = state

    @property
    def owes_abort(self) -> bool:
        """Whether the engine works for nobody and has not been told."""
        return (self.client, self.engine) in OWES_ABORT

    @property
    def ended(self) -> bool:
        """Whether client and engine have both ended (the books may still be open)."""
        return self.client in CLIENT_ENDED and self.engine in ENGINE_ENDED

    def _apply_joint_rules(self) -> None:
        while (target := JOINT_RULES.get((self.client, self.engine))) is not None:
            self.client, self.engine = target
        if self.client in CLIENT_ENDED and self.books is Books.OPEN:
            self.books = BOOKS_TABLE[Books.OPEN][BooksEvent.SETTLING]

    def _illegal(self, which: str, event: enum.IntEnum) -> IllegalTransition:
        return IllegalTransition(
            f"{which}: {event.name} is impossible when client={self.client.name} engine={self.engine.name} "
            f"books={self.books.name}"
        )

    def __repr__(self) -> str:
        return f"<Machine client={self.client.name} engine={self.engine.name} books={self.books.name}>"
