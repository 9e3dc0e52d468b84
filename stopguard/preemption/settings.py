"""What can be set about classes, the queue and preemption. The same names and defaults as in the configuration."""

from __future__ import annotations

import enum

import msgspec

from stopguard.errors import ConfigurationError

__all__ = ["ClassSettings", "Mode", "PreemptionSettings", "TenantStanding"]


class Mode(enum.StrEnum):
    """How much of it is used."""

    OFF = "off"
    """One class, one tenant: requests wait in the order of their arrival."""
    QUEUE = "queue"
    """Classes, fairness and deadlines decide who goes next; what runs is left alone."""
    PREEMPT = "preempt"
    """And what runs makes room for what is more urgent."""


class ClassSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One class of requests. A higher `urgency` is more urgent; it is also what engines get as a priority."""

    urgency: int
    preempts: bool = False
    """Whether its requests may take the room of less urgent ones."""
    preemptible: bool = True
    """Whether its requests may have to make room."""


class TenantStanding(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant may have. Empty words take the general setting."""

    ceiling: str = ""
    usual_class: str = ""
    weight: float = 1.0


def _usual_classes() -> dict[str, ClassSettings]:
    return {
        "background": ClassSettings(urgency=-10),
        "standard": ClassSettings(urgency=0),
        "urgent": ClassSettings(urgency=10, preempts=True, preemptible=False),
    }


class PreemptionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about who goes first. Seconds, tokens, shares of one."""

    mode: Mode = Mode.OFF
    classes: dict[str, ClassSettings] = msgspec.field(default_factory=_usual_classes)
    default_class: str = "standard"
    ceiling: str = "standard"
    """The most urgent class for tenants of which nothing else is said."""
    tenants: dict[str, TenantStanding] = {}
    """By the SHA-256 of an API key in hexadecimal."""
    promote_seconds: float = 10.0
    policy: str = "least_work_lost"
    patience_seconds: float = 0.05
    blind_patience_seconds: float = 0.5
    """The patience where the engine does not say how full it is."""
    kv_high: float = 0.9
    kv_low: float = 0.8
    cool_down_seconds: float = 2.0
    hold_seconds: float = 0.1
    longest_parked_seconds: float = 30.0
    preemptions_per_request: int = 3
    recomputed_share: float = 0.1
    window_seconds: float = 60.0
    window_tokens: int = 20_000
    """What the window is taken to have computed at least, so that the first preemption is not refused."""
    remaining_tokens_min: int = 16
    victims_at_once: int = 4
    assumed_tokens: int = 256
    """The length of an answer whose request does not bound it."""
    block_tokens: int = 16
    """Tokens in a block, where the engine counts in blocks."""

    def __post_init__(self) -> None:
        if not self.classes:
            raise ConfigurationError("preemption.classes: at least one class is needed")
        urgencies = [each.urgency for each in self.classes.values()]
        if len(set(urgencies)) != len(urgencies):
            raise ConfigurationError("preemption.classes: two classes have the same urgency: give each its own number")
        wanted = [("default_class", self.default_class), ("ceiling", self.ceiling)]
        wanted += [("a tenant's ceiling", each.ceiling) for each in self.tenants.values() if each.ceiling]
        wanted += [("a tenant's class", each.usual_class) for each in self.tenants.values() if each.usual_class]
        for what, name in wanted:
            if name not in self.classes:
                known = ", ".join(sorted(self.classes))
                raise ConfigurationError(f"preemption: {what} is {name!r}, which is no class; there are: {known}")
        if not 0 < self.kv_low <= self.kv_high <= 1:
            raise ConfigurationError(
                f"preemption: kv_low ({self.kv_low}) must not be above kv_high ({self.kv_high}), both from 0 to 1"
            )
        if not 0 < self.recomputed_share <= 1:
            raise ConfigurationError(
                f"preemption.recomputed_share must be above 0 and at most 1: {self.recomputed_share}"
            )
