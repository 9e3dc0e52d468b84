"""The stage of one scenario: open calls, bring them into a state, and stop them.

A *victim* is a call whose stop is judged. A *companion* is there to keep the engine busy, or to see whether
a stop hits somebody else. Whatever is still open when the scenario's own lines are over is dismissed by
`settle`, so that no scenario leaves load behind.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from stopguard.audit.plan import Budget, Plan
from stopguard.audit.target import Observer, Reading, Row, TargetModel
from stopguard.audit.watch import Trace, Watch
from stopguard.audit.world import Call, Exchange, Leaving, Reply, World
from stopguard.engines import AbortReply
from stopguard.stops import AbortAnswer

__all__ = ["Canary", "Measured", "Skip", "Stage", "Ticket", "why"]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_WORDS = "the river and the stone of the small house by the bridge "

#: How often events are fetched while nothing else is looked at.
_EVENTS_SECONDS = 1.0

#: What a prompt's line of 12 words takes, in tokens, if the tokenizer is a poor one.
_TOKENS_A_LINE = 18

Role = Literal["victim", "companion"]


class Skip(Exception):
    """The state cannot be staged here; the message is the reason that is printed."""


class Measured(msgspec.Struct):
    """What the first calls have shown of the engine; all in seconds, tokens as tokens."""

    first_token_seconds: float = 0.1
    token_seconds: float = 0.02
    short_seconds: float = 0.5


class Canary(msgspec.Struct, frozen=True):
    """A fixed prompt and what a quiet engine says to it. `stable`: it said the same under plain load."""

    number: int
    prompt: str
    tokens: int
    cold: str
    stable: bool = True


class Ticket(msgspec.Struct, eq=False, kw_only=True):
    """One call of this scenario."""

    exchange: Exchange
    tag: str
    role: Role
    tokens: int
    sequences: int
    stream: bool
    opened_at: float
    #: Ids under which the engine knows it, as far as it has told.
    engine_ids: set[str] = set()
    stopped_at: float | None = None
    how: str = ""
    #: A companion that has to reach its end, and what it must say.
    must_finish: bool = False
    canary: Canary | None = None
    dismissed: bool = False

    @property
    def reply(self) -> Reply:
        return self.exchange.reply


class Stage:
    """Everything that a scenario may touch."""

    def __init__(
        self,
        *,
        world: World,
        watch: Watch,
        plan: Plan,
        budget: Budget,
        model: TargetModel,
        measured: Measured,
        canaries: list[Canary],
        numbers: random.Random,
        through_gateway: bool = False,
        initial: Reading | None = None,
    ) -> None:
        self.world = world
        self.watch = watch
        self.plan = plan
        self.model = model
        self.measured = measured
        self.canaries = canaries
        self.numbers = numbers
        self.through_gateway = through_gateway
        #: The engine's totals when the audit began.
        self.initial = initial
        self.budget = budget
        self.tickets: list[Ticket] = []
        self.notes: list[str] = []
        #: Set by a scenario that judges something of its own: (ledger, amount, unit, sentence).
        #: The same for what is too slow: (ledger, measured seconds, limit, sentence).
        self.slowness: list[tuple[str, float, float, str]] = []
        #: Ledgers that this scenario has really looked at, beside those that every stop shows.
        self.looked_at: set[str] = set()

    @property
    def observer(self) -> Observer:
        return self.watch.observer

    @property
    def events(self) -> bool:
        """Whether single requests can be followed."""
        return self.observer.facts.sees_events

    # Sizes ----------------------------------------------------------------------------------------

    def long_tokens(self, sequences: int = 1, share: float = 0.25, words: int = 3) -> int:
        """Tokens for a call that outlives the watch, as far as context and pool permit beside its prompt."""
        wanted = int(self.plan.leak_seconds * 2 / max(1e-4, self.measured.token_seconds))
        limits = [self.plan.tokens_max, wanted]
        if self.model.context_tokens:
            limits.append(self.model.context_tokens - 64 - _TOKENS_A_LINE * max(words, 4))
        reading = self.watch.reading
        if reading is not None and reading.gauges.blocks_total and self.pool_tokens:
            limits.append(int(self.pool_tokens * share / sequences))
        return max(16, min(limits))

    @property
    def pool_tokens(self) -> int:
        """Tokens that fit into the whole pool; 0 when that is not known."""
        reading = self.watch.reading
        total = reading.gauges.blocks_total if reading is not None else None
        return (total or 0) * self.block_tokens

    #: Tokens a block; learnt by the first call, 16 until then.
    block_tokens = 16

    # Calls ----------------------------------------------------------------------------------------

    async def open(
        self,
        role: Role = "victim",
        *,
        stream: bool = True,
        tokens: int | None = None,
        words: int = 3,
        sequences: int = 1,
        prompt: Any = None,
        extra: dict[str, Any] | None = None,
        must_finish: bool = False,
        canary: Canary | None = None,
        after: Exchange | None = None,
        keep_alive: bool = False,
        bind: bool = True,
        tag: str = "",
    ) -> Ticket:
        """Send a call. Its prompt is unlike any other, so that nothing of it is in a prefix cache."""
        tag = tag or f"audit-{self.numbers.getrandbits(96):024x}"
        asked = canary.tokens if canary else tokens if tokens is not None else self.long_tokens(sequences, words=words)
        text = canary.prompt if canary else self.prompt(words)
        body: dict[str, Any] = {
            "model": self.model.name,
            "max_tokens": asked,
            "temperature": 0,
            "stream": stream,
            **self.observer.facts.features.get("endless", {}),
        }
        if sequences > 1:
            body["n"] = sequences
            body["temperature"] = 1  # several choices of one greedy text make no sense, and some engines refuse to
        if prompt is not None:
            path, body["prompt"] = COMPLETIONS, prompt
        else:
            path, body["messages"] = CHAT, [{"role": "user", "content": text}]
        headers, fields = self.observer.place(tag)
        body |= fields
        body |= extra or {}
        self.budget.spend(asked * sequences * (len(prompt) if isinstance(prompt, list) else 1))
        opened_at = self.world.now()
        call = Call(path=path, body=body, headers=headers, keep_alive=keep_alive)
        exchange = await self.world.open(call, after)
        ticket = Ticket(
            exchange=exchange,
            tag=tag,
            role=role,
            tokens=asked,
            sequences=sequences * (len(prompt) if isinstance(prompt, list) else 1),
            stream=stream,
            opened_at=opened_at,
            must_finish=must_finish or canary is not None,
            canary=canary,
        )
        self.tickets.append(ticket)
        if bind and self.events:
            await self.bind(ticket)
        return ticket

    async def canary(self, number: int, **more: Any) -> Ticket:
        """A companion that must reach its end and say what it said to a quiet engine."""
        return await self.open("companion", canary=self.canaries[number % len(self.canaries)], **more)

    def prompt(self, words: int) -> str:
        """A prompt of about `words` × 12 words that nobody has sent before."""
        return f"{self.numbers.getrandbits(64):016x} " + _WORDS * words

    async def bind(self, ticket: Ticket, seconds: float = 1.0) -> bool:
        """Find out under which ids the engine knows the call; False when it does not say within `seconds`."""
        until = self.world.now() + seconds
        while True:
            await self.watch.events()
            self._match(ticket)
            if ticket.engine_ids or ticket.reply.ended:
                return bool(ticket.engine_ids)
            if self.world.now() >= until:
                return False
            await self.world.sleep(min(0.005, self.watch.interval_seconds))

    def _match(self, ticket: Ticket) -> None:
        """Ids that carry our tag are ours; without any of them, on an engine of our own, whatever is new is."""
        unbound = self.watch.unbound
        named = [name for name in unbound if ticket.tag in name]
        if not named and not self.plan.shared and not any(ticket.tag in name for name in self.watch.traces):
            tags = [other.tag for other in self.tickets]
            named = [name for name in unbound if not any(tag in name for tag in tags)]
        ticket.engine_ids |= set(named)
        self.watch.unbound = [name for name in unbound if name not in named]

    def traces(self, ticket: Ticket) -> list[Trace]:
        """What the engine's events have told of the call's sequences."""
        if not ticket.engine_ids:
            self._match(ticket)
        # An id that was taken for ours while it had no name may turn out to be somebody else's.
        others = [other.tag for other in self.tickets if other is not ticket]
        found = self.watch.children(ticket.engine_ids)
        return [trace for trace in found if not any(tag in trace.request_id for tag in others)]

    # States ---------------------------------------------------------------------------------------

    async def speaking(self, ticket: Ticket, events: int = 3) -> None:
        """Wait until the call is in the middle of its output. `Skip` when it never gets there."""
        seconds = max(self.plan.deadline_seconds * 2, self.measured.first_token_seconds * 20)
        if ticket.stream:
            reached = await self.world.wait(lambda: ticket.reply.events >= events or ticket.reply.ended, seconds)
        else:
            reached = await self.working(ticket, seconds)
        if not reached or (ticket.reply.ended and not self._went_well(ticket)):
            raise Skip(f"a call did not get as far as its output ({why(ticket.reply)})")

    async def working(self, ticket: Ticket, seconds: float) -> bool:
        """Wait until a call that shows nothing is being computed; by its row, else by the time it needs."""
        until = self.world.now() + seconds
        while self.events and self.world.now() < until and not ticket.reply.ended:
            if any(trace.computed for trace in self.traces(ticket)):
                return True
            await self.watch.events()
            await self.world.sleep(max(0.002, self.measured.token_seconds / 2))
        if self.events:
            return ticket.reply.ended
        await self.world.sleep(self.measured.first_token_seconds * 2 + self.measured.token_seconds * 4)
        return True

    async def reading(self) -> Reading | None:
        """The engine's totals now."""
        return await self.watch.poll()

    def row(self, ticket: Ticket) -> Row | None:
        """The call's row in the engine's own list, as of the last reading."""
        rows = self.watch.reading.rows if self.watch.reading is not None else None
        ids = ticket.engine_ids
        return next((row for row in rows or () if row.request_id in ids or row.parent_id in ids), None)

    def _went_well(self, ticket: Ticket) -> bool:
        return ticket.reply.complete and ticket.reply.status == 200

    # Stops ----------------------------------------------------------------------------------------

    async def leave(self, ticket: Ticket, how: Leaving = "fin") -> None:
        """The client goes."""
        if ticket.stopped_at is None:
            ticket.stopped_at, ticket.how = self.world.now(), how
        await ticket.exchange.leave(how)

    async def abort(self, ticket: Ticket, *, quietly: bool = False) -> AbortReply:
        """Abort by id, and again when it is refused for the moment, until the deadline."""
        ids = self.ids(ticket)
        if not ids and not quietly:
            raise Skip("the id of a request is not known before its first output")
        if ticket.stopped_at is None and not quietly:
            ticket.stopped_at, ticket.how = self.world.now(), "abort"
        reply = AbortReply(answer=AbortAnswer.FAILED)
        for engine_id in ids:
            reply = await self.knock(engine_id)
        return reply

    def ids(self, ticket: Ticket) -> list[str]:
        """The ids to abort a call by; empty while none is known."""
        known = sorted(ticket.engine_ids) or [self.observer.engine_id(ticket.tag, ticket.reply.response_id)]
        return [name for name in known if name]

    async def knock(self, engine_id: str) -> AbortReply:
        """Abort by id, and again while the engine says "not now"."""
        until = self.world.now() + self.plan.deadline_seconds
        while True:
            reply = await self.observer.abort(engine_id)
            if reply.answer is not AbortAnswer.REFUSED or self.world.now() >= until:
                return reply
            await self.world.sleep(max(0.002, reply.retry_after_seconds))

    def need_abort_door(self) -> None:
        """`Skip` unless requests can be aborted by id here."""
        if not self.observer.facts.abort_door:
            raise Skip("nothing but closing the connection stops a request here")
        if self.through_gateway and not self.events:
            raise Skip("behind a gateway the engine's ids are not known")

    def feature(self, name: str) -> dict[str, Any]:
        """The body fields that ask for a feature, or `Skip`."""
        found = self.observer.facts.features.get(name)
        if found is None:
            raise Skip(f"it is not known how to ask this engine for it ({name})")
        return dict(found)

    def victims(self) -> list[Ticket]:
        return [ticket for ticket in self.tickets if ticket.role == "victim"]

    def companions(self) -> list[Ticket]:
        return [ticket for ticket in self.tickets if ticket.role == "companion"]

    async def all_ended(self, tickets: Iterable[Ticket], seconds: float) -> bool:
        """Wait for the ends of these calls."""
        waiting = list(tickets)
        until = self.world.now() + seconds
        while not await self.world.wait(
            lambda: all(ticket.reply.ended for ticket in waiting), min(_EVENTS_SECONDS, until - self.world.now())
        ):
            await self.watch.events()  # whoever keeps a log keeps only its end
            if self.world.now() >= until:
                return False
        return True


def why(reply: Reply) -> str:
    """In a few words, how a call went wrong."""
    if reply.errors:
        return f"HTTP {reply.status}: {reply.errors[0][:120]}"
    if reply.status is not None and reply.status != 200:
        return f"HTTP {reply.status}"
    return reply.failure or ("it ended without a text" if reply.complete else "nothing came")
