"""Limits, and what an audit will put on an engine: counted before it starts, and kept to while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from stopguard.errors import ConfigurationError, LimitReached

__all__ = ["Budget", "Load", "Plan", "total_load"]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for. Everything has a limit.

    A stop that takes longer than `deadline_seconds` is SLOW; what is still open `leak_factor` times as long
    after it is a LEAK.
    """

    scenarios: tuple[str, ...] = ()
    storm: int = 40
    deadline_seconds: float = 5.0
    leak_factor: float = 1.5
    #: The other traffic of the target is somebody's: count only our own requests.
    shared: bool = False
    seed: int = 0
    #: Requests at once that may be used to fill the engine's slots or its pool.
    fill_max: int = 48
    requests_max: int = 2000
    seconds_max: float = 3600.0
    race_tries: int = 52
    keep_alive_requests: int = 30
    #: Tokens that one call may ask for, whatever the model's context.
    tokens_max: int = 4096

    @property
    def leak_seconds(self) -> float:
        return self.deadline_seconds * self.leak_factor

    def check(self, known: Sequence[str]) -> Plan:
        """Itself, or `ConfigurationError` with what to change."""
        unknown = [name for name in self.scenarios if name not in known]
        if unknown:
            raise ConfigurationError(f"no scenario {unknown[0]!r}; there are: {', '.join(known)}")
        if not 0.05 <= self.deadline_seconds <= 600:
            raise ConfigurationError(f"--deadline must be 0.05 to 600 seconds, not {self.deadline_seconds:g}")
        if not 0 <= self.storm <= 1000:
            raise ConfigurationError(f"--storm must be 0 to 1000 requests, not {self.storm}")
        return self


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What one scenario puts on the engine at most: requests in all, at once, and how many of them are long."""

    requests: int
    at_once: int
    long: int = 0


def total_load(loads: Iterable[Load]) -> Load:
    """All scenarios, one after the other. Each is followed by one short request that must be served."""
    loads = list(loads)
    return Load(
        requests=sum(load.requests + 1 for load in loads),
        at_once=max((load.at_once for load in loads), default=0),
        long=sum(load.long for load in loads),
    )


class Budget:
    """What has been spent; refuses what would be too much."""

    def __init__(self, plan: Plan, started_at: float) -> None:
        self._plan = plan
        self._started_at = started_at
        self.requests = 0
        self.tokens = 0

    def spend(self, tokens: int) -> None:
        """One more request that asks for `tokens`. `LimitReached` when that is more than was promised."""
        if self.requests >= self._plan.requests_max:
            raise LimitReached("requests of this audit", self._plan.requests_max, "choose fewer scenarios")
        self.requests += 1
        self.tokens += tokens

    def overdue(self, now: float) -> bool:
        """Whether the audit has run for as long as it may."""
        return now - self._started_at > self._plan.seconds_max
