"""A gateway without sockets: its two protocol classes with transports that only remember.

`Bench.client()` is a client's connection, `Bench.engine` one connection of the engine, resting in the pool.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import h11

from stopguard.engines import OpenAIEngine
from stopguard.gateway.downstream import Downstream
from stopguard.gateway.server import Gateway
from stopguard.gateway.settings import EngineSettings, GatewaySettings
from stopguard.gateway.upstream import Upstream

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Transport:
    """What was written, and how it ended."""

    def __init__(self, socket: Any = None) -> None:
        self.socket = socket
        self.written: list[bytes] = []
        self.ended = ""
        self.reading = True

    def write(self, data: bytes) -> None:
        assert data, "an empty write is a bug"
        assert not self.ended, f"written after {self.ended}: {data!r}"
        self.written.append(data)

    @property
    def sent(self) -> bytes:
        return b"".join(self.written)

    def get_extra_info(self, name: str) -> Any:
        return self.socket if name == "socket" else None

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = self.ended or "eof"

    def close(self) -> None:
        self.ended = self.ended or "close"

    def abort(self) -> None:
        self.ended = "abort"

    def is_closing(self) -> bool:
        return self.ended in ("close", "abort")

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Bench:
    """One gateway, one engine with one connection that answers when it is told to."""

    def __init__(self, settings: GatewaySettings | None = None) -> None:
        # The clock is the real one, and a debugger or a slow machine must not age the resting connection.
        patient = EngineSettings(idle_seconds=1e6)
        self.gateway = Gateway(
            [(OpenAIEngine("engine", "http://engine.test:8000"), patient)], settings or GatewaySettings()
        )
        self.pool = self.gateway.fleet.members[0].pool
        self.upstream_bytes: list[bytes] = []
        self.new_engine()

    def new_engine(self) -> None:
        """Another connection of the engine, resting in the pool."""
        self.engine_transport = Transport()
        self.engine = Upstream(self.pool)
        self.engine.connection_made(self.engine_transport)  # type: ignore[arg-type]

    def client(self, socket: Any = None) -> tuple[Downstream, Transport]:
        transport = Transport(socket)
        downstream = Downstream(self.gateway)
        downstream.connection_made(transport)  # type: ignore[arg-type]
        return downstream, transport

    def answer_all(self, response: bytes = OK) -> int:
        """Let the engine answer what it was asked, until it is asked nothing more; returns how many."""
        answered = 0
        while self.engine.exchange is not None:
            self.upstream_bytes.append(self.engine_transport.sent)
            self.engine_transport.written.clear()
            self.engine.data_received(response)
            answered += 1
        assert not self.engine_transport.written, "bytes for the engine outside of any exchange"
        return answered

    def feed(self, pieces: Iterable[bytes]) -> tuple[list[bytes], Transport]:
        """One client sends `pieces`; returns what reached the engine, one entry a request, and its transport."""
        downstream, transport = self.client()
        before = len(self.upstream_bytes)
        for piece in pieces:
            if piece and not transport.is_closing():
                downstream.data_received(piece)
                self.answer_all()
        downstream.eof_received()
        downstream.connection_lost(None)
        return self.upstream_bytes[before:], transport


def parse(raw: bytes) -> tuple[h11.Request, bytes]:
    """What a second, strict implementation reads in bytes for the engine: exactly one request, whole."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(raw)
    request = connection.next_event()
    assert isinstance(request, h11.Request), request
    body = b""
    while isinstance(event := connection.next_event(), h11.Data):
        body += bytes(event.data)
    assert isinstance(event, h11.EndOfMessage), event
    assert connection.trailing_data[0] == b"", connection.trailing_data
    return request, body
