"""Inside SGLang's scheduler: takes one named request's room away between two steps, and gives it back later.

Facts (sglang 0.5.23): at the head of `get_next_batch_to_run` no step is being prepared, so that a running request can
be given up as SGLang's own retraction does it (`schedule_batch.release_req`, then `filter_batch`). Three things are
minded:

- a request in the middle of a prefill in pieces, or in a prefill whose result has not been merged yet, is left until a
  later step;
- it stays away for at least one whole step, since with the overlap loop a token of it is still being computed: put back
  in the same step it would get that token twice;
- penalties (frequency, presence, repetition, minimum length) are not rebuilt after a retraction, so such a request
  would go on differently: it is refused.

An abort finds a held request in the waiting queue, where `give_back_for_abort` puts it first.
"""

from __future__ import annotations

import importlib
import threading
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from stopguard.probe import wire
from stopguard.probe.sender import Guarded

if TYPE_CHECKING:
    from stopguard_sglang.plugin_scheduler import Record, SchedulerWatch

__all__ = ["Preempter"]

_WAIT_SECONDS: Final = 0.005
_RETRY_SECONDS: Final = 0.05
_DEFERRALS_MAX: Final = 2000
_PARKED_MAX: Final = 4096
_NEEDED: Final = (
    "hisparse_coordinator",
    "req_to_token_pool",
    "token_to_kv_pool_allocator",
    "tree_cache",
    "waiting_queue",
)
_PENALTIES: Final = (
    ("frequency_penalty", 0.0),
    ("presence_penalty", 0.0),
    ("repetition_penalty", 1.0),
    ("min_new_tokens", 0),
)


class Preempter:
    """Requests taken out (`parked`: id -> request, and the turn in which it was taken), and orders that wait."""

    def __init__(self, watch: SchedulerWatch) -> None:
        self._watch = watch
        self.orders: deque[tuple[wire.Command, int]] = deque()
        self.parked: dict[str, tuple[Any, int]] = {}
        self.turns = 0
        # Families of which only a part could be taken: the part goes back as soon as it may.
        self._undone: set[str] = set()
        #: Set when a command has come: an idle scheduler that holds requests waits for it.
        self.wake = threading.Event()
        self._release: Any = None
        self.between_steps = Guarded(self._between_steps, "preempt", 20)

    @property
    def busy(self) -> bool:
        """Whether it wants to be told of each turn."""
        return bool(self.orders or self.parked or self._undone)

    def usable(self, scheduler: Any) -> bool:
        """Whether this scheduler has what a preemption needs."""
        try:
            self._release = importlib.import_module("sglang.srt.managers.schedule_batch").release_req
        except (ImportError, AttributeError):
            return False
        mode = getattr(getattr(scheduler, "disaggregation_mode", None), "value", "null")
        return mode == "null" and all(hasattr(scheduler, name) for name in _NEEDED)

    def obey(self, command: wire.Command) -> None:
        """Note an order; it is carried out at the head of the next step, and answered then."""
        if command.action == "resume":
            self._answer(command, self._resume(command.request_id))
        elif self._release is None:
            self._answer(command, "unsupported")
        else:
            self.orders.append((command, 0))
            if not self._watch.family(command.request_id):
                self.orders.pop()
                self._answer(command, "unknown")

    def turn(self) -> None:
        """One turn of the event loop; orders of requests that do not step (queued ones) are carried out here too."""
        self.turns += 1
        if self.wake.is_set():
            self.wake.clear()
        for rid in list(self._undone):
            if self._resume(rid) != "refused":
                self._undone.discard(rid)

    def wait(self) -> None:
        """Instead of SGLang's idle sleep, while requests are held: wait for a command, briefly."""
        self.wake.wait(_WAIT_SECONDS)

    def forget(self, rid: str) -> None:
        """It has ended."""
        self.parked.pop(rid, None)

    def give_back_for_abort(self, rid: str) -> None:
        """Put a held request where SGLang's abort looks for it."""
        parked = self.parked.pop(rid, None)
        if parked is not None:
            self._watch.scheduler.waiting_queue.append(parked[0])

    # ---- at the head of a step -------------------------------------------------------------------

    def _between_steps(self, batches: dict[str, Any]) -> None:
        for _ in range(len(self.orders)):
            command, deferrals = self.orders.popleft()
            family = self._watch.family(command.request_id)
            if not family:
                self._answer(command, "gone")
                continue
            if command.action == "hold" and any(record.place == "running" for record in family):
                self._answer(command, "refused", "it runs")
                continue
            verdicts = [self._preempt(record, batches) for record in family]
            if "later" in verdicts and deferrals < _DEFERRALS_MAX:
                self.orders.append((command, deferrals + 1))
            elif "refused" in verdicts or "later" in verdicts:
                self._undone.add(command.request_id)
                refused = "refused" in verdicts
                why = "its penalties cannot be rebuilt afterwards" if refused else "it is being prefilled for too long"
                self._answer(command, "refused", why)
            else:
                self._answer(command, "applied")

    def _preempt(self, record: Record, batches: dict[str, Any]) -> str:
        """`done`, `later` or `refused`."""
        scheduler, req = self._watch.scheduler, record.req
        if record.rid in self.parked or record.ending or req.finished():
            return "done"
        if len(self.parked) >= _PARKED_MAX or _has_penalties(req):
            return "refused"
        if any(other is req for other in scheduler.waiting_queue):
            scheduler.waiting_queue[:] = [other for other in scheduler.waiting_queue if other is not req]
            self._park(record)
            if record.place != "preempted":
                self._watch.move(record, "preempted")
                self._watch.events.append(wire.Preempted(record.rid, monotonic(), 0))
            return "done"
        running, last = batches.get("running_batch"), batches.get("last_batch")
        if running is None or getattr(scheduler, "chunked_req", None) is req:
            return "later"
        if last is not None and last is not running and last.forward_mode.is_extend() and _holds(last, req):
            return "later"  # its prefill is in flight
        keep = [index for index, other in enumerate(running.reqs) if other is not req]
        if len(keep) == len(running.reqs):
            return "later"
        self._release(
            req=req,
            remaing_req_count=len(keep),
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            tree_cache=scheduler.tree_cache,
            hisparse_coordinator=scheduler.hisparse_coordinator,
        )
        running.filter_batch(keep_indices=keep)
        running.batch_is_full = False
        self._park(record)
        return "done"

    def _park(self, record: Record) -> None:
        self.parked[record.rid] = (record.req, self.turns)

    def _resume(self, rid: str) -> wire.Answer:
        found = [record for record in self._watch.family(rid) if record.rid in self.parked]
        if not found:
            return "gone" if not self._watch.family(rid) else "unknown"
        if any(self.turns - self.parked[record.rid][1] < 1 for record in found):
            return "refused"
        scheduler = self._watch.scheduler
        for record in found:
            req, _ = self.parked.pop(record.rid)
            if req.is_retracted or len(req.output_ids):
                scheduler._add_request_to_queue(req, is_retracted=True)
            else:
                scheduler.waiting_queue.append(req)
                self._watch.move(record, "waiting")
        return "accepted"

    def _answer(self, command: wire.Command, answer: wire.Answer, detail: str = "") -> None:
        sender = self._watch.sender
        if sender is not None:
            wait = _RETRY_SECONDS if answer == "refused" else 0.0
            sender.send(wire.CommandAnswer(command.command_id, answer, wait, detail if answer == "refused" else ""))


def _holds(batch: Any, req: Any) -> bool:
    return any(other is req for other in batch.reqs)


def _has_penalties(req: Any) -> bool:
    params = req.sampling_params
    return any((getattr(params, name, neutral) or neutral) != neutral for name, neutral in _PENALTIES)
