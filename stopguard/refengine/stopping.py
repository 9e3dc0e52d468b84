"""What the scheduler does with an abort: match it, refuse it, mark it, apply it.

An abort has up to four moments: it *arrives* (the scheduler reads it), it may be *refused* (and is
read again at each boundary), it may be *marked* (the request ends with a later step), and it is
*applied*: from then on the request is out of the scheduler, and that is the ack.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stopguard.probe import wire
from stopguard.refengine.core import Core
from stopguard.refengine.interface import Door
from stopguard.refengine.request import Request, State

__all__ = ["AbortCommand", "act", "prefill_in_flight", "read_abort", "retry_refused", "sweep"]


class AbortCommand(msgspec.Struct):
    """An abort on its way: the id as given, and the sequences that the front end knows under it."""

    request_id: str
    requests: list[Request]
    door: Door


def read_abort(core: Core, command: AbortCommand, *, ended_before: bool) -> None:
    """The scheduler reads one abort."""
    matched = _match(core, command)
    for fault in core.hooks.extra_victims:
        matched += fault.extra_victims(command.request_id, matched, core.requests.values())
    for fault in core.hooks.spare:
        if len(matched) > 1:
            matched = list(fault.spare(matched))
    if not matched:
        noop(core, command.request_id, ended_before=ended_before)
    for request in matched:
        if request.state is not State.GONE:
            act(core, request, retries=True)


def noop(core: Core, request_id: str, *, ended_before: bool) -> None:
    """An abort for an id that the scheduler does not have is harmless."""
    core.events.append(wire.AbortNoop(request_id, core.now))
    for fault in core.hooks.crash_on_noop:
        core.crashed = core.crashed or fault.crash_on_noop(request_id, ended_before)


def _match(core: Core, command: AbortCommand) -> list[Request]:
    if not core.policy.prefix_match:
        return [request for request in command.requests if request.request_id in core.requests]
    prefixes = tuple(request.request_id for request in command.requests) or (command.request_id,)
    return [request for name, request in core.requests.items() if name.startswith(prefixes)]


def act(core: Core, request: Request, *, retries: bool) -> bool:
    """Let the abort act on one request; False when it is refused. `retries`: the engine itself tries again."""
    if request.marked:
        core.events.append(wire.AbortNoop(request.request_id, core.now))
        return True
    core.events.append(wire.AbortArrived(request.request_id, core.now))
    if any(fault.lose_abort(request) for fault in core.hooks.lose_abort):
        return True
    policy = core.policy
    if request.aborted_at is None:
        request.aborted_at = core.now
    if _refused(core, request):
        wait = core.batches[0].ends_at - core.now if core.batches else core.config.step_cost.base_seconds
        core.events.append(wire.AbortRefused(request.request_id, core.now, max(0.0, wait)))
        if retries and request not in core.refused:
            core.refused.append(request)
        return False
    if policy.effect == "beat":
        core.events.append(wire.AbortApplied(request.request_id, core.now))
        _mark(core, request)
    elif _at_once(core, request):
        _apply(core, request)
    else:
        _mark(core, request)
    return True


def _refused(core: Core, request: Request) -> bool:
    if request.state is State.TRANSFERRING:
        return core.policy.in_transfer == "refuse"
    return core.policy.intake == "at_call" and prefill_in_flight(request)


def prefill_in_flight(request: Request) -> bool:
    """A step that computes part of its prompt is under way."""
    return request.prefilling and request.in_flight > 0


def _at_once(core: Core, request: Request) -> bool:
    policy = core.policy
    if request.state is State.TRANSFERRING:
        return policy.in_transfer == "fence"
    if policy.effect == "boundary":
        return True
    if policy.effect == "loop":
        return False
    # A chunked prefill is looked at when its chunk has ended, which is now.
    return request.state is not State.RUNNING or (request.prefilling and not request.in_flight)


def _mark(core: Core, request: Request) -> None:
    request.marked = True
    core.marked.append(request)


def _apply(core: Core, request: Request) -> None:
    """The request leaves the scheduler because of the abort."""
    if core.policy.effect != "beat":
        core.events.append(wire.AbortApplied(request.request_id, core.now))
    request.abort_applied_at = core.now
    for fault in core.hooks.undo_abort:
        if request.state in {State.PREEMPTED, State.PAUSED, State.HELD} and fault.undo_abort(request):
            _undo(core, request)
            return
    for fault in core.hooks.abort_as_finish:
        reason = fault.abort_as_finish(request)
        if reason is not None:
            core.end(request, reason, "finish")
            return
    core.end(request, core.policy.abort_reason, "abort")


def _undo(core: Core, request: Request) -> None:
    if request.marked:
        core.marked.remove(request)
        request.marked = False
    if request.state is State.HELD:
        core.release_held(request)
    else:
        core.events.append(wire.Moved(request.request_id, core.now, request.place))


def sweep(core: Core) -> None:
    """A boundary: the marked requests that no step in flight contains any more are taken out."""
    for request in list(core.marked):
        if not request.in_flight and request.state is not State.TRANSFERRING:
            _apply(core, request)


def retry_refused(core: Core) -> None:
    """A boundary: refused aborts are tried again."""
    waiting: Sequence[Request] = core.refused
    core.refused = []
    for request in waiting:
        if request.state is not State.GONE:
            act(core, request, retries=True)
