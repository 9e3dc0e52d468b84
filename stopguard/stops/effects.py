"""Effects: what the controller wants done. The edge does them, in order, and reports back as events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stopguard.ledger.leaks import Leak
from stopguard.stops.cause import StopCause
from stopguard.stops.doors import Door

if TYPE_CHECKING:
    from stopguard.stops.tracked import Tracked

__all__ = [
    "Effect",
    "Knock",
    "Leaked",
    "Observe",
    "Preempt",
    "Resume",
    "RetryAdvice",
    "Settled",
    "StopBegan",
    "TellClient",
]


class RetryAdvice(msgspec.Struct, frozen=True, gc=False):
    """Whether the same request may be sent again without running twice, and why."""

    safe: bool
    reason: str

    def header(self) -> str:
        """The value of `X-StopGuard-Retry`."""
        return f"{'safe' if self.safe else 'unsafe'}; reason={self.reason}"


class Knock(msgspec.Struct, frozen=True, gc=False):
    """Send an abort through `door`. `attempt` counts all knocks for this stop, from 1."""

    tracked: Tracked
    door: Door
    attempt: int


class TellClient(msgspec.Struct, frozen=True, gc=False):
    """The client is still connected: give it a terminal event that says why, then end its response."""

    tracked: Tracked
    cause: StopCause
    advice: RetryAdvice


class Observe(msgspec.Struct, frozen=True, gc=False):
    """A stop is pending that only this engine's gauges can prove: read them, at the adapter's safe rate."""

    engine: str


class StopBegan(msgspec.Struct, frozen=True, gc=False):
    """A stop is under way: its entries should reach the disk soon."""

    tracked: Tracked


class Leaked(msgspec.Struct, frozen=True, gc=False):
    """Something was due and has not come."""

    tracked: Tracked
    leak: Leak


class Settled(msgspec.Struct, frozen=True, gc=False):
    """The books of the request are closed (settled or written off). Nothing may refer to it any more."""

    tracked: Tracked


class Preempt(msgspec.Struct, frozen=True, gc=False):
    """Ask the engine, or the gateway's own resume, to take the request off and keep it."""

    tracked: Tracked


class Resume(msgspec.Struct, frozen=True, gc=False):
    """Let a preempted request go on."""

    tracked: Tracked


Effect = Knock | TellClient | Observe | StopBegan | Leaked | Settled | Preempt | Resume
