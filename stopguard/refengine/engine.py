"""The reference engine: commands and time in, frames and outputs out.

The driver owns the clock. It calls the commands whenever they happen and `step(at)` when
`next_event_at` says so; `at` never goes back. One call of `step` is one turn of an engine's core loop:

1. connections that the policy has noticed by now become aborts;
2. if the oldest step in flight is done: its results are processed (a *boundary*);
3. if the pipeline has room: commands are read, refused aborts tried again, and the next steps launched.

While the pipeline is full the core is blocked, as a real one is: an abort that comes in the middle of a
step is read at its end.

The front end is here too: which ids are live, one watch a connection, what the doors answer. Nothing
here outlives its request, except where a fault wants it to.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from stopguard.errors import LimitReached
from stopguard.probe import wire
from stopguard.refengine import stopping
from stopguard.refengine.batching import plan
from stopguard.refengine.core import Core
from stopguard.refengine.execution import finish_device, launch, process_outputs
from stopguard.refengine.faults import fault_named
from stopguard.refengine.hooks import Fault, Hooks
from stopguard.refengine.interface import (
    AbortAnswer,
    Door,
    DuplicateRequest,
    EngineConfig,
    EngineCrashed,
    EngineSnapshot,
    Gauges,
    Health,
    NotSupported,
    PauseMode,
    PoolCorrupted,
    RequestRejected,
    RequestSpec,
    StepResult,
    TimeWentBackwards,
)
from stopguard.refengine.policies import Policy, Watch, answer_at_door, policy_named
from stopguard.refengine.request import Request, State, check_spec
from stopguard.refengine.stopping import AbortCommand

__all__ = ["ReferenceEngine"]

#: Two floats this close are the same moment: a driver's clock may differ in the last bit.
_SAME_MOMENT_SECONDS = 1e-9
#: Commands that may wait for the core to read them.
_COMMANDS_MAX = 65_536
#: How many ended ids are remembered where a fault wants to tell "ended" from "never heard of".
_ENDED_IDS_MAX = 1024


class _Submit(msgspec.Struct):
    requests: list[Request]


class _Preempt(msgspec.Struct):
    requests: list[Request]


class _Resume(msgspec.Struct):
    requests: list[Request]


class _Pause(msgspec.Struct):
    mode: PauseMode


class _ResumeAll(msgspec.Struct):
    pass


_Command = _Submit | AbortCommand | _Preempt | _Resume | _Pause | _ResumeAll


class _Root(msgspec.Struct):
    """One request as its client knows it: its sequences, and how many of them have not ended."""

    requests: list[Request]
    open: int
    #: A fault has lost the abort and the front end believes it sent: all later ones are suppressed.
    abort_lost: bool = False


class ReferenceEngine:
    """One engine with the stop behaviour of `policy`, healthy unless `faults` are given.

    The same configuration, policy, faults, seed and calls give the same frames and outputs, byte for byte.
    """

    def __init__(
        self, config: EngineConfig, policy: Policy | str, faults: Sequence[Fault | str] = (), seed: int = 0
    ) -> None:
        self.config = config.check()
        self.policy = policy_named(policy) if isinstance(policy, str) else policy
        self.faults = tuple(fault_named(fault) if isinstance(fault, str) else fault for fault in faults)
        for fault in self.faults:
            fault.seed(seed)
        self.pipeline_depth = self.config.pipeline_depth or max(
            self.policy.pipeline_depth, *(fault.needs_depth for fault in self.faults), 1
        )
        numbers = random.Random(seed)
        self._core = Core(self.config, self.policy, Hooks(self.faults), self.pipeline_depth, numbers, self._on_gone)
        self._numbers = numbers
        self._roots: dict[str, _Root] = {}
        self._live = 0
        self._inbox: list[_Command] = []
        self._dirty = False
        self._sequence = 0
        #: When a chunk or a whole answer was last delivered to anybody (it starves llama.cpp's wait).
        self._delivered_at = 0.0
        self._ended: OrderedDict[str, None] = OrderedDict()
        #: One a connection; gone with its request. A fault may let them live on.
        self.watchers: dict[str, Watch] = {}
        self._gone: dict[str, Watch] = {}

    def __repr__(self) -> str:
        core = self._core
        return (
            f"<{self.policy.name} engine: step {core.steps_done}, {len(core.running)} running, "
            f"{len(core.waiting)} waiting, {core.pool!r}>"
        )

    # Commands -------------------------------------------------------------------------------------

    def submit(self, spec: RequestSpec, at: float) -> list[str]:
        """Take a request; returns the internal ids, one a sequence (the caller's own id when `n` is 1).

        Raises `RequestRejected`, `DuplicateRequest`, `LimitReached` or `EngineCrashed`; nothing is kept then.
        """
        self._advance(at)
        self._check_ready()
        check_spec(spec, self.config, self.policy)
        if spec.request_id in self._roots:
            raise DuplicateRequest(f"request {spec.request_id} is live already: give each request its own id")
        self._check_room(spec.sampling.n)
        count = spec.sampling.n
        if count == 1:
            requests = [Request(spec, spec.request_id, 0, "", at)]
        else:
            names = [self.policy.child_names(spec.request_id, index, self._numbers) for index in range(count)]
            requests = [Request(spec, name, index, spec.request_id, at) for index, name in enumerate(names)]
        self._roots[spec.request_id] = _Root(requests, count)
        self._live += count
        self.watchers[spec.request_id] = Watch(spec.request_id, spec.stream, at)
        if self.policy.intake == "at_call":
            for request in requests:
                self._core.add(request)
            self._dirty = True
        else:
            self._post(_Submit(requests))
        return [request.request_id for request in requests]

    def abort(self, request_id: str, at: float, door: Door = "api") -> AbortAnswer:
        """Knock at `door`. What comes back is what that door of the imitated engine says, no more."""
        self._advance(at)
        self._check_ready()
        if not request_id:
            raise RequestRejected("an abort needs a request id: an empty one would match every request")
        return self._abort(request_id, door)

    def _abort(self, request_id: str, door: Door) -> AbortAnswer:
        root = self._roots.get(request_id)
        live = [request for request in root.requests if request.state is not State.GONE] if root else []
        answer, goes_on = answer_at_door(self.policy, request_id, live, door)
        if root is not None and root.abort_lost:
            return AbortAnswer("suppressed", answer.status)
        if self.policy.intake == "at_call":
            return self._abort_now(request_id, live, retries=door == "socket")
        if not goes_on:
            return answer
        core = self._core
        dispatched = all(request.request_id in core.requests for request in live)
        if root is not None and any(
            fault.lose_at_door(live, dispatched, core.paused, door) for fault in core.hooks.lose_at_door
        ):
            root.abort_lost = True
            return answer
        if self.policy.front_gate:
            for request in live:
                request.front_stopped = True
        self._post(AbortCommand(request_id, live, door))
        return answer

    def abort_all(self, at: float, door: Door = "api") -> AbortAnswer:
        """Abort everything that is live; the answer counts the requests that were named."""
        names = list(self._roots)
        answer = AbortAnswer("accepted", 200)
        for name in names:
            answer = self.abort(name, at, door)
        return msgspec.structs.replace(answer, count=len(names))

    def client_gone(self, request_id: str, at: float) -> None:
        """The client's connection has closed. *When* the engine notices is the policy's business.

        After the end of the request it means nothing: finished beats gone.
        """
        self._advance(at)
        root, watch = self._roots.get(request_id), self.watchers.get(request_id)
        if root is None or watch is None or watch.gone_at is not None or root.requests[0].spec.detached:
            return
        watch.gone_at = at
        if not any(fault.ignore_disconnect(root.requests) for fault in self._core.hooks.ignore_disconnect):
            self._gone[request_id] = watch

    def preempt(self, request_id: str, at: float) -> None:
        """Between two steps: take the request out and hold it, without blocks, until `resume`."""
        self._hold_command(request_id, at, _Preempt)

    def resume(self, request_id: str, at: float) -> None:
        """Put a held request back into the queue; its output goes on where it stopped."""
        self._hold_command(request_id, at, _Resume)

    def _hold_command(self, request_id: str, at: float, kind: type[_Preempt | _Resume]) -> None:
        self._advance(at)
        self._check_ready()
        if not self.policy.holds:
            raise NotSupported(f"{self.policy.name} cannot preempt a named request: stop it and resume from token ids")
        root = self._roots.get(request_id)
        if root is not None:
            self._post(kind([request for request in root.requests if request.state is not State.GONE]))

    def pause(self, mode: PauseMode, at: float) -> None:
        """Stop scheduling, until `resume_all`, and do with what runs what `mode` says."""
        self._advance(at)
        self._check_ready()
        if mode not in self.policy.pause_modes:
            known = ", ".join(self.policy.pause_modes) or "none"
            raise NotSupported(f"{self.policy.name} has no pause mode {mode!r}; it has: {known}")
        self._post(_Pause(mode))

    def resume_all(self, at: float) -> None:
        """End a pause."""
        self._advance(at)
        self._check_ready()
        self._post(_ResumeAll())

    def observe(self, at: float) -> None:
        """Somebody reads the engine's own status page. Where that goes through the task queue it wakes the
        waits, and so puts off the noticing of closed connections (llama.cpp's `/slots` and `/metrics`).
        """
        self._advance(at)
        self._delivered_at = at

    def _post(self, command: _Command) -> None:
        self._inbox.append(command)
        self._dirty = True

    # Time -----------------------------------------------------------------------------------------

    def step(self, at: float) -> StepResult:
        """One turn of the core loop at `at`. Harmless at any time, useful at `next_event_at`."""
        self._advance(at)
        core = self._core
        launched_seconds = 0.0
        if not core.crashed and not core.wedged:
            self._notice()
            launched_seconds = self._turn()
        if core.pins and not core.crashed:
            core.drain_pins()
        outputs, core.outputs = core.outputs, []
        events, core.events = core.events, []
        for output in outputs:
            watch = self.watchers.get(output.request_id)
            if watch is None or watch.stream or output.finish_reason is not None:
                self._delivered_at = at
            if watch is not None and watch.first_output_at is None and output.token_ids:
                watch.first_output_at = at
        self._sequence += 1
        frame = wire.Frame(
            self._sequence,
            core.steps_done,
            at,
            events,
            len(core.running),
            len(core.waiting),
            core.pool.free,
            core.pool.cached,
        )
        return StepResult(frame, outputs, launched_seconds, core.steps_done)

    def _turn(self) -> float:
        core = self._core
        if core.batches and core.batches[0].ends_at <= core.now + _SAME_MOMENT_SECONDS:
            batch = finish_device(core)
            if self.policy.intake == "aborts_first":
                self._read_aborts()
            process_outputs(core, batch)
            stopping.sweep(core)
            core.hand_out_endings()
        if len(core.batches) >= self.pipeline_depth:
            return 0.0
        self._dirty = False
        self._intake()
        if core.refused:
            stopping.retry_refused(core)
        if self.policy.effect == "beat" and not core.batches:
            stopping.sweep(core)
        seconds = self._launch()
        if core.marked and not core.batches and not core.paused:
            stopping.sweep(core)
            seconds += self._launch()
        return seconds

    def _launch(self) -> float:
        core, seconds = self._core, 0.0
        while len(core.batches) < self.pipeline_depth and not core.crashed:
            entries = plan(core)
            if not entries and (core.batches or not core.needs_beat):
                break
            batch = launch(core, entries)
            seconds += batch.ends_at - batch.launched_at
        return seconds

    def next_event_at(self, at: float) -> float | None:
        """When the driver must call `step` next, never before `at`; None when only a command can change anything."""
        core = self._core
        if core.crashed:
            return None
        times = [pin.due_at for pin in core.pins]
        if not core.wedged:
            if self._dirty and len(core.batches) < self.pipeline_depth:
                return at
            if core.batches:
                times.append(core.batches[0].ends_at)
            times.extend(self._noticed_at(watch) for watch in self._gone.values())
        return max(at, min(times)) if times else None

    def _advance(self, at: float) -> None:
        if at < self._core.now - _SAME_MOMENT_SECONDS:
            raise TimeWentBackwards(f"the engine is at {self._core.now:.6f} s and was called for {at:.6f} s")
        self._core.now = max(at, self._core.now)

    # Noticing -------------------------------------------------------------------------------------

    def _noticed_at(self, watch: Watch) -> float:
        return self.policy.detection(watch, self._delivered_at, self.config.stream_detection_seconds)

    def _notice(self) -> None:
        if not self._gone:
            return
        now = self._core.now + _SAME_MOMENT_SECONDS
        due = [watch for watch in self._gone.values() if self._noticed_at(watch) <= now]
        for watch in due:
            del self._gone[watch.request_id]
            watch.noticed = True
            self._abort(watch.request_id, "socket")

    # Reading commands -----------------------------------------------------------------------------

    def _read_aborts(self) -> None:
        """Only the aborts, and only those whose requests the scheduler has: the others wait for their turn."""
        rest: list[_Command] = []
        for command in self._inbox:
            if isinstance(command, AbortCommand) and self._known(command.requests):
                self._read_abort(command)
            else:
                rest.append(command)
        self._inbox = rest

    def _known(self, requests: Iterable[Request]) -> bool:
        return all(request.state is State.GONE or request.request_id in self._core.requests for request in requests)

    def _intake(self) -> None:
        commands, self._inbox = self._inbox, []
        if self.policy.intake == "head":
            commands = self._aborts_to_the_head(commands)
        for command in commands:
            match command:
                case _Submit():
                    for request in command.requests:
                        self._core.add(request)
                case AbortCommand():
                    self._read_abort(command)
                case _Preempt():
                    self._read_preempt(command)
                case _Resume():
                    for request in command.requests:
                        if request.state is State.HELD and not request.marked:
                            self._core.release_held(request)
                case _Pause():
                    self._read_pause(command.mode)
                case _ResumeAll():
                    self._core.paused = self._core.admission_closed = False

    def _aborts_to_the_head(self, commands: list[_Command]) -> list[_Command]:
        """Cancel tasks go to the head of the queue; a task that has not been read yet is read just before."""
        aborts = [command for command in commands if isinstance(command, AbortCommand)]
        named = {id(request) for command in aborts for request in command.requests}
        rest = [command for command in commands if not isinstance(command, AbortCommand)]
        before = [
            command
            for command in rest
            if isinstance(command, _Submit) and any(id(request) in named for request in command.requests)
        ]
        return [*before, *aborts, *(command for command in rest if command not in before)]

    def _read_abort(self, command: AbortCommand) -> None:
        if not self._core.crashed:
            stopping.read_abort(self._core, command, ended_before=command.request_id in self._ended)

    def _abort_now(self, request_id: str, live: list[Request], *, retries: bool) -> AbortAnswer:
        """The in-process call: it acts before it returns, and says how many sequences it took out."""
        core = self._core
        self._dirty = True
        if not live:
            stopping.read_abort(core, AbortCommand(request_id, [], "api"), ended_before=request_id in self._ended)
            return AbortAnswer("unknown", 200, count=0)
        if any(stopping.prefill_in_flight(request) for request in live) and any(
            fault.lose_in_prefill(request) for fault in core.hooks.lose_in_prefill for request in live
        ):
            return AbortAnswer("unknown", 200, count=0)
        spared: Sequence[Request] = live
        for fault in core.hooks.spare:
            spared = fault.spare(spared) if len(spared) > 1 else spared
        victims = list(spared)
        for fault in core.hooks.extra_victims:
            victims += fault.extra_victims(request_id, victims, core.requests.values())
        done = sum(stopping.act(core, request, retries=retries) for request in victims)
        if done < len(victims):
            wait = core.batches[0].ends_at - core.now if core.batches else self.config.step_cost.base_seconds
            return AbortAnswer("try_again", 200, count=done, retry_after_seconds=max(0.0, wait))
        return AbortAnswer("aborted", 200, count=done)

    def _read_preempt(self, command: _Preempt) -> None:
        again = []
        for request in command.requests:
            if request.marked:
                continue
            match request.state:
                case State.RUNNING:
                    self._core.preempt(request, hold=True)
                case State.WAITING | State.PREEMPTED | State.PAUSED:
                    self._core.hold_waiting(request)
                case State.TRANSFERRING:
                    again.append(request)  # its blocks are being written from outside: at a later boundary
                case State.HELD | State.GONE:
                    pass
        if again:
            self._inbox.append(_Preempt(again))

    def _read_pause(self, mode: PauseMode) -> None:
        core = self._core
        if mode == "wait":
            core.admission_closed = True
            return
        core.paused = True
        if mode == "retract":
            for request in [request for request in core.running if not request.marked]:
                core.preempt(request)
        elif mode == "abort":
            for request in list(core.requests.values()):
                stopping.act(core, request, retries=True)
            stopping.sweep(core)  # no further step will come to end the marked ones

    # Ends -----------------------------------------------------------------------------------------

    def _on_gone(self, request: Request) -> None:
        """A sequence has ended and its last output is on its way: with the last one the watch ends, too."""
        root = self._roots[request.root_id]
        root.open -= 1
        self._live -= 1
        if root.open:
            return
        del self._roots[request.root_id]
        self._gone.pop(request.root_id, None)
        hooks = self._core.hooks
        if not any(fault.keep_watcher(request) for fault in hooks.keep_watcher):
            self.watchers.pop(request.root_id, None)
        if hooks.crash_on_noop:
            self._ended[request.root_id] = None
            if len(self._ended) > _ENDED_IDS_MAX:
                self._ended.popitem(last=False)

    # Checks ---------------------------------------------------------------------------------------

    def _check_ready(self) -> None:
        if self._core.crashed:
            raise EngineCrashed(f"the engine's core is dead: {self._core.crashed}")
        if len(self._inbox) >= _COMMANDS_MAX:
            raise LimitReached("commands that the core has not read", _COMMANDS_MAX, "call step, or wait for it")

    def _check_room(self, sequences: int) -> None:
        limit = self.config.max_waiting + self.config.max_running
        if self._live + sequences > limit:
            raise LimitReached("live requests", limit, "try again when some have ended")

    # Looking --------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The time of the latest call, in seconds."""
        return self._core.now

    @property
    def crashed(self) -> str:
        """Why the core is dead; empty while it lives."""
        return self._core.crashed

    @property
    def stale_writes(self) -> int:
        """Writes of dead steps that landed in a block with a new owner: 0 in a healthy engine."""
        return self._core.pool.stale_writes

    @property
    def sequence(self) -> int:
        """The number of the last frame."""
        return self._sequence

    @property
    def between_frames(self) -> bool:
        """Whether nothing has happened that the last frame did not say."""
        return not self._core.events

    def leaving(self) -> list[tuple[Request, int]]:
        """What `Core.leaving` says."""
        return self._core.leaving()

    def health(self) -> Health:
        """What `/health` answers (it knows a dead process, not a wedged one) and whether that is true."""
        if self._core.crashed:
            return Health(503, alive=False, reason=self._core.crashed)
        if self._core.wedged:
            return Health(200, alive=False, reason="the core makes no progress")
        return Health(200, alive=True)

    def gauges(self) -> Gauges:
        """The engine's own totals."""
        core = self._core
        pool, counters = core.pool, core.counters
        queued = Counter(request.state for request in core.waiting)
        return Gauges(
            running=len(core.running) + core.running_drift,
            waiting=queued[State.WAITING],
            preempted=queued[State.PREEMPTED],
            paused=queued[State.PAUSED] + len(core.held),
            transferring=len(core.transferring),
            blocks_total=pool.total,
            blocks_free=pool.free,
            blocks_cached=pool.cached,
            blocks_held=pool.held,
            blocks_fenced=pool.fenced,
            host_blocks_held=core.host_blocks_held,
            slots_held=core.slots.held(),
            watchers=len(self.watchers),
            steps_total=core.steps_done,
            prompt_tokens_total=counters.prompt_tokens,
            generated_tokens_total=counters.generated_tokens,
            preemptions_total=counters.preemptions,
            recomputed_tokens_total=counters.recomputed_tokens,
            aborts_total=counters.aborts,
            finished_total=dict(counters.finished),
        )

    def snapshot(self, at: float) -> EngineSnapshot:
        """Everything that is open: for gaps in the frames, for reconciling, and for the proof at idle."""
        self._advance(at)
        core = self._core
        return EngineSnapshot(
            at=at,
            steps_done=core.steps_done,
            requests=[request.view() for request in core.requests.values()],
            gauges=self.gauges(),
            commands_pending=len(self._inbox) + len(core.refused),
            fences_pending=len(core.fences) + len(core.pins) + len(core.stalled),
            outputs_deferred=len(core.endings),
        )

    def verify(self) -> None:
        """Count everything again from scratch; a `BookkeepingError` says what is wrong. For tests."""
        core = self._core
        core.pool.verify()
        places = (
            (State.RUNNING, len(core.running)),
            (State.TRANSFERRING, len(core.transferring)),
            (State.HELD, len(core.held)),
        )
        for state, count in places:
            found = sum(request.state is state for request in core.requests.values())
            if found != count:
                raise PoolCorrupted(f"{found} requests are {state.value} and the list has {count}")
        owned = {block for request in core.requests.values() for block in request.table}
        owned |= {block for pin in (*core.pins, *core.stalled) for block in pin.blocks}
        if len(owned) != core.pool.held:
            raise PoolCorrupted(f"{core.pool.held} blocks are held and live requests own {len(owned)}")
