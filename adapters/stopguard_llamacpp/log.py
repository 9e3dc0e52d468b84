"""llama.cpp's own log, read as what its scheduler says. No file here: text in, events out.

The server's pages go through the same queue as its requests, so that looking at them puts off what is to be seen (see
`adapter`). Its log does not. At the default verbosity it says who got a slot, who was cancelled and who gave the slot
back; at debug verbosity (`-lv 5` and more) also who has to wait for a slot, and each token. Lines of the build in
xllamacpp 2026.10.11549 (a request is a *task*, the KV memory that it may use is a *slot*)::

    0.05.668.247 D srv  process_sing: no slot is available, defer task, id_task = 105
    0.05.676.814 I slot launch_slot_: id  1 | task 105 | processing task, is_child = 0
    0.05.692.010 D slot process_toke: id  1 | task 105 | n_gen = 1, n_remaining = 99, next token:   891 ' xl'
    0.06.174.021 W srv          stop: cancel task, id_task = 105
    0.06.174.534 I slot      release: id  1 | task 105 | stop processing: n_tokens = 71, truncated = 0

A cancel is logged by the thread that posts it, the slot's release by the scheduler. Who is cancelled while it waits is
taken out of the queue without a further line.

No line says whose request a task is. At debug verbosity the sampler's parameters are printed before a slot is given
away, and one of them means nothing unless it is switched on: `dry_allowed_length` with `dry_multiplier` 0. A client
that wants to find its own requests sends a number there (`named`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from stopguard.audit.target import Happening, Submitted
from stopguard.errors import LimitReached
from stopguard.probe import wire

__all__ = ["ServerLog"]

_STAMP: Final = re.compile(r"(\d+)\.(\d\d)\.(\d{3})\.(\d{3}) ([A-Z]) ")
_LINE: Final = re.compile(
    r"launch_slot_: id +\d+ \| task (?P<launched>\d+) \| processing task"
    r"|defer task, id_task = (?P<deferred>\d+)"
    r"|process_toke: id +\d+ \| task (?P<token>\d+) \| n_gen = "
    r"|stop: cancel task, id_task = (?P<cancelled>\d+)"
    r"|release: id +\d+ \| task (?P<released>\d+) \| stop processing"
)
_MARK: Final = re.compile(r"\tdry_multiplier = 0\.000, .*dry_allowed_length = (\d+),")
_TASKS_MAX: Final = 100_000
#: One line of a log; longer ones are cut (llama.cpp prints whole prompts at its highest verbosity).
_LINE_CHARACTERS_MAX: Final = 64 * 1024


class ServerLog:
    """What a server's log has said so far. `feed` takes the text as it grows.

    `running` and `waiting` are the tasks that have a slot and those that wait for one, `tokens_total` the tokens that
    were sampled; the latter two are known only at debug verbosity (`sees_queue`). Times are those of the log's stamps,
    moved to the reader's clock: a line is read after it was written, so the smallest distance seen is the best one.

    `named` gives the owner of a mark, or nothing: then a task that gets a slot is called OWNER/TASK, else by its
    number. A task that has waited changes its name when it gets its slot; the old one becomes the parent of the new.
    """

    def __init__(self, named: Callable[[int], str] | None = None) -> None:
        self.running: set[str] = set()
        self.waiting: set[str] = set()
        self.cancelled: set[str] = set()
        self.sees_queue = False
        self.tokens_total = 0
        self.cancels_total = 0
        self._named = named
        self._names: dict[str, str] = {}
        self._mark = 0
        self._rest = ""
        self._offset: float | None = None

    def feed(self, text: str, at: float) -> list[Happening]:
        """The events of the whole lines in `text`, which was read at `at` (seconds on the reader's clock)."""
        *lines, self._rest = (self._rest + text).split("\n")
        self._rest = self._rest[:_LINE_CHARACTERS_MAX]
        happenings: list[Happening] = []
        for line in lines:
            stamp = _STAMP.match(line)
            if stamp is None:
                marked = _MARK.match(line)
                if marked is not None:
                    self._mark = int(marked[1])
                continue
            self.sees_queue = self.sees_queue or stamp[5] == "D"
            said = _LINE.search(line, stamp.end())
            if said is not None:
                minutes, seconds, milliseconds, microseconds = (int(stamp[number]) for number in range(1, 5))
                written = minutes * 60 + seconds + milliseconds / 1e3 + microseconds / 1e6
                if self._offset is None or at - written < self._offset:
                    self._offset = at - written
                assert said.lastgroup is not None
                happenings += self._happened(said.lastgroup, said[said.lastgroup], written + self._offset)
        return happenings

    def _happened(self, what: str, task: str, at: float) -> list[Happening]:
        known = task in self.running or task in self.waiting
        name = self._names.get(task, task)
        new: list[Happening] = [] if known else [Submitted(name, at), wire.Added(name, at, 0)]
        match what:
            case "token":
                self.tokens_total += 1
                # A token goes to the HTTP side in the same breath, whoever still listens there.
                if task not in self.running:
                    return []
                return [wire.TokensComputed(name, at, 1), wire.TokensEmitted(name, at, 1)]
            case "deferred":
                if not known:
                    self._take(self.waiting, task)
                    new.append(wire.Moved(name, at, "waiting"))
                return new
            case "launched":
                return self._launched(task, at, known=known)
            case "cancelled":
                self.cancels_total += 1
                new.append(wire.AbortArrived(name, at))
                if task in self.running:
                    self.cancelled.add(task)
                    return new
                self.waiting.discard(task)
                return [*new, *self._gone(name, at, stopped=True)]
            case _:
                if task not in self.running:
                    return []  # it was there before we began to read
                self.running.discard(task)
                self._names.pop(task, None)
                stopped = task in self.cancelled
                self.cancelled.discard(task)
                return [wire.BlocksReturned(name, at, 1), *self._gone(name, at, stopped=stopped)]

    def _launched(self, task: str, at: float, *, known: bool) -> list[Happening]:
        self.waiting.discard(task)
        self._take(self.running, task)
        owner = self._named(self._mark) if self._named is not None and self._mark else ""
        self._mark = 0
        happenings: list[Happening] = []
        name, parent = task, ""
        if owner:
            name = self._names[task] = f"{owner}/{task}"
            parent = task if known else ""
        if parent:
            happenings.append(wire.Moved(parent, at, "gone"))
        if owner or not known:
            happenings += [Submitted(name, at), wire.Added(name, at, 0, parent)]
        return [*happenings, wire.Moved(name, at, "running"), wire.BlocksHeld(name, at, 1)]

    @staticmethod
    def _gone(task: str, at: float, *, stopped: bool) -> list[Happening]:
        end: list[Happening] = [wire.Finished(task, at, "abort" if stopped else "stop"), wire.Moved(task, at, "gone")]
        return [wire.AbortApplied(task, at), *end] if stopped else end

    def _take(self, tasks: set[str], task: str) -> None:
        if len(self.running) + len(self.waiting) >= _TASKS_MAX:
            raise LimitReached("live tasks in the server's log", _TASKS_MAX, "is this the log of one server?")
        tasks.add(task)
