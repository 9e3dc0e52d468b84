"""The clients of the soak: keep-alive connections, small requests of two kinds, and cancels in many windows.

Run as ``python -m benchmarks._soak_load PORT REQUESTS CANCELS CONNECTIONS SEED STEP SECONDS``. It prints a JSON line
with its counts after every STEP requests and at the end, with ``"over": true``. What is done is drawn from a seeded
generator; only the interleaving is the machine's.

A cancel closes the client's connection, which is made anew, by FIN and by RST in turn. Windows:

- ``at_once``: the request is sent and the connection closed in the same moment
- ``upload``: with half of the body sent
- ``before_head``: a stream whose head the engine has not sent
- ``non_streaming``: the engine computes an answer
- ``before_first_chunk``: the head has come and no event
- ``mid_stream``: after the first event
- ``by_api``: after the first event, by ``DELETE /v1/requests/{id}`` on another connection; the client's own stays
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from benchmarks.relay_bench.wire import CHUNK_MARK, PATH, Program, ResponseReader, chat_body, chat_request, request_head

API_KEY = "soak-bench"
STREAMING = 0.3
"""Of the requests that nobody cancels."""
STILL_MS = 30_000
"""How long the stub stays in a window if nobody stops it: longer than any client stays."""
LINGER_SECONDS = 0.002
RECONNECT_SECONDS = 0.05
GIVE_UP_SECONDS = 60.0
WINDOWS = ("at_once", "upload", "before_head", "non_streaming", "before_first_chunk", "mid_stream", "by_api")
_RESET = struct.pack("ii", 1, 0)
_ID = re.compile(rb"x-stopguard-id: ([^\r]+)")

_SHORT = Program(chunks=4)
_STILL = Program(headers_after_ms=STILL_MS)
_HEAD_ONLY = Program(first_chunk_after_ms=STILL_MS)
_ONE_CHUNK = Program(chunk_gap_ms=STILL_MS, chunks=8)


def _half_request() -> bytes:
    body = chat_body(stream=True, program=_SHORT, padding_bytes=2000)
    return request_head(PATH, len(body), API_KEY) + body[:1000]


_REQUESTS = {
    "answer": chat_request(API_KEY, stream=False),
    "stream": chat_request(API_KEY, stream=True, program=_SHORT),
    "at_once": chat_request(API_KEY, stream=True, program=_STILL),
    "upload": _half_request(),
    "before_head": chat_request(API_KEY, stream=True, program=_STILL),
    "non_streaming": chat_request(API_KEY, stream=False, program=_STILL),
    "before_first_chunk": chat_request(API_KEY, stream=True, program=_HEAD_ONLY),
    "mid_stream": chat_request(API_KEY, stream=True, program=_ONE_CHUNK),
    "by_api": chat_request(API_KEY, stream=True, program=_ONE_CHUNK),
}


class Load:
    """What all connections share: how many requests are left, and what became of the others."""

    def __init__(
        self, port: int, requests: int, cancels: float, connections: int, seed: int, step: int, seconds: float
    ):
        self.port = port
        self.requests = requests
        self.cancels = cancels
        self.connections = connections
        self.random = random.Random(seed)
        self.step = step
        self.began = 0
        self.ended: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.loop = asyncio.get_running_loop()
        self.alive = 0
        self.done = asyncio.Event()
        self._ends_at = time.monotonic() + seconds
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """All requests, on all connections, to their end."""
        self.alive = self.connections
        for _ in range(self.connections):
            self.connect(Client(self))
        await self.done.wait()
        self.report(over=True)

    def next_kind(self) -> str | None:
        """What the next request shall be, None when there is none."""
        if self.began >= self.requests or (not self.began & 255 and time.monotonic() > self._ends_at):
            self.requests = self.began
            return None
        self.began += 1
        if self.random.random() < self.cancels:
            return self.random.choice(WINDOWS)
        return "stream" if self.random.random() < STREAMING else "answer"

    def end(self, kind: str) -> None:
        """One request has come to the end that was meant for it."""
        self.ended[kind] += 1
        self._count()

    def fail(self, kind: str, why: str) -> None:
        """One has not."""
        self.failures[f"{kind}: {why}"] += 1
        self._count()

    def leave(self) -> None:
        """One connection has nothing more to do."""
        self.alive -= 1
        if not self.alive:
            self.done.set()

    def connect(self, client: Client) -> None:
        """Make a client's connection (anew)."""
        self._spawn(self._connect(lambda: client))

    def ask(self, client: Client, request_id: bytes) -> None:
        """Have a request of this client's cancelled by the API."""
        if client.control is not None:
            client.control.cancel(request_id)
        else:
            self._spawn(self._ask(client, request_id))

    def report(self, *, over: bool = False) -> None:
        """One line for the harness."""
        counts = {"began": self.began, "ended": self.ended, "failures": self.failures, "over": over}
        print(json.dumps(counts), flush=True)

    def _count(self) -> None:
        if (self.ended.total() + self.failures.total()) % self.step == 0:
            self.report()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, client: Client, request_id: bytes) -> None:
        await self._connect(lambda: Control(self, client))
        if client.control is not None:
            client.control.cancel(request_id)

    async def _connect(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        while time.monotonic() < self._ends_at + GIVE_UP_SECONDS:
            try:
                await self.loop.create_connection(protocol, "127.0.0.1", self.port)
                return
            except OSError as error:
                # All ports of the machine rest for a moment, or the accept queue is full.
                self.failures[f"connect: {error.strerror}"] += 1
                await asyncio.sleep(RECONNECT_SECONDS)
        # The gateway is gone.
        self.done.set()


class Control(asyncio.Protocol):
    """The connection on which one client asks for its request to be stopped."""

    def __init__(self, load: Load, client: Client) -> None:
        self._load = load
        self._client = client
        self._transport: Any = None
        self._reader = ResponseReader(self._answered)
        self._asked: bytes | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._client.control = self

    def connection_lost(self, error: Exception | None) -> None:
        # One that rests too long is closed, perhaps just when it is wanted: then the client asks once more.
        self._client.control = None
        if self._asked is not None:
            self._load.ask(self._client, self._asked)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)

    def cancel(self, request_id: bytes) -> None:
        """Send the cancel."""
        self._asked = request_id
        self._transport.write(request_head(f"/v1/requests/{request_id.decode()}", 0, API_KEY, method="DELETE"))

    def close(self) -> None:
        """No more."""
        self._transport.close()

    def _answered(self, status: int) -> None:
        self._asked = None
        if status != 200:
            self._load.failures[f"cancel by API: status {status}"] += 1


class Client(asyncio.Protocol):
    """One client: requests one after another; a cancel costs it its connection."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._transport: Any = None
        self._reader = ResponseReader(self._on_response)
        self._kind = ""
        self._head = b""
        self._left = False
        self._over = False
        self._resets = False
        self.control: Control | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._reader = ResponseReader(self._on_response)
        self._left = False
        self._next()

    def data_received(self, data: bytes) -> None:
        kind = self._kind
        if self._left:
            return
        if kind == "before_first_chunk" or (kind == "mid_stream" and CHUNK_MARK in data):
            self._cancel()
            return
        if kind == "by_api":
            self._head += data
            if CHUNK_MARK in self._head:
                found = _ID.search(self._head)
                self._head = b""
                self._kind = "by_api, asked"
                if found is None:
                    raise RuntimeError("a response names no id")
                self._load.ask(self, found[1])
        self._reader.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self._over:
            self._load.leave()
            return
        if not self._left:
            self._load.fail(self._kind, "the connection was closed")
        self._load.connect(self)

    def _next(self) -> None:
        kind = self._load.next_kind()
        if kind is None:
            self._left = self._over = True
            if self.control is not None:
                self.control.close()
            self._transport.close()
            return
        self._kind = kind
        self._head = b""
        self._transport.write(_REQUESTS[kind])
        if kind == "at_once":
            self._cancel()
        elif kind in ("upload", "before_head", "non_streaming"):
            self._load.loop.call_later(LINGER_SECONDS, self._cancel)

    def _on_response(self, status: int) -> None:
        kind = self._kind.partition(",")[0]
        if self._left:
            return
        if status == 200 and kind in ("answer", "stream", "by_api"):
            self._load.end(kind)
        else:
            self._load.fail(kind, f"status {status}")
        # Not from within the parser, which the next response needs.
        self._load.loop.call_soon(self._next)

    def _cancel(self) -> None:
        """Leave, by FIN and by RST in turn."""
        if self._left or self._transport.is_closing():
            return
        self._left = True
        self._load.end(self._kind)
        self._resets = not self._resets
        if self._resets:
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._transport.abort()


async def _main(arguments: list[str]) -> None:
    port, requests, cancels, connections, seed, step, seconds = arguments
    load = Load(int(port), int(requests), float(cancels), int(connections), int(seed), int(step), float(seconds))
    await load.run()


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1:]))
