"""How long an engine's step takes, and what one token of it costs: needed to say waste in GPU-seconds.

With a probe both are measured: frames are numbered by step and carry the engine's own clock and the number of
running requests. Without one, a finished stream gives its own pace (one token a step, in every engine whose
decoding is batched by step), and the books give the number of requests beside it.

The GPU works on all requests of a step at once, so a token that nobody wants cost the step's time divided by
the requests that shared it. Averages move by a sixteenth a sample, so that one odd step does not count for much.
"""

from __future__ import annotations

from stopguard.ledger import Account
from stopguard.probe.wire import Frame
from stopguard.stops import Tracked

__all__ = ["StepClock", "stream_pace"]

_WEIGHT = 1 / 16
_TOKENS_MIN = 8
_STEP_SECONDS_MAX = 10.0


class StepClock:
    """The measured step of one engine."""

    __slots__ = ("_last", "share_seconds", "step_seconds")

    def __init__(self) -> None:
        self.step_seconds: float | None = None
        self.share_seconds: float | None = None
        self._last: tuple[int, float, int] | None = None

    def on_frame(self, frame: Frame) -> None:
        """A probe's frame. Time in which nothing ran is no step; nor is one across a restart."""
        last, self._last = self._last, (frame.step, frame.at, frame.running_now)
        if last is None or not last[2]:
            return
        steps, seconds = frame.step - last[0], frame.at - last[1]
        if steps > 0 and seconds > 0:
            self.add(seconds / steps, last[2])

    def add(self, step_seconds: float, running: int) -> None:
        """One sample: a step that took `step_seconds` for `running` requests."""
        if not 0 < step_seconds < _STEP_SECONDS_MAX:
            return
        share = step_seconds / max(1, running)
        if self.step_seconds is None or self.share_seconds is None:
            self.step_seconds, self.share_seconds = step_seconds, share
        else:
            self.step_seconds += (step_seconds - self.step_seconds) * _WEIGHT
            self.share_seconds += (share - self.share_seconds) * _WEIGHT


def stream_pace(tracked: Tracked) -> float | None:
    """Seconds from token to token of a request that ran to its end; `None` when it was too short to say."""
    ledgers = tracked.ledgers
    tokens = ledgers.tokens_delivered
    if tokens < _TOKENS_MIN:
        return None
    for entry in ledgers.entries:
        if entry.credit is Account.QUEUE_RUNNING:
            return (tracked.last_activity_at - entry.at) / (tokens - 1)
    return None
