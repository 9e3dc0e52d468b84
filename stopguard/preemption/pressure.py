"""Pressure: whether an urgent request cannot start because of what runs, and how much would help.

Three signs, in the order in which they can be trusted: our own limit of requests at an engine is reached and it
waits here; the engine's gauges or probe, read after it was sent, say that requests wait there or that the KV is
(nearly) taken; and, where an engine says nothing, that it has waited for its first output for longer than it
should. Pure functions; nobody polls: the edge asks when something has happened.
"""

from __future__ import annotations

import math

import msgspec

from stopguard.ledger import EngineGauges
from stopguard.preemption.classes import Claim
from stopguard.preemption.settings import PreemptionSettings

__all__ = ["NOWHERE", "Pressure", "Room", "at_engine", "fits", "in_queue", "room_of"]


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """One engine now. `places_free` is by our own books and limit; the rest is the engine's word at `read_at`.

    `None` is "it does not say". Blocks that the prefix cache would give away count as free.
    """

    places_free: int
    read_at: float = -math.inf
    waiting: int | None = None
    blocks_used: int | None = None
    blocks_total: int | None = None
    block_tokens: int = 16
    prefix_cache: bool = True
    slots_free: int | None = None
    """Slots that have none of our requests (below 0: some of them wait there); `None`: it has no slots."""

    @property
    def blocks_free(self) -> int | None:
        if self.blocks_used is None or not self.blocks_total:
            return None
        return self.blocks_total - self.blocks_used

    @property
    def kv_usage(self) -> float | None:
        """The share of the KV that is taken, 0 to 1."""
        if self.blocks_used is None or not self.blocks_total:
            return None
        return self.blocks_used / self.blocks_total


NOWHERE = Room(places_free=0)


class Pressure(msgspec.Struct, frozen=True, gc=False):
    """Why an urgent request cannot start, and the blocks that would let it; 0 blocks: a place is what it needs."""

    reason: str
    blocks_needed: int = 0


def room_of(gauges: EngineGauges | None, places_free: int, block_tokens: int, slots_free: int | None = None) -> Room:
    """The room at an engine by its last gauges. `block_tokens` counts where they do not say it."""
    if gauges is None:
        return Room(places_free=places_free, block_tokens=block_tokens, slots_free=slots_free)
    return Room(
        places_free=places_free,
        read_at=gauges.at,
        waiting=gauges.waiting,
        blocks_used=gauges.blocks_used,
        blocks_total=gauges.blocks_total,
        block_tokens=gauges.block_tokens or block_tokens,
        slots_free=slots_free,
    )


def in_queue(room: Room) -> Pressure | None:
    """Of a request that waits with us: whether all places of this engine are taken."""
    return Pressure("places") if room.places_free <= 0 else None


def at_engine(
    room: Room, claim: Claim, sent_at: float, at: float, settings: PreemptionSettings
) -> tuple[Pressure | None, float | None]:
    """Of a request that was sent and has no output: whether what runs is in its way, and else when to look again.

    A reading from before it was sent says nothing about it. Where it has a slot of its own nobody is in its way: it
    computes its prompt, however long that takes.
    """
    if room.slots_free is not None and room.slots_free >= 0 and not room.waiting:
        return None, None
    if room.read_at < sent_at and at < sent_at + settings.blind_patience_seconds:
        return None, sent_at + settings.blind_patience_seconds
    if at < sent_at + settings.patience_seconds:
        return None, sent_at + settings.patience_seconds
    if room.read_at < sent_at:
        return Pressure("slow", claim.blocks(room.block_tokens)), None
    needed = claim.blocks(room.block_tokens)
    free, usage = room.blocks_free, room.kv_usage
    if free is not None and needed > free:
        return Pressure("kv", needed - free), None
    if usage is not None and usage >= settings.kv_high:
        return Pressure("kv", needed), None
    if room.waiting:
        return Pressure("waiting", 0 if usage is not None else needed), None
    return None, None


def fits(room: Room, blocks_needed: int, settings: PreemptionSettings, *, alone: bool) -> bool | None:
    """Whether a parked request could go on without pressing anybody; `None` where the engine does not say.

    Its return must leave the KV below the low mark, not the high one, or it would be the next victim. Alone
    at its engine (`alone`), or with a slot that is free, it needs no margin.
    """
    if room.places_free <= 0:
        return False
    if alone or (room.slots_free is not None and room.slots_free > 0):
        return True
    if room.waiting:
        return False
    if room.blocks_used is None or not room.blocks_total:
        return None
    return room.blocks_used + blocks_needed <= settings.kv_low * room.blocks_total
