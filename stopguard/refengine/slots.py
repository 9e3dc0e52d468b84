"""What a request can hold beside KV blocks: LoRA, encoder-cache, grammar and speculative slots.

A slot belongs to a request from `take` to `give`. The LoRA pool is shared: requests with the same
adapter share one place, and the place is free when the last of them has gone.
"""

from __future__ import annotations

from stopguard.probe.wire import SlotKind
from stopguard.refengine.interface import EngineConfig, SlotCorrupted

__all__ = ["SLOT_KINDS", "SlotPool", "SlotPools"]

SLOT_KINDS: tuple[SlotKind, ...] = ("lora", "encoder", "grammar", "speculative")


class SlotPool:
    """`size` places of one kind. With a `name`, takers of the same name share one place."""

    def __init__(self, kind: SlotKind, size: int) -> None:
        self.kind = kind
        self.size = size
        self._holders: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._shared: dict[str, int] = {}
        self._private = 0

    @property
    def held(self) -> int:
        """Slots that requests hold; each sharer counts."""
        return sum(self._holders.values())

    @property
    def places_used(self) -> int:
        """Places that are taken; a shared one counts once."""
        return self._private + len(self._shared)

    def fits(self, count: int, name: str = "") -> bool:
        """Whether `take` would succeed."""
        if name:
            return name in self._shared or self.places_used < self.size
        return self.places_used + count <= self.size

    def take(self, request_id: str, count: int = 1, name: str = "") -> None:
        """`count` slots for the request, or one share of the place called `name`."""
        if request_id in self._holders:
            raise SlotCorrupted(f"{request_id} already holds a {self.kind} slot")
        if not self.fits(count, name):
            raise SlotCorrupted(f"no {self.kind} slot is free: ask `fits` first")
        self._holders[request_id] = count
        if name:
            self._names[request_id] = name
            self._shared[name] = self._shared.get(name, 0) + 1
        else:
            self._private += count

    def give(self, request_id: str) -> int:
        """All that the request holds goes back; returns slots. `SlotCorrupted` when it holds none."""
        count = self._holders.pop(request_id, 0)
        if not count:
            raise SlotCorrupted(f"{request_id} gives back a {self.kind} slot that it does not hold")
        name = self._names.pop(request_id, "")
        if not name:
            self._private -= count
        elif self._shared[name] == 1:
            del self._shared[name]
        else:
            self._shared[name] -= 1
        return count


class SlotPools:
    """The four pools of one engine."""

    def __init__(self, config: EngineConfig) -> None:
        sizes = (config.lora_slots, config.encoder_slots, config.grammar_slots, config.speculative_slots)
        self._pools = {kind: SlotPool(kind, size) for kind, size in zip(SLOT_KINDS, sizes, strict=True)}

    def __getitem__(self, kind: SlotKind) -> SlotPool:
        return self._pools[kind]

    def held(self) -> dict[SlotKind, int]:
        """Slots held, by kind."""
        return {kind: pool.held for kind, pool in self._pools.items()}
