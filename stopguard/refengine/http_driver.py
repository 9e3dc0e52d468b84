"""The driver: it owns the clock, steps the core when an event is due, and hands outputs to whoever waits.

The engine lives on its own time line. `RealClock` maps it to the machine's monotonic clock (times
`speed`); `VirtualClock` stands still until somebody moves it. Either way each event is played at its own
moment, in order, before a command that comes later: a late wake-up delays delivery, never the engine.
The same commands at the same times therefore give the same frames.

A `Ticket` lives exactly as long as the engine's request: from `submit` to the last sequence's last
output. An `Inbox` lives as long as the HTTP exchange. Either may end first.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import msgspec

from stopguard.errors import BookkeepingError, EngineError
from stopguard.refengine.engine import ReferenceEngine
from stopguard.refengine.interface import AbortAnswer, Door, EngineCrashed, Output, RequestSpec, StepResult

__all__ = ["Clock", "Driver", "Inbox", "RealClock", "Ticket", "VirtualClock"]

#: Steps played in one go. A process that was stopped for a while does not play the whole time after it.
_CATCH_UP_STEPS_MAX: Final = 512
#: More steps than this without a pause are a loop without an end.
_STEPS_AT_ONCE_MAX: Final = 1_000_000
#: Lag beyond which the engine's time is put back, so that it goes on from where it is.
_LAG_SECONDS_MAX: Final = 1.0


class Clock(Protocol):
    """The engine's time line, in seconds."""

    def now(self) -> float:
        """Engine time."""

    def wall(self) -> float:
        """Seconds since the epoch, for what clients read."""

    def delay(self, at: float) -> float:
        """Real seconds from now until engine time `at`, at least 0."""

    def slip(self, seconds: float) -> None:
        """Put engine time back by `seconds`: the process did not run for that long."""


class RealClock:
    """The monotonic clock, `speed` times as fast. At speed 1 engine time *is* the monotonic clock."""

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed
        self._real = self._engine = time.monotonic()

    def now(self) -> float:
        return self._engine + (time.monotonic() - self._real) * self.speed

    def wall(self) -> float:
        return time.time()

    def delay(self, at: float) -> float:
        return max(0.0, (at - self.now()) / self.speed)

    def slip(self, seconds: float) -> None:
        self._engine -= seconds


class VirtualClock:
    """Time that moves when `at` is set, and never back."""

    #: Where virtual time begins on the wall clock, so that bodies are equal in every run.
    EPOCH: Final = 1_700_000_000.0

    def __init__(self, at: float = 0.0) -> None:
        self.at = at

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.EPOCH + self.at

    def delay(self, at: float) -> float:
        return max(0.0, at - self.at)

    def slip(self, seconds: float) -> None:
        """Nothing: virtual time has no lag."""


class Inbox:
    """What an HTTP exchange waits for: outputs, the client's departure, or the engine's death.

    Bounded by what its requests may generate, since nobody else writes to it.
    """

    __slots__ = ("_outputs", "_waiter", "client_gone", "failure")

    def __init__(self) -> None:
        self._outputs: deque[Output] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.client_gone = False
        self.failure = ""

    def put(self, output: Output) -> None:
        self._outputs.append(output)
        self._wake()

    def leave(self) -> None:
        """The client has gone: nobody reads what comes now."""
        self.client_gone = True
        self._wake()

    def fail(self, reason: str) -> None:
        """No output will come any more."""
        self.failure = self.failure or reason
        self._wake()

    async def take(self) -> list[Output]:
        """Everything that has come, at least one output; empty when there will be none (see the two flags)."""
        while not self._outputs and not self.client_gone and not self.failure:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.client_gone:
            return []
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Ticket(msgspec.Struct, eq=False):
    """One live request of the engine. `handle` is the name under which clients may abort it (not always the id)."""

    request_id: str
    handle: str
    inbox: Inbox | None
    #: Numbers of the sequences whose last output has not come.
    open: set[int]
    #: What whoever sent it calls it (`X-Request-Id`): the name that a probe knows it by.
    owner: str = ""


class Driver:
    """Steps one engine. Not thread-safe: everything happens in one event loop."""

    def __init__(
        self, engine: ReferenceEngine, clock: Clock, on_step: Iterable[Callable[[StepResult], None]] = ()
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.on_step = list(on_step)
        #: Why no step is taken any more; empty while the engine lives.
        self.failure = ""
        self.tickets: dict[str, Ticket] = {}
        self.by_handle: dict[str, list[str]] = {}
        self.by_owner: dict[str, list[str]] = {}
        #: Outputs that nobody waited for: their client had gone, or a fault made them.
        self.outputs_unclaimed = 0
        self.slipped_seconds = 0.0
        self.prompt_tokens_ended = 0
        self.cached_tokens_ended = 0
        self._wake: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None

    # Commands -------------------------------------------------------------------------------------

    def submit(self, spec: RequestSpec, handle: str, inbox: Inbox, owner: str = "") -> Ticket:
        """Give the engine a request whose outputs go to `inbox`. Raises what `ReferenceEngine.submit` raises."""
        at = self.catch_up()
        self._check_alive()
        self.engine.submit(spec, at)
        ticket = Ticket(spec.request_id, handle, inbox, set(range(spec.sampling.n)), owner)
        self.tickets[spec.request_id] = ticket
        for index, key in ((self.by_handle, handle), (self.by_owner, owner)):
            if key:
                index.setdefault(key, []).append(spec.request_id)
        self.wake()
        return ticket

    def client_gone(self, request_id: str) -> None:
        """Tell the engine that the connection has closed. Harmless after the end, or after its death."""
        at = self.catch_up()
        if not self.failure and request_id in self.tickets:
            self.engine.client_gone(request_id, at)
            self.wake()

    def abort(self, handle: str, door: Door = "api") -> list[AbortAnswer]:
        """Knock for every live request with this handle (or for the handle itself, if there is none)."""
        at = self.catch_up()
        self._check_alive()
        names = list(self.by_handle.get(handle, ())) or [handle]
        answers = [self.engine.abort(name, at, door) for name in names]
        self._after_command()
        return answers

    def command(self, call: Callable[[float], None]) -> None:
        """Run any other command of the engine at the present engine time."""
        at = self.catch_up()
        self._check_alive()
        call(at)
        self._after_command()

    def forget(self, tickets: Iterable[Ticket]) -> None:
        """The exchange has ended: what its requests still deliver is for nobody."""
        for ticket in tickets:
            ticket.inbox = None

    def _after_command(self) -> None:
        self._look_for_death()
        self.wake()

    def _check_alive(self) -> None:
        if self.failure:
            raise EngineCrashed(f"the engine's core is dead: {self.failure}")

    # Time -----------------------------------------------------------------------------------------

    def due_at(self) -> float | None:
        """Engine time of the next event; None when only a command can change anything."""
        return None if self.failure else self.engine.next_event_at(self.engine.now)

    def catch_up(self) -> float:
        """Play every event that is due, and return the present engine time (never before the engine's own)."""
        now = self.clock.now()
        steps = 0
        while (due := self.due_at()) is not None and due <= now:
            if steps >= _STEPS_AT_ONCE_MAX:
                raise BookkeepingError(f"the engine wants a step at {due:.6f} s for ever: {self.engine!r}")
            if steps >= _CATCH_UP_STEPS_MAX and now - due > _LAG_SECONDS_MAX:
                self.slipped_seconds += now - due
                self.clock.slip(now - due)
                now = due
            self._step(due)
            steps += 1
        return max(now, self.engine.now)

    def _step(self, at: float) -> None:
        try:
            result = self.engine.step(at)
        except (BookkeepingError, EngineError) as error:
            # A real core would die of it as well; its clients get an error instead of silence.
            self._die(str(error))
            return
        for output in result.outputs:
            self._deliver(output)
        for observer in self.on_step:
            observer(result)
        self._look_for_death()

    def _deliver(self, output: Output) -> None:
        ticket = self.tickets.get(output.request_id)
        if ticket is None:
            self.outputs_unclaimed += 1
            return
        if ticket.inbox is None:
            self.outputs_unclaimed += 1
        else:
            ticket.inbox.put(output)
        if output.finish_reason is None:
            return
        if output.usage is not None:
            self.prompt_tokens_ended += output.usage.prompt_tokens
            self.cached_tokens_ended += output.usage.cached_tokens
        ticket.open.discard(output.index)
        if not ticket.open:
            self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        del self.tickets[ticket.request_id]
        for index, key in ((self.by_handle, ticket.handle), (self.by_owner, ticket.owner)):
            if key:
                index[key].remove(ticket.request_id)
                if not index[key]:
                    del index[key]

    def _look_for_death(self) -> None:
        if self.engine.crashed and not self.failure:
            self._die(self.engine.crashed)

    def _die(self, reason: str) -> None:
        self.failure = reason
        self.fail_all(reason)

    def fail_all(self, reason: str) -> None:
        """No ticket will get another output."""
        for ticket in list(self.tickets.values()):
            if ticket.inbox is not None:
                ticket.inbox.fail(reason)
            self._end(ticket)

    # Real time ------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something has changed: look at the next event again."""
        if self._wake is not None:
            self._wake.set()

    def start(self) -> None:
        """Step in real time from now on, as one task of the running loop."""
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run(self._wake), name="reference engine")

    async def stop(self) -> None:
        """End the task; requests that still wait fail."""
        task, self._task, self._wake = self._task, None, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self.fail_all("the server is shutting down")
        if task is not None and not task.cancelled():
            task.result()  # it can only have ended by an error, which must not get lost

    async def _run(self, wake: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        while True:
            wake.clear()
            try:
                self.catch_up()
            except Exception as error:
                self._die(f"internal error: {error!r}")
                raise
            due = self.due_at()
            timer = None if due is None else loop.call_later(self.clock.delay(due), wake.set)
            try:
                await wake.wait()
            finally:
                if timer is not None:
                    timer.cancel()
