"""The harness's view of the upstream stub: starts it, and hears what became of each request that names itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import BinaryIO, cast

from benchmarks.relay_bench.processes import running_on
from benchmarks.relay_bench.wire import ResponseReader, request_head

_POLL_SECONDS = 0.05


@dataclass(slots=True)
class Fate:
    """What the stub saw of one request. Times are CLOCK_MONOTONIC nanoseconds, None until they happen."""

    identity: str
    began_ns: int | None = None
    closed_ns: int | None = None
    finished_ns: int | None = None
    began: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class UpstreamWatch:
    """The running stub and the fates of the requests that are being watched."""

    def __init__(self, port: int, processors: frozenset[int]) -> None:
        self.port = port
        self._fates: dict[str, Fate] = {}
        with running_on(processors):
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.relay_bench.upstream", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                cwd=Path(__file__).resolve().parents[2],
            )
        self._transport: asyncio.ReadTransport | None = None

    async def listen(self) -> None:
        """Begins to read the stub's reports on the running loop."""
        loop = asyncio.get_running_loop()
        output = cast(BinaryIO, self._process.stdout)
        self._transport, _ = await loop.connect_read_pipe(lambda: _Lines(self._take), output)

    def watch(self) -> Fate:
        """A new fate; its identity goes in a request's program. Give it back with ``forget``."""
        fate = Fate(uuid.uuid4().hex)
        self._fates[fate.identity] = fate
        return fate

    def forget(self, fate: Fate) -> None:
        """Ends the watching."""
        self._fates.pop(fate.identity, None)

    async def active(self) -> int:
        """Answers that the stub is giving now, to whomever."""
        body = await fetch(self.port, "/relay-bench/active", api_key="none")
        return int(body.partition(b'"active":')[2].strip(b" }"))

    async def settled(self, timeout_seconds: float) -> int:
        """Waits until the stub answers nobody; returns how many answers still ran when the time was up."""
        active = await self.active()
        for _ in range(ceil(timeout_seconds / _POLL_SECONDS)):
            if not active:
                break
            await asyncio.sleep(_POLL_SECONDS)
            active = await self.active()
        return active

    async def break_off(self) -> None:
        """Resets the connections of all answers in progress."""
        await fetch(self.port, "/relay-bench/abort", api_key="none")

    def stop(self) -> None:
        """Ends the stub."""
        if self._transport is not None:
            self._transport.close()
        self._process.terminate()
        self._process.wait()

    def _take(self, line: bytes) -> None:
        event, identity, at_ns = line.decode().split()
        fate = self._fates.get(identity)
        if fate is None:
            return
        if event == "began":
            fate.began_ns = int(at_ns)
            fate.began.set()
        elif event == "closed":
            fate.closed_ns = int(at_ns)
            fate.ended.set()
        else:
            fate.finished_ns = int(at_ns)
            fate.ended.set()


class _Lines(asyncio.Protocol):
    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line)


async def fetch(port: int, path: str, api_key: str) -> bytes:
    """The body of a GET; raises ConnectionError when there is no answer or it is not 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    statuses: list[int] = []
    response = ResponseReader(statuses.append, keep_body=True)
    try:
        writer.write(request_head(path, 0, api_key, method="GET"))
        while not statuses:
            data = await reader.read(65536)
            if not data:
                raise ConnectionError("closed without an answer")
            response.feed(data)
    finally:
        writer.close()
    if statuses[0] != 200:
        raise ConnectionError(f"status {statuses[0]}: {bytes(response.body[:120])!r}")
    return bytes(response.body)
