"""A plugin for vLLM and for SGLang that measures what StopGuard's own costs the thread of the scheduler.

Where a scheduler steps, a thread beside it looks 50 times a second for a new order in `STOPGUARD_COST_FOLDER`/order (a
number and a mode), obeys, and writes into `answer` what the scheduler's thread has used until then. The modes, to be
changed while nothing runs:

* `off`: the engine's own methods are in their places, as if there were no plugin;
* `on`: StopGuard's are;
* `timed`: StopGuard's are, and each call is timed outside of them and inside, around the engine's own method. The
  difference is theirs; what the clock costs is measured at the start and taken off.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from time import thread_time_ns
from typing import Any

LOOK_SECONDS = 0.02
READINGS = 10_000


class Meter:
    """What is counted in one scheduler's process. `places` are (owner, name, StopGuard's method, the engine's)."""

    def __init__(self, is_in_class: bool) -> None:
        self.places: list[tuple[Any, str, Any, Any]] = []
        self.is_in_class = is_in_class
        self.timing = False
        self.steps = 0
        self.requests = 0
        #: By method: nanoseconds outside of StopGuard's and inside, and calls.
        self.spent: dict[str, list[int]] = {}
        self._thread = 0
        readings = [thread_time_ns() for _ in range(READINGS + 1)]
        self._clock_ns = (readings[-1] - readings[0]) // READINGS

    def count(self, requests: int) -> None:
        """A step with so many requests is over."""
        if not self._thread:
            self._thread = threading.get_ident()
            threading.Thread(target=self._serve, name="probe cost", daemon=True).start()
        self.steps += 1
        self.requests += requests

    def inner(self, method: Any, requests_of: Callable[..., int] | None = None) -> Any:
        """The engine's own `method`, timed. Given `requests_of(*arguments)`, each call is a step of so many."""
        spent = self.spent.setdefault(method.__name__, [0, 0, 0])

        @functools.wraps(method)
        def own(*arguments: Any, **named: Any) -> Any:
            if requests_of is not None:
                self.count(requests_of(*arguments))
            if not self.timing:
                return method(*arguments, **named)
            began = thread_time_ns()
            try:
                return method(*arguments, **named)
            finally:
                spent[1] += thread_time_ns() - began

        return own

    def _outer(self, method: Any) -> Any:
        spent = self.spent[method.__name__]

        @functools.wraps(method)
        def ours(*arguments: Any, **named: Any) -> Any:
            began = thread_time_ns()
            try:
                return method(*arguments, **named)
            finally:
                spent[0] += thread_time_ns() - began
                spent[2] += 1

        return ours

    def _turn(self, mode: str) -> None:
        self.timing = mode == "timed"
        for owner, name, ours, own in self.places:
            if mode == "off" and not self.is_in_class:
                vars(owner).pop(name, None)
            elif mode == "off":
                setattr(owner, name, own)
            else:
                # What is not timed inside (an encoder's cache) is not called here: the model has no encoder.
                setattr(owner, name, self._outer(ours) if self.timing and name in self.spent else ours)

    def _serve(self) -> None:
        folder, clock, done = Path(os.environ["STOPGUARD_COST_FOLDER"]), time.pthread_getcpuclockid(self._thread), ""
        while True:
            time.sleep(LOOK_SECONDS)
            order = (folder / "order").read_text() if (folder / "order").exists() else ""
            if order in ("", done):
                continue
            number, mode = order.split()
            used_ns = time.clock_gettime_ns(clock)
            # Two of the three intervals between four readings are left, each with one reading's cost in it.
            ours_ns = {
                name: outside - inside - 2 * self._clock_ns * calls
                for name, (outside, inside, calls) in self.spent.items()
            }
            found = {"number": int(number), "used_ns": used_ns, "ours_ns": ours_ns, "clock_ns": self._clock_ns}
            self._turn(mode)
            (folder / "answer.new").write_text(json.dumps({**found, "steps": self.steps, "requests": self.requests}))
            (folder / "answer.new").rename(folder / "answer")
            done = order


def register_vllm() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCoreProc

    from stopguard_vllm import plugin

    meter = Meter(is_in_class=False)
    for name in ("add_request", "schedule", "finish_requests", "_preempt_request", "_free_request_blocks"):
        setattr(Scheduler, name, meter.inner(getattr(Scheduler, name)))
    Scheduler.update_from_output = meter.inner(Scheduler.update_from_output, _scheduled)
    Scheduler._drain_deferred_frees = meter.inner(Scheduler._drain_deferred_frees)
    EngineCoreProc._handle_client_request = meter.inner(EngineCoreProc._handle_client_request)
    attach = plugin.attach_core

    def attach_core(core: Any) -> Any:
        attached = attach(core)
        if attached is not None:
            for instance, name in attached.hooks._places:
                meter.places.append((instance, name, vars(instance)[name], None))
        return attached

    plugin.attach_core = attach_core


def register_sglang() -> None:
    """Called by SGLang in each of its processes, before the hooks that StopGuard has asked for are put in."""
    import pkgutil

    from stopguard_sglang import plugin_hooks

    meter = Meter(is_in_class=True)
    owners = []
    for hook in plugin_hooks.hooks():
        path, _, name = hook.target.rpartition(".")
        owner = pkgutil.resolve_name(path)
        if isinstance(owner, type) and hasattr(owner, name):
            own = meter.inner(getattr(owner, name), _batch_size if name == "process_batch_result" else None)
            setattr(owner, name, own)
            owners.append((owner, name, own))
    turn = meter._turn

    def first_turn(mode: str) -> None:
        # By now SGLang has put StopGuard's in.
        meter.places = [(owner, name, vars(owner)[name], own) for owner, name, own in owners]
        meter._turn = turn  # type: ignore[method-assign]
        turn(mode)

    meter._turn = first_turn  # type: ignore[method-assign]


def _scheduled(_scheduler: Any, output: Any, *_: Any) -> int:
    return len(output.num_scheduled_tokens)


def _batch_size(_scheduler: Any, batch: Any, *_: Any) -> int:
    return len(batch.reqs)
