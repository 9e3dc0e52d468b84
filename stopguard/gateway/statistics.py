"""The gateway and its engines at one moment: the only window on their insides."""

from __future__ import annotations

import msgspec

__all__ = ["GatewayStatistics", "MemberStatistics"]


class MemberStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One engine at one moment. `load` counts requests in it or waiting for a connection to it."""

    name: str
    base_url: str
    healthy: bool
    load: int
    waiting_for_connection: int
    open_connections: int
    idle_connections: int
    failures: int
    ejections: int
    models: tuple[str, ...]


class GatewayStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway at one moment. Counts of requests come from the books, not from here."""

    connections: int
    connections_accepted: int
    requests: int
    queued: int
    refused: int
    buffered_body_bytes: int
    aborts_in_flight: int
    cancel_waiters: int
    failed_effects: int
    draining: bool
    engines: tuple[MemberStatistics, ...]
