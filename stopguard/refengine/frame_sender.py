"""Sends the probe's frames to a collector, from a thread of its own, without ever making the engine wait.

The wire: a TCP or Unix stream of messages, each a 4-byte big-endian length and so many bytes of msgpack.
The first message after each connect is a hello map; then come frames (`stopguard.probe.wire`). The queue
is bounded: when it is full the oldest frame is dropped and counted. The receiver sees a drop as a hole in
the frames' numbers, and the count in the next hello.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections import deque
from typing import Final

import msgspec

from stopguard.errors import ConfigurationError
from stopguard.probe import wire

__all__ = ["FrameSender", "parse_address"]

_SEND_TIMEOUT_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1.0)
#: Frames joined into one write.
_BURST_FRAMES_MAX: Final = 64

#: (host, port), or the path of a Unix socket.
_Address = tuple[str, int] | str


def parse_address(address: str) -> _Address:
    """`tcp://HOST:PORT`, `unix:PATH` or an absolute path; `ConfigurationError` for anything else."""
    if address.startswith("tcp://"):
        host, colon, port = address.removeprefix("tcp://").rpartition(":")
        if colon and host and port.isdecimal() and 0 < int(port) < 65536:
            return host.strip("[]"), int(port)
    else:
        path = address.removeprefix("unix:").removeprefix("//")
        if path.startswith("/"):
            return path
    raise ConfigurationError(f"probe address {address!r}: give tcp://HOST:PORT or an absolute path of a Unix socket")


class FrameSender:
    """One connection to a collector, kept up in the background. `send` only appends to a queue."""

    def __init__(self, address: str, engine: str, frames_max: int = 1024) -> None:
        self._address = parse_address(address)
        self._engine = engine
        self._queue: deque[wire.Frame] = deque(maxlen=frames_max)
        self._ready = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._connection: socket.socket | None = None
        self.frames_sent = 0
        #: Frames that the collector will never see.
        self.frames_dropped = 0
        self.connects = 0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="frame sender", daemon=True)
        self._thread.start()

    def send(self, frame: wire.Frame) -> None:
        """Queue one frame; costs a microsecond and never waits."""
        queue = self._queue
        if len(queue) == queue.maxlen:
            self.frames_dropped += 1
        queue.append(frame)
        self._ready.set()

    def close(self, timeout: float = 1.0) -> None:
        """Send what is queued if the collector takes it within `timeout` seconds, then disconnect."""
        self._closing.set()
        self._ready.set()
        thread = self._thread
        if thread is None:
            return
        thread.join(timeout)
        connection = self._connection
        if thread.is_alive() and connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes a `sendall` that the collector does not take
            thread.join(timeout)

    # The thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        while True:
            try:
                with self._connect() as connection:
                    self._connection = connection
                    failures = 0
                    self._hello(connection)
                    self._pump(connection)
                    return
            except OSError:
                wait = _RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)]
                failures += 1
                if self._closing.wait(wait):
                    self.frames_dropped += len(self._queue)
                    self._queue.clear()
                    return

    def _connect(self) -> socket.socket:
        target = self._address
        if isinstance(target, tuple):
            connection = socket.create_connection(target, timeout=_SEND_TIMEOUT_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_SEND_TIMEOUT_SECONDS)
            connection.connect(target)
        except BaseException:
            connection.close()
            raise
        return connection

    def _hello(self, connection: socket.socket) -> None:
        self.connects += 1
        hello = {
            "hello": "stopguard-probe",
            "schema_version": wire.SCHEMA_VERSION,
            "engine": self._engine,
            "process": os.getpid(),
            "frames_dropped": self.frames_dropped,
        }
        connection.sendall(_message(msgspec.msgpack.encode(hello)))

    def _pump(self, connection: socket.socket) -> None:
        """Send until it is closed; `OSError` when the connection breaks (what was on its way is lost)."""
        queue = self._queue
        while True:
            self._ready.wait()
            self._ready.clear()
            while queue:
                burst: list[bytes] = []
                while queue and len(burst) < _BURST_FRAMES_MAX:
                    burst.append(_message(wire.encode_frame(queue.popleft())))
                try:
                    connection.sendall(b"".join(burst))
                except OSError:
                    self.frames_dropped += len(burst)
                    raise
                self.frames_sent += len(burst)
            if self._closing.is_set():
                return


def _message(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload
