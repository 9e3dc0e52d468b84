"""Walks every interleaving of a world's events, up to a depth, and lets each path end.

The walk goes level by level over *states*: two sequences of events that lead to worlds with the same future
are continued once. The number of interleavings is exact all the same: each state carries how many different
sequences of events lead to it at this level, and they are added up.

Each state is brought to an end in two ways: the engine says and does everything that it still owes, or it never
says anything again and only time passes. Both must leave nothing behind, and either settle or report. Where the
next step of such an end is one that the walk has made anyway, the end of the state that it led to is taken.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import msgspec

from tests.explorer.world import EVENTS, SHARED_EVENTS, UNLIMITED, World, apply, enabled

STEPS_TO_THE_END_MAX = 80
EVERYTHING = frozenset(name for name, _, _ in (*EVENTS, *SHARED_EVENTS))
_HONEST_ORDER = (
    *("abort found nothing", "ack", "release", "output leaves", "served", "resumed", "resume", "preempted"),
    *("finish", "gauges", "time passes"),
)
_SILENT_ORDER = ("served", "time passes")
_ORDERS = (_SILENT_ORDER, _HONEST_ORDER)
_DO = {name: (possible, do) for name, possible, do in (*EVENTS, *SHARED_EVENTS)}
_SHARED = {name for name, _, _ in SHARED_EVENTS}

Path = tuple[str, ...]
#: how each request ended, or the event (and the request) with which the end goes on
End = tuple[str, ...]
Known = dict[Any, End]


class Walk(msgspec.Struct, kw_only=True):
    """What was walked. `interleavings` counts the event sequences of the full depth, and those that end before."""

    engine: str
    requests: int
    depth: int
    states: int = 0
    transitions: int = 0
    interleavings: int = 0
    ends: Counter[str] = msgspec.field(default_factory=Counter)
    events: Counter[str] = msgspec.field(default_factory=Counter)
    seconds: float = 0.0

    def line(self) -> str:
        """One line for people."""
        ends = ", ".join(f"{count:,} {name}" for name, count in sorted(self.ends.items()))
        return (
            f"{self.engine}: {self.interleavings:,} interleavings of {self.requests} request(s), depth {self.depth} "
            f"({self.states:,} states, {self.transitions:,} transitions; requests by end: {ends}) "
            f"in {self.seconds:.1f} s"
        )


class PathFailed(AssertionError):
    """Something did not hold; the message has the sequence of events that leads there."""

    def __init__(self, path: Path, error: Exception) -> None:
        super().__init__(" → ".join(path) + f"\n{type(error).__name__}: {error}")


class Walker:
    """One walk from one world."""

    def __init__(self, start: World, depth: int, alphabet: frozenset[str]) -> None:
        self.alphabet = alphabet
        self.result = Walk(engine=start.profile.name, requests=len(start.peers), depth=depth)
        self.numbers: dict[Any, int] = {start.key(): 0}
        #: state -> the event that leads to each of its successors
        self.successors: dict[int, dict[str, int]] = {}
        #: a state that was not continued yet -> a world in that state, and the events that led there
        self.fresh: dict[int, tuple[World, Any, Path]] = {0: (start, start.key(), ())}
        #: for the silent and for the honest end: state -> how each request ends, or the event that leads on
        self.ends: tuple[dict[int, End | str], dict[int, End | str]] = ({}, {})
        self.known: tuple[Known, Known] = ({}, {})

    def walk(self) -> Walk:
        began, result = time.perf_counter(), self.result
        level = {0: 1}  # state -> how many sequences of events lead to it at this level
        for _ in range(result.depth):
            following: dict[int, int] = {}
            for state, paths in level.items():
                if state not in self.successors:
                    self._continue(state)
                reached = self.successors[state]
                if not reached:
                    result.interleavings += paths
                for number in reached.values():
                    following[number] = following.get(number, 0) + paths
            level = following
        result.interleavings += sum(level.values())
        for state, (world, key, path) in self.fresh.items():
            for honest in (False, True):
                self.ends[honest][state] = self._end(world, key, path, honest=honest)
        self._count_ends()
        result.states = len(self.numbers)
        result.seconds = time.perf_counter() - began
        return result

    def _continue(self, state: int) -> None:
        """Let each event happen that is possible in `state`."""
        world, key, path = self.fresh.pop(state)
        reached = self.successors[state] = {}
        for name, peer_name, do in enabled(world, self.alphabet):
            label = f"{name} {peer_name}".strip()
            after = world.copy()
            try:
                apply(after, peer_name, do)
                after_key = after.key()
            except Exception as error:
                raise PathFailed((*path, label), error) from error
            self.result.transitions += 1
            self.result.events[name] += 1
            number = self.numbers.setdefault(after_key, len(self.numbers))
            if number not in self.successors and number not in self.fresh:
                self.fresh[number] = (after, after_key, (*path, label))
            else:
                after.dispose()
            reached[label] = number
        for honest in (False, True):
            step = next_step(world, honest=honest)
            if step is not None and label_of(*step) in reached:
                self.ends[honest][state] = label_of(*step)
            else:
                self.ends[honest][state] = self._end(world, key, path, honest=honest)
        world.dispose()

    def _end(self, world: World, key: Any, path: Path, *, honest: bool) -> End:
        unlimited, known = (key[0], UNLIMITED, *key[2:]), self.known[honest]
        if unlimited in known:
            return known[unlimited]
        after = world.copy()
        after.time_left = UNLIMITED
        steps = [*path, "|"]
        try:
            ends = run_to_the_end(after, unlimited, honest, steps, known)
        except Exception as error:
            raise PathFailed(tuple(steps), error) from error
        after.dispose()
        return ends

    def _count_ends(self) -> None:
        for ends in self.ends:
            for first in ends:
                state, steps = first, 0
                while isinstance(label := ends[state], str):
                    state = self.successors[state][label]
                    steps += 1
                    assert steps < STEPS_TO_THE_END_MAX, "it goes on without end"
                self.result.ends.update(label)


def walk(start: World, depth: int, alphabet: frozenset[str] = EVERYTHING) -> Walk:
    """Every sequence of `depth` events of `alphabet` from `start`."""
    return Walker(start, depth, alphabet).walk()


def next_step(world: World, *, honest: bool) -> tuple[str, str] | None:
    """The event, and its request, that comes next on the way to the end; `None` when all is over."""
    if not world.controller.tracked:
        return None
    for name in _ORDERS[honest]:
        possible, _ = _DO[name]
        for peer in world.peers.values():
            if not peer.settled and possible(world, peer):
                return name, peer.name
    return "nothing", ""


def label_of(name: str, peer_name: str) -> str:
    return name if name in _SHARED else f"{name} {peer_name}"


def run_to_the_end(world: World, key: Any, honest: bool, steps: list[str], known: Known) -> End:
    """How each request ends from here. What follows a state is decided by its key, so it is run only once."""
    passed = []
    while key not in known:
        step = next_step(world, honest=honest)
        if step is None:
            break
        name, peer_name = step
        assert name != "nothing", "nothing can happen any more, and a request is still open"
        passed.append(key)
        assert len(passed) < STEPS_TO_THE_END_MAX, "it goes on without end"
        steps.append(label_of(*step))
        apply(world, peer_name, _DO[name][1])
        key = world.key()
    ends = known.get(key)
    if ends is None:
        check_nothing_is_left(world)
        ends = known[key] = tuple(peer.end for peer in world.peers.values())
    known.update(dict.fromkeys(passed, ends))
    return ends


def check_nothing_is_left(world: World) -> None:
    controller = world.controller
    assert not controller.tracked
    assert not controller.parts
    assert not any(controller.in_engine.values())
    assert not len(controller.wheel)
    assert not len(controller.book)
    assert all(peer.settled for peer in world.peers.values())
    controller.book.verify()
