"""The load of the benchmark `urgent`: streams that keep an engine full, urgent requests between them, one gateway at
a time in front of it.

Every background stream is one of a few known ones, whose whole text was asked before, when nobody else was there: what
comes out under any way must be that text. A way of going first is a gateway's settings, nothing else: the clients and
the engine are the same in all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from time import monotonic

import msgspec

from stopguard.audit.client import SocketExchange, SocketWorld
from stopguard.engines.registry import create
from stopguard.gateway.preempting import PreemptingStatistics
from stopguard.gateway.probing import ProbeSettings, Probing
from stopguard.gateway.server import Gateway
from stopguard.gateway.settings import EngineSettings, GatewaySettings, Listener
from stopguard.preemption import ClassSettings, Mode, PreemptionSettings
from stopguard.testing.staging import Shape

__all__ = ["Front", "Load", "Streams", "Way", "fronting", "references_of"]

_START_SECONDS = 60.0
_ANSWER_SECONDS = 120.0
BACKGROUND = {"X-StopGuard-Class": "background"}
URGENT = {"X-StopGuard-Class": "urgent"}


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of one engine. `clients` ask one stream after another, `streams` different ones there are.

    Lengths in words of a prompt and in tokens of an answer. An urgent request comes each `gap_seconds`, give or take
    half of it, whatever became of the one before. `places` is how many requests the gateway has at the engine at
    once, all of which are taken when it is full; 0: as many as come, and the engine's KV says what is full. One that
    `reserves` room for what its requests may still want is full when somebody waits.
    """

    clients: int
    tokens: int
    words: int = 30
    streams: int = 12
    urgent_words: int = 130
    urgent_tokens: int = 8
    gap_seconds: float = 3.0
    places: int = 0
    block_tokens: int = 1
    reserves: bool = False


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way of going first. `mode` is `preemption.mode`; with `probe` the gateway hears the probe in the engine.

    `apart` is the distance of the two classes in the engine's `priority` (0: the default classes as they are).
    """

    name: str
    mode: Mode
    probe: bool = False
    apart: int = 0

    def settings(self) -> PreemptionSettings:
        """Anybody may be urgent, and the default holds for the rest."""
        if not self.apart:
            return PreemptionSettings(mode=self.mode, ceiling="urgent")
        classes = {
            "background": ClassSettings(urgency=0),
            "standard": ClassSettings(urgency=self.apart - 1),
            "urgent": ClassSettings(urgency=self.apart, preempts=True, preemptible=False),
        }
        return PreemptionSettings(mode=self.mode, ceiling="urgent", classes=classes)


class Front:
    """A gateway that goes the way `way`, and a client of it."""

    def __init__(self, way: Way, gateway: Gateway, world: SocketWorld, shape: Shape, load: Load) -> None:
        self.way = way
        self.gateway = gateway
        self.world = world
        self.shape = shape
        self.load = load

    async def ask(self, prompt: str, tokens: int, headers: dict[str, str]) -> SocketExchange:
        """Send one streaming request."""
        return await self.world.open(self.shape.call(prompt, tokens=tokens, headers=headers))

    async def whole(self, exchange: SocketExchange) -> str:
        """Its whole text; `RuntimeError` when it does not come to its end."""
        reply = exchange.reply
        await self.world.wait(lambda: reply.ended, _ANSWER_SECONDS)
        if not reply.complete or reply.errors or reply.status != 200:
            said = "; ".join(reply.errors) or reply.failure or f"no end within {_ANSWER_SECONDS:.0f} s"
            raise RuntimeError(f"{self.way.name}: a request ended with status {reply.status}: {said}")
        return reply.text

    async def prompt_tokens(self, words: int) -> int:
        """How many tokens the engine makes of a prompt of so many words."""
        call = self.shape.call(self.shape.prompt(0, words), tokens=1, stream=False)
        answer = await self.world.control("POST", call.path, call.body)
        return int(answer.json()["usage"]["prompt_tokens"])

    async def urgent(self, number: int) -> float:
        """Seconds from sending one urgent request to its first token."""
        sent_at = self.world.now()
        exchange = await self.ask(self.shape.prompt(number, self.load.urgent_words), self.load.urgent_tokens, URGENT)
        await self.whole(exchange)
        assert exchange.reply.first_at is not None
        return exchange.reply.first_at - sent_at

    def statistics(self) -> PreemptingStatistics | None:
        """What was preempted, where there is preempting."""
        return None if self.gateway.preempting is None else self.gateway.preempting.statistics()

    def pressures(self) -> Counter[str]:
        """Preemptions by why room was wanted."""
        found: Counter[str] = Counter()
        if self.gateway.preempting is not None:
            for (_, pressure), number in self.gateway.preempting.coordinator.victims.items():
                found[pressure] += number
        return found


@contextlib.asynccontextmanager
async def fronting(
    kind: str, url: str, way: Way, shape: Shape, load: Load, probes: ProbeSettings | None
) -> AsyncIterator[Front]:
    """The gateway, once it knows the engine (and, where it should, the probe in it)."""
    engine = create(kind, kind, url)
    limit = EngineSettings(concurrent_requests=load.places) if load.places else EngineSettings()
    settings = GatewaySettings(listeners=(Listener(port=0),), preemption=way.settings())
    gateway = Gateway([(engine, limit)], settings)
    await gateway.start()
    probing = Probing(gateway, probes, {kind: kind}) if way.probe and probes is not None else None
    host, port = gateway.addresses[0]
    world = SocketWorld(f"http://{host}:{port}", url)
    try:
        if probing is not None:
            await probing.start()
        member = gateway.fleet.members[0]
        async with asyncio.timeout(_START_SECONDS):
            while member.models is None or member.identity is None or member.profile.probed is not way.probe:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield Front(way, gateway, world, shape, load)
    finally:
        await world.aclose()
        await gateway.shutdown(drain_seconds=5.0)
        if probing is not None:
            await probing.close()


async def references_of(front: Front) -> list[str]:
    """The text of every background stream, asked alone."""
    texts = []
    for number in range(front.load.streams):
        exchange = await front.ask(front.shape.prompt(number, front.load.words), front.load.tokens, BACKGROUND)
        texts.append(await front.whole(exchange))
    return texts


class Streams:
    """The background: clients that ask one known stream after another, until they are told to stop.

    `characters` counts what has come so far. `different` are the numbers of streams whose text was another one.
    """

    def __init__(self, front: Front, references: list[str], choices: random.Random) -> None:
        self.front = front
        self.references = references
        self.ended = 0
        self.different: list[int] = []
        self._characters_ended = 0
        self._free = list(range(len(references)))
        choices.shuffle(self._free)
        self._running: dict[int, SocketExchange] = {}
        self._over = False

    @property
    def characters(self) -> int:
        """Characters of text that have come, of all streams."""
        return self._characters_ended + sum(len(each.reply.text) for each in self._running.values())

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """All clients at work; on leaving the block each ends its stream first."""
        async with asyncio.TaskGroup() as group:
            for number in range(self.front.load.clients):
                group.create_task(self._client(0.15 * number))
            try:
                yield
            finally:
                self._over = True

    async def _client(self, wait_seconds: float) -> None:
        await asyncio.sleep(wait_seconds)
        while not self._over:
            number = self._free.pop(0)
            prompt = self.front.shape.prompt(number, self.front.load.words)
            exchange = await self.front.ask(prompt, self.front.load.tokens, BACKGROUND)
            self._running[number] = exchange
            text = await self.front.whole(exchange)
            del self._running[number]
            self._characters_ended += len(text)
            self._free.append(number)
            self.ended += 1
            if text != self.references[number]:
                self.different.append(number)

    async def full(self, tokens: int, seconds: float) -> bool:
        """Wait until a prompt of so many tokens has no room at the engine; whether that came about in time."""
        engine, load = self.front.gateway.fleet.members[0].engine, self.front.load
        due_at = monotonic() + seconds
        while monotonic() < due_at:
            if load.places:
                if sum(each.reply.events > 0 for each in self._running.values()) >= load.places:
                    return True
            else:
                gauges = await engine.gauges()
                assert gauges is not None
                assert gauges.blocks_used is not None
                assert gauges.blocks_total is not None
                if load.reserves and gauges.waiting:
                    return True
                if (gauges.blocks_total - gauges.blocks_used) * load.block_tokens < tokens:
                    return True
            await asyncio.sleep(max(0.05, engine.gauge_seconds))
        return False


def numbers_from(first: int) -> Iterator[int]:
    """Numbers for prompts that nobody has asked before."""
    while True:
        yield first
        first += 1
