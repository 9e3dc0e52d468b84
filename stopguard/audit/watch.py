"""Collecting evidence: one trace for each request that the engine speaks of, and its totals over time.

A trace is folded from events, never polled, so that its times are the engine's own. Where there are no
events the totals are all there is, and a time is the moment at which a reading showed it, which is later
than the truth by up to one polling interval.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from stopguard.audit.target import Happening, Observer, Reading, Submitted
from stopguard.audit.world import World
from stopguard.errors import LimitReached
from stopguard.probe import wire

__all__ = ["Trace", "Watch"]

TRACES_MAX = 20_000
#: Finish reasons that say that somebody stopped the request.
STOPPED = frozenset({"abort", "aborted", "cancelled", "canceled", "abandoned"})


class Trace(msgspec.Struct):
    """What the engine's events have told of one sequence. Times on the world's clock, `None` until told."""

    request_id: str
    parent_id: str = ""
    submitted_at: float | None = None
    added_at: float | None = None
    arrived_at: float | None = None
    applied_at: float | None = None
    gone_at: float | None = None
    finished_at: float | None = None
    returned_at: float | None = None
    last_at: float = 0.0
    reason: str = ""
    place: str = ""
    noops: int = 0
    refusals: int = 0
    preemptions: int = 0
    blocks_held: int = 0
    blocks_returned: int = 0
    host_blocks: int = 0
    slots: dict[str, int] = {}
    computed: int = 0
    emitted: int = 0
    dropped: int = 0
    emitted_after_gone: int = 0
    #: It was put back into a queue after its abort had been applied.
    resurrected: bool = False

    @property
    def live(self) -> bool:
        """The engine has it, as far as it has said."""
        return self.gone_at is None

    @property
    def blocks_kept(self) -> int:
        return self.blocks_held - self.blocks_returned

    @property
    def in_flight(self) -> int:
        """Tokens computed and neither handed on nor dropped; negative when more went out than was computed."""
        return self.computed - self.emitted - self.dropped

    @property
    def closed(self) -> bool:
        """It holds nothing and is nowhere."""
        return (
            not self.live
            and self.blocks_kept <= 0
            and self.host_blocks <= 0
            and self.in_flight <= 0
            and not any(self.slots.values())
        )

    @property
    def ended_by_itself(self) -> bool:
        """It ran to its own end: no abort was applied to it."""
        return not self.live and self.applied_at is None and bool(self.reason) and self.reason not in STOPPED

    def wasted(self, since: float, log: Iterable[tuple[float, int]]) -> int:
        """Tokens computed after `since`, from `log` (time, tokens)."""
        return sum(tokens for at, tokens in log if at > since)


class Watch:
    """The evidence of one audit. `poll` never reads more often than the observer declares safe."""

    def __init__(self, world: World, observer: Observer) -> None:
        self._world = world
        self.observer = observer
        self.traces: dict[str, Trace] = {}
        #: Ids that the engine has taken and that no call of ours has been matched with.
        self.unbound: list[str] = []
        self.reading: Reading | None = None
        self.gaps = 0
        self.readings = 0
        self.token_log: dict[str, list[tuple[float, int]]] = {}
        self._polled_at = -1e9

    @property
    def interval_seconds(self) -> float:
        return self.observer.facts.safe_interval_seconds

    def forget(self) -> None:
        """Begin anew: what was traced before belongs to an earlier scenario."""
        self.traces = {name: trace for name, trace in self.traces.items() if not trace.closed and trace.live}
        self.token_log = {name: log for name, log in self.token_log.items() if name in self.traces}
        self.unbound.clear()
        self.gaps = 0

    async def events(self) -> None:
        """Take the events alone: where they come at all, they disturb nothing."""
        happenings, gap = await self.observer.events()
        self.gaps += gap
        for happening in happenings:
            self._fold(happening)

    async def poll(self) -> Reading | None:
        """Events and totals; waits first, if the last time was too short ago."""
        wait = self._polled_at + self.interval_seconds - self._world.now()
        if wait > 0:
            await self._world.sleep(wait)
        self._polled_at = self._world.now()
        self.readings += 1
        await self.events()
        self.reading = await self.observer.read()
        return self.reading

    def children(self, ids: Iterable[str]) -> list[Trace]:
        """The traces of these ids: themselves, and the sequences whose parent they are."""
        wanted = set(ids)
        found = [trace for trace in self.traces.values() if trace.request_id in wanted or trace.parent_id in wanted]
        parents = {trace.parent_id for trace in found if trace.parent_id}
        return [trace for trace in found if trace.request_id not in parents]

    def _trace(self, request_id: str) -> Trace:
        trace = self.traces.get(request_id)
        if trace is None:
            if len(self.traces) >= TRACES_MAX:
                raise LimitReached("traced requests", TRACES_MAX, "audit an engine that serves nobody else")
            trace = self.traces[request_id] = Trace(request_id)
        return trace

    def _fold(self, happening: Happening) -> None:
        if isinstance(happening, wire.AbortNoop) and happening.request_id not in self.traces:
            return  # an abort of an id that never was
        trace = self._trace(happening.request_id)
        at = happening.at
        trace.last_at = max(trace.last_at, at)
        match happening:
            case Submitted():
                if trace.submitted_at is None:
                    trace.submitted_at = at
                    if trace.added_at is None:
                        self.unbound.append(trace.request_id)
            case wire.Added():
                trace.added_at, trace.parent_id = at, happening.parent_id
                if trace.submitted_at is None and not happening.parent_id:
                    self.unbound.append(trace.request_id)
            case wire.Moved():
                self._moved(trace, happening.place, at)
            case wire.BlocksHeld():
                trace.blocks_held += happening.blocks
            case wire.BlocksReturned():
                trace.blocks_returned += happening.blocks
                trace.returned_at = at
            case wire.SlotTaken():
                trace.slots = Counter(trace.slots) + Counter({happening.kind: happening.slots})
            case wire.SlotReturned():
                trace.slots = Counter(trace.slots) - Counter({happening.kind: happening.slots})
                trace.returned_at = at
            case wire.TokensComputed():
                trace.computed += happening.tokens
                self.token_log.setdefault(trace.request_id, []).append((at, happening.tokens))
            case wire.TokensEmitted():
                trace.emitted += happening.tokens
                if not trace.live:
                    trace.emitted_after_gone += happening.tokens
            case wire.TokensDropped():
                trace.dropped += happening.tokens
            case wire.AbortArrived():
                trace.arrived_at = at if trace.arrived_at is None else trace.arrived_at
            case wire.AbortApplied():
                trace.applied_at = at if trace.applied_at is None else trace.applied_at
            case wire.AbortNoop():
                trace.noops += 1
            case wire.AbortRefused():
                trace.refusals += 1
            case wire.Preempted():
                trace.preemptions += 1
            case wire.Finished():
                trace.finished_at, trace.reason = at, happening.reason
            case wire.HostHeld():
                trace.host_blocks += happening.blocks
            case wire.HostReturned():
                trace.host_blocks -= happening.blocks
                trace.returned_at = at
            case _:
                pass

    def _moved(self, trace: Trace, place: wire.Place, at: float) -> None:
        if place == "gone":
            trace.gone_at = at
        elif trace.applied_at is not None and at >= trace.applied_at:
            trace.resurrected = True
        trace.place = place
