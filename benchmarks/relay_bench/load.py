"""Load: small requests back to back, and sets of streams. Plain protocol clients on the harness's own loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, cast

import httptools

from benchmarks.relay_bench.wire import CHUNK_MARK, Program, ResponseReader, chat_request

ERRORS_MAX = 100
"""More errors than this end a measurement: what follows would measure error pages."""

SETTLE_INTO_RATE_SECONDS = 0.5
"""Streams run this long before counting starts, so that connecting is not charged to the chunks."""

STREAM_START_SECONDS_MAX = 6.0
UNPACED_CHUNKS_MAX = 100_000
"""A stream's length: some seconds at the stub's own speed, and an end where a proxy reads on for nobody."""

PACED_STREAM_SECONDS_MAX = 130.0


class MeasurementError(Exception):
    """A measurement that did not come about; the text is what the report shows."""


class OverloadedError(MeasurementError):
    """The streams of a load did not all begin to flow: more than this proxy can carry."""


@dataclass(slots=True)
class _RequestLoad:
    request: bytes
    ends_at: float
    latencies_seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class _RequestClient(asyncio.Protocol):
    """Sends the same request again and again on one connection until the time is up."""

    def __init__(self, load: _RequestLoad) -> None:
        self._load = load
        self._transport: asyncio.Transport
        self._reader = ResponseReader(self._answered)
        self._sent_at = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
        except httptools.HttpParserError as error:
            self._load.errors.append(f"not HTTP: {error}")
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self._load.errors.append(f"connection lost: {error}")
            self.done.set_result(None)

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(self._load.request)

    def _answered(self, status: int) -> None:
        now = time.perf_counter()
        if status == 200:
            self._load.latencies_seconds.append(now - self._sent_at)
        else:
            self._load.errors.append(f"status {status}")
        if now < self._load.ends_at and len(self._load.errors) <= ERRORS_MAX:
            self._send()
        elif not self.done.done():
            self.done.set_result(None)
            self._transport.close()


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """What a load of small requests gave."""

    per_second: float
    p50_ms: float
    p99_ms: float
    processor_us: float
    """Processor time of the proxy a request, microseconds."""
    busy_share: float
    """Processor time of the proxy over the wall time: near 1, the proxy was the bottleneck, else the harness was."""


async def measure_requests(
    port: int, api_key: str, connections: int, seconds: float, processor_seconds: Callable[[], float]
) -> RequestFigures:
    """Sends small non-streaming requests over keep-alive ``connections``, each as soon as the last is answered.

    Raises MeasurementError when requests fail.
    """
    loop = asyncio.get_running_loop()
    load = _RequestLoad(chat_request(api_key, stream=False), time.perf_counter() + seconds)
    before, started_at = processor_seconds(), time.perf_counter()
    clients: list[_RequestClient] = []
    try:
        for _ in range(connections):
            _, client = await loop.create_connection(lambda: _RequestClient(load), "127.0.0.1", port)
            clients.append(client)
        async with asyncio.timeout(seconds + 10):
            await asyncio.gather(*(client.done for client in clients))
    except (OSError, TimeoutError) as error:
        raise MeasurementError(f"small requests: {str(error) or 'no answer within 10 s'}") from error
    used, wall = processor_seconds() - before, time.perf_counter() - started_at
    count = len(load.latencies_seconds)
    if load.errors or count == 0:
        raise MeasurementError(f"small requests: {len(load.errors)} errors, first: {(load.errors or ['none'])[0]}")
    ordered = sorted(load.latencies_seconds)
    return RequestFigures(
        per_second=count / wall,
        p50_ms=quantile(ordered, 0.50) * 1000,
        p99_ms=quantile(ordered, 0.99) * 1000,
        processor_us=used / count * 1e6,
        busy_share=used / wall,
    )


def quantile(ordered: list[float], share: float) -> float:
    """The nearest-rank quantile of an ordered, non-empty list."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


class _StreamClient(asyncio.Protocol):
    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._transport: asyncio.Transport
        self._flowing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._streams.request)

    def data_received(self, data: bytes) -> None:
        count = data.count(CHUNK_MARK)
        self._streams.chunks += count
        if count and not self._flowing:
            self._flowing = True
            self._streams.note_flowing()

    def connection_lost(self, error: Exception | None) -> None:
        self._streams.lost += 1

    def abort(self) -> None:
        self._transport.abort()


class Streams:
    """A set of streams that run at once while the context is open; leaving it closes them from the client's side."""

    def __init__(self, port: int, api_key: str, count: int, chunk_gap_ms: int) -> None:
        chunks = int(PACED_STREAM_SECONDS_MAX * 1000 / chunk_gap_ms) if chunk_gap_ms else UNPACED_CHUNKS_MAX
        self.request = chat_request(api_key, stream=True, program=Program(chunk_gap_ms=chunk_gap_ms, chunks=chunks))
        self.chunks = 0
        self.lost = 0
        self._port = port
        self._count = count
        self._chunk_gap_ms = chunk_gap_ms
        self._clients: list[_StreamClient] = []
        self._flowing = 0
        self._all_flow = asyncio.Event()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(STREAM_START_SECONDS_MAX):
                for _ in range(self._count):
                    _, client = await loop.create_connection(lambda: _StreamClient(self), "127.0.0.1", self._port)
                    self._clients.append(client)
                    if self._chunk_gap_ms:
                        # Spread over one gap: tokens of different requests do not come in one burst.
                        await asyncio.sleep(self._chunk_gap_ms / 1000 / self._count)
                await self._all_flow.wait()
        except (OSError, TimeoutError) as error:
            self._close()
            raise OverloadedError(
                f"{self._count} streams: only {self._flowing} flowed within {STREAM_START_SECONDS_MAX:.0f} s"
            ) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def note_flowing(self) -> None:
        """A stream's first chunk has come."""
        self._flowing += 1
        if self._flowing == self._count:
            self._all_flow.set()

    def _close(self) -> None:
        for client in self._clients:
            client.abort()


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """What a set of streams gave."""

    chunks_per_second: float
    processor_us: float
    """Processor time of the proxy a chunk, microseconds."""
    delivered_share: float
    """Chunks that came over chunks that were due; 1 for unpaced streams, which have no due."""


async def measure_streams(
    port: int, api_key: str, count: int, chunk_gap_ms: int, seconds: float, processor_seconds: Callable[[], float]
) -> StreamFigures:
    """Counts chunks of ``count`` streams, one chunk each ``chunk_gap_ms``, or as fast as they go where it is 0.

    Raises OverloadedError when the streams do not all flow, MeasurementError when they break off.
    """
    async with Streams(port, api_key, count, chunk_gap_ms) as streams:
        await asyncio.sleep(SETTLE_INTO_RATE_SECONDS)
        chunks, used, started_at = streams.chunks, processor_seconds(), time.perf_counter()
        await asyncio.sleep(seconds)
        chunks, used = streams.chunks - chunks, processor_seconds() - used
        wall = time.perf_counter() - started_at
        if streams.lost:
            raise MeasurementError(f"{count} streams: {streams.lost} broke off")
    if chunks == 0:
        raise MeasurementError(f"{count} streams: no chunk came in {seconds:.0f} s")
    due = count * wall * 1000 / chunk_gap_ms if chunk_gap_ms else chunks
    return StreamFigures(chunks / wall, used / chunks * 1e6, chunks / due)


async def check(port: int, api_key: str) -> None:
    """One request of each kind must come through whole; raises MeasurementError with what was wrong."""
    for stream in (False, True):
        kind = "stream" if stream else "request"
        program = Program(chunk_gap_ms=10, chunks=5)
        try:
            async with asyncio.timeout(20):
                status, body = await _exchange(port, chat_request(api_key, stream=stream, program=program))
        except (OSError, TimeoutError, httptools.HttpParserError) as error:
            raise MeasurementError(f"a {kind} got no answer: {str(error) or 'timeout'}") from error
        if status != 200:
            raise MeasurementError(f"a {kind} got status {status}: {body[:160].decode(errors='replace')}")
        if stream and (body.count(CHUNK_MARK) != program.chunks or b"[DONE]" not in body):
            raise MeasurementError(f"a stream came through with {body.count(CHUNK_MARK)} of {program.chunks} chunks")
        if not stream and b'"hi"' not in body:
            raise MeasurementError(f"a request came back as {body[:160].decode(errors='replace')}")


async def _exchange(port: int, request: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    statuses: list[int] = []
    response = ResponseReader(statuses.append, keep_body=True)
    try:
        writer.write(request)
        while not statuses:
            data = await reader.read(65536)
            if not data:
                raise ConnectionError("closed before the end of the answer")
            response.feed(data)
    finally:
        writer.close()
    return statuses[0], bytes(response.body)
