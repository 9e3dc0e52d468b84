"""Commands from the control channel, carried out in the core's own thread between two steps.

* **abort** ends a request and its children, and tells the front end that still waits for it, so that a client which
  is there gets `finish_reason: "abort"` instead of silence. It goes to the core that has the request, whichever API
  server accepted it.
* **preempt** takes a running request's room away and keeps it aside until **resume**; **hold** only keeps a waiting
  one from being scheduled. What is kept aside is in none of the scheduler's queues (a list of excluded ones would
  make an idle core spin) and stays in `Scheduler.requests`, so that an abort still finds it.
* **prioritise** changes what a scheduler with the policy `priority` sorts by: for one that waits, its place in the
  queue; for one that runs, who is preempted first when blocks run out.

Requests with a KV connector are not preempted: a transfer may still write what would be given away. An engine that
shuts down and drains takes back what is parked, since its own count of unfinished requests does not know it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from stopguard.probe import wire
from stopguard_vllm.plugin_probe import SchedulerProbe, is_ours, outer_id, parent_of

__all__ = ["CommandSource", "Commands", "actions_of"]

_ACTIONS: Final[tuple[wire.Action, ...]] = ("preempt", "hold", "resume", "snapshot")
_AGAIN_SECONDS: Final = 0.02


def actions_of(core: Any) -> tuple[wire.Action, ...]:
    """What this core can be told: to abort only if it can tell its front end, to prioritise only if it sorts."""
    aborts: tuple[wire.Action, ...] = ("abort",) if callable(getattr(core, "_send_abort_outputs", None)) else ()
    policy = getattr(getattr(core.scheduler, "policy", None), "value", "fcfs")
    sorts: tuple[wire.Action, ...] = ("prioritise",) if policy == "priority" else ()
    return (*aborts, *_ACTIONS, *sorts)


class CommandSource(Protocol):
    """Where commands come from and answers go: `stopguard.probe.sender.Sender`."""

    def commands(self) -> Sequence[wire.Command]: ...

    def send(self, message: wire.Frame | wire.Snapshot | wire.CommandAnswer) -> None: ...


class _Answer(Exception):
    """Ends a command with an answer that is not simply success."""

    def __init__(self, answer: wire.Answer, detail: str = "", retry_after_seconds: float = 0.0) -> None:
        super().__init__(detail)
        self.answer = answer
        self.retry_after_seconds = retry_after_seconds


class Commands:
    """Carries out what `source` brings, on one core. `statuses` is vLLM's `RequestStatus`."""

    def __init__(self, core: Any, probe: SchedulerProbe, source: CommandSource, statuses: Any) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._probe = probe
        self._source = source
        self._statuses = statuses
        self._actions: dict[str, Callable[[list[Any], wire.Command], wire.Answer]] = {
            "abort": self._abort,
            "preempt": self._preempt,
            "hold": self._hold,
            "resume": self._resume,
            "prioritise": self._prioritise,
        }

    def run(self) -> None:
        """Carry out everything that waits. Call it between two steps."""
        for command in self._source.commands():
            if command.action == "snapshot":
                self._source.send(self._probe.snapshot(command.command_id))
                continue
            self._source.send(self._answer(command))

    def _answer(self, command: wire.Command) -> wire.CommandAnswer:
        action = self._actions.get(command.action)
        if action is None:
            return wire.CommandAnswer(command.command_id, "unsupported")
        requests = self._find(command.request_id)
        if not requests:
            return wire.CommandAnswer(
                command.command_id, "gone" if command.request_id in self._probe.recent else "unknown"
            )
        try:
            return wire.CommandAnswer(command.command_id, action(requests, command))
        except _Answer as other:
            return wire.CommandAnswer(command.command_id, other.answer, other.retry_after_seconds, str(other))
        except Exception as error:  # the engine's own methods, called in a way that it does not know
            return wire.CommandAnswer(command.command_id, "failed", 0.0, f"{type(error).__name__}: {error}")

    def _find(self, name: str) -> list[Any]:
        """The request that is called so, by us, by its client or by vLLM, with all its children. Exact names only."""
        requests = self._scheduler.requests
        if not name:
            return []
        if name in requests and not is_ours(name):
            return [requests[name]]
        return [
            request
            for internal, request in requests.items()
            if not request.is_finished() and (outer_id(internal) == name or parent_of(internal) == name)
        ]

    # ---- abort ----------------------------------------------------------------------------------------

    def _abort(self, requests: list[Any], _command: wire.Command) -> wire.Answer:
        ids = [request.request_id for request in requests]
        self._scheduler.finish_requests(ids, self._statuses.FINISHED_ABORTED)
        ended = [request for request in requests if request.is_finished()]
        if not ended:
            raise _Answer("failed", "the scheduler did not take it out")
        self._core._send_abort_outputs(ended)
        return "applied"

    # ---- preempt, hold, resume --------------------------------------------------------------------------

    def _preempt(self, requests: list[Any], _command: wire.Command) -> wire.Answer:
        running = [request for request in requests if request.status is self._statuses.RUNNING]
        if all(request.request_id in self._probe.parked for request in requests):
            return "applied"
        self._check(requests)
        for request in running:
            self._scheduler.running.remove(request)
            self._scheduler._preempt_request(request, time.monotonic())
            # Else a resume before the next step sends the worker no token ids (`_make_cached_request_data`).
            getattr(self._scheduler, "prev_step_scheduled_req_ids", set()).discard(request.request_id)
        for request in requests:
            if request.request_id not in self._probe.parked:
                self._park(request)
        return "applied"

    def _hold(self, requests: list[Any], _command: wire.Command) -> wire.Answer:
        if any(request.status is self._statuses.RUNNING for request in requests):
            raise _Answer("refused", "it runs: preempt it", _AGAIN_SECONDS)
        self._check(requests)
        for request in requests:
            if request.request_id not in self._probe.parked:
                self._park(request)
        return "applied"

    def _check(self, requests: list[Any]) -> None:
        """Raise the answer that says why these may not be taken aside, all of them or none."""
        scheduler, statuses = self._scheduler, self._statuses
        if getattr(scheduler, "connector", None) is not None:
            raise _Answer("unsupported", "a KV connector may still write its blocks")
        ready = getattr(scheduler, "_request_blocks_can_be_freed", None)
        for request in requests:
            if getattr(request, "resumable", False):
                raise _Answer("unsupported", "its prompt is still being streamed")
            if request.status not in (statuses.RUNNING, statuses.WAITING, statuses.PREEMPTED):
                raise _Answer("refused", f"it is {request.status.name}", _AGAIN_SECONDS)
            if request.status is statuses.RUNNING and ready is not None and not ready(request):
                raise _Answer("refused", "a step that is under way writes its blocks", _AGAIN_SECONDS)

    def _park(self, request: Any) -> None:
        scheduler = self._scheduler
        for queue in self._queues():
            queue.remove_requests([request])
        deferred = getattr(scheduler, "deferred_waiting", None)
        if deferred is not None:
            deferred.discard(request)
        self._probe.parked[request.request_id] = request
        if request.status is not self._statuses.PREEMPTED:
            self._probe.moved(request.request_id, "paused")

    def _resume(self, requests: list[Any], _command: wire.Command) -> wire.Answer:
        parked = self._probe.parked
        held = [request for request in requests if request.request_id in parked]
        for request in held:
            self._back(request)
        return "applied" if held else "gone"

    def _back(self, request: Any) -> None:
        del self._probe.parked[request.request_id]
        self._scheduler.waiting.prepend_request(request)
        if request.status is not self._statuses.PREEMPTED:
            self._probe.moved(request.request_id, "waiting")

    # ---- prioritise -------------------------------------------------------------------------------------

    def _prioritise(self, requests: list[Any], command: wire.Command) -> wire.Answer:
        """A heap in which a key changes is no heap any more: whoever waits is taken out and put in again."""
        for request in requests:
            queues = [queue for queue in self._queues() if any(other is request for other in queue)]
            for queue in queues:
                queue.remove_requests([request])
            request.priority = command.priority
            for queue in queues:
                queue.add_request(request)
        return "applied"

    def _queues(self) -> list[Any]:
        """The queues of those that wait, by the names that they have in one version or another."""
        named = (getattr(self._scheduler, name, None) for name in ("waiting", "kv_holding_waiting", "skipped_waiting"))
        return [queue for queue in named if queue is not None]

    def give_back(self) -> None:
        """Put everything that is parked back among those who wait: the engine drains, or the probe goes."""
        for request in list(self._probe.parked.values()):
            self._back(request)
