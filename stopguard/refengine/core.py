"""The scheduler's state, and the one way out of it.

`Core` owns every queue, pool and counter of the engine. The functions that change it are here where
they take things away (`end`, `preempt`, `give_blocks`), in `batching` (what runs next), in
`execution` (what a step did) and in `stopping` (what an abort does).

One release path: whatever ends a request, for whatever reason, `end` gives back all that it holds.
Fences are generic: blocks that a step in flight may still write go behind a fence until that step is
done, whoever gave them up and why. The policies differ in *when* they come here.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import msgspec

from stopguard.probe import wire
from stopguard.refengine.batches import Batch
from stopguard.refengine.hooks import Cause, Hooks
from stopguard.refengine.interface import EngineConfig, FinishReason, Output, Usage
from stopguard.refengine.model import decode
from stopguard.refengine.policies import Policy
from stopguard.refengine.pool import BlockPool
from stopguard.refengine.queue import WaitingQueue
from stopguard.refengine.request import Event, Request, State
from stopguard.refengine.slots import SlotPools

__all__ = ["Core", "Counters", "Transfer"]


class _Fence(msgspec.Struct):
    """Blocks that may be written until `step` is done."""

    step: int
    request: Request
    blocks: list[int]
    #: A fault frees the last block twice when the fence falls.
    again: bool


class _Pin(msgspec.Struct):
    """Blocks that a fault holds after their request has gone."""

    due_at: float
    request: Request
    blocks: list[int]


class Transfer(msgspec.Struct):
    """KV that another instance is writing into `blocks` until `step` is done; it does not know about aborts."""

    step: int
    request: Request
    blocks: list[int]
    generations: list[int]
    tokens: list[int]


class _Ending(msgspec.Struct):
    """A final output that is handed out some boundaries after the release."""

    beat: int
    request: Request
    reason: FinishReason
    output: Output


class Counters(msgspec.Struct):
    """Totals since the start; they only rise."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    aborts: int = 0
    finished: dict[str, int] = {}


class Core:
    """Queues, pools, batches and counters of one engine. `now` is the time of the call being served."""

    def __init__(
        self,
        config: EngineConfig,
        policy: Policy,
        hooks: Hooks,
        depth: int,
        numbers: random.Random,
        on_gone: Callable[[Request], None],
    ) -> None:
        self.config = config
        self.policy = policy
        self.hooks = hooks
        self.depth = depth
        self.numbers = numbers
        self.now = 0.0
        self.pool = BlockPool(
            config.blocks, config.block_tokens, prefix_cache=config.prefix_cache, strict=not hooks.free_again
        )
        self.slots = SlotPools(config)
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue(by_priority=config.priority_scheduling)
        self.running: list[Request] = []
        self.transferring: list[Request] = []
        self.held: dict[str, Request] = {}
        self.batches: deque[Batch] = deque()
        self.steps_launched = 0
        self.steps_done = 0
        #: Boundaries passed: one for each step whose results were processed.
        self.beats = 0
        self.fences: list[_Fence] = []
        self.pins: list[_Pin] = []
        self.stalled: list[_Pin] = []
        self.transfers: list[Transfer] = []
        self.endings: list[_Ending] = []
        #: Aborts that were read and take effect later.
        self.marked: list[Request] = []
        #: Those that were refused and that the engine itself tries again.
        self.refused: list[Request] = []
        self.host_blocks_held = 0
        self.events: list[wire.Event] = []
        self.outputs: list[Output] = []
        self.counters = Counters()
        self.running_drift = 0
        self.paused = False
        self.admission_closed = False
        self.crashed = ""
        self.wedged = False
        self._on_gone = on_gone

    # Coming in ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """The scheduler has read the request: it waits."""
        self.requests[request.request_id] = request
        self.events.append(wire.Added(request.request_id, self.now, request.prompt_tokens, request.parent_id))
        request.chain = self.pool.root(request.spec.lora)
        self.waiting.push_back(request)
        self.events.append(wire.Moved(request.request_id, self.now, "waiting"))

    def take_slot(self, request: Request, kind: wire.SlotKind, count: int, name: str = "") -> None:
        """The caller has made sure that it fits."""
        self.slots[kind].take(request.request_id, count, name)
        request.slots[kind] = count
        self.events.append(wire.SlotTaken(request.request_id, self.now, kind, count))

    # Going out ------------------------------------------------------------------------------------

    def end(
        self, request: Request, reason: FinishReason, cause: Cause, tokens: tuple[int, ...] = (), text: str = ""
    ) -> None:
        """The one way out: everything that the request holds goes back, and its last output goes out.

        `tokens` and `text` are what the last output brings beside the reason.
        """
        reported = reason
        for fault in self.hooks.rename_finish:
            reported = fault.rename_finish(request, reported)
        output = self._last_output(request, reported, tokens, text)
        if request.marked and cause != "abort":  # it ended by itself before its abort took effect
            self.events.append(wire.AbortNoop(request.request_id, self.now))
        self._leave(request)
        if self.policy.response_first:
            self._announce(request, reported, output)
        self.give_blocks(request, cause)
        self.give_slots(request, cause)
        self._give_host(request)
        for fault in self.hooks.drift:
            self.running_drift += fault.drift(request, cause)
        request.move(Event.END)
        del self.requests[request.request_id]
        self.events.append(wire.Moved(request.request_id, self.now, "gone"))
        if cause == "abort" and not any(fault.blind_counter(request, cause) for fault in self.hooks.blind_counter):
            self.counters.aborts += 1
        if any(fault.wedge(request, cause) for fault in self.hooks.wedge):
            self.wedged = True
        if self.policy.response_first:
            self._on_gone(request)
        elif cause == "abort" and self.policy.final_output_beats:
            self.endings.append(_Ending(self.beats + self.policy.final_output_beats, request, reported, output))
        else:
            self._announce(request, reported, output)
            self._on_gone(request)

    def hand_out_endings(self) -> None:
        """The final outputs whose beat has come."""
        due = [ending for ending in self.endings if ending.beat <= self.beats]
        for ending in due:
            self.endings.remove(ending)
            self._announce(ending.request, ending.reason, ending.output)
            self._on_gone(ending.request)

    def _announce(self, request: Request, reason: FinishReason, output: Output) -> None:
        self.events.append(wire.Finished(request.request_id, self.now, reason))
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        self.outputs.append(output)

    def _last_output(self, request: Request, reason: FinishReason, tokens: tuple[int, ...], text: str) -> Output:
        usage = Usage(request.prompt_tokens, request.delivered, request.cached_tokens)
        rest = request.assembler.flush()
        return Output(request.root_id, request.index, tokens, text + rest, reason, usage)

    def _leave(self, request: Request) -> None:
        match request.state:
            case State.RUNNING:
                self.running.remove(request)
            case State.TRANSFERRING:
                self.transferring.remove(request)
            case State.WAITING | State.PREEMPTED | State.PAUSED:
                self.waiting.remove(request)
            case State.HELD:
                del self.held[request.request_id]
            case State.GONE:
                pass  # `move` refuses it
        if request.marked:
            self.marked.remove(request)
            request.marked = False
        if request in self.refused:
            self.refused.remove(request)

    # Releases -------------------------------------------------------------------------------------

    def give_blocks(self, request: Request, cause: Cause) -> None:
        """All blocks of the request: behind a fence while a step in flight may write them, else into the pool."""
        hooks = self.hooks
        table, request.table = request.table, []
        if not table:
            return
        kept = max((fault.keep_blocks(request, cause, len(table)) for fault in hooks.keep_blocks), default=0)
        if kept:
            table = table[: len(table) - kept]
            if not table:
                return
        elif hooks.pin_seconds or hooks.wait_for_admission:
            seconds = max((fault.pin_seconds(request, cause) for fault in hooks.pin_seconds), default=0.0)
            if seconds > 0.0:
                self.pins.append(_Pin(self.now + seconds, request, table))
                return
            if any(fault.wait_for_admission(request, cause) for fault in hooks.wait_for_admission):
                self.stalled.append(_Pin(self.now, request, table))
                return
        again = any(fault.free_again(request, cause) for fault in hooks.free_again)
        fence = max(request.last_step if request.in_flight else 0, request.transfer_until)
        if fence > self.steps_done and not any(fault.skip_fence(request, cause) for fault in hooks.skip_fence):
            self.pool.fence(table)
            self.fences.append(_Fence(fence, request, table, again))
            request.blocks_fenced += len(table)
            self.events.append(wire.BlocksFenced(request.request_id, self.now, len(table), fence))
        else:
            if self.policy.keeps_partial_blocks and cause != "preempt":
                self._keep_partial_block(request, table)
            self.return_blocks(request, table)
            if again:
                self._free_again(request, table[-1])

    def _free_again(self, request: Request, block: int) -> None:
        if self.pool.free_again(block):
            self.events.append(wire.BlocksReturned(request.request_id, self.now, 1))

    def return_blocks(self, request: Request, blocks: list[int], *, fenced: bool = False) -> None:
        """`blocks` are reusable from now on. The last one goes back last, so that it is reused first."""
        if fenced:
            self.pool.unfence(blocks)
            request.blocks_fenced -= len(blocks)
        else:
            self.pool.give(blocks)
        self.events.append(wire.BlocksReturned(request.request_id, self.now, len(blocks), fenced))

    def drain_fences(self) -> None:
        """Blocks behind the fences of steps that are done by now."""
        if self.fences:
            due = [fence for fence in self.fences if fence.step <= self.steps_done]
            if due:
                self.fences = [fence for fence in self.fences if fence.step > self.steps_done]
                for fence in due:
                    self.return_blocks(fence.request, fence.blocks, fenced=True)
                    if fence.again:
                        self._free_again(fence.request, fence.blocks[-1])

    def drain_pins(self) -> None:
        """What a fault held until now."""
        for pin in [pin for pin in self.pins if pin.due_at <= self.now]:
            self.pins.remove(pin)
            self.return_blocks(pin.request, pin.blocks)

    def drain_stalled(self) -> None:
        """What a fault held until the next admission."""
        for pin in self.stalled:
            self.return_blocks(pin.request, pin.blocks)
        self.stalled.clear()

    def leaving(self) -> list[tuple[Request, int]]:
        """Requests that are over and whose blocks are not all back, each with those of them that no fence holds."""
        found: dict[str, tuple[Request, int]] = {}
        for fence in self.fences:
            found[fence.request.request_id] = (fence.request, 0)
        for pin in (*self.pins, *self.stalled):
            held = found.get(pin.request.request_id, (pin.request, 0))[1]
            found[pin.request.request_id] = (pin.request, held + len(pin.blocks))
        return [(request, held) for name, (request, held) in found.items() if name not in self.requests]

    def _keep_partial_block(self, request: Request, table: list[int]) -> None:
        whole, rest = divmod(request.computed, self.config.block_tokens)
        if rest and whole < len(table) and request.sealed == whole:
            start = whole * self.config.block_tokens
            self.pool.seal_partial(table[whole], request.chain, request.tokens[start : request.computed])

    def give_slots(self, request: Request, cause: Cause) -> None:
        """All slots that the request holds."""
        kinds, request.slots = request.slots, {}
        for kind in kinds:
            if any(fault.keep_slot(request, kind, cause) for fault in self.hooks.keep_slot):
                continue
            count = self.slots[kind].give(request.request_id)
            self.events.append(wire.SlotReturned(request.request_id, self.now, kind, count))

    def _give_host(self, request: Request) -> None:
        if request.host_blocks and not any(fault.keep_host(request) for fault in self.hooks.keep_host):
            self.host_blocks_held -= request.host_blocks
            self.events.append(wire.HostReturned(request.request_id, self.now, request.host_blocks))
        request.host_blocks = 0
        request.host_tokens = []

    # Preemption -----------------------------------------------------------------------------------

    def preempt(self, request: Request, *, hold: bool = False) -> None:
        """A running request gives up its room and lives on, in the queue or (`hold`) beside it."""
        self.running.remove(request)
        self._back_up(request)
        recompute = max(0, request.computed - len(request.host_tokens))
        self.give_blocks(request, "preempt")
        self.give_slots(request, "preempt")  # who waits holds nothing, or the queue could wait for itself
        request.epoch += 1
        request.preemptions += 1
        request.computed = request.scheduled = request.sealed = 0
        request.chain = self.pool.root(request.spec.lora)
        self.counters.preemptions += 1
        self.counters.recomputed_tokens += recompute
        request.move(Event.HOLD if hold else Event.PAUSE if self.policy.victim_goes == "paused" else Event.PREEMPT)
        self.events.append(wire.Preempted(request.request_id, self.now, recompute))
        self.events.append(wire.Moved(request.request_id, self.now, request.place))
        if hold:
            self.held[request.request_id] = request
        elif self.policy.victim_goes == "back":
            self.waiting.push_back(request)
        else:
            self.waiting.push_front(request)
        if self.policy.retract_evicts_cache:
            self.pool.evict_cached()

    def hold_waiting(self, request: Request) -> None:
        """A request in the queue is put beside it."""
        self.waiting.remove(request)
        request.move(Event.HOLD)
        self.held[request.request_id] = request
        self.events.append(wire.Moved(request.request_id, self.now, request.place))

    def release_held(self, request: Request) -> None:
        """A held request goes back into the queue, where the policy puts a preempted one."""
        del self.held[request.request_id]
        request.move(Event.RESUME if request.preemptions else Event.REQUEUE)
        if self.policy.victim_goes == "back":
            self.waiting.push_back(request)
        else:
            self.waiting.push_front(request)
        self.events.append(wire.Moved(request.request_id, self.now, request.place))

    def _back_up(self, request: Request) -> None:
        """Copy the KV to the host, if there is room and no step in flight still changes it."""
        blocks = len(request.table)
        if request.in_flight or request.host_blocks or self.host_blocks_held + blocks > self.config.host_blocks:
            return
        request.host_blocks = blocks
        request.host_tokens = self.pool.read(request.table, request.computed)
        self.host_blocks_held += blocks
        self.events.append(wire.HostHeld(request.request_id, self.now, blocks))

    def drop_backup(self, request: Request) -> None:
        """The backup is back in the pool's blocks."""
        self._give_host(request)

    # Asking ---------------------------------------------------------------------------------------

    @property
    def needs_beat(self) -> bool:
        """Something only the passing of a step brings on: transfers, their fences, deferred outputs."""
        return bool(self.transfers or self.fences or self.endings)

    def redeliver(self, request: Request, tokens: tuple[int, ...]) -> None:
        """Hand out tokens that must not be handed out: only faults do this."""
        self.events.append(wire.TokensEmitted(request.request_id, self.now, len(tokens)))
        self.outputs.append(Output(request.root_id, request.index, tokens, decode(tokens)))
