"""The kernel's note of when it last heard of a peer, read from real sockets."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import sys
from typing import Any, cast

import pytest

from stopguard.gateway.liveness import silent_seconds

PAUSE_SECONDS = 0.06
_LAST_DATA_RECEIVED = struct.Struct("=52xI")


class _Transport:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def get_extra_info(self, name: str) -> Any:
        return self.connection if name == "socket" else None


def _silent(connection: socket.socket) -> float | None:
    return silent_seconds(cast("asyncio.BaseTransport", _Transport(connection)))


def _wait_for_fin(connection: socket.socket) -> None:
    """Returns when the peer has closed; what it sent is read."""
    while connection.recv(100):
        pass


def _let_the_kernels_clock_go_on() -> None:
    select.select([], [], [], PAUSE_SECONDS)


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO as Linux gives it")
def test_a_fin_has_an_age_of_its_own() -> None:
    """Younger than the data before it, and it grows."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        connection, _ = server.accept()
    with connection:
        connection.settimeout(10.0)
        with client:
            client.sendall(b"a request")
            _let_the_kernels_clock_go_on()
        _wait_for_fin(connection)
        age = _silent(connection)
        assert age is not None
        information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECEIVED.size)
        assert age < _LAST_DATA_RECEIVED.unpack(information)[0] / 1000.0
        _let_the_kernels_clock_go_on()
        later = _silent(connection)
        assert later is not None
        assert later >= age + PAUSE_SECONDS / 2


def test_a_unix_socket_has_none() -> None:
    left, right = socket.socketpair()
    with left, right:
        assert _silent(left) is None
