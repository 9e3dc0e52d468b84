"""The list: which code keeps which rule, and what is put in its place.

A mutation is one replacement of text in one file of `stopguard`. The text must occur exactly once, so that a
mutation which no longer fits the code fails loudly and is not silently skipped.
"""

from __future__ import annotations

from typing import NamedTuple

RULES = "tests/unit/stops/test_rules.py"
_MACHINE, _CONTROLLER = "stops/machine.py", "stops/controller.py"
_OBSERVATIONS, _OVERDUE = "stops/observations.py", "stops/overdue.py"
_REQUEST, _BOOK, _TIMERS = "ledger/request.py", "ledger/book.py", "stops/timers.py"


class Mutation(NamedTuple):
    """`what` is broken in `file` by putting `new` in the place of `old`; the class of `rule` must fail."""

    rule: int
    what: str
    file: str
    old: str
    new: str


MUTATIONS = [
    Mutation(
        *(1, "a disconnect after the last byte makes the client LEFT", _MACHINE),
        "        ClientEvent.GONE: Client.SERVED,\n",
        "        ClientEvent.GONE: Client.LEFT,\n",
    ),
    Mutation(
        *(1, "a finish that overtakes an abort is called confirmed", _CONTROLLER),
        'self.conclude(tracked, "raced_finish", evidence)',
        'self.conclude(tracked, "confirmed", evidence)',
    ),
    Mutation(
        *(1, "a finish in ABORTING is an ack", _MACHINE),
        "        EngineEvent.FINISHED: Engine.FINISHED,\n        EngineEvent.LOST: Engine.LOST,\n"
        "        EngineEvent.OVERDUE: Engine.UNCONFIRMED,\n        # A cancel",
        "        EngineEvent.FINISHED: Engine.STOPPED,\n        EngineEvent.LOST: Engine.LOST,\n"
        "        EngineEvent.OVERDUE: Engine.UNCONFIRMED,\n        # A cancel",
    ),
    Mutation(
        *(2, "a second disconnect begins a second stop", _CONTROLLER),
        "        if before is not Client.LISTENING:\n            return NOTHING\n        movements.fold(tracked, at)\n"
        "        movements.close_connection(tracked.ledgers, at, method)\n",
        "        movements.fold(tracked, at)\n        movements.close_connection(tracked.ledgers, at, method)\n",
    ),
    Mutation(
        *(2, "a cancel by the API after a disconnect begins a second stop", _CONTROLLER),
        "        if before not in (Client.LISTENING, Client.DRAINING):\n            return NOTHING\n",
        "",
    ),
    Mutation(
        *(2, "an abort is owed to an engine that has finished", _MACHINE),
        "for engine in (Engine.DISPATCHED, Engine.PREEMPTING, Engine.PARKED, Engine.RESUMING)\n",
        "for engine in (Engine.DISPATCHED, Engine.PREEMPTING, Engine.PARKED, Engine.RESUMING, Engine.FINISHED)\n",
    ),
    Mutation(
        *(2, "a late word about what is over is an error", _OBSERVATIONS),
        "if not isinstance(event, _HARMLESS_LATE) and ",
        "if ",
    ),
    Mutation(
        *(3, "an abort is sent once", _CONTROLLER),
        "            TimerKind.RETRY: self._retry,\n",
        "            TimerKind.RETRY: lambda tracked, at: NOTHING,\n",
    ),
    Mutation(
        *(3, "it never goes to the next door", _CONTROLLER),
        "            tracked.door_index += 1\n            tracked.tries_at_door = 0\n        return self._knock",
        "            tracked.tries_at_door = 0\n        return self._knock",
    ),
    Mutation(
        *(3, "there is no backoff", _CONTROLLER),
        "self.arm(tracked, TimerKind.RETRY, at + profile.retry.wait_seconds(tracked.attempts))",
        "self.arm(tracked, TimerKind.RETRY, at + profile.retry.first_wait_seconds)",
    ),
    Mutation(
        *(3, "a refusal is not repeated when the engine wants", _CONTROLLER),
        "wait = max(wait_seconds, tracked.profile",
        "wait = max(0.0, tracked.profile",
    ),
    Mutation(
        *(3, "an abort that came too early is not repeated", _OBSERVATIONS),
        "        return controller.knock_again(tracked, at)\n",
        "        return NOTHING\n",
    ),
    Mutation(
        *(3, "an API that says yes is an ack", _CONTROLLER),
        "if answer is AbortAnswer.GONE and door.worth",
        "if answer is AbortAnswer.ACCEPTED and door.worth",
    ),
    Mutation(
        *(3, "a stop without evidence is confirmed", _OVERDUE),
        'controller.conclude(tracked, "unconfirmed", ',
        'controller.conclude(tracked, "confirmed", ',
    ),
    Mutation(
        *(4, "what comes back after a cancel goes on", _MACHINE),
        "        EngineEvent.RESUMED: Engine.ABORTING,\n",
        "        EngineEvent.RESUMED: Engine.DISPATCHED,\n",
    ),
    Mutation(
        *(4, "a preemption that completes after the cancel undoes it", _MACHINE),
        "        EngineEvent.PREEMPTED: Engine.ABORTING,\n",
        "        EngineEvent.PREEMPTED: Engine.PARKED,\n",
    ),
    Mutation(
        *(4, "what comes back is not told again", "stops/preemptions.py"),
        "        return controller.knock_again(tracked, at)\n",
        "        return NOTHING\n",
    ),
    Mutation(
        *(4, "what was shelved is not withdrawn", _MACHINE),
        "        for engine in (Engine.UNDISPATCHED, Engine.SHELVED):\n            rules[client, engine]",
        "        for engine in (Engine.UNDISPATCHED,):\n            rules[client, engine]",
    ),
    Mutation(
        *(4, "the preemption stays the cause", "stops/cause.py"),
        "return current is None or (",
        "return current is None or False and (",
    ),
    Mutation(
        *(5, "a client that left is not muted", _CONTROLLER),
        "        tracked.discarding = tracked.muted = True\n        if machine.client is Client.DRAINING:\n",
        "        if machine.client is Client.DRAINING:\n",
    ),
    Mutation(
        *(5, "a stop by somebody else does not mute", _CONTROLLER),
        "        tracked.discarding = tracked.muted = True\n        return self.begin_stop(tracked, at, cause)\n",
        "        return self.begin_stop(tracked, at, cause)\n",
    ),
    Mutation(
        *(5, "a lost engine does not mute", _CONTROLLER),
        "        tracked.discarding = tracked.muted = True\n        if before in STOPPING:\n",
        "        if before in STOPPING:\n",
    ),
    Mutation(
        *(5, "an ack that nobody asked for does not mute", _CONTROLLER),
        "        tracked.discarding = tracked.muted = True\n        effects: list[Effect] = []\n"
        "        if client_before",
        "        effects: list[Effect] = []\n        if client_before",
    ),
    Mutation(
        *(5, "what is emitted for nobody counts as delivered", _OBSERVATIONS),
        "    if tracked.muted:\n        # The engine let",
        "    if False:\n        # The engine let",
    ),
    Mutation(
        *(5, "what passes after the stop counts as delivered", "stops/movements.py"),
        "        if not tracked.discarding:\n            ledgers.tokens_delivered += new\n",
        "        ledgers.tokens_delivered += new\n",
    ),
    Mutation(
        *(6, "more may leave an account than is in it", _REQUEST),
        "            if free < amount:\n                raise self._overdraft(debit, amount)\n",
        "",
    ),
    Mutation(
        *(6, "a book error is not shown", "stops/anomalies.py"),
        "        self.book_errors.append(BookError(at, request_id, text))\n",
        "",
    ),
    Mutation(
        *(6, "a second release after the end goes unnoticed", _OBSERVATIONS),
        "and controller.book.find(event.request_id) is not None:",
        "and False:",
    ),
    Mutation(
        *(7, "the first child that stops is taken for all", _OBSERVATIONS),
        "    alive = [name for name in (tracked.part_places or ()) if name not in finished]\n",
        "    alive: list[str] = []\n",
    ),
    Mutation(
        *(7, "a child is taken for its parent by prefix", _OBSERVATIONS),
        "    tracked = controller.parts.get(event.request_id) or controller.tracked.get(event.request_id)\n",
        "    matches = sorted(n for n in controller.tracked if n.startswith(event.request_id[:2]))\n"
        "    tracked = controller.tracked[matches[-1]] if matches else None\n",
    ),
    Mutation(
        *(8, "a total misses what is taken out", _REQUEST),
        "            totals[debit] -= amount\n",
        "",
    ),
    Mutation(
        *(8, "the open requests are counted by hand, and one is forgotten", _BOOK),
        "            open_requests=len(self._open),\n",
        "            open_requests=self._opened,\n",
    ),
    Mutation(
        *(8, "balances are not derived again", _REQUEST),
        "        if derived != self.balances:\n",
        "        if False:\n",
    ),
    Mutation(
        *(9, "a deadline reports nothing", _OVERDUE),
        "    leaks = controller.book.expire(ledgers, at)\n",
        "    leaks: list[Leak] = []\n",
    ),
    Mutation(
        *(9, "a deadline closes the books", _OVERDUE),
        "    leaks = controller.book.expire(ledgers, at)\n",
        "    leaks = controller.book.expire(ledgers, at)\n"
        "    movements.release_engine_side(ledgers, at, Evidence.NONE)\n",
    ),
    Mutation(
        *(9, "late looks like in time", _REQUEST),
        "EntryState.LATE if obligation.expired else EntryState.RESOLVED",
        "EntryState.RESOLVED",
    ),
    Mutation(
        *(9, "what was given up on counts as settled", _BOOK),
        "        self._written_off += 1\n",
        "        self._settled += 1\n",
    ),
    Mutation(
        *(10, "a timer survives its request", _CONTROLLER),
        "        for kind in list(tracked.timers or ()):\n            self.disarm(tracked, kind)\n        for deadline",
        "        for deadline",
    ),
    Mutation(
        *(10, "a request stays among those of its engine", _CONTROLLER),
        "            self.in_engine.get(tracked.profile.name, {}).pop(tracked.request_id, None)\n",
        "            pass\n",
    ),
    Mutation(
        *(10, "its parts stay known", _CONTROLLER),
        "            self.parts.pop(part, None)\n",
        "            pass\n",
    ),
    Mutation(
        *(10, "a cancelled timer stays in the wheel", _TIMERS),
        "            del bucket[timer.number]\n            if not bucket:\n                bucket.clear()  #",
        "            if not bucket:\n                bucket.clear()  #",
    ),
    Mutation(
        *(10, "what is over is remembered for ever", _BOOK),
        "                del self._recent_by_id[oldest.request_id]\n",
        "                pass\n",
    ),
    Mutation(
        *(11, "open requests have no limit", _BOOK),
        "if len(self._open) >= self.limits.open_requests:",
        "if False:",
    ),
    Mutation(
        *(11, "the entries of a request have no limit", _REQUEST),
        "if sequence >= self.entry_limit and",
        "if False and",
    ),
    Mutation(
        *(11, "the marks of a request have no limit", _REQUEST),
        "        if len(self.marks) < self.entry_limit:\n",
        "        if True:\n",
    ),
    Mutation(
        *(11, "models have no limit", _BOOK),
        "if len(self._totals) >= self.limits.engine_models:",
        "if False:",
    ),
    Mutation(
        *(11, "overdue requests have no limit", _BOOK),
        "            len(self._overdue) >= self.limits.overdue\n            and request",
        "            False\n            and request",
    ),
    Mutation(
        *(11, "timers have no limit", _TIMERS),
        "if self._armed >= self._limit:",
        "if False:",
    ),
    Mutation(
        *(11, "attempts have no limit", _CONTROLLER),
        "profile is None or tracked.attempts >= profile.retry.tries:",
        "profile is None:",
    ),
    Mutation(
        *(11, "book errors have no limit", "stops/anomalies.py"),
        "deque(maxlen=limit)",
        "deque()",
    ),
    Mutation(
        *(12, "a dead engine keeps what it held", "stops/gauges.py"),
        '        movements.release_engine_side(tracked.ledgers, at, Evidence.STREAM_CLOSED, "the engine is gone")\n',
        "",
    ),
    Mutation(
        *(12, "an engine that dies takes the requests of others along", "stops/gauges.py"),
        "    for tracked in list(controller.in_engine.get(engine, {}).values()):\n",
        "    for tracked in list(controller.tracked.values()):\n",
    ),
    Mutation(
        *(12, "nobody is told whether a retry is safe", "stops/advice.py"),
        'Engine.LOST: RetryAdvice(False, "the engine was lost and may have been working"),',
        "",
    ),
    Mutation(
        *(12, "what is open cannot be written down", _REQUEST),
        "            closed_at=self.closed_at,\n",
        "            closed_at=self.closed_at or self.last_at,\n",
    ),
]
