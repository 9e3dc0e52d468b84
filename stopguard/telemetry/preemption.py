"""Preemption in numbers: what its edge hands to the metrics at a scrape.

The words that a way says when it cannot preempt are its own and many; as a label they are folded into a closed set.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from stopguard.telemetry.catalogue import NOT_PREEMPTED

__all__ = ["ContinuationNumbers", "PreemptionNumbers", "folded"]


class PreemptionNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """Preemption since the start and now. Seconds; `queued` and `victims` are by class."""

    away_seconds: Mapping[str, float] = {}
    """By engine."""
    longest_away_seconds: float = 0.0
    victims: Mapping[tuple[str, str], int] = {}
    """By class and kind of pressure."""
    refusals: Mapping[str, int] = {}
    """By reason, in the words of whoever refused."""
    queued: Mapping[str, int] = {}
    guard_closed: bool = False
    recomputed_share: float = 0.0
    lowered: int = 0
    hopeless: int = 0


class ContinuationNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """Streams that were cut at the gateway, since the start, by the labels of their two metrics."""

    preempted: int = 0
    engine_lost: int = 0
    mismatch: int = 0
    failed: int = 0


def folded(refusals: Mapping[str, int]) -> dict[str, int]:
    """The refusals by the closed set of reasons; what a way says by itself is `inexact`."""
    found = dict.fromkeys(NOT_PREEMPTED.values, 0)
    for reason, count in refusals.items():
        found[reason if reason in found else "inexact"] += count
    return found
