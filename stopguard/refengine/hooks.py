"""Where a fault can get in: the injection points of the engine, and who stands at each.

A healthy engine asks at every point and hears "no". A fault overrides the methods of the points where
it does its damage; `Hooks` collects, for each point, only the faults that do, so that a point without
faults costs one look at an empty tuple.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from stopguard.errors import ConfigurationError
from stopguard.probe.wire import SlotKind

if TYPE_CHECKING:
    from stopguard.refengine.interface import Door, FinishReason
    from stopguard.refengine.request import Request

__all__ = ["Cause", "Fault", "FaultLedger", "Hooks"]

#: Why resources are given up.
Cause = Literal["abort", "finish", "error", "preempt"]

#: Where a fault must show: the five ledgers, or beside them.
FaultLedger = Literal["queue", "kv", "output", "link", "stream", "health", "counters", "crosstalk"]


class Fault:
    """One way to be wrong. It strikes at each opportunity with `probability`, at most `limit` times.

    `failure_class` is the class of public bug reports it belongs to, `issues` are the reports,
    `ledger` is where it must show, and `needs_depth` is the pipeline depth below which it cannot do
    any damage (the engine takes it as its default). All methods are injection points.
    """

    name: ClassVar[str] = ""
    failure_class: ClassVar[int] = 0
    issues: ClassVar[tuple[str, ...]] = ()
    ledger: ClassVar[FaultLedger] = "kv"
    needs_depth: ClassVar[int] = 1

    def __init__(self, probability: float = 1.0, limit: int | None = None) -> None:
        if not 0.0 < probability <= 1.0:
            raise ConfigurationError(f"fault {self.name}: probability must be above 0 and at most 1, not {probability}")
        self.probability = probability
        self.limit = limit
        self.strikes = 0
        self._random = random.Random(self.name)

    def seed(self, seed: int) -> None:
        """Start over with the engine's seed, so that a run can be repeated."""
        self._random = random.Random(f"{self.name}:{seed}")
        self.strikes = 0

    def fires(self) -> bool:
        """Whether to strike at this opportunity."""
        if self.limit is not None and self.strikes >= self.limit:
            return False
        if self.probability < 1.0 and self._random.random() >= self.probability:
            return False
        self.strikes += 1
        return True

    def __repr__(self) -> str:
        return f"<fault {self.name}: {self.strikes} strikes>"

    # Release --------------------------------------------------------------------------------------

    def keep_blocks(self, request: Request, cause: Cause, blocks: int) -> int:
        """How many of `blocks` are never given back."""
        return 0

    def free_again(self, request: Request, cause: Cause) -> bool:
        """Free the last block twice."""
        return False

    def skip_fence(self, request: Request, cause: Cause) -> bool:
        """Give blocks back although a step in flight still writes them."""
        return False

    def pin_seconds(self, request: Request, cause: Cause) -> float:
        """Hold the blocks for so long after the request has gone."""
        return 0.0

    def wait_for_admission(self, request: Request, cause: Cause) -> bool:
        """Release only when the next request is admitted."""
        return False

    def keep_slot(self, request: Request, kind: SlotKind, cause: Cause) -> bool:
        """Never give this slot back."""
        return False

    def keep_host(self, request: Request) -> bool:
        """Never give the host backup back."""
        return False

    # Aborts ---------------------------------------------------------------------------------------

    def lose_at_door(self, requests: Sequence[Request], dispatched: bool, paused: bool, door: Door) -> bool:
        """The front end notes the abort as sent and sends nothing."""
        return False

    def lose_abort(self, request: Request) -> bool:
        """The scheduler reads the abort and does nothing."""
        return False

    def lose_in_prefill(self, request: Request) -> bool:
        """The door says "0 aborted" as if there were nothing, while a prefill step is in flight."""
        return False

    def crash_on_noop(self, request_id: str, ended_before: bool) -> str:
        """Why the core dies of an abort for an id that it does not have; empty: it does not."""
        return ""

    def spare(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Those of a parent's children that the abort reaches."""
        return requests

    def extra_victims(self, request_id: str, matched: Sequence[Request], live: Iterable[Request]) -> Sequence[Request]:
        """Requests that the abort hits although it does not name them."""
        return ()

    def abort_as_finish(self, request: Request) -> FinishReason | None:
        """The finish reason under which an abort is booked; None: as an abort."""
        return None

    def undo_abort(self, request: Request) -> bool:
        """The request is put back into the queue after its abort was applied."""
        return False

    # Output ---------------------------------------------------------------------------------------

    def deliver_stale(self, request: Request) -> bool:
        """Hand a dead request's late tokens to its client."""
        return False

    def rename_finish(self, request: Request, reason: FinishReason) -> FinishReason:
        """The reason that is reported instead of `reason`."""
        return reason

    def replay(self, request: Request) -> bool:
        """Deliver the recomputed tokens once more after a preemption."""
        return False

    # Counters, watchers, health -------------------------------------------------------------------

    def drift(self, request: Request, cause: Cause) -> int:
        """What the running gauge is wrong by after this request has gone."""
        return 0

    def blind_counter(self, request: Request, cause: Cause) -> bool:
        """Do not count this abort."""
        return False

    def keep_watcher(self, request: Request) -> bool:
        """The disconnect watcher of an ended request lives on."""
        return False

    def ignore_disconnect(self, requests: Sequence[Request]) -> bool:
        """The front end does not act on the closed connection."""
        return False

    def wedge(self, request: Request, cause: Cause) -> bool:
        """The core makes no more progress after this release; `/health` does not know."""
        return False


class Hooks:
    """For each injection point the faults that override it, as a tuple."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        self.keep_blocks = self._at("keep_blocks")
        self.free_again = self._at("free_again")
        self.skip_fence = self._at("skip_fence")
        self.pin_seconds = self._at("pin_seconds")
        self.wait_for_admission = self._at("wait_for_admission")
        self.keep_slot = self._at("keep_slot")
        self.keep_host = self._at("keep_host")
        self.lose_at_door = self._at("lose_at_door")
        self.lose_abort = self._at("lose_abort")
        self.lose_in_prefill = self._at("lose_in_prefill")
        self.crash_on_noop = self._at("crash_on_noop")
        self.spare = self._at("spare")
        self.extra_victims = self._at("extra_victims")
        self.abort_as_finish = self._at("abort_as_finish")
        self.undo_abort = self._at("undo_abort")
        self.deliver_stale = self._at("deliver_stale")
        self.rename_finish = self._at("rename_finish")
        self.replay = self._at("replay")
        self.drift = self._at("drift")
        self.blind_counter = self._at("blind_counter")
        self.keep_watcher = self._at("keep_watcher")
        self.ignore_disconnect = self._at("ignore_disconnect")
        self.wedge = self._at("wedge")

    def _at(self, point: str) -> tuple[Fault, ...]:
        return tuple(fault for fault in self.faults if getattr(type(fault), point) is not getattr(Fault, point))
