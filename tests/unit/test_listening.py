"""Sockets to listen on."""

from __future__ import annotations

import errno
import socket

import pytest

from stopguard.errors import ConfigurationError
from stopguard.listening import open_listener, open_listeners


def test_an_address_that_is_taken_is_named() -> None:
    with open_listener("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"admin: cannot listen on 127\.0\.0\.1:{port}: Address already"):
            open_listener("127.0.0.1", port, whose="admin: ")


def test_a_name_that_is_none() -> None:
    with pytest.raises(ConfigurationError, match="cannot listen on no such host:80: "):
        open_listeners("no such host", 80)


def test_nothing_stays_open_when_an_option_cannot_be_set() -> None:
    seen: list[socket.socket] = []

    def refuse(listening: socket.socket) -> None:
        seen.append(listening)
        raise OSError(errno.ENOPROTOOPT, "Protocol not available")

    with pytest.raises(ConfigurationError, match=r"cannot listen on \[::1\]:0: Protocol not available"):
        open_listeners("::1", 0, prepare=refuse)
    assert [each.fileno() for each in seen] == [-1]


def test_a_socket_says_that_it_is_tcp() -> None:
    """Asyncio turns Nagle off only on those."""
    with open_listener("127.0.0.1", 0) as listening:
        assert listening.proto == socket.IPPROTO_TCP
