"""The queue: who goes next when there is room, and who is turned away when there is none to wait.

Theory
------
Three rules, in this order:

1. **Level.** A request enters at the rank of its class and rises by one each `promote_seconds` that it waits, up
   to the highest rank there is. A higher level goes first, so an urgent request never waits for a less urgent one
   that came lately, and nobody waits for ever: after (levels - rank) x `promote_seconds` everybody is at the top.
2. **Tenant.** Within a level tenants take turns by weight (self-clocked fair queueing: Golestani, INFOCOM 1994).
   Each tenant carries a finish tag, `max(clock, own tag) + 1/weight`; the lowest tag goes next, and the clock is
   the tag of whoever went last. However many requests one tenant has, another tenant's head waits for at most
   `weight_j / weight_i + 1` picks of each other tenant j. New tenants start at the clock, never before it, so
   that many new names gain nothing.
3. **Arrival.** A tenant's own requests go in the order of their arrival at StopGuard, the older first also after
   it was promoted among newer ones of a higher class.

Requests that can use the same engines share a *pool*: when the head of a lane finds no room, nobody behind it in
the same lane would, and the next lane is tried; a full engine holds up nobody whose engine is free.

The queue is bounded. When it is full a newcomer displaces the newest request of a lower level, or, on its own
level, of a tenant that has more than its share of the queue; otherwise it is turned away itself. Neither was ever
sent anywhere, so both may safely come again.

Pure bookkeeping: time is an argument.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

T = TypeVar("T", bound=Hashable)
R = TypeVar("R")
Lane = tuple[str, Hashable]
"""(tenant, pool)"""

_LANES_AT_ONCE = 256


class _Entry(Generic[T]):
    __slots__ = ("alive", "arrived_at", "item", "lane", "level", "number", "rank")

    def __init__(self, item: T, lane: Lane, rank: int, arrived_at: float, number: int) -> None:
        self.item = item
        self.lane = lane
        self.rank = rank
        self.level = rank
        self.arrived_at = arrived_at
        self.number = number
        self.alive = True

    def __lt__(self, other: _Entry[T]) -> bool:
        return (self.arrived_at, self.number) < (other.arrived_at, other.number)


class _Tenant:
    __slots__ = ("finish", "waiting", "weight")

    def __init__(self, weight: float, finish: float) -> None:
        self.weight = weight
        self.finish = finish
        self.waiting = 0


class FairQueue(Generic[T]):
    """Requests that wait for room. `levels` is the number of ranks; `limit` how many may wait."""

    def __init__(self, *, limit: int, levels: int, promote_seconds: float) -> None:
        assert limit > 0
        assert levels > 0
        assert promote_seconds > 0
        self._limit = limit
        self._levels = levels
        self._promote_seconds = promote_seconds
        self._entries: dict[T, _Entry[T]] = {}
        self._lanes: list[dict[Lane, list[_Entry[T]]]] = [{} for _ in range(levels)]
        self._tenants: dict[str, _Tenant] = {}
        self._promotions: list[tuple[float, int, _Entry[T]]] = []
        self._clock = 0.0
        self._number = 0
        self.displaced = 0

    # ---- in and out ----------------------------------------------------------------------------

    def offer(
        self, item: T, *, tenant: str, weight: float, rank: int, pool: Hashable, arrived_at: float, at: float
    ) -> tuple[bool, T | None]:
        """Let `item` wait. Returns whether it does, and whom it has displaced for it."""
        assert item not in self._entries
        assert 0 <= rank < self._levels
        assert weight > 0
        self.promote(at)
        displaced: T | None = None
        if len(self._entries) >= self._limit:
            loser = self._displaceable(tenant, weight, rank)
            if loser is None:
                return False, None
            displaced = loser.item
            self.remove(displaced)
            self.displaced += 1
        self._number += 1
        entry = _Entry(item, (tenant, pool), rank, arrived_at, self._number)
        entry.level = self._level_at(entry, at)
        self._entries[item] = entry
        standing = self._tenants.get(tenant)
        if standing is None:
            standing = self._tenants[tenant] = _Tenant(weight, self._clock + 1.0 / weight)
        standing.waiting += 1
        self._push(entry)
        return True, displaced

    def remove(self, item: T) -> bool:
        """It waits no more. Returns whether it did."""
        entry = self._entries.pop(item, None)
        if entry is None:
            return False
        entry.alive = False
        self._leave(entry)
        return True

    def rerank(self, item: T, rank: int, at: float) -> bool:
        """Its class has changed: it waits at `rank`, risen by as long as it has waited. Returns whether it waits."""
        assert 0 <= rank < self._levels
        old = self._entries.get(item)
        if old is None:
            return False
        self._take_from_lane(old)
        old.alive = False  # its promotions are of the old rank
        entry = self._entries[item] = _Entry(item, old.lane, rank, old.arrived_at, old.number)
        entry.level = self._level_at(entry, at)
        self._push(entry)
        self._drop_dead_promotions()
        return True

    def pick(self, at: float, usable: Callable[[T], R | None]) -> tuple[T, R, int] | None:
        """The next that `usable` has something for, taken out, with what that is and the level at which it waited."""
        self.promote(at)
        looked_at = 0
        for level in range(self._levels - 1, -1, -1):
            lanes = self._lanes[level]
            if not lanes:
                continue
            order = sorted(lanes, key=lambda lane: (self._tenants[lane[0]].finish, _head(lanes[lane])))
            for lane in order:
                if looked_at >= _LANES_AT_ONCE:
                    return None
                looked_at += 1
                item = lanes[lane][0].item
                found = usable(item)
                if found is None:
                    continue
                tenant = self._tenants[lane[0]]
                self._clock = max(self._clock, tenant.finish)
                tenant.finish = self._clock + 1.0 / tenant.weight
                self.remove(item)
                return item, found, level
        return None

    def promote(self, at: float) -> None:
        """Let everybody rise who has waited long enough."""
        while self._promotions and self._promotions[0][0] <= at:
            entry = heapq.heappop(self._promotions)[2]
            if not entry.alive:
                continue
            self._take_from_lane(entry)
            entry.level = self._level_at(entry, at)
            self._push(entry)

    # ---- questions -----------------------------------------------------------------------------

    def ahead_of(self, rank: int, pool: Hashable) -> int:
        """How many of the same pool wait at `rank` or above."""
        return sum(
            len(entries) for lanes in self._lanes[rank:] for (_, other), entries in lanes.items() if other == pool
        )

    def highest_level(self, pool_serves: Callable[[Hashable], bool]) -> int:
        """The highest level at which somebody waits whose pool `pool_serves`; -1 when nobody does."""
        for level in range(self._levels - 1, -1, -1):
            if any(pool_serves(pool) for _, pool in self._lanes[level]):
                return level
        return -1

    def level_of(self, item: T) -> int:
        """The level at which it waits now."""
        return self._entries[item].level

    def full_for(self, tenant: str, weight: float, rank: int) -> bool:
        """Whether a newcomer like this would be turned away."""
        return len(self._entries) >= self._limit and self._displaceable(tenant, weight, rank) is None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: object) -> bool:
        return item in self._entries

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._entries))

    def __repr__(self) -> str:
        levels = " ".join(f"{level}:{sum(map(len, lanes.values()))}" for level, lanes in enumerate(self._lanes))
        return f"<FairQueue {len(self)} of {self._limit} ({levels}) tenants {len(self._tenants)}>"

    def verify(self) -> None:
        """Everything that waits stands in exactly one lane, and every tenant's count is right."""
        seen: dict[str, int] = {}
        for level, lanes in enumerate(self._lanes):
            for lane, entries in lanes.items():
                assert entries
                for entry in entries:
                    assert entry.alive
                    assert (entry.lane, entry.level) == (lane, level)
                    assert self._entries[entry.item] is entry
                    seen[lane[0]] = seen.get(lane[0], 0) + 1
        assert sum(seen.values()) == len(self._entries)
        assert {name: tenant.waiting for name, tenant in self._tenants.items()} == seen
        assert len(self._promotions) <= 2 * len(self._entries) + 64

    # ---- private -------------------------------------------------------------------------------

    def _level_at(self, entry: _Entry[T], at: float) -> int:
        risen = int(max(0.0, at - entry.arrived_at) / self._promote_seconds)
        return min(self._levels - 1, entry.rank + risen)

    def _push(self, entry: _Entry[T]) -> None:
        heapq.heappush(self._lanes[entry.level].setdefault(entry.lane, []), entry)
        if entry.level < self._levels - 1:
            risen = entry.level - entry.rank + 1
            heapq.heappush(self._promotions, (entry.arrived_at + risen * self._promote_seconds, entry.number, entry))

    def _take_from_lane(self, entry: _Entry[T]) -> None:
        lanes = self._lanes[entry.level]
        entries = lanes[entry.lane]
        if entries[0] is entry:
            heapq.heappop(entries)
        else:
            entries.remove(entry)
            heapq.heapify(entries)
        if not entries:
            del lanes[entry.lane]

    def _leave(self, entry: _Entry[T]) -> None:
        self._take_from_lane(entry)
        tenant = self._tenants[entry.lane[0]]
        tenant.waiting -= 1
        if not tenant.waiting:
            # Nothing is lost with its tag: whoever went last has set the clock to no less.
            del self._tenants[entry.lane[0]]
        self._drop_dead_promotions()

    def _drop_dead_promotions(self) -> None:
        if len(self._promotions) > 2 * len(self._entries) + 64:
            self._promotions = [each for each in self._promotions if each[2].alive]
            heapq.heapify(self._promotions)

    def _displaceable(self, tenant: str, weight: float, rank: int) -> _Entry[T] | None:
        """Who goes when the queue is full and such a newcomer comes; `None` when it is the newcomer."""
        for level in range(rank + 1):
            lanes = self._lanes[level]
            if not lanes:
                continue
            if level < rank:
                names = {lane[0] for lane in lanes}
            else:
                own = self._tenants.get(tenant)
                mine = ((own.waiting if own is not None else 0) + 1) / weight
                names = {lane[0] for lane in lanes if self._share(lane[0]) > mine and lane[0] != tenant}
            if names:
                greediest = max(names, key=self._share)
                return max(max(entries) for lane, entries in lanes.items() if lane[0] == greediest)
        return None

    def _share(self, tenant: str) -> float:
        standing = self._tenants[tenant]
        return standing.waiting / standing.weight


def _head(entries: list[_Entry[T]]) -> tuple[float, int]:
    return entries[0].arrived_at, entries[0].number
