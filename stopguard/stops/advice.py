"""Is it safe to try again? The question every client has after an error, answered from the machine."""

from __future__ import annotations

from stopguard.stops.effects import RetryAdvice
from stopguard.stops.machine import Engine
from stopguard.stops.tracked import Tracked

__all__ = ["retry_advice"]

_ADVICE: dict[Engine, RetryAdvice] = {
    Engine.UNDISPATCHED: RetryAdvice(True, "never dispatched"),
    Engine.WITHDRAWN: RetryAdvice(True, "never dispatched"),
    Engine.SHELVED: RetryAdvice(True, "stopped for a preemption"),
    Engine.FINISHED: RetryAdvice(False, "it finished"),
    Engine.LOST: RetryAdvice(False, "the engine was lost and may have been working"),
}
_UNCONFIRMED = RetryAdvice(False, "not confirmed stopped")


def retry_advice(tracked: Tracked) -> RetryAdvice:
    """Whether the request may be sent again without running twice: only when it never ran, or surely stopped."""
    engine = tracked.machine.engine
    if engine is Engine.WITHDRAWN and tracked.preemptions:
        engine = Engine.SHELVED
    if engine is Engine.STOPPED:
        stop = tracked.ledgers.stop
        return RetryAdvice(True, f"confirmed stopped ({stop.evidence.label if stop else 'engine'})")
    return _ADVICE.get(engine, _UNCONFIRMED)
