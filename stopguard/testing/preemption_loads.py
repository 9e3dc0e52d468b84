"""Seeded loads for the study of preemption: who arrives when, how urgent, how long.

Four of them are honest: a pool full of long background work beside a trickle of urgent requests (`steady`), bursts of
urgent ones (`bursts`), chats of mixed length (`chats`), and long prompts (`prompts`). Three are hostile, made to
break a scheduler that preempts: everything urgent (`all_urgent`), background that nobody may preempt
(`unpreemptible`), and clients whose every next request has another class (`flapping`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from stopguard.errors import ConfigurationError

__all__ = ["HOSTILE", "LOADS", "Arrival", "Load", "load_named"]

_TENANTS = ("red", "green", "blue")


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One request: when it arrives, of which class and tenant, and its lengths in tokens."""

    at: float
    priority_class: str
    tenant: str
    prompt_tokens: int
    max_tokens: int


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A load. `unpreemptible` makes every way refuse every request."""

    name: str
    arrivals: tuple[Arrival, ...]
    unpreemptible: bool = False


def _arrivals(
    numbers: random.Random,
    count: int,
    rate: float,
    priority_class: str,
    prompt: tuple[int, int],
    output: tuple[int, int],
    begin: float = 0.0,
) -> list[Arrival]:
    at = begin
    found = []
    for _ in range(count):
        at += numbers.expovariate(rate)
        found.append(
            Arrival(
                at=at,
                priority_class=priority_class,
                tenant=numbers.choice(_TENANTS),
                prompt_tokens=numbers.randint(*prompt),
                max_tokens=numbers.randint(*output),
            )
        )
    return found


def _steady(numbers: random.Random) -> list[Arrival]:
    background = _arrivals(numbers, 24, 8.0, "background", (40, 200), (300, 800))
    return background + _arrivals(numbers, 40, 4.0, "urgent", (40, 200), (8, 32), begin=0.5)


def _bursts(numbers: random.Random) -> list[Arrival]:
    found = _arrivals(numbers, 40, 8.0, "background", (40, 200), (200, 500))
    for burst in range(8):
        found += _arrivals(numbers, 5, 200.0, "urgent", (40, 160), (8, 48), begin=0.5 + 1.3 * burst)
    return found


def _chats(numbers: random.Random) -> list[Arrival]:
    found = _arrivals(numbers, 30, 4.0, "background", (30, 120), (50, 600))
    found += _arrivals(numbers, 40, 5.0, "standard", (30, 200), (20, 200))
    return found + _arrivals(numbers, 30, 4.0, "urgent", (30, 120), (8, 64), begin=0.5)


def _prompts(numbers: random.Random) -> list[Arrival]:
    background = _arrivals(numbers, 36, 8.0, "background", (200, 600), (100, 300))
    return background + _arrivals(numbers, 30, 4.0, "urgent", (200, 600), (8, 24), begin=0.5)


def _all_urgent(numbers: random.Random) -> list[Arrival]:
    return _arrivals(numbers, 120, 10.0, "urgent", (40, 200), (20, 200))


def _flapping(numbers: random.Random) -> list[Arrival]:
    found = []
    plain = _arrivals(numbers, 140, 14.0, "background", (40, 200), (20, 200))
    for number, arrival in enumerate(plain):
        # Each client's next request is of another class than the one before, so that everybody evicts everybody.
        wanted = ("background", "urgent", "standard", "urgent")[number % 4]
        found.append(msgspec.structs.replace(arrival, priority_class=wanted))
    return found


_MAKERS: Mapping[str, Callable[[random.Random], list[Arrival]]] = MappingProxyType(
    {
        "steady": _steady,
        "bursts": _bursts,
        "chats": _chats,
        "prompts": _prompts,
        "all_urgent": _all_urgent,
        "unpreemptible": _steady,
        "flapping": _flapping,
    }
)
LOADS: tuple[str, ...] = tuple(_MAKERS)
HOSTILE: tuple[str, ...] = ("all_urgent", "unpreemptible", "flapping")


def load_named(name: str, seed: int) -> Load:
    """The load, the same for the same seed; `ConfigurationError` with the names that exist."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise ConfigurationError(f"there is no load {name!r}; there are: {', '.join(LOADS)}")
    arrivals = sorted(maker(random.Random(f"{name} {seed}")), key=lambda each: each.at)
    return Load(name=name, arrivals=tuple(arrivals), unpreemptible=name == "unpreemptible")
