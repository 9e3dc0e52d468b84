"""Clients that hold streams open and do nothing: plain blocking sockets, one a stream.

Run as ``python -m benchmarks._idle_clients PORT``. Requests are lines on standard input, answers JSON lines on
standard output::

    open N      open N streams; answered when the first chunk of each has come
    close       close all sockets, one system call after another; answered with CLOCK_MONOTONIC nanoseconds of each

A stream's identity is ``ROUND-NUMBER``, by which the stub reports its end.
"""

from __future__ import annotations

import json
import socket
import sys
import time

from benchmarks.relay_bench.wire import CHUNK_MARK, Program, chat_request

_AT_ONCE = 128
_IDLE_MS = 3_600_000
_SECONDS = 30.0
_API_KEY = "scale-bench"


class IdleClients:
    """The open streams of one process, by identity."""

    def __init__(self, port: int) -> None:
        self._address = ("127.0.0.1", port)
        self._sockets: dict[str, socket.socket] = {}
        self._rounds = 0

    def open(self, streams: int) -> None:
        """Open so many streams, a few at a time, and read the first chunk of each."""
        self._rounds += 1
        for first in range(0, streams, _AT_ONCE):
            names = [f"{self._rounds}-{number}" for number in range(first, min(first + _AT_ONCE, streams))]
            for name in names:
                self._begin(name)
            for name in names:
                _read_first_chunk(self._sockets[name])

    def close(self) -> dict[str, int]:
        """Leave: close every socket. Returns when each was closed, read before the system call."""
        closed: dict[str, int] = {}
        sockets, self._sockets = self._sockets, {}
        for name, one in sockets.items():
            closed[name] = time.monotonic_ns()
            one.close()
        return closed

    def _begin(self, name: str) -> None:
        one = socket.create_connection(self._address, timeout=_SECONDS)
        self._sockets[name] = one
        program = Program(identity=name, chunk_gap_ms=_IDLE_MS, chunks=2)
        one.sendall(chat_request(_API_KEY, stream=True, program=program))


def _read_first_chunk(one: socket.socket) -> None:
    seen = b""
    while CHUNK_MARK not in seen:
        data = one.recv(65536)
        if not data:
            raise ConnectionError(f"a stream ended before its first chunk: {seen[:300]!r}")
        seen += data
        if not seen.startswith(b"HTTP/1.1 200 "):
            raise ConnectionError(f"a stream was refused: {seen[:300]!r}")


def main(port: int) -> None:
    """Answer questions until standard input ends."""
    clients = IdleClients(port)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "open":
            clients.open(int(argument))
            answer: dict[str, object] = {"open": int(argument)}
        else:
            answer = {"closed_ns": clients.close()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
