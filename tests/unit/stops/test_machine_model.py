"""Random events against the three tables, and the timer wheel against the simplest thing that could be right."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from stopguard.stops import Timer, TimerWheel
from stopguard.stops.machine import (
    BOOKS_TABLE,
    CLIENT_ENDED,
    CLIENT_TABLE,
    ENGINE_ENDED,
    ENGINE_TABLE,
    JOINT_RULES,
    Books,
    BooksEvent,
    Client,
    ClientEvent,
    Engine,
    EngineEvent,
    IllegalTransition,
    Machine,
)

_WORK = (Engine.DISPATCHED, Engine.PREEMPTING, Engine.PARKED, Engine.SHELVED, Engine.RESUMING)


class TableMachine(RuleBasedStateMachine):
    """Any event at any time: it follows the table, or it raises and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine()
        self.before = self.state
        self.unwanted = False

    @property
    def state(self) -> tuple[Client, Engine, Books]:
        return (self.machine.client, self.machine.engine, self.machine.books)

    def expect(self, legal: bool, raised: bool) -> None:
        assert legal != raised
        if raised:
            assert self.state == self.before

    @rule(event=st.sampled_from(list(ClientEvent)))
    def client(self, event: ClientEvent) -> None:
        self.before = self.state
        legal = event in CLIENT_TABLE[self.machine.client]
        if event is ClientEvent.SERVED:
            legal = legal and self.machine.engine is Engine.FINISHED
        try:
            self.machine.on_client(event)
        except IllegalTransition:
            self.expect(legal, raised=True)
        else:
            self.expect(legal, raised=False)

    @rule(event=st.sampled_from(list(EngineEvent)))
    def engine(self, event: EngineEvent) -> None:
        self.before = self.state
        legal = event in ENGINE_TABLE[self.machine.engine]
        try:
            self.machine.on_engine(event)
        except IllegalTransition:
            self.expect(legal, raised=True)
        else:
            self.expect(legal, raised=False)

    @rule(event=st.sampled_from(list(BooksEvent)))
    def books(self, event: BooksEvent) -> None:
        self.before = self.state
        legal = event in BOOKS_TABLE[self.machine.books]
        if event is BooksEvent.CLOSED:
            legal = legal and self.machine.ended
        try:
            self.machine.on_books(event)
        except IllegalTransition:
            self.expect(legal, raised=True)
        else:
            self.expect(legal, raised=False)

    @precondition(lambda self: self.machine.owes_abort)
    @rule()
    def pay_the_abort(self) -> None:
        self.before = self.state
        self.machine.on_engine(EngineEvent.ABORT_SENT)
        assert self.machine.engine is Engine.ABORTING
        assert not self.machine.owes_abort

    @invariant()
    def what_has_ended_stays(self) -> None:
        client, engine, books = self.before
        if client in CLIENT_ENDED:
            assert self.machine.client is client
        if engine in ENGINE_ENDED:
            assert self.machine.engine is engine
            assert not self.machine.owes_abort
        if books in (Books.SETTLED, Books.WRITTEN_OFF):
            assert self.machine.books is books

    @invariant()
    def books_close_last(self) -> None:
        if self.machine.books is Books.SETTLED:
            assert self.machine.client in CLIENT_ENDED
            assert self.machine.engine in ENGINE_ENDED

    @invariant()
    def joint_rules_are_at_rest(self) -> None:
        assert (self.machine.client, self.machine.engine) not in JOINT_RULES

    @invariant()
    def nobody_works_again_for_a_client_that_is_gone(self) -> None:
        if self.unwanted:
            assert self.machine.owes_abort or self.machine.engine not in _WORK
        client, engine, _ = self.before
        if client in (Client.LEFT, Client.DISMISSED) and engine not in _WORK:
            assert self.machine.engine not in _WORK
        self.unwanted = self.machine.client in (Client.LEFT, Client.DISMISSED)


class WheelMachine(RuleBasedStateMachine):
    """The wheel against a list of what is armed."""

    timers = Bundle("timers")

    def __init__(self) -> None:
        super().__init__()
        self.wheel: TimerWheel[int] = TimerWheel(0.0, tick_seconds=0.25, slots=8, limit=1000)
        self.at = 0.0
        self.armed: dict[int, tuple[float, float]] = {}  # number -> (due at, set at)
        self.numbers = 0

    @rule(target=timers, wait=st.sampled_from([-3.0, -0.1, 0.0, 0.1, 0.25, 0.3, 0.5, 1.0, 1.9, 2.0, 2.1, 7.3, 40.0]))
    def set(self, wait: float) -> tuple[int, Timer[int]]:
        self.numbers += 1
        timer = self.wheel.set(self.numbers, self.at + wait)
        self.armed[self.numbers] = (self.at + wait, self.at)
        return self.numbers, timer

    @rule(one=consumes(timers))
    def cancel(self, one: tuple[int, Timer[int]]) -> None:
        number, timer = one
        assert timer.armed == (number in self.armed)
        self.wheel.cancel(timer)
        self.armed.pop(number, None)

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.25, 0.3, 1.0, 1.75, 2.0, 2.25, 9.0]))
    def advance(self, seconds: float) -> None:
        self.at += seconds
        self.check_fired(self.wheel.advance(self.at))

    @precondition(lambda self: self.armed)
    @rule()
    def advance_to_what_it_says(self) -> None:
        due = self.wheel.next_due()
        assert due is not None
        assert due >= self.at - 0.25
        self.at = max(self.at, due)
        self.check_fired(self.wheel.advance(self.at))

    def check_fired(self, fired: list[int]) -> None:
        assert fired == sorted(fired, key=lambda number: (self.armed[number][0], number))
        for number in fired:
            assert self.armed[number][0] <= self.at, "early"
            del self.armed[number]
        for due_at, set_at in self.armed.values():
            assert due_at > set_at, "one that was due when it was set must fire at the next advance"
            assert due_at + 0.25 > self.at - 1e-6, "more than a tick late"

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.wheel) == len(self.armed)
        next_due = self.wheel.next_due()
        assert (next_due is None) == (not self.armed)
        if next_due is not None:
            earliest = min(due_at for due_at, _ in self.armed.values())
            assert next_due <= math.floor(max(earliest, self.at) / 0.25) * 0.25 + 0.5


TableMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
WheelMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestTables = pytest.mark.slow(TableMachine.TestCase)
TestWheel = pytest.mark.slow(WheelMachine.TestCase)
