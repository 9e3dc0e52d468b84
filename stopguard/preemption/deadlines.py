"""Deadlines at admission: what cannot be met is refused at once, while it is still cheap and safe to go elsewhere.

A forecast is made of what was seen lately, for each engine: the pause between two starts while somebody waited
(how fast a queue moves), and what a start takes by itself. It is meant to be too hopeful rather than too strict:
nothing is refused before enough was seen, or on old news, and never for less than `_DOUBT` times too long.

Pure: time is an argument.
"""

from __future__ import annotations

import math

import msgspec

from stopguard.stops import DeadlineKind

__all__ = ["Forecast", "Hopeless", "Limits"]

_SAMPLES_MIN = 8
_SHARE = 0.1
_DOUBT = 1.25
_NEWS_SECONDS = 30.0
_RETRY_SECONDS_MAX = 60
_SECONDS_MIN = 1e-6


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How long one request may take, in seconds from its arrival; `None`: as long as it takes."""

    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    total_seconds: float | None = None


class Hopeless(msgspec.Struct, frozen=True, kw_only=True):
    """A deadline that cannot be met, by what was seen lately."""

    kind: DeadlineKind
    expected_seconds: float
    limit_seconds: float
    retry_after_seconds: int


class _Pace:
    __slots__ = ("first_seconds", "gap_seconds", "gaps", "started_at", "was_waiting")

    def __init__(self) -> None:
        self.gap_seconds = 0.0
        self.gaps = 0
        self.first_seconds = 0.0
        self.started_at = -math.inf
        self.was_waiting = False


class Forecast:
    """What to expect of each engine."""

    def __init__(self) -> None:
        self._paces: dict[str, _Pace] = {}

    def started(self, engine: str, at: float, *, still_waiting: bool, after_seconds: float) -> None:
        """A request gave its first output, `after_seconds` after it was sent; whether others wait for theirs."""
        pace = self._paces.setdefault(engine, _Pace())
        if pace.was_waiting and at >= pace.started_at:
            pace.gaps += 1
            pace.gap_seconds = _mix(pace.gap_seconds, at - pace.started_at, pace.gaps)
        elif not pace.was_waiting:
            # Nobody was ahead of it: this is what a start takes by itself. The least that was seen counts.
            own = max(_SECONDS_MIN, after_seconds)
            pace.first_seconds = own if pace.first_seconds == 0.0 else min(own, pace.first_seconds * 1.05)
        pace.started_at = at
        pace.was_waiting = still_waiting

    def wait_seconds(self, engine: str, ahead: int, at: float) -> float:
        """How long until it starts with `ahead` before it; 0 where too little is known."""
        pace = self._paces.get(engine)
        if pace is None or pace.gaps < _SAMPLES_MIN or at - pace.started_at > _NEWS_SECONDS:
            return 0.0
        return ahead * pace.gap_seconds

    def judge(self, engines: list[str], ahead: int, limits: Limits, at: float) -> Hopeless | None:
        """Whether a request with `ahead` before it must miss one of its deadlines at each of `engines`."""
        verdicts = [self._judge(engine, ahead, limits, at) for engine in engines]
        if not verdicts or any(verdict is None for verdict in verdicts):
            return None
        return min((each for each in verdicts if each is not None), key=lambda each: each.retry_after_seconds)

    def _judge(self, engine: str, ahead: int, limits: Limits, at: float) -> Hopeless | None:
        wait = self.wait_seconds(engine, ahead, at)
        if wait == 0.0:
            return None
        pace = self._paces[engine]
        first = wait + pace.first_seconds
        for kind, expected, limit in (
            (DeadlineKind.QUEUE, wait, limits.queue_seconds),
            (DeadlineKind.FIRST_TOKEN, first, limits.first_token_seconds),
            (DeadlineKind.TOTAL, first, limits.total_seconds),
        ):
            if limit is not None and expected > limit * _DOUBT:
                retry_after = min(_RETRY_SECONDS_MAX, max(1, math.ceil(expected - limit)))
                return Hopeless(
                    kind=kind, expected_seconds=expected, limit_seconds=limit, retry_after_seconds=retry_after
                )
        return None


def _mix(before: float, now: float, count: int) -> float:
    """A moving average that begins as a plain one."""
    share = max(_SHARE, 1.0 / count)
    return before + (now - before) * share
