"""A view over a real book and controller in virtual time, without a gateway: what the admin app is tested with."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stopguard.admin.view import ClassTaken, EngineFacts, LifeSigns, StopTaken, StopWanted
from stopguard.ledger import Account, Book, BookStatistics, Difference, Leak, Reconciliation, RequestLedgers
from stopguard.ledger.journal import JournalStatistics
from stopguard.ledger.journal_reader import StoredRequest
from stopguard.ledger.journal_recovery import RecoveredBook
from stopguard.preemption import UnknownClass
from stopguard.stops import (
    CLOSE_CONNECTION,
    Anomalies,
    Controller,
    EngineProfile,
    Semantics,
    Source,
    StopCause,
    StopConfig,
    Tracked,
)

WALL_ZERO = 1_700_000_000.0
PROFILE = EngineProfile(name="gpu0", doors=(CLOSE_CONNECTION,))


class FakeView:
    """`View` over `controller`, whose time is `at` and moves only when a test moves it."""

    def __init__(self) -> None:
        self.book = Book()
        self.controller = Controller(self.book, StopConfig())
        self.at = 0.0
        self.life = LifeSigns(version="0", started_at=0.0, draining=False)
        self.relay = True
        self.stored: dict[str, StoredRequest] = {}
        self.stored_error: Exception | None = None
        self.facts: list[EngineFacts] = []
        self.compared: dict[str, Reconciliation] = {}
        self.lasting: list[Difference] = []
        self.journal_now: JournalStatistics | None = None
        self.left_open: list[RecoveredBook] = []
        self.orders: list[StopWanted] = []
        self.groups: dict[str, str] = {}

    # ---- what a test does ----------------------------------------------------------------------

    def admit(self, number: int, *, model: str = "base", group: str = "") -> Tracked:
        request_id = f"sg-{number:032x}"
        self.groups[request_id] = group
        return self.controller.admit(request_id, self.at, model=model)

    def run(self, number: int, *, profile: EngineProfile = PROFILE, group: str = "", model: str = "base") -> Tracked:
        tracked = self.admit(number, group=group, model=model)
        self.controller.dispatch(tracked, self.at, profile)
        return tracked

    def finish(self, tracked: Tracked) -> None:
        self.controller.engine_finished(tracked, self.at)
        self.controller.client_served(tracked, self.at)

    # ---- View ------------------------------------------------------------------------------------

    def now(self) -> float:
        return self.at

    def wall(self, at: float) -> float:
        return WALL_ZERO + at

    def signs(self) -> LifeSigns:
        return self.life

    async def relay_answers(self, timeout_seconds: float) -> bool:
        return self.relay

    def open_requests(self) -> Sequence[Tracked]:
        return list(self.controller.tracked.values())

    def closed_requests(self) -> Sequence[RequestLedgers]:
        return self.book.recent()

    def find_open(self, request_id: str) -> Tracked | None:
        return self.controller.tracked.get(request_id)

    def find_closed(self, request_id: str) -> RequestLedgers | None:
        found = self.book.find(request_id)
        return found if found is not None and found.closed_at is not None else None

    async def find_stored(self, request_id: str) -> StoredRequest | None:
        if self.stored_error is not None:
            raise self.stored_error
        return self.stored.get(request_id)

    def group_of(self, tracked: Tracked) -> str:
        return self.groups.get(tracked.request_id, "")

    def leaks(self) -> Sequence[Leak]:
        return self.book.leaks()

    def engines(self) -> Sequence[EngineFacts]:
        return self.facts

    def statistics(self) -> BookStatistics:
        return self.book.statistics()

    def totals(self) -> dict[tuple[str, str], dict[Account, int]]:
        return self.book.totals()

    def anomalies(self) -> Anomalies:
        return self.controller.anomalies

    def reconciliations(self) -> dict[str, Reconciliation]:
        return self.compared

    def persistent(self, engine: str) -> Sequence[Difference]:
        return self.lasting

    def journal(self) -> JournalStatistics | None:
        return self.journal_now

    def recovered(self) -> Sequence[RecoveredBook]:
        return self.left_open

    async def reclass(self, request_id: str, name: str) -> ClassTaken | None:
        """Two classes, of which every request has the first."""
        if request_id not in self.controller.tracked:
            return None
        if name not in ("standard", "urgent"):
            raise UnknownClass(f"class {name!r} is no class here; there are: standard, urgent")
        return ClassTaken(request_id=request_id, priority_class=name, changed=name == "urgent")

    async def stop(self, wanted: StopWanted) -> Sequence[StopTaken]:
        """Stops what is asked for by id; time passes while somebody waits."""
        self.orders.append(wanted)
        taken = []
        for request_id in wanted.ids or tuple(self.controller.tracked):
            tracked = self.controller.tracked.get(request_id)
            if tracked is None:
                known = self.find_closed(request_id) is not None
                taken.append(StopTaken(request_id=request_id, result="already" if known else "unknown"))
                continue
            cause = StopCause(
                semantics=Semantics.CANCEL,
                source=Source.API,
                reason=wanted.reason,
                observed_at=self.at,
                actor=wanted.actor,
            )
            self.controller.stop(tracked, self.at, cause)
            taken.append(StopTaken(request_id=request_id, result="stopping"))
        return taken


def facts(name: str = "gpu0", **changes: object) -> EngineFacts:
    """An engine that is well and idle."""
    plain = EngineFacts(
        name=name,
        base_url="http://127.0.0.1:8000",
        healthy=True,
        models=("base",),
        in_engine=0,
        stopping=0,
        unconfirmed=0,
        waiting_for_connection=0,
        open_connections=1,
        idle_connections=1,
        failures=0,
        ejections=0,
        doors=("close",),
        best_evidence="sent",
        probed=False,
    )
    return msgspec.structs.replace(plain, **changes)
