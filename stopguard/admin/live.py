"""The admin app's view of a running gateway.

The app lives in another thread than the relay. What it reads here is a copy made in one step of the interpreter
(`list` of a dictionary's values) or a number; what it changes or awaits is handed to the relay's loop. The
relay itself does nothing for it, so that a page nobody looks at costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic, time

from stopguard import __version__
from stopguard.admin.view import ClassTaken, EngineFacts, LifeSigns, StopTaken, StopWanted
from stopguard.engines import EngineUnreachable
from stopguard.gateway.class_api import give_class
from stopguard.gateway.exchange import Exchange
from stopguard.gateway.server import Gateway
from stopguard.ledger import (
    Account,
    BookStatistics,
    Difference,
    EngineGauges,
    Leak,
    Reconciler,
    Reconciliation,
    RequestLedgers,
    reconcile,
    reconcile_inside,
)
from stopguard.ledger.journal import Journal, JournalStatistics
from stopguard.ledger.journal_reader import JournalReader, StoredRequest
from stopguard.ledger.journal_recovery import RecoveredBook
from stopguard.stops import Anomalies, Engine, Semantics, Source, StopCause, Tracked

__all__ = ["LiveView"]

logger = logging.getLogger("stopguard.admin")

_STOPS_A_TURN = 32
"""A stop costs the relay some tens of microseconds; between so many it serves everybody else."""

_RECONCILE_INSIDE_SECONDS = 1.0
_GAUGES_EACH = 5
"""The engines' own gauges are read each so many turns."""

_NAMES_SECONDS = 3.0
_KV = slice(Account.KV_HELD, Account.KV_SPECULATIVE + 1)


def _has_kv(ledgers: RequestLedgers) -> bool:
    return ledgers.blocks_held > 0 or any(ledgers.balances[_KV])


class LiveView:
    """`View` over a `Gateway` and its `Journal`. Made on the relay's loop, used from the admin thread.

    `kinds` are the configured kinds of the engines, by name.
    """

    def __init__(
        self,
        gateway: Gateway,
        journal: Journal | None,
        relay: asyncio.AbstractEventLoop,
        *,
        kinds: Mapping[str, str] | None = None,
    ) -> None:
        self._kinds = kinds or {}
        self._gateway = gateway
        self._controller = gateway.controller
        self._book = gateway.book
        self._journal = journal
        self._relay = relay
        self._started_at = monotonic()
        self._wall_offset = time() - self._started_at
        self._reconcilers: dict[str, Reconciler] = {}
        self._newest: dict[str, Reconciliation] = {}
        self._gauges: dict[str, EngineGauges] = {}
        self._journal_reads = asyncio.Semaphore(1)

    # ---- reading ---------------------------------------------------------------------------------

    def now(self) -> float:
        return monotonic()

    def wall(self, at: float) -> float:
        return at + self._wall_offset

    def signs(self) -> LifeSigns:
        gateway = self._gateway
        members = gateway.fleet.members
        reasons = []
        if gateway.draining:
            reasons.append("it is shutting down")
        # An engine that was never heard of counts as healthy for the relay, which must try; not for us.
        silent = [member for member in members if not member.healthy or member.models is None]
        if len(silent) == len(members):
            reasons.append("no engine answers")
        warnings = [f"engine {member.engine.name} does not answer" for member in silent]
        journal = self.journal()
        if journal is not None and journal.failing is not None:
            warnings.append(f"the journal cannot be written: {journal.failing}")
        return LifeSigns(
            version=__version__,
            started_at=self._started_at,
            draining=gateway.draining,
            reasons=tuple(reasons),
            warnings=tuple(warnings),
        )

    async def relay_answers(self, timeout_seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        answered = asyncio.Event()
        try:
            self._relay.call_soon_threadsafe(loop.call_soon_threadsafe, answered.set)
            async with asyncio.timeout(timeout_seconds):
                await answered.wait()
        except (RuntimeError, TimeoutError):  # RuntimeError: its loop is closed
            return False
        return True

    def open_requests(self) -> Sequence[Tracked]:
        return list(self._controller.tracked.values())

    def closed_requests(self) -> Sequence[RequestLedgers]:
        return self._book.recent()

    def find_open(self, request_id: str) -> Tracked | None:
        return self._controller.tracked.get(request_id)

    def find_closed(self, request_id: str) -> RequestLedgers | None:
        found = self._book.find(request_id)
        return found if found is not None and found.closed_at is not None else None

    async def find_stored(self, request_id: str) -> StoredRequest | None:
        if self._journal is None:
            return None
        path = self._journal.path

        def read() -> StoredRequest:
            with JournalReader(path) as reader:
                return reader.find(request_id)

        async with self._journal_reads:  # one at a time: a disk gets no faster by more readers
            return await asyncio.to_thread(read)

    def group_of(self, tracked: Tracked) -> str:
        exchange = tracked.owner
        return exchange.head.group if isinstance(exchange, Exchange) else ""

    def leaks(self) -> Sequence[Leak]:
        return self._book.leaks()

    def engines(self) -> Sequence[EngineFacts]:
        return list(self._engine_facts())

    def _engine_facts(self) -> Iterator[EngineFacts]:
        probes = [] if self._gateway.probing is None else self._gateway.probing.facts()
        for member in self._gateway.fleet.members:
            numbers, profile = member.statistics(), member.profile
            inside = list(self._controller.in_engine.get(profile.name, {}).values())
            states = [tracked.machine.engine for tracked in inside]
            gauges = self._gauges.get(numbers.name)
            identity = member.identity
            yield EngineFacts(
                name=numbers.name,
                base_url=numbers.base_url,
                healthy=numbers.healthy,
                models=numbers.models,
                in_engine=len(inside),
                stopping=states.count(Engine.ABORTING),
                unconfirmed=states.count(Engine.UNCONFIRMED),
                waiting_for_connection=numbers.waiting_for_connection,
                open_connections=numbers.open_connections,
                idle_connections=numbers.idle_connections,
                failures=numbers.failures,
                ejections=numbers.ejections,
                doors=tuple(door.name for door in profile.doors),
                best_evidence=profile.best_evidence.label,
                probed=profile.probed,
                kind=self._kinds.get(numbers.name, ""),
                version=identity.version if identity is not None else "",
                gauge_unit=member.engine.capabilities.gauge_unit.value,
                blocks_used=None if gauges is None else gauges.blocks_used,
                blocks_total=None if gauges is None else gauges.blocks_total,
                probes=tuple(probe for probe in probes if probe.engine == numbers.name),
            )

    def statistics(self) -> BookStatistics:
        return self._book.statistics()

    def totals(self) -> dict[tuple[str, str], dict[Account, int]]:
        return self._book.totals()

    def anomalies(self) -> Anomalies:
        return self._controller.anomalies

    def reconciliations(self) -> dict[str, Reconciliation]:
        return dict(self._newest)

    def persistent(self, engine: str) -> list[Difference]:
        reconciler = self._reconcilers.get(engine)
        return reconciler.persistent() if reconciler is not None else []

    def journal(self) -> JournalStatistics | None:
        return None if self._journal is None else self._journal.statistics()

    def recovered(self) -> Sequence[RecoveredBook]:
        return [] if self._journal is None else self._journal.recovered

    # ---- stopping --------------------------------------------------------------------------------

    async def stop(self, wanted: StopWanted) -> Sequence[StopTaken]:
        future = asyncio.run_coroutine_threadsafe(self._stop(wanted), self._relay)
        return await asyncio.wrap_future(future)

    async def _stop(self, wanted: StopWanted) -> list[StopTaken]:
        """On the relay's loop. A request that ends while its turn comes is `already`."""
        gateway = self._gateway
        taken: list[StopTaken] = []
        ids = wanted.ids or list(self._chosen(wanted))
        for number, request_id in enumerate(ids, start=1):
            tracked = self._alive(request_id)
            if tracked is None:
                known = self.find_closed(request_id) is not None or not wanted.ids
                taken.append(StopTaken(request_id=request_id, result="already" if known else "unknown"))
            elif tracked.muted or tracked.machine.engine is Engine.FINISHED:
                taken.append(StopTaken(request_id=request_id, result="already"))
            else:
                cause = StopCause(
                    semantics=Semantics.CANCEL,
                    source=Source.API,
                    reason=wanted.reason,
                    observed_at=monotonic(),
                    actor=wanted.actor,
                )
                gateway.stop(tracked, cause)
                taken.append(StopTaken(request_id=request_id, result="stopping"))
            if number % _STOPS_A_TURN == 0:
                await asyncio.sleep(0)
        return taken

    async def reclass(self, request_id: str, name: str) -> ClassTaken | None:
        future = asyncio.run_coroutine_threadsafe(self._reclass(request_id, name), self._relay)
        return await asyncio.wrap_future(future)

    async def _reclass(self, request_id: str, name: str) -> ClassTaken | None:
        """On the relay's loop."""
        exchange = self._gateway.registry.alive.get(request_id)
        if exchange is None:
            return None
        changed = give_class(self._gateway, exchange, name, "the admin API")
        now = exchange.claim.priority_class.name if exchange.claim is not None else name
        return ClassTaken(request_id=request_id, priority_class=now, changed=changed)

    def _alive(self, request_id: str) -> Tracked | None:
        """A request of ours that is alive, or one that is only watched (then its probe can stop it)."""
        exchange = self._gateway.registry.alive.get(request_id)
        if exchange is not None:
            return exchange.tracked
        return self._controller.tracked.get(request_id) if self._only_watches else None

    @property
    def _only_watches(self) -> bool:
        return self._gateway.probing is not None and self._gateway.probing.bystander

    def _chosen(self, wanted: StopWanted) -> Iterator[str]:
        if self._only_watches:
            for tracked in self.open_requests():
                ledgers = tracked.ledgers
                if wanted.everything or wanted.model == ledgers.model or wanted.engine == ledgers.engine:
                    yield tracked.request_id
        for exchange in self._gateway.registry.exchanges():
            ledgers = exchange.tracked.ledgers
            if (
                wanted.everything
                or (wanted.group and exchange.head.group == wanted.group)
                or (wanted.model and wanted.model in (exchange.asked_model, ledgers.model))
                or (wanted.engine and ledgers.engine == wanted.engine)
            ):
                yield exchange.request_id

    # ---- comparing with the engines' gauges ----------------------------------------------------------

    async def background(self) -> None:
        """Compare the books with every engine, on the admin loop: each second with what its probes say, else with
        its gauges now and then.
        """
        turns = 0
        while True:
            await asyncio.sleep(_RECONCILE_INSIDE_SECONDS)
            turns += 1
            for member in self._gateway.fleet.members:
                if self.reconcile_inside(member.engine.name) is not None:
                    continue
                if turns % _GAUGES_EACH == 0 and member.engine.gauge_seconds > 0 and member.healthy:
                    try:
                        await self.reconcile_with(member.engine.name)
                    except EngineUnreachable as error:
                        logger.info("engine %s: its gauges cannot be read: %s", member.engine.name, error)

    def reconcile_inside(self, name: str) -> Reconciliation | None:
        """One comparison with the totals of the engine's probes; `None` where there are none to compare with.

        A difference makes the engine list its requests, so that it has names the next time.
        """
        probing, at = self._gateway.probing, monotonic()
        gauges = None if probing is None else probing.gauges(name, at)
        if probing is None or gauges is None:
            return None
        inside = [tracked for tracked in self.open_requests() if tracked.ledgers.engine == name]
        if not all(tracked.probed for tracked in self._controller.in_engine.get(name, {}).copy().values()):
            return None  # some came before the probe: its totals have them, its events had not
        self._gauges[name] = gauges
        named = probing.named(name, at - _NAMES_SECONDS)
        orphans, phantoms = ((), ()) if named is None else (named.orphan_ids, named.phantom_ids)
        known = [tracked.ledgers for tracked in inside if tracked.part_places or _has_kv(tracked.ledgers)]
        comparison = reconcile_inside(known, gauges, orphans, phantoms)
        self._newest[name] = comparison
        reconciler = self._reconcilers.setdefault(name, Reconciler())
        reconciler.add(comparison)
        if not comparison.agrees and reconciler.persistent():
            self._relay.call_soon_threadsafe(probing.want_names, name)
        return comparison

    async def reconcile_with(self, name: str) -> Reconciliation | None:
        """One comparison: the gauges are read on the relay's loop, the books are walked over here."""
        member = self._gateway.fleet.named(name)
        if member is None:
            return None
        reading = asyncio.run_coroutine_threadsafe(member.engine.gauges(), self._relay)
        gauges = await asyncio.wrap_future(reading)
        if gauges is None:
            return None
        self._gauges[name] = gauges
        inside = list(self._controller.in_engine.get(member.profile.name, {}).values())
        comparison = reconcile([tracked.ledgers for tracked in inside], gauges)
        self._newest[name] = comparison
        self._reconcilers.setdefault(name, Reconciler()).add(comparison)
        return comparison
