"""StopGuard inside vLLM: the entry point of the group `vllm.general_plugins`.

vLLM calls `register` once in each of its processes: launcher, API servers, engine cores, workers. Without
`STOPGUARD_COLLECTOR` in the environment it does nothing at all. With it

* each engine core gets a probe on its scheduler and a connection to the collector, made when the core begins to
  listen to its front ends (the plugin loads *inside* `EngineCore.__init__`, so that this is the first moment at
  which there is a scheduler, and the last before there are requests);
* each API server is mended where vLLM would lose a cancel, and marks which aborts are ends (`plugin_front_end`).

Where this vLLM is not understood nothing is attached and one line in the log says what was missing; the gateway then
proves stops by vLLM's metrics.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from typing import Any, Final

from stopguard.probe.sender import Sender
from stopguard_vllm.plugin_attach import Hooks, attach, missing_points
from stopguard_vllm.plugin_commands import Commands, actions_of
from stopguard_vllm.plugin_front_end import attach_front_end, attach_launcher, ranks_of
from stopguard_vllm.plugin_probe import SchedulerProbe

__all__ = ["CoreProbe", "attach_core", "register"]

ADDRESS_VARIABLE: Final = "STOPGUARD_COLLECTOR"

logger = logging.getLogger("stopguard.vllm")


def register() -> None:
    """Called by vLLM in each of its processes. Never raises."""
    if not os.environ.get(ADDRESS_VARIABLE):
        return
    try:
        _speak()
        _register()
    except Exception as error:  # a vLLM that is laid out in another way
        logger.warning("StopGuard's probe is off: this vLLM is not understood (%s: %s)", type(error).__name__, error)


def _register() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415
    from vllm.v1.engine.core import EngineCoreProc  # noqa: PLC0415
    from vllm.v1.engine.core_client import AsyncMPClient  # noqa: PLC0415
    from vllm.v1.engine.output_processor import OutputProcessor  # noqa: PLC0415
    from vllm.v1.engine.utils import CoreEngineProcManager  # noqa: PLC0415

    attach_launcher(CoreEngineProcManager)
    missing = attach_front_end(AsyncLLM, OutputProcessor, AsyncMPClient)
    if missing:
        logger.warning("StopGuard in vLLM's API server: %s is not there and is left alone", ", ".join(missing))
    original = EngineCoreProc.process_input_sockets
    if hasattr(original, "stopguard"):
        return

    @functools.wraps(original)
    def process_input_sockets(self: Any, *arguments: Any, **named: Any) -> Any:
        attach_core(self)
        return original(self, *arguments, **named)

    process_input_sockets.stopguard = True  # type: ignore[attr-defined]
    EngineCoreProc.process_input_sockets = process_input_sockets


class CoreProbe:
    """Everything that StopGuard has put into one engine core."""

    def __init__(self, sender: Sender, probe: SchedulerProbe, commands: Commands) -> None:
        self.sender = sender
        self.probe = probe
        self.commands = commands
        self.hooks = Hooks(self.failed)

    def failed(self, name: str) -> None:
        """A hook has failed too often: everything comes off, and the gateway goes back to metrics."""
        self.hooks.remove()
        self.commands.give_back()
        logger.warning("StopGuard's probe is off: its hook on %s failed too often; the engine runs on", name)
        self.sender.describe(hooks_attached=(), hooks_missing=(name,), commands=())
        self.sender.close(timeout=0.0)


def attach_core(core: Any) -> CoreProbe | None:
    """Put a probe on the scheduler of `core` and connect it; `None`, with a line in the log, where it cannot be."""
    try:
        return _attach_core(core)
    except Exception as error:
        logger.warning("StopGuard's probe is off: %s: %s", type(error).__name__, error, exc_info=True)
        return None


def _attach_core(core: Any) -> CoreProbe | None:
    from vllm.v1.engine import EngineCoreRequestType  # noqa: PLC0415
    from vllm.v1.request import RequestStatus  # noqa: PLC0415
    from vllm.version import __version__ as version  # noqa: PLC0415

    scheduler = core.scheduler
    missing = missing_points(scheduler)
    if missing:
        logger.warning(
            "StopGuard's probe is off: vLLM %s has no %s; stops are proved by its metrics instead",
            version,
            ", ".join(missing),
        )
        return None
    wake = getattr(EngineCoreRequestType, "WAKEUP", None)
    nothing: tuple[Any, Any] = (wake, None) if wake is not None else (EngineCoreRequestType.ABORT, [])
    pool = scheduler.kv_cache_manager.block_pool
    rank, ranks = ranks_of(int(getattr(core, "engine_index", 0)), os.environ)
    sender = Sender.from_environment(
        "vllm",
        version,
        role="engine",
        rank=rank,
        ranks=ranks,
        blocks_total=int(pool.num_gpu_blocks) - 1,  # the null block is never anybody's
        block_tokens=int(scheduler.block_size),
        commands=actions_of(core),
        on_command=lambda: core.input_queue.put_nowait(nothing),
    )
    if sender is None:
        return None
    probe = SchedulerProbe(scheduler, sender)
    core_probe = CoreProbe(sender, probe, Commands(core, probe, sender, RequestStatus))
    hooks, commands = core_probe.hooks, core_probe.commands
    absent = attach(scheduler, probe, hooks)

    def look() -> None:
        probe.urgent = True
        core.input_queue.put_nowait(nothing)

    def look_again(seconds: float) -> None:
        timer = threading.Timer(seconds, look)
        timer.daemon = True
        timer.start()

    probe.slots.look_again = look_again

    def before_request(*arguments: Any) -> bool:
        commands.run()
        if probe.parked and not core.is_running():
            commands.give_back()  # a draining shutdown wakes the core by a request, and has to see them
        return True

    def after_request(*arguments: Any) -> None:
        if probe.urgent:
            probe.flush()

    hooks.around(core, "_handle_client_request", before_request, after_request)
    _hear_aborts(core, probe, hooks)
    sender.describe(hooks_attached=tuple(hooks.attached), hooks_missing=absent)
    sender.start()
    logger.info(
        "StopGuard's probe watches vLLM %s: %s of %d blocks of %d tokens; hooks: %s%s",
        version,
        type(scheduler).__name__,
        pool.num_gpu_blocks - 1,
        scheduler.block_size,
        ", ".join(hooks.attached),
        f"; not there: {', '.join(absent)}" if absent else "",
    )
    return core_probe


def _hear_aborts(core: Any, probe: SchedulerProbe, hooks: Hooks) -> None:
    """Know when an abort has reached the core's input thread, before the core's own thread takes it."""
    arrivals = getattr(core, "aborts_queue", None)
    if arrivals is None:
        return
    heard = hooks.guarded(probe.abort_arrived, "aborts_queue")
    put = arrivals.put_nowait

    def put_nowait(ids: Any) -> None:
        heard(ids)
        put(ids)

    arrivals.put_nowait = put_nowait
    hooks.attached.append("aborts_queue")


def _speak() -> None:
    """VLLM's processes show the log of its own packages only: let ours go the same way."""
    ours, theirs = logging.getLogger("stopguard"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(logging.INFO)
        ours.propagate = False
