"""Sockets to listen on, bound by the caller: an address that cannot be had is an error at the start."""

from __future__ import annotations

import socket
from collections.abc import Callable

from stopguard.errors import ConfigurationError

__all__ = ["open_listener", "open_listeners"]

Prepare = Callable[[socket.socket], None]


def open_listeners(host: str, port: int, *, prepare: Prepare | None = None, whose: str = "") -> list[socket.socket]:
    """A TCP socket for every address that `host` stands for (empty: all of this machine), bound; port 0 gets one.

    `prepare` sets options before the bind; what it raises as `OSError` counts as one that cannot be had. Raises
    `ConfigurationError`, whose text begins with `whose` (``"admin: "``), and leaves nothing open.
    """
    opened: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            # The protocol is named since asyncio turns Nagle off only on sockets that say they are TCP.
            listening = socket.socket(family, kind, protocol)
            opened.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if prepare is not None:
                prepare(listening)
            listening.bind(address)
    except OSError as error:
        for each in opened:
            each.close()
        name = f"[{host}]" if ":" in host else host
        raise ConfigurationError(f"{whose}cannot listen on {name}:{port}: {error.strerror or error}") from None
    return opened


def open_listener(host: str, port: int, *, whose: str = "") -> socket.socket:
    """The first of `open_listeners`, for those who serve one address."""
    first, *others = open_listeners(host, port, whose=whose)
    for other in others:
        other.close()
    return first
