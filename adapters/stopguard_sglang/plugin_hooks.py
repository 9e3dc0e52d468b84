"""The hook points of SGLang's scheduler, and what is done at each (`plugin_scheduler` knows what it means).

Each function here calls SGLang's own exactly once (but for an abort of nobody) and returns what that returned; what is
ours around it is guarded, piece by piece. Hooks that go `after` are given the result first, and leave it as it is.
The three of each step look at a few attributes of their own, which cannot fail, before they call anything.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, Final

from stopguard.probe.sender import Guarded
from stopguard_sglang.plugin import Hook
from stopguard_sglang.plugin_scheduler import QUIET_SECONDS, Record, watch

__all__ = ["hooks", "leak_hooks"]

logger = logging.getLogger("stopguard.probe")

_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler."
_GRAMMARS: Final = "sglang.srt.constrained.grammar_manager.GrammarManager."
_MEMORY: Final = "sglang.srt.mem_cache.common."
_BATCH: Final = "sglang.srt.managers.schedule_batch."
_CHECKER: Final = "sglang.srt.managers.scheduler_components.invariant_checker."

_turn = Guarded(watch.turn, "turn", 20)
_entered = Guarded(watch.entered, "entered", 20)
_scheduled = Guarded(watch.scheduled, "scheduled", 20)
_flush = Guarded(watch.flush, "flush", 20)
_retracted = Guarded(watch.retracted, "retracted", 20)
_echoed = Guarded(watch.echoed, "echoed", 20)
_abort_comes = Guarded(watch.abort_comes, "abort", 20)
_paused = Guarded(watch.paused, "paused", 20)
_continued = Guarded(watch.continued, "continued", 20)


@contextlib.contextmanager
def _hiding(rid: str, everything: bool) -> Iterator[None]:
    hidden = _abort_comes(rid, everything)
    try:
        yield
    finally:
        if hidden:
            watch.abort_went(hidden)


def ingest(_result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    if watch.attention or watch.events:
        _turn(scheduler)


def add_request(original: Callable[..., Any], scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    _entered(req)
    return original(scheduler, req, *args, **kwargs)


def compile_grammar(original: Callable[..., Any], manager: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    _entered(req)
    return original(manager, req, *args, **kwargs)


def next_batch(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    if watch.preempter.orders:
        watch.preempter.between_steps(kwargs)
    plan = original(scheduler, *args, **kwargs)
    batch = getattr(plan, "batch_to_run", None)
    if batch is not None and getattr(batch, "forward_mode", None) is not watch.decode_mode:
        _scheduled(batch)
    return plan


def read_results(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(scheduler, batch, *args, **kwargs)
    watch.step += 1
    if watch.events or watch.endings or monotonic() - watch.flushed_at >= QUIET_SECONDS:
        _flush()
    return result


def abort(original: Callable[..., Any], scheduler: Any, command: Any, *args: Any, **kwargs: Any) -> Any:
    if not command.rid and not command.abort_all:
        return None  # the beginning of every id is nobody's
    with _hiding(command.rid or "", bool(command.abort_all)):
        return original(scheduler, command, *args, **kwargs)


def abort_output(_result: Any, _scheduler: Any, command: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    _echoed(req, getattr(command, "finished_reason", None))


def release(original: Callable[..., Any], req: Any, tree_cache: Any, *args: Any, **kwargs: Any) -> Any:
    before = _before_release(req)
    result = original(req, tree_cache, *args, **kwargs)
    _after_release(req, before)
    return result


def _look_before(req: Any) -> tuple[Record, int, int, int | None] | None:
    record = watch.known(req)
    if record is None or not req.kv.holds_kv:
        return None
    kv = req.kv
    own = kv.kv_allocated_len - kv.cache_protected_len
    record.lost = own
    return record, kv.kv_allocated_len, own, watch.pool_sum()


def _look_after(req: Any, seen: tuple[Record, int, int, int | None] | None) -> None:
    if seen is None:
        record_now = watch.known(req)
        if record_now is not None and req.finished():
            watch.released(record_now, 0, 0)
        return
    record, held, own, before = seen
    missing = 0
    after = watch.pool_sum()
    # A streaming session keeps the row: it is the session's from now on.
    if before is not None and after is not None and req.kv.is_kv_released:
        missing = before + own - after
    watch.released(record, held, max(0, missing))


_before_release = Guarded(_look_before, "release", 20)
_after_release = Guarded(_look_after, "release", 20)


def retract(_result: Any, *args: Any, **kwargs: Any) -> None:
    req = kwargs.get("req")
    if req is not None:
        _retracted(req)


def pause(_result: Any, _scheduler: Any, command: Any, *args: Any, **kwargs: Any) -> None:
    _paused(str(getattr(command, "mode", "")))


def go_on(_result: Any, _scheduler: Any, *args: Any, **kwargs: Any) -> None:
    _continued()


def sleep_idle(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    # SGLang sleeps up to a second when it has nothing to do; a request that we hold may be wanted back sooner.
    if watch.preempter.parked:
        watch.preempter.wait()
        return None
    return original(scheduler, *args, **kwargs)


def complain(original: Callable[..., Any], checker: Any, _strict: bool, *args: Any, **kwargs: Any) -> Any:
    """SGLang's own check found tokens missing: say so once for each amount, and go on."""
    pool = watch.pool_sum()
    if pool not in _complained:
        _complained.add(pool)
        text = str(args[-1] if args else kwargs).strip()
        logger.error("StopGuard: SGLang's own check of its pools found a leak: %s", text)
    return original(checker, False, *args, **kwargs)


#: The pool's sums at which SGLang has complained: at most one for each token that leaks.
_complained: set[int | None] = set()


def hooks() -> list[Hook]:
    """The hook points of a scheduler process."""
    return [
        Hook(_SCHEDULER + "ingest_requests", ingest, "after", necessary=True),
        Hook(_SCHEDULER + "_add_request_to_queue", add_request, "around", necessary=True),
        Hook(_GRAMMARS + "process_req_with_grammar", compile_grammar, "around"),
        Hook(_SCHEDULER + "get_next_batch_to_run", next_batch, "around", necessary=True),
        Hook(_SCHEDULER + "process_batch_result", read_results, "around", necessary=True),
        Hook(_SCHEDULER + "abort_request", abort, "around"),
        Hook(
            _SCHEDULER + "send_abort_output",
            abort_output,
            "after",
            instead="its queues are searched 50 times a second for those that have left",
        ),
        Hook(_MEMORY + "release_kv_cache", release, "around", necessary=True),
        Hook(_BATCH + "release_req", retract, "after"),
        Hook(_SCHEDULER + "pause_generation", pause, "after"),
        Hook(_SCHEDULER + "continue_generation", go_on, "after"),
        Hook(_SCHEDULER + "maybe_sleep_on_idle", sleep_idle, "around"),
    ]


def leak_hooks() -> list[Hook]:
    """What turns SGLang's own check of its pools from an end of the server into a line in its log."""
    return [Hook(_CHECKER + "raise_error_or_warn", complain, "around")]
