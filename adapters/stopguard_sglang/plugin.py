"""Runs inside SGLang (entry-point group ``sglang.srt.plugins``): says what the scheduler does, makes stops fast.

SGLang loads plugins in its launcher, in each API process and in each scheduler process, calls `register` there and then
applies what was registered (`sglang/srt/plugins/__init__.py`, sglang 0.5.23). Without `STOPGUARD_COLLECTOR` (and its
token) nothing is registered at all. With it:

- `plugin_scheduler` (with `plugin_hooks`) watches the scheduler: at most one frame a step, aborts that match whole ids,
  aborts and snapshots from the collector;
- `plugin_preempt` takes one named request's room away between two steps, and gives it back;
- `plugin_front` watches the API side: a client that leaves is noticed at once, an abort that came too early is sent
  again once there is something to abort, children of a request are known by its id.

Each hook point is looked for before it is hooked. What a version of SGLang does not have is named in one line of the
log and in the greeting to the collector; the rest works, unless it is one without which books would be wrong. A hook of
ours that fails is counted, switched off after some failures, and never raised into the engine.

Variables: `STOPGUARD_SGLANG_LEAK_CHECK=report` turns SGLang's own idle check of its pools, which otherwise ends the
server when tokens are missing, into an error in its log. `STOPGUARD_SGLANG_DISCONNECT=engine` leaves the detection of
disconnects to SGLang.
"""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
from collections.abc import Callable
from typing import Any, Final

from stopguard.probe.sender import Sender

__all__ = ["Hook", "register"]

logger = logging.getLogger("stopguard.probe")

DISCONNECT_VARIABLE: Final = "STOPGUARD_SGLANG_DISCONNECT"
LEAK_VARIABLE: Final = "STOPGUARD_SGLANG_LEAK_CHECK"

KIND: Final = "sglang"


class Hook:
    """One hook point: its dotted `target`, the function, and how it goes around (`before`, `after` or `around`).

    `instead` says what is done where a version does not have it. Without one that is `necessary` the books of a healthy
    engine would be wrong.
    """

    def __init__(
        self,
        target: str,
        function: Callable[..., Any],
        how: str,
        *,
        instead: str = "its events are not in the books",
        necessary: bool = False,
    ) -> None:
        self.target = target
        self.function = function
        self.how = how
        self.instead = instead
        self.necessary = necessary

    @property
    def name(self) -> str:
        """The last two parts of its target."""
        return ".".join(self.target.rsplit(".", 2)[1:])

    def exists(self) -> bool:
        """Whether this SGLang has it."""
        path, _, attribute = self.target.rpartition(".")
        try:
            return hasattr(pkgutil.resolve_name(path), attribute)
        except (ImportError, AttributeError, ValueError):
            return False


def register() -> None:
    """Called by SGLang in each of its processes. Never raises."""
    if Sender.from_environment(KIND, "") is None:
        return
    try:
        _register()
    except Exception:
        logger.exception("StopGuard's plugin could not be set up; SGLang runs without it")


def _register() -> None:
    from stopguard_sglang import plugin_front, plugin_hooks, plugin_scheduler  # noqa: PLC0415 (inert without a collector)

    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    ways = {way.value: way for way in registry.HookType}
    watching = plugin_hooks.hooks()
    if os.environ.get(LEAK_VARIABLE) == "report":
        watching += plugin_hooks.leak_hooks()
    version = _version()
    absent = [hook.name for hook in watching if hook.necessary and not hook.exists()]
    if absent:
        watching = []
        logger.warning(
            "StopGuard's probe is off: SGLang %s has no %s; stops are proved from outside instead",
            version,
            ", ".join(absent),
        )
    attached, missing, lost = [], list(absent), []
    for hook in (*watching, *plugin_front.hooks()):
        if hook.exists():
            registry.HookRegistry.register(hook.target, hook.function, ways[hook.how])
            attached.append(hook.name)
        else:
            missing.append(hook.name)
            lost.append(f"{hook.name} ({hook.instead})")
    plugin_scheduler.watch.greet(version, attached, missing)
    plugin_front.watch.greet(version, attached, missing)
    if os.environ.get(DISCONNECT_VARIABLE) != "engine":
        plugin_front.guard_server()
    if lost:
        logger.warning(
            "StopGuard's plugin: SGLang %s has no %s; the other %d hook points are attached",
            version,
            ", no ".join(lost),
            len(attached),
        )
    elif not absent:
        logger.info("StopGuard's plugin: all %d hook points of SGLang %s are attached", len(attached), version)


def _version() -> str:
    try:
        return str(importlib.import_module("sglang.version").__version__)
    except (ImportError, AttributeError):
        return ""
