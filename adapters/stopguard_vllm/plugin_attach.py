"""Hooks on one living scheduler and its core: what is wrapped, what must be there, and how it comes off again.

Only the instances of this process are wrapped, never vLLM's classes, so that taking the hooks off leaves nothing
behind. vLLM's scheduler is no public interface: each attribute that the probe reads is looked for first, and what
is not there is said in one line. Without one of the necessary points nothing is attached at all.

A hook that fails ten times takes all of them off: books that miss one kind of event would accuse a healthy engine.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Final

from stopguard.probe.sender import Guarded
from stopguard_vllm.plugin_probe import SchedulerProbe
from stopguard_vllm.plugin_slots import encoder_references

__all__ = ["Hooks", "attach", "missing_points"]

logger = logging.getLogger("stopguard.vllm")

_FAILURES_MAX: Final = 10
_NECESSARY: Final = (
    "add_request",
    "schedule",
    "update_from_output",
    "finish_requests",
    "_preempt_request",
    "_free_request_blocks",
)
_READ: Final = (
    "requests",
    "running",
    "waiting",
    "kv_cache_manager.coordinator.single_type_managers",
    "kv_cache_manager.block_pool.get_num_free_blocks",
)
_USEFUL: Final = ("_drain_deferred_frees",)
_ENCODER: Final = "encoder_cache_manager."

Before = Callable[..., Any]
After = Callable[..., Any]


def missing_points(scheduler: Any) -> tuple[str, ...]:
    """What of the necessary is not there: then this vLLM is not understood, and nothing may be attached."""
    missing = [name for name in _NECESSARY if not callable(getattr(scheduler, name, None))]
    for path in _READ:
        try:
            functools.reduce(getattr, path.split("."), scheduler)
        except AttributeError:
            missing.append(path)
    if not missing:
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        if not all(isinstance(getattr(single, "req_to_blocks", None), dict) for single in managers):
            missing.append("req_to_blocks")
    return tuple(missing)


class Hooks:
    """The wrapped methods of this process. `remove` puts everything back; calling it twice is harmless."""

    def __init__(self, on_failed: Callable[[str], None]) -> None:
        self.attached: list[str] = []
        self.guards: list[Guarded[Any, Any]] = []
        self._on_failed = on_failed
        self._places: list[tuple[Any, str]] = []

    def guarded(self, function: Callable[..., Any], name: str) -> Guarded[Any, Any]:
        """`function`, unable to hurt the engine."""
        guard = Guarded(function, name, _FAILURES_MAX, self._on_failed)
        self.guards.append(guard)
        return guard

    def around(self, instance: Any, name: str, before: Before | None, after: After | None) -> None:
        """Call `before(*arguments)` and `after(what before gave, *arguments)` around the method `name`."""
        method = getattr(instance, name)
        first = None if before is None else self.guarded(before, f"{name} (before)")
        last = None if after is None else self.guarded(after, name)

        @functools.wraps(method)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            seen = first(*arguments, **named) if first is not None else None
            result = method(*arguments, **named)
            if last is not None and (first is None or seen is not None):
                last(seen, result, *arguments, **named)
            return result

        self._put(instance, name, wrapped)

    def after(self, instance: Any, name: str, hook: After, owner: str = "") -> None:
        """Call `hook(result, *arguments)` after the method `name` (of `owner`, for people)."""
        method = getattr(instance, name)
        last = self.guarded(hook, owner + name)

        @functools.wraps(method)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            result = method(*arguments, **named)
            last(result, *arguments, **named)
            return result

        self._put(instance, name, wrapped, owner)

    def _put(self, instance: Any, name: str, wrapped: Callable[..., Any], owner: str = "") -> None:
        setattr(instance, name, wrapped)
        self._places.append((instance, name))
        self.attached.append(owner + name)

    def remove(self) -> None:
        """Give every instance its own methods back."""
        while self._places:
            instance, name = self._places.pop()
            vars(instance).pop(name, None)
        self.attached.clear()


def attach(scheduler: Any, probe: SchedulerProbe, hooks: Hooks) -> tuple[str, ...]:
    """Wrap the scheduler's methods for `probe`; returns the useful points that are not there."""
    hooks.after(scheduler, "add_request", lambda _, request, *rest, **named: probe.added(request))
    hooks.after(scheduler, "schedule", lambda output, *rest, **named: probe.scheduled(output))
    hooks.after(scheduler, "update_from_output", probe.stepped)
    hooks.around(
        scheduler,
        "finish_requests",
        lambda request_ids, finished_status: (probe.before_finish(request_ids), finished_status),
        lambda before, *_, **__: probe.finished_from_outside(*before),
    )
    hooks.around(
        scheduler,
        "_preempt_request",
        lambda request, *rest, **named: probe.before_preempt(request),
        lambda tokens, _, request, *rest, **named: probe.preempted(tokens, request),
    )
    hooks.around(
        scheduler,
        "_free_request_blocks",
        lambda request, *rest, **named: probe.before_free(request),
        lambda before, _, request, *rest, **named: probe.freed(before, request),
    )
    missing = [name for name in _USEFUL if not callable(getattr(scheduler, name, None))]
    if not missing:
        hooks.around(
            scheduler,
            "_drain_deferred_frees",
            # Called at each step of an engine that defers; nearly always nothing waits, and then `after` is spared.
            lambda: probe.before_drain() or None,
            lambda before, _: probe.drained(before),
        )
    manager = getattr(scheduler, "encoder_cache_manager", None)
    if encoder_references(manager) is None:
        return (*missing, f"{_ENCODER}cached")
    for name in ("check_and_update_cache", "allocate", "free_encoder_input"):
        hooks.after(manager, name, lambda _, request, input_id: probe.slots.encoder_output(request, input_id), _ENCODER)
    if callable(getattr(manager, "reset", None)):
        hooks.after(manager, "reset", lambda _: probe.slots.encoder_emptied(), _ENCODER)
    return tuple(missing)
