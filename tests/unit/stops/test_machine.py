"""The three tables: what is legal, what is owed, and that an illegal event changes nothing."""

from __future__ import annotations

import itertools

import pytest

from stopguard.stops.machine import (
    BOOKS_TABLE,
    CLIENT_ENDED,
    CLIENT_TABLE,
    ENGINE_ENDED,
    ENGINE_TABLE,
    JOINT_RULES,
    OWES_ABORT,
    Books,
    BooksEvent,
    Client,
    ClientEvent,
    Engine,
    EngineEvent,
    IllegalTransition,
    Machine,
)

WORKING = (Engine.DISPATCHED, Engine.PREEMPTING, Engine.PARKED, Engine.RESUMING)


def machine(client: Client, engine: Engine, books: Books = Books.OPEN) -> Machine:
    made = Machine()
    made.client, made.engine, made.books = client, engine, books
    return made


def reachable() -> set[tuple[Client, Engine, Books]]:
    """Every joint state that some sequence of events leads to."""
    seen = set()
    waiting = [(Client.LISTENING, Engine.UNDISPATCHED, Books.OPEN)]
    while waiting:
        state = waiting.pop()
        if state in seen:
            continue
        seen.add(state)
        for event in (*ClientEvent, *EngineEvent, *BooksEvent):
            one = machine(*state)
            try:
                apply(one, event)
            except IllegalTransition:
                continue
            waiting.append((one.client, one.engine, one.books))
    return seen


def apply(one: Machine, event: ClientEvent | EngineEvent | BooksEvent) -> None:
    if isinstance(event, ClientEvent):
        one.on_client(event)
    elif isinstance(event, EngineEvent):
        one.on_engine(event)
    else:
        one.on_books(event)


def refusal(one: Machine, event: ClientEvent | EngineEvent | BooksEvent) -> str:
    """What `event` is refused with, or nothing."""
    try:
        apply(one, event)
    except IllegalTransition as error:
        return str(error)
    return ""


REACHABLE = sorted(reachable())


def test_every_state_has_a_row() -> None:
    assert set(CLIENT_TABLE) == set(Client)
    assert set(ENGINE_TABLE) == set(Engine)
    assert set(BOOKS_TABLE) == set(Books)


def test_every_state_is_reachable() -> None:
    assert {client for client, _, _ in REACHABLE} == set(Client)
    assert {engine for _, engine, _ in REACHABLE} == set(Engine)
    assert {books for _, _, books in REACHABLE} == set(Books)


def test_a_normal_life() -> None:
    one = Machine()
    assert repr(one) == "<Machine client=LISTENING engine=UNDISPATCHED books=OPEN>"
    one.on_engine(EngineEvent.DISPATCHED)
    assert repr(one) == "<Machine client=LISTENING engine=DISPATCHED books=OPEN>"
    one.on_engine(EngineEvent.FINISHED)
    assert repr(one) == "<Machine client=LISTENING engine=FINISHED books=OPEN>"
    one.on_client(ClientEvent.SERVED)
    assert repr(one) == "<Machine client=SERVED engine=FINISHED books=SETTLING>"
    one.on_books(BooksEvent.CLOSED)
    assert repr(one) == "<Machine client=SERVED engine=FINISHED books=SETTLED>"


def test_a_cancel() -> None:
    one = Machine()
    one.on_engine(EngineEvent.DISPATCHED)
    one.on_client(ClientEvent.GONE)
    assert (one.owes_abort, repr(one)) == (True, "<Machine client=LEFT engine=DISPATCHED books=SETTLING>")
    one.on_engine(EngineEvent.ABORT_SENT)
    assert (one.owes_abort, repr(one)) == (False, "<Machine client=LEFT engine=ABORTING books=SETTLING>")
    one.on_engine(EngineEvent.OVERDUE)
    assert repr(one) == "<Machine client=LEFT engine=UNCONFIRMED books=SETTLING>"
    one.on_engine(EngineEvent.ABORT_ACKED)
    assert one.ended


@pytest.mark.parametrize("state", REACHABLE, ids=lambda state: "-".join(part.name for part in state))
def test_an_illegal_event_raises_and_changes_nothing(state: tuple[Client, Engine, Books]) -> None:
    for event in (*ClientEvent, *EngineEvent, *BooksEvent):
        one = machine(*state)
        text = refusal(one, event)
        if text:
            assert (one.client, one.engine, one.books) == state
            assert event.name in text
            assert state[1].name in text


@pytest.mark.parametrize("state", REACHABLE, ids=lambda state: "-".join(part.name for part in state))
def test_what_holds_in_every_reachable_state(state: tuple[Client, Engine, Books]) -> None:
    client, engine, books = state
    one = machine(*state)
    assert (client, engine) not in JOINT_RULES  # a fixed point
    if one.owes_abort:
        assert client in (Client.LEFT, Client.DISMISSED)
        assert engine in WORKING
        assert EngineEvent.ABORT_SENT in ENGINE_TABLE[engine]
    if client in (Client.LEFT, Client.DISMISSED):
        assert engine not in (Engine.UNDISPATCHED, Engine.SHELVED)  # never sent (again)
    if client is Client.SERVED:
        assert engine is Engine.FINISHED
    if books is Books.SETTLED:
        assert one.ended
    if client in CLIENT_ENDED:
        assert books is not Books.OPEN


@pytest.mark.parametrize("state", REACHABLE, ids=lambda state: "-".join(part.name for part in state))
def test_what_every_step_keeps(state: tuple[Client, Engine, Books]) -> None:
    client, engine, books = state
    for event in (*ClientEvent, *EngineEvent, *BooksEvent):
        one = machine(*state)
        try:
            apply(one, event)
        except IllegalTransition:
            continue
        if client in CLIENT_ENDED:
            assert one.client is client
        if engine in ENGINE_ENDED:
            assert one.engine is engine
        if books in (Books.SETTLED, Books.WRITTEN_OFF):
            assert one.books is books
        if engine in (Engine.ABORTING, Engine.UNCONFIRMED):
            assert one.engine in (Engine.ABORTING, Engine.UNCONFIRMED) or one.engine in ENGINE_ENDED
        if client in (Client.LEFT, Client.DISMISSED) and engine not in WORKING:
            assert one.engine not in WORKING, "back to work for nobody"


def test_what_we_must_never_do_is_illegal_everywhere() -> None:
    for _, engine, _ in REACHABLE:
        if engine in ENGINE_ENDED:
            for event in (
                *(EngineEvent.ABORT_SENT, EngineEvent.DISPATCHED, EngineEvent.PREEMPT_SENT, EngineEvent.RESUME_SENT),
                EngineEvent.WITHDRAWN,
            ):
                assert event not in ENGINE_TABLE[engine]
        if engine not in (Engine.UNDISPATCHED, Engine.SHELVED):
            assert EngineEvent.DISPATCHED not in ENGINE_TABLE[engine]


def test_an_engine_may_say_anything_late() -> None:
    late = set(EngineEvent) - {
        *(EngineEvent.DISPATCHED, EngineEvent.PREEMPT_SENT, EngineEvent.RESUME_SENT, EngineEvent.ABORT_SENT),
        EngineEvent.WITHDRAWN,
    }
    for engine in ENGINE_ENDED:
        assert set(ENGINE_TABLE[engine]) == late


def test_served_needs_a_finished_engine() -> None:
    for engine in set(Engine) - {Engine.FINISHED}:
        one = machine(Client.LISTENING, engine)
        with pytest.raises(IllegalTransition, match="client: SERVED is impossible"):
            one.on_client(ClientEvent.SERVED)


def test_books_close_only_when_both_have_ended() -> None:
    for client, engine in itertools.product(Client, Engine):
        one = machine(client, engine, Books.SETTLING)
        if client in CLIENT_ENDED and engine in ENGINE_ENDED:
            one.on_books(BooksEvent.CLOSED)
            assert one.books is Books.SETTLED
        else:
            with pytest.raises(IllegalTransition, match="books: CLOSED is impossible"):
                one.on_books(BooksEvent.CLOSED)


def test_whoever_owes_an_abort_is_written_down() -> None:
    assert {(client, engine) for client in (Client.LEFT, Client.DISMISSED) for engine in WORKING} == OWES_ABORT


def test_the_late_end_of_a_preemption_that_was_given_up_on() -> None:
    """The gateway waited, went on, and then the engine had stopped it after all."""
    one = machine(Client.LISTENING, Engine.PREEMPTING)
    one.on_engine(EngineEvent.PREEMPT_REFUSED)
    one.on_engine(EngineEvent.SHELVED)
    assert one.engine is Engine.SHELVED


def test_a_state_cannot_be_invented() -> None:
    with pytest.raises(AttributeError):
        Machine().other = 1  # type: ignore[attr-defined]
