"""Inside SGLang's scheduler process: what each step did to each request, at most one frame a step.

Facts (sglang 0.5.23)
---------------------
A request enters by `Scheduler._add_request_to_queue` (with a grammar that must be compiled first, by
`GrammarManager.process_req_with_grammar`), is given KV in `get_next_batch_to_run`, and gains tokens in
`process_batch_result`. Its KV comes back in `mem_cache.common.release_kv_cache`: what was its own goes to the pool or
to the radix tree, and its lock on the shared prefix is taken off. KV is counted here in tokens (blocks of one), and
what a request no longer locks counts as returned: it may be evicted.

`release_kv_cache` is measured, not believed: with what the pool and the tree hold before and after, tokens that went
nowhere are found at once, and stay booked on their request. (Not in pools with pages of several tokens or with several
kinds of state, whose sums do not add up in single tokens.)

An abort reaches `Scheduler.abort_request`, which matches by prefix (`req.rid.startswith`); here only whole ids are hit,
and for an id of ours its children (`ID_0` of a list of prompts, `ID.…` of `n` > 1: `plugin_front`). A queued request
leaves with an echo (`send_abort_output`), a running one at the end of the next step. Health generations
(`HEALTH_CHECK…`) are no requests.

With the overlap loop the next step has been launched when a request is found to have ended; the token that this step
computes for it is thrown away, and booked as stale at once.

A step that only brings tokens calls nothing here. A model's step has filled the processor's caches with something
else, and each function that is touched then costs several microseconds, whatever it does (measured in the real engine),
so the hooks themselves look at a few attributes (`attention`, `events`, `endings`, `flushed_at`). What running requests
have computed, sent and taken since the last frame is read off them when a frame is due: because something else has
happened, or after `QUIET_SECONDS`. Whatever ends, moves or releases a request counts it first.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

from stopguard.probe import wire
from stopguard.probe.sender import Sender
from stopguard_sglang.plugin import KIND
from stopguard_sglang.plugin_preempt import Preempter

__all__ = ["ECHO_HOOK", "QUIET_SECONDS", "Record", "SchedulerWatch", "parent_of", "watch"]

logger = logging.getLogger("stopguard.probe")

QUIET_SECONDS: Final = 0.05
"""Steps that only bring tokens are told together when they follow each other faster than this."""
ECHO_HOOK: Final = "Scheduler.send_abort_output"
_SWEEP_SECONDS: Final = 0.02
_HEALTH: Final = "HEALTH_CHECK"
_OURS: Final = re.compile(r"sg-[0-9a-f]{32}")
_CHILD: Final = re.compile(r"(sg-[0-9a-f]{32})[_.].")
#: Is no mode of any batch.
_UNKNOWN: Final = object()
#: Put before the id of a request that an abort must not hit, while the abort looks for its victims.
_HIDDEN: Final = "\0"


def parent_of(rid: str) -> str:
    """Our id, when `rid` belongs to one of its children; else empty."""
    found = _CHILD.match(rid)
    return found[1] if found else ""


class Record:
    """What the collector knows of one request. Amounts in tokens."""

    __slots__ = ("aborting", "computed", "emitted", "ending", "held", "lost", "parent", "place", "req", "rid", "warmup")

    def __init__(self, req: Any) -> None:
        self.req = req
        self.rid: str = req.rid
        self.parent = parent_of(self.rid)
        self.place: wire.Place = "waiting"
        self.held = 0
        self.computed = len(req.output_ids)
        self.emitted = self.computed
        self.aborting = False
        self.ending = False
        #: What it held alone when it was last retracted: this much is computed again.
        self.lost = 0
        # Of `n` > 1 SGLang first computes the prompt alone (max_new_tokens 0), as a child of its own.
        params = getattr(req, "sampling_params", None)
        self.warmup = bool(self.parent) and getattr(params, "max_new_tokens", None) == 0


class SchedulerWatch:
    """All that is known of one scheduler. Every method but `nudge` is called by the scheduler's own thread."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.events: list[wire.Event] = []
        self.scheduler: Any = None
        self.sender: Sender | None = None
        self.sequence = 0
        self.step = 0
        self.preempter = Preempter(self)
        #: Requests that have ended in this step.
        self.endings: list[Record] = []
        self.flushed_at = 0.0
        #: Something waits for `turn`; true from the start.
        self.attention = True
        #: The mode of a batch in which everybody runs already.
        self.decode_mode: Any = _UNKNOWN
        self._names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._version = ""
        self._measures = False
        self._generates = True
        self._echoes = True
        self._swept_at = 0.0
        self._abort_type: Any = None
        self._started = False

    # ---- beginning -------------------------------------------------------------------------------

    def greet(self, version: str, attached: Sequence[str], missing: Sequence[str]) -> None:
        """What the greeting to the collector shall say of our hooks."""
        self._version = version
        self._names = (tuple(attached), tuple(missing))
        self._echoes = ECHO_HOOK not in missing

    def _start(self, scheduler: Any) -> None:
        self._started = True
        self.scheduler = scheduler
        if not _speaks(scheduler):
            return
        alone = _ranks(scheduler) == 1
        allocator = scheduler.token_to_kv_pool_allocator
        self._generates = bool(getattr(scheduler, "is_generation", True))
        self._measures = (
            getattr(allocator, "page_size", 0) == 1
            and not getattr(scheduler, "is_hybrid_swa", False)
            and not getattr(scheduler, "is_hybrid_ssm", False)
            and not getattr(scheduler, "enable_hisparse", False)
        )
        with contextlib.suppress(ImportError, AttributeError):
            self._abort_type = importlib.import_module("sglang.srt.managers.io_struct").AbortReq
        with contextlib.suppress(ImportError, AttributeError):
            self.decode_mode = importlib.import_module(
                "sglang.srt.model_executor.forward_batch_info"
            ).ForwardMode.DECODE
        commands: list[wire.Action] = ["snapshot"]
        # With several ranks each must see the same commands in the same step: there the API process broadcasts them.
        if alone and self._abort_type is not None:
            commands += ["abort"]
            if self.preempter.usable(scheduler):
                commands += ["preempt", "hold", "resume"]
            if getattr(scheduler, "enable_priority_scheduling", False):
                commands += ["prioritise"]
        attached, missing = self._names
        self.sender = Sender.from_environment(
            KIND,
            self._version,
            role="scheduler",
            rank=_parallel("dp_rank", 0),
            ranks=max(1, _parallel("dp_size", 1)),
            blocks_total=int(getattr(scheduler, "max_total_num_tokens", 0)),
            block_tokens=1,
            commands=commands,
            hooks_attached=attached,
            hooks_missing=missing,
            on_command=self.nudge,
        )
        if self.sender is not None:
            self.sender.start()

    # ---- requests --------------------------------------------------------------------------------

    def known(self, req: Any) -> Record | None:
        """The record of this very request."""
        record = self.records.get(req.rid)
        return record if record is not None and record.req is req else None

    def entered(self, req: Any) -> None:
        """It is about to be queued, for the first time or again."""
        if req.rid.startswith(_HEALTH):
            return
        record = self.known(req)
        if record is not None:
            return
        record = self.records[req.rid] = Record(req)
        self.events.append(wire.Added(record.rid, monotonic(), len(req.origin_input_ids), record.parent))

    def move(self, record: Record, place: wire.Place) -> None:
        """Say where it sits, when that is news."""
        if record.place != place:
            before, record.place = record.place, place
            at = monotonic()
            self.events.append(wire.Moved(record.rid, at, place))
            if before == "preempted" and place in ("running", "waiting"):
                self.events.append(wire.Resumed(record.rid, at))

    def scheduled(self, batch: Any) -> None:
        """`batch` will run now; its KV has been given out. Needs not be told of a batch in `decode_mode`."""
        for req in batch.reqs:
            record = self.known(req)
            if record is not None and not record.ending:
                if record.place != "running":
                    self.move(record, "running")
                self.count_held(record, monotonic())

    def count_held(self, record: Record, at: float) -> None:
        """Book what it holds now."""
        kv = record.req.kv
        held = kv.kv_allocated_len if kv.holds_kv else 0
        if held != record.held:
            change, record.held = held - record.held, held
            self.events.append(
                wire.BlocksHeld(record.rid, at, change) if change > 0 else wire.BlocksReturned(record.rid, at, -change)
            )

    def count_tokens(self, record: Record, at: float) -> None:
        """Book what was computed and what was handed to the detokenizer since the last time."""
        if not self._generates:
            return
        req = record.req
        computed, emitted = len(req.output_ids), req.send_token_offset
        if computed > record.computed:
            self.events.append(wire.TokensComputed(record.rid, at, computed - record.computed))
        if emitted > record.emitted:
            self.events.append(wire.TokensEmitted(record.rid, at, emitted - record.emitted))
        record.computed, record.emitted = computed, emitted

    def released(self, record: Record, held: int, missing: int) -> None:
        """Its KV was given back, but for `missing` tokens that went nowhere."""
        at = monotonic()
        if held > record.held:
            self.events.append(wire.BlocksHeld(record.rid, at, held - record.held))
            record.held = held
        returned = record.held - missing
        if returned > 0:
            self.events.append(wire.BlocksReturned(record.rid, at, returned))
        record.held = max(0, missing)
        if missing > 0:
            logger.error(
                "StopGuard: %d KV tokens of request %s came back to neither the pool nor the cache", missing, record.rid
            )
        if record.req.finished():
            self._end_soon(record)

    def retracted(self, req: Any) -> None:
        """It lost its room and lives on."""
        record = self.known(req)
        if record is not None and not req.finished():
            self.count_tokens(record, monotonic())
            self.move(record, "preempted")
            lost = record.lost or len(req.origin_input_ids) + len(req.output_ids)
            self.events.append(wire.Preempted(record.rid, monotonic(), lost))

    def echoed(self, req: Any, reason: Any) -> None:
        """The scheduler ended it outside of a step (queued, mid-prefill, or refused)."""
        record = self.known(req)
        if record is None:
            return
        self.count_held(record, monotonic())
        code = reason.get("status_code") if isinstance(reason, dict) else None
        self._end(record, "abort" if record.aborting or code is None else "rejected")

    def _end_soon(self, record: Record) -> None:
        if not record.ending:
            record.ending = True
            self.endings.append(record)

    def _end(self, record: Record, reason: str) -> None:
        at = monotonic()
        rid = record.rid
        self.count_tokens(record, at)
        unsent = record.computed - record.emitted
        if unsent > 0:
            self.events.append(wire.TokensDropped(rid, at, unsent))
        if self._computed_once_more(record.req):
            self.events += (wire.TokensComputed(rid, at, 1), wire.TokensDropped(rid, at, 1, True))
        if reason == "abort":
            self.events.append(wire.AbortApplied(rid, at))
        # A prompt computed for children that will follow is no end of their request.
        if reason == "abort" or not record.warmup:
            self.events.append(wire.Finished(rid, at, reason))
        self.events.append(wire.Moved(rid, at, "gone"))
        del self.records[rid]
        self.preempter.forget(rid)

    def _computed_once_more(self, req: Any) -> bool:
        """Whether the step in flight computes a token for a request that has ended."""
        pending = getattr(self.scheduler, "result_queue", None)
        if not pending:
            return False
        batch = pending[-1][0]
        return batch.forward_mode.is_decode() and any(other is req for other in batch.reqs)

    # ---- aborts ----------------------------------------------------------------------------------

    def abort_comes(self, rid: str, everything: bool) -> list[Any]:
        """An abort is about to look for its victims. Returns the requests that it must not see; see `abort_went`."""
        at = monotonic()
        hits, hidden = [], []
        whole_family = _OURS.fullmatch(rid) is not None
        for record in self.records.values():
            if everything or record.rid == rid or (whole_family and record.parent == rid):
                hits.append(record)
            elif record.rid.startswith(rid):
                hidden.append(record.req)
        for record in hits:
            record.aborting = True
            self.events.append(wire.AbortArrived(record.rid, at))
            self.preempter.give_back_for_abort(record.rid)
        if not hits and rid and not rid.startswith(_HEALTH):
            self.events.append(wire.AbortNoop(rid, at))
        for req in hidden:
            req.rid = _HIDDEN + req.rid
        return hidden

    @staticmethod
    def abort_went(hidden: list[Any]) -> None:
        """Undo what `abort_comes` hid."""
        for req in hidden:
            req.rid = req.rid.removeprefix(_HIDDEN)

    def paused(self, mode: str) -> None:
        """The scheduler takes no step until it is continued."""
        if mode == "in_place":
            for record in self.records.values():
                if record.place == "running":
                    self.count_tokens(record, monotonic())
                    self.move(record, "paused")

    def continued(self) -> None:
        for record in self.records.values():
            if record.place == "paused":
                self.move(record, "running")

    # ---- between steps ---------------------------------------------------------------------------

    def turn(self, scheduler: Any) -> None:
        """One turn of the event loop begins, and there is `attention` or something to tell."""
        if not self._started:
            self._start(scheduler)
        if self.sender is None:
            self._forget_everything()
            return
        self.attention = False  # before the commands are looked at: others may come at any time
        self.preempter.turn()
        for command in self.sender.commands():
            self._obey(command)
        sweeping = not self._echoes and bool(self.records)
        if sweeping:
            self._sweep()
        if self.events or self.endings:
            self.flush()
        if sweeping or self.preempter.busy:
            self.attention = True

    def _sweep(self) -> None:
        """Where SGLang has no single place for echoes (before 0.5.23): whoever waits in no queue any more has ended."""
        at = monotonic()
        if at - self._swept_at < _SWEEP_SECONDS:
            return
        self._swept_at = at
        scheduler = self.scheduler
        there = {id(req) for req in scheduler.waiting_queue}
        there |= {id(req) for req in getattr(getattr(scheduler, "grammar_manager", None), "grammar_queue", ())}
        there |= {id(req) for req, _ in self.preempter.parked.values()}
        there.add(id(scheduler.chunked_req))
        for batch in (scheduler.running_batch, scheduler.last_batch):
            there |= {id(req) for req in getattr(batch, "reqs", ())}
        for record in list(self.records.values()):
            if record.place in ("waiting", "preempted") and not record.ending and id(record.req) not in there:
                self.echoed(record.req, None if record.aborting else {"status_code": 0})

    def flush(self) -> None:
        """Send what has happened since the last frame."""
        for record in self.endings:
            if record.rid in self.records:
                self._end(record, _reason(record))
        self.endings.clear()
        at = self.flushed_at = monotonic()
        for record in self.records.values():
            if record.place == "running":
                self.count_held(record, at)
                self.count_tokens(record, at)
        if not self.events or self.sender is None:
            return
        running, waiting, free, cached = self._totals()
        events, self.events = self.events, []
        sequence = self.sequence = self.sequence + 1
        self.sender.send(wire.Frame(sequence, self.step, at, events, running, waiting, free, cached))

    def _forget_everything(self) -> None:
        """This process does not speak: keep nothing for nobody."""
        for record in self.endings:
            self.records.pop(record.rid, None)
        self.endings.clear()
        self.events.clear()

    def _totals(self) -> tuple[int, int, int, int]:
        running = sum(record.place in ("running", "paused") for record in self.records.values())
        scheduler = self.scheduler
        free = scheduler.token_to_kv_pool_allocator.available_size()
        cached = scheduler.tree_cache.evictable_size()
        return running, len(self.records) - running, int(free), _whole(cached)

    def pool_sum(self) -> int | None:
        """Tokens free, to be freed, cached and locked, together; `None` in a pool where they do not add up."""
        if not self._measures:
            return None
        allocator, tree = self.scheduler.token_to_kv_pool_allocator, self.scheduler.tree_cache
        held_back = getattr(allocator, "free_group", None) or ()
        pending = sum(part.numel() for part in held_back)
        in_tree = _whole(tree.evictable_size()) + _whole(tree.protected_size())
        return int(allocator.available_size() + pending + in_tree)

    # ---- commands --------------------------------------------------------------------------------

    def nudge(self) -> None:
        """Commands have come. Called by the sender's thread: an idle scheduler may sleep for a second.

        While there is no request at all nothing can be done wrong here: nothing is known, and nothing is held.
        """
        self.attention = True
        self.preempter.wake.set()
        sender = self.sender
        if sender is None:
            return
        sequence = self.sequence
        if self.records or self.events:
            return
        for command in sender.commands():
            if command.action == "snapshot":
                sender.send(self._snapshot(command.command_id, sequence, []))
            else:
                sender.send(wire.CommandAnswer(command.command_id, "unknown"))

    def family(self, rid: str) -> list[Record]:
        """The request and its children."""
        return [record for record in self.records.values() if rid in (record.rid, record.parent)]

    def _obey(self, command: wire.Command) -> None:
        sender = self.sender
        assert sender is not None
        action, rid = command.action, command.request_id
        if action == "snapshot":
            self.flush()
            rows = [_row(record) for record in self.records.values()]
            sender.send(self._snapshot(command.command_id, self.sequence, rows))
        elif action == "abort":
            found = self.family(rid)
            for record in found:
                self.scheduler.abort_request(self._abort_type(rid=record.rid))
            sender.send(wire.CommandAnswer(command.command_id, "accepted" if found else "unknown"))
        elif action == "prioritise":
            # Its queue is sorted by this attribute anew in each step (`schedule_policy.py: calc_priority`).
            found = self.family(rid)
            for record in found:
                record.req.priority = command.priority
            sender.send(wire.CommandAnswer(command.command_id, "applied" if found else "unknown"))
        else:
            self.preempter.obey(command)

    def _snapshot(self, command_id: int, sequence: int, rows: list[wire.RequestNow]) -> wire.Snapshot:
        running, waiting, free, cached = self._totals()
        return wire.Snapshot(command_id, sequence, self.step, monotonic(), rows, running, waiting, free, cached)


watch: Final = SchedulerWatch()


def _whole(size: Any) -> int:
    """A tree's size in tokens of full attention (some trees say a pair)."""
    return int(size[0]) if isinstance(size, tuple) else int(size)


def _reason(record: Record) -> str:
    finished = record.req.finished_reason
    told = finished.to_json() if finished is not None else {}
    kind = str(told.get("type", "stop"))
    if kind == "abort" and not record.aborting and told.get("status_code") is not None:
        return "error"  # refused for what it asks, or out of its time: its client is told so by SGLang
    return kind


def _row(record: Record) -> wire.RequestNow:
    req = record.req
    return wire.RequestNow(
        record.rid,
        record.place,
        prompt_tokens=len(req.origin_input_ids),
        parent_id=record.parent,
        blocks_held=record.held,
        tokens_computed=record.computed,
        tokens_emitted=record.emitted,
        tokens_dropped=0,
    )


def _ranks(scheduler: Any) -> int:
    """How many scheduler processes act in step with this one, itself counted."""
    arguments = getattr(scheduler, "server_args", None)
    return int(getattr(arguments, "tp_size", 1) or 1) * int(getattr(arguments, "pp_size", 1) or 1)


def _speaks(scheduler: Any) -> bool:
    """Of the ranks that act in step only the first one speaks."""
    names = ("attn_tp_rank", "pp_rank", "attn_cp_rank")
    return all(_parallel(name, int(getattr(scheduler, name, 0) or 0)) == 0 for name in names)


def _parallel(name: str, default: int) -> int:
    """One of the sizes and ranks that SGLang keeps for the whole process."""
    try:
        parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
        return int(getattr(parallel, name) or default)
    except Exception:  # not there, or not set up
        return default
