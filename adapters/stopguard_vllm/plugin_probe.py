"""What vLLM's scheduler knows, turned into frames: one `SchedulerProbe` beside one `Scheduler`.

It reads what vLLM itself says has changed (`SchedulerOutput`, the outputs of a step, the arguments of the methods
that move a request) and never walks over all requests. Nothing here imports vLLM; every attribute that is read was
checked to be there when the probe was attached (`plugin_attach`).

Three things need care, all of vLLM 0.32 (`v1/core/sched/scheduler.py`):

* Blocks are counted as references: a block of a shared prefix counts for each holder. At a release each block is
  looked at before and after: it must have one holder less, and be in the pool if that was the last. One that is
  not stays in the books under the request's name.
* A step that runs ahead may still sample for a request that was aborted. Its token is booked as computed when the
  abort is applied and as stale when the step comes back, so that the books stay open as long as the step does.
* The front end ends a request at a stop string by an abort. `plugin_front_end` marks those, and here they finish.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from stopguard.probe import wire
from stopguard_vllm.plugin_slots import SlotWatch

__all__ = ["ENDED_MARK", "QUIET_SECONDS", "FrameSink", "SchedulerProbe", "is_ours", "outer_id"]

#: Put before the id of a request that the front end itself has ended (see `plugin_front_end`).
ENDED_MARK: Final = "stopguard:ended:"

QUIET_SECONDS: Final = 0.02
"""Steps that only bring tokens and blocks are told together when they follow each other faster than this."""
_RECENT_MAX: Final = 4096
_SNAPSHOT_MAX: Final = 20_000
_ARRIVED_MAX: Final = 65_536
_OUR_PREFIX: Final = "sg-"
_OUR_CHARACTERS: Final = len(_OUR_PREFIX) + 32
#: vLLM ends an internal id with a hyphen and eight hexadecimal digits (`v1/engine/input_processor.py`).
_SUFFIX_CHARACTERS: Final = 9


class FrameSink(Protocol):
    """Where frames go: `stopguard.probe.sender.Sender`."""

    def send(self, message: wire.Frame | wire.Snapshot | wire.CommandAnswer) -> None: ...


def is_ours(request_id: str) -> bool:
    """Whether this is an id that StopGuard gave: one length, one beginning."""
    return len(request_id) == _OUR_CHARACTERS and request_id.startswith(_OUR_PREFIX)


def parent_of(internal_id: str) -> str:
    """The parent's internal id where this is the id of a child (`n` > 1: `INDEX_PARENT`), else empty."""
    index, separator, parent = internal_id.partition("_")
    return parent if separator and index.isdecimal() else ""


def owner_of(internal_id: str) -> str:
    """Whose part this is, for the books: our id where it is in there, else the parent's; empty: it is a request itself.

    vLLM wraps the id that it is given, so that each request of ours is a part with a name of vLLM's.
    """
    outer = outer_id(internal_id)
    return outer if is_ours(outer) else parent_of(internal_id)


def outer_id(internal_id: str) -> str:
    """What a client may call the request: our own id where it is ours, else vLLM's external id."""
    at = internal_id.find(_OUR_PREFIX)
    if at >= 0 and len(ours := internal_id[at : at + _OUR_CHARACTERS]) == _OUR_CHARACTERS:
        return ours
    return (parent_of(internal_id) or internal_id)[:-_SUFFIX_CHARACTERS]


class SchedulerProbe:
    """Collects the events of one scheduler and sends them, at most two frames a step. Runs in the engine's own thread.

    Only `abort_arrived` may be called from another. `parked` are requests that were taken out of the scheduler's
    queues to be held (`plugin_commands`), by internal id.
    """

    def __init__(self, scheduler: Any, sink: FrameSink, clock: Callable[[], float] = time.monotonic) -> None:
        self.scheduler = scheduler
        self.sink = sink
        self.clock = clock
        self.sequence = 0
        self.step = 0
        self.parked: dict[str, Any] = {}
        #: Ids that clients may know of requests that are over, the newest last.
        self.recent: dict[str, None] = {}
        self.sees_blocks = True
        self._events: list[wire.Event] = []
        #: Handed to the front ends since the last frame, by request.
        self._tokens: dict[str, int] = {}
        self._flushed_at = 0.0
        self._arrived: deque[tuple[float, Sequence[str]]] = deque(maxlen=_ARRIVED_MAX)
        #: Something else than tokens and blocks has happened, and should be known before the next step is over.
        self.urgent = False
        self._held: dict[str, int] = {}
        #: Behind a fence: the scheduler's own list of the blocks, whose they are, how many, and how many of these
        #: were given another holder while they should have lost one.
        self._fenced: deque[tuple[Any, str, int, int]] = deque()
        #: Behind a fence that is done, and not back.
        self._stuck: dict[str, int] = {}
        self.slots = SlotWatch(scheduler, self._tell, clock)
        #: Of aborted requests that steps under way still compute: (tokens to be sampled, tokens scheduled).
        self._owed: dict[str, tuple[int, int]] = {}
        self._preempted: set[str] = set()
        self._transferring: set[str] = set()
        manager = scheduler.kv_cache_manager
        self._tables: list[dict[str, Any]] = [
            single.req_to_blocks for single in manager.coordinator.single_type_managers
        ]
        self._pool = manager.block_pool
        self._connected = getattr(scheduler, "connector", None) is not None

    # ---- requests come and are scheduled ----------------------------------------------------------

    def added(self, request: Any) -> None:
        """`Scheduler.add_request` has taken it (or a further turn of one that is there)."""
        internal = request.request_id
        if self.scheduler.requests.get(internal) is request:
            self._events.append(
                wire.Added(internal, self.clock(), int(request.num_prompt_tokens or 0), owner_of(internal))
            )
            self.slots.added(request)
            self.urgent = True

    def scheduled(self, output: Any) -> None:
        """`Scheduler.schedule` has chosen the next step."""
        self.step += 1
        events, held = self._events, self._held
        at = 0.0
        for new in output.scheduled_new_reqs:
            at = at or self.clock()
            self._runs(new.req_id, sum(map(len, new.block_ids)), at)
        cached = output.scheduled_cached_reqs
        resumed = cached.resumed_req_ids
        for internal, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is not None:
                at = at or self.clock()
                count = sum(map(len, blocks))
                if internal in resumed:
                    self._runs(internal, count, at)
                elif count and self.sees_blocks:
                    held[internal] = held.get(internal, 0) + count
                    events.append(wire.BlocksHeld(internal, at, count))
        if self._connected:
            self._look_for_transfers()
        if self.urgent:
            self.flush()

    def _runs(self, internal: str, blocks: int, at: float) -> None:
        events = self._events
        if internal in self._preempted:
            self._preempted.discard(internal)
            events.append(wire.Resumed(internal, at))
        self._transferring.discard(internal)
        events.append(wire.Moved(internal, at, "running"))
        more = blocks - self._held.get(internal, 0)
        if more > 0 and self.sees_blocks:
            self._held[internal] = self._held.get(internal, 0) + more
            events.append(wire.BlocksHeld(internal, at, more))
        self.slots.runs(internal)
        self.urgent = True

    def _look_for_transfers(self) -> None:
        """With a KV connector a waiting request may be receiving its blocks from elsewhere."""
        waiting = getattr(self.scheduler, "deferred_waiting", ())
        now = {request.request_id for request in waiting if request.status.name == "WAITING_FOR_REMOTE_KVS"}
        if now != self._transferring:
            at, requests = self.clock(), self.scheduler.requests
            for internal in now - self._transferring:
                self._events.append(wire.Moved(internal, at, "transferring"))
                more = self._in_tables(internal) - self._held.get(internal, 0)
                if more > 0 and self.sees_blocks:  # what is being filled is taken already
                    self._held[internal] = self._held.get(internal, 0) + more
                    self._events.append(wire.BlocksHeld(internal, at, more))
            for internal in self._transferring - now:
                # One that was stopped keeps its blocks until its transfer is over.
                if internal in requests and not requests[internal].is_finished():
                    self._events.append(wire.Moved(internal, at, "waiting"))
            self._transferring = now
            self.urgent = True

    # ---- a step comes back --------------------------------------------------------------------------

    def stepped(self, outputs: dict[int, Any], output: Any, model_output: Any) -> None:
        """`Scheduler.update_from_output` has handed the step's tokens to the front ends."""
        at = self.clock()
        if self._owed:
            self._drop_stale(output, model_output, at)
        tokens = self._tokens
        for group in outputs.values():
            for each in group.outputs:
                internal = each.request_id
                count = len(each.new_token_ids)
                if count:
                    tokens[internal] = tokens.get(internal, 0) + count
                if each.finish_reason is not None:
                    self._events.append(wire.Finished(internal, at, str(each.finish_reason)))
                    self.urgent = True
                    if self._connected:
                        self._handed_over(internal, at)
        if self.urgent or at - self._flushed_at >= QUIET_SECONDS:
            self.flush(at)

    def _drop_stale(self, output: Any, model_output: Any, at: float) -> None:
        """Tokens that were sampled for requests which had been aborted while the step ran."""
        sampled = model_output.sampled_token_ids
        for internal in [name for name in self._owed if name in output.num_scheduled_tokens]:
            owed, in_flight = self._owed.pop(internal)
            in_flight -= output.num_scheduled_tokens[internal]
            index = model_output.req_id_to_index.get(internal)
            count = len(sampled[index]) if sampled and index is not None else 0
            if count > owed:
                self._events.append(wire.TokensComputed(internal, at, count - owed))
            dropped = max(count, owed) if in_flight <= 0 else count  # what a draft promised and did not keep goes too
            if dropped:
                self._events.append(wire.TokensDropped(internal, at, dropped, stale=True))
            if in_flight > 0:
                self._owed[internal] = (max(0, owed - dropped), in_flight)
            self.urgent = True  # books wait for it, and no further step may follow

    # ---- requests end, and lose their room --------------------------------------------------------------

    def before_finish(self, ids: str | Iterable[str] | None) -> list[tuple[str, Any]]:
        """`Scheduler.finish_requests` is about to end these: (internal id, the request or `None`)."""
        requests = self.scheduler.requests
        if ids is None:
            wanted: Iterable[str] = list(requests)
        else:
            wanted = (ids,) if isinstance(ids, str) else dict.fromkeys(ids)
        found = []
        for internal in wanted:
            request = requests.get(internal)
            found.append((internal, None if request is None or request.is_finished() else request))
        return found

    def finished_from_outside(self, found: list[tuple[str, Any]], status: Any) -> None:
        """`Scheduler.finish_requests` has ended what `before_finish` found, unless it is still there."""
        at = self.clock()
        aborted = status.name == "FINISHED_ABORTED"
        ended = {name[len(ENDED_MARK) :] for name, _ in found if name.startswith(ENDED_MARK)}
        for internal, request in found:
            if request is None:
                if aborted and not internal.startswith(ENDED_MARK):
                    self._events.append(wire.AbortNoop(internal, at))
                continue
            if not request.is_finished():
                continue  # it was not ended after all
            owed = self._still_sampled(request)
            if owed:
                self._owed[internal] = (owed, int(request.num_in_flight_tokens))
                self._events.append(wire.TokensComputed(internal, at, owed))
            if not aborted or internal in ended:
                self._events.append(wire.Finished(internal, at, "stop" if aborted else "error"))
            else:
                self._events.append(wire.AbortApplied(internal, at))
            if self._connected:
                self._handed_over(internal, at)
        self.urgent = True

    def _handed_over(self, internal: str, at: float) -> None:
        """It is over: where the scheduler still has it, a connector reads or writes its blocks."""
        if internal in self.scheduler.requests and internal not in self._transferring:
            self._events.append(wire.Moved(internal, at, "transferring"))

    @staticmethod
    def _still_sampled(request: Any) -> int:
        """How many tokens the steps under way will sample for it."""
        if getattr(request, "num_in_flight_tokens", 0) <= 0 or getattr(request, "is_prefill_chunk", False):
            return 0
        return max(1, int(getattr(request, "num_output_placeholders", 0)))

    def abort_arrived(self, ids: str | Sequence[str]) -> None:
        """The core's input thread has read an abort. Any thread."""
        self._arrived.append((self.clock(), (ids,) if isinstance(ids, str) else tuple(ids)))

    def before_preempt(self, request: Any) -> int:
        """`Scheduler._preempt_request`: what will have to be computed again, in tokens."""
        return int(request.num_computed_tokens)

    def preempted(self, recompute_tokens: int, request: Any) -> None:
        """`Scheduler._preempt_request` has put it back to those who wait."""
        at = self.clock()
        internal = request.request_id
        self._preempted.add(internal)
        self._events.append(wire.Preempted(internal, at, recompute_tokens))
        self._events.append(wire.Moved(internal, at, "preempted"))
        self.slots.set_aside(request)
        self.urgent = True

    def _tell(self, event: wire.Event) -> None:
        """A slot was taken or given back."""
        self._events.append(event)
        self.urgent = True

    def moved(self, internal: str, place: wire.Place) -> None:
        """A command has put the request somewhere else."""
        self._events.append(wire.Moved(internal, self.clock(), place))
        self.urgent = True

    # ---- blocks -------------------------------------------------------------------------------------------

    def before_free(self, request: Any) -> tuple[list[Any], list[int], int, int]:
        """`Scheduler._free_request_blocks`: (its blocks, how many hold each, free in the pool, fences)."""
        internal = request.request_id
        blocks = [block for table in self._tables for block in table.get(internal) or () if not block.is_null]
        holders = [block.ref_cnt for block in blocks]
        return blocks, holders, self._pool.get_num_free_blocks(), len(getattr(self.scheduler, "deferred_frees", ()))

    def freed(self, before: tuple[list[Any], list[int], int, int], request: Any) -> None:
        """`Scheduler._free_request_blocks` has given its blocks back, or put them behind a fence."""
        given, holders, free_before, fences_before = before
        blocks = len(given)
        internal = request.request_id
        at = self.clock()
        events = self._events
        booked = self._held.pop(internal, 0)
        if self.sees_blocks:
            if blocks > booked:  # taken without being scheduled: a transfer, or a step that was undone
                events.append(wire.BlocksHeld(internal, at, blocks - booked))
            elif booked > blocks:  # given back on the way, behind a sliding window
                events.append(wire.BlocksReturned(internal, at, booked - blocks))
            fences: Sequence[tuple[int, Any]] = getattr(self.scheduler, "deferred_frees", ())
            if len(fences) > fences_before:
                fence, waiting = fences[-1]
                grown = sum(block.ref_cnt > count for block, count in zip(given, holders, strict=True))
                self._fenced.append((waiting, internal, blocks, grown))
                if blocks:
                    events.append(wire.BlocksFenced(internal, at, blocks, int(fence)))
            else:
                left = sum(len(table.get(internal) or ()) for table in self._tables)
                kept = sum(block.ref_cnt >= count for block, count in zip(given, holders, strict=True))
                free_now = sum(block.ref_cnt == 0 for block in given)
                lost = free_now - (self._pool.get_num_free_blocks() - free_before)
                missing = max(left, kept + max(0, lost))
                if blocks > missing:
                    events.append(wire.BlocksReturned(internal, at, blocks - missing))
                if missing:
                    self._held[internal] = missing
        if request.is_finished():
            self._gone(request, at)
        self.urgent = True

    def _gone(self, request: Any, at: float) -> None:
        """`Scheduler._free_blocks` forgets the request right after this."""
        internal = request.request_id
        self._preempted.discard(internal)
        self._transferring.discard(internal)
        self.parked.pop(internal, None)
        self._events.append(wire.Moved(internal, at, "gone"))
        self.slots.gone(request)
        recent = self.recent
        recent[outer_id(internal)] = None
        if len(recent) > _RECENT_MAX:
            del recent[next(iter(recent))]

    def before_drain(self) -> list[list[tuple[Any, int]]]:
        """`Scheduler._drain_deferred_frees`: how many hold each block behind each fence that is ours."""
        return [[(block, block.ref_cnt) for block in blocks if not block.is_null] for blocks, *_ in self._fenced]

    def drained(self, before: list[list[tuple[Any, int]]]) -> None:
        """`Scheduler._drain_deferred_frees` has returned the blocks whose step is done.

        As at any release each block must have one holder less. One that has not stays behind its fence in the books.
        """
        waiting = self._fenced
        still = {id(blocks) for _, blocks in self.scheduler.deferred_frees}
        at = self.clock()
        for holders in before:
            blocks, internal, count, grown = waiting.popleft()
            if id(blocks) in still:
                waiting.append((blocks, internal, count, grown))
                continue
            kept = grown + sum(block.ref_cnt >= held for block, held in holders)
            if kept:
                self._stuck[internal] = self._stuck.get(internal, 0) + kept
            if count > kept:
                self._events.append(wire.BlocksReturned(internal, at, count - kept, fenced=True))
                self.urgent = True

    # ---- frames ---------------------------------------------------------------------------------------------

    def flush(self, at: float | None = None) -> None:
        """Send what has happened, if anything has."""
        at = self.clock() if at is None else at
        self.slots.settle()
        first: list[wire.Event] = []
        for internal, count in self._tokens.items():
            first.append(wire.TokensComputed(internal, at, count))
            first.append(wire.TokensEmitted(internal, at, count))
        while self._arrived:
            when, ids = self._arrived.popleft()
            first += [wire.AbortArrived(name, when) for name in ids if not name.startswith(ENDED_MARK)]
        events = first + self._events
        self.urgent = False
        if not events:
            return
        self._tokens.clear()
        self._events = []
        self._flushed_at = at
        self.sequence += 1
        running, waiting = self._counts()
        self.sink.send(
            wire.Frame(
                self.sequence,
                self.step,
                at,
                events,
                running,
                waiting,
                # vLLM's free list holds the blocks of the prefix cache too: they are reusable at once.
                self._pool.get_num_free_blocks(),
                0,
            )
        )

    def _counts(self) -> tuple[int, int]:
        scheduler = self.scheduler
        waiting = len(scheduler.waiting) + len(self.parked)
        for name in ("kv_holding_waiting", "skipped_waiting"):  # the second is what 0.17 to 0.31 call theirs
            queue = getattr(scheduler, name, None)
            if queue is not None:
                waiting += len(queue)
        return len(scheduler.running), waiting

    def snapshot(self, command_id: int) -> wire.Snapshot:
        """Every request that the scheduler has now, and those that are over and of which something is not back."""
        self.flush()
        running, waiting = self._counts()
        fenced = dict(self._stuck)
        for _, internal, count, _ in self._fenced:
            fenced[internal] = fenced.get(internal, 0) + count
        requests = self.scheduler.requests
        rows = [self._now(request, fenced.get(request.request_id, 0)) for request in requests.values()]
        for internal in (self._held.keys() | fenced.keys() | self.slots.held.keys()) - requests.keys():
            held, slots = self._held.get(internal, 0), dict(self.slots.held.get(internal, {}))
            behind = fenced.get(internal, 0)
            rows.append(
                wire.RequestNow(
                    internal, "gone", 0, owner_of(internal), blocks_held=held, blocks_fenced=behind, slots=slots
                )
            )
        return wire.Snapshot(
            command_id,
            self.sequence,
            self.step,
            self.clock(),
            rows[:_SNAPSHOT_MAX],
            running,
            waiting,
            self._pool.get_num_free_blocks(),
            0,
            complete=len(rows) <= _SNAPSHOT_MAX,
        )

    def _now(self, request: Any, blocks_fenced: int) -> wire.RequestNow:
        internal = request.request_id
        tokens = int(request.num_output_tokens)
        held = self._in_tables(internal)
        if held != self._held.get(internal, 0):
            self._held[internal] = held  # the snapshot is the new base of the books
        return wire.RequestNow(
            internal,
            self._place(request),
            int(request.num_prompt_tokens or 0),
            owner_of(internal),
            held if self.sees_blocks else 0,
            blocks_fenced,
            0,
            tokens,
            tokens,
            0,
            dict(self.slots.held.get(internal, {})),
        )

    def _in_tables(self, internal: str) -> int:
        return sum(not block.is_null for table in self._tables for block in table.get(internal) or ())

    def _place(self, request: Any) -> wire.Place:
        internal = request.request_id
        name = request.status.name
        if name == "RUNNING":
            return "running"
        if name == "PREEMPTED" or internal in self._preempted:
            return "preempted"
        if internal in self.parked:
            return "paused"
        return "transferring" if name == "WAITING_FOR_REMOTE_KVS" or request.is_finished() else "waiting"
