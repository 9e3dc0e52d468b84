"""Who may name which request: ids, aliases, groups and idempotency keys, each scoped to its credentials.

A request belongs to the API key that made it (its SHA-256; without a key, to everybody without one, with the
unguessable id as the only protection). A name of one tenant never finds another tenant's request, and "not
yours" is answered exactly like "unknown". Entries live as long as their request; a bounded number of
finished ones is remembered, so that a late cancel can be answered with "already".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stopguard.gateway.exchange import Exchange

__all__ = ["Registry"]

Name = tuple[str, str]
"""(digest of the credentials, name)"""


class Registry:
    """The exchanges that are alive, by every name that a client may use."""

    __slots__ = ("_aliases", "_finished", "_finished_limit", "_finished_order", "_groups", "_keys", "alive")

    def __init__(self, finished_limit: int) -> None:
        self.alive: dict[str, Exchange] = {}
        self._aliases: dict[Name, dict[str, Exchange]] = {}
        self._groups: dict[Name, dict[str, Exchange]] = {}
        self._keys: dict[Name, Exchange] = {}
        self._finished: dict[str, str] = {}
        self._finished_order: deque[str] = deque()
        self._finished_limit = finished_limit

    def add(self, exchange: Exchange) -> None:
        """A request begins."""
        self.alive[exchange.request_id] = exchange
        head = exchange.head
        if head.alias:
            self._aliases.setdefault((exchange.digest, head.alias), {})[exchange.request_id] = exchange
        if head.group:
            self._groups.setdefault((exchange.digest, head.group), {})[exchange.request_id] = exchange

    def remove(self, exchange: Exchange) -> None:
        """Its books are closed: nothing finds it any more, but that it was is remembered for a while."""
        request_id, head = exchange.request_id, exchange.head
        if self.alive.pop(request_id, None) is None:
            return
        digest: str = head.standing.digest
        if head.alias:
            _discard(self._aliases, (digest, head.alias), request_id)
        if head.group:
            _discard(self._groups, (digest, head.group), request_id)
        if head.idempotency_key:
            name = (digest, head.idempotency_key.decode("ascii"))
            if self._keys.get(name) is exchange:
                del self._keys[name]
        order = self._finished_order
        self._finished[request_id] = digest
        order.append(request_id)
        if len(order) > self._finished_limit:
            # A queue beside the map: finding the oldest key of a map gets slow as keys are deleted.
            del self._finished[order.popleft()]

    def hold_key(self, exchange: Exchange) -> Exchange | None:
        """`exchange` is the present holder of its idempotency key; returns the one before, if it is alive."""
        name = (exchange.digest, exchange.head.idempotency_key.decode("ascii"))
        before = self._keys.get(name)
        self._keys[name] = exchange
        return before

    def key_holder(self, digest: str, key: bytes) -> Exchange | None:
        """The live request with this idempotency key."""
        return self._keys.get((digest, key.decode("ascii")))

    def named(self, digest: str, name: str) -> list[Exchange]:
        """The live requests of this tenant that `name` means: one by id, or all with that alias."""
        exchange = self.alive.get(name)
        if exchange is not None:
            return [exchange] if exchange.digest == digest else []
        return list(self._aliases.get((digest, name), {}).values())

    def grouped(self, digest: str, group: str) -> list[Exchange]:
        """The live requests of this tenant with the label `group`."""
        return list(self._groups.get((digest, group), {}).values())

    def of_model(self, digest: str, model: str) -> list[Exchange]:
        """The live requests of this tenant for `model`."""
        return [each for each in self.alive.values() if each.digest == digest and each.asked_model == model]

    def has_finished(self, digest: str, request_id: str) -> bool:
        """Whether this tenant's request ended lately."""
        return self._finished.get(request_id) == digest

    def exchanges(self) -> Iterable[Exchange]:
        return list(self.alive.values())

    def __len__(self) -> int:
        return len(self.alive)


def _discard(index: dict[Name, dict[str, Exchange]], name: Name, request_id: str) -> None:
    """Remove one entry, and the name with its last one."""
    entries = index.get(name)
    if entries is not None:
        entries.pop(request_id, None)
        if not entries:
            del index[name]
