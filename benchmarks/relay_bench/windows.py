"""Client close -> upstream close, in six windows of a request's life.

Each sample is one request on a raw socket of its own: it is brought into its window (the stub's own report says when
the request has arrived), waits a random moment, and is closed; the stub reports when the proxy closed the upstream
connection. Both times are CLOCK_MONOTONIC of one machine. The client's time is taken directly before the system call
that closes, so nothing of the harness lies between.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import time
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.relay_bench.upstream_watch import Fate, UpstreamWatch
from benchmarks.relay_bench.wire import CHUNK_MARK, PATH, Program, chat_body, request_head

HOLD_MS = 3000
"""How long the stub keeps a request in its window when nobody stops it."""

LATE_AFTER_MS = 2500.0
"""A close this late was not a reaction to the client but to the stub's own next bytes."""

ARRIVAL_SECONDS_MAX = 5.0
UPLOAD_ARRIVAL_SECONDS_MAX = 0.3
"""A proxy that passes an upload on as it comes does so at once; one that has not by then buffers it."""

JITTER_SECONDS = (0.03, 0.13)
CONCURRENT_SAMPLES = 8
UNDETECTED_MAX = 4
"""So many without one that was detected end a window: each costs seconds, and the rest would say the same."""

WINDOW_SECONDS_MAX = 12.0
"""No sample is begun later than this: a proxy that is sometimes late makes a window long."""

UPLOAD_BYTES = 64 * 1024

DETECTED, LATE, NEVER, NOT_REACHED, NOT_STAGED = "detected", "late", "never", "never reached", "not staged"


@dataclass(frozen=True, slots=True)
class Window:
    """A moment in a request's life at which the client leaves."""

    name: str
    title: str
    stream: bool
    program: Program
    chunks_before_close: int = 0
    """Chunks the client reads before it leaves; 0 where no byte may have come."""
    whole_upload: bool = True
    reset: bool = False
    """Leave by RST instead of FIN."""


_MID_STREAM = Program(chunk_gap_ms=20, chunks=(HOLD_MS + 500) // 20)

WINDOWS = (
    Window("mid_stream", "mid-stream", True, _MID_STREAM, chunks_before_close=3),
    Window("before_headers", "stream, before headers", True, Program("", HOLD_MS, 0, 20, 10)),
    Window("before_first_byte", "stream, headers, no byte", True, Program("", 0, HOLD_MS, 20, 10)),
    Window("non_streaming", "non-streaming, running", False, Program("", HOLD_MS)),
    Window("uploading", "client still uploading", True, Program("", HOLD_MS, 0, 20, 10), whole_upload=False),
    Window("mid_stream_reset", "mid-stream, by RST", True, _MID_STREAM, chunks_before_close=3, reset=True),
)


@dataclass(slots=True)
class WindowFigures:
    """The samples of one window in one round."""

    latencies_ms: list[float] = field(default_factory=list)
    """Of the samples that were detected."""
    outcomes: Counter[str] = field(default_factory=Counter)


async def measure_window(
    window: Window, port: int, api_key: str, upstream: UpstreamWatch, samples: int
) -> WindowFigures:
    """Takes up to ``samples`` samples, a few at a time; gives up early where the first ones all go undetected."""
    figures = WindowFigures()
    left = samples
    deadline = time.monotonic() + WINDOW_SECONDS_MAX

    async def worker() -> None:
        nonlocal left
        while left > 0 and time.monotonic() < deadline:
            left -= 1
            fate = upstream.watch()
            try:
                outcome, latency_ms = await _sample(window, port, api_key, fate)
            finally:
                upstream.forget(fate)
            figures.outcomes[outcome] += 1
            if outcome == DETECTED:
                figures.latencies_ms.append(latency_ms)
            elif not figures.latencies_ms and figures.outcomes.total() >= UNDETECTED_MAX:
                left = 0

    await asyncio.gather(*(worker() for _ in range(min(CONCURRENT_SAMPLES, samples))))
    return figures


async def _sample(window: Window, port: int, api_key: str, fate: Fate) -> tuple[str, float]:
    """One request; returns its outcome and, where detected, the milliseconds from close to close."""
    loop = asyncio.get_running_loop()
    connection = socket.socket()
    connection.setblocking(False)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            async with asyncio.timeout(ARRIVAL_SECONDS_MAX):
                await loop.sock_connect(connection, ("127.0.0.1", port))
                await loop.sock_sendall(connection, _request(window, api_key, fate))
                await _read_chunks(connection, window.chunks_before_close)
        except (OSError, TimeoutError):
            return NOT_STAGED, 0.0
        arrival_seconds = ARRIVAL_SECONDS_MAX if window.whole_upload else UPLOAD_ARRIVAL_SECONDS_MAX
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(fate.began.wait(), arrival_seconds)
        if window.whole_upload and not fate.began.is_set():
            return NOT_STAGED, 0.0
        await asyncio.sleep(random.uniform(*JITTER_SECONDS))
        if fate.ended.is_set():
            return NOT_STAGED, 0.0
        closed_ns = _close(connection, window)
    finally:
        connection.close()
    return await _outcome(fate, closed_ns)


def _request(window: Window, api_key: str, fate: Fate) -> bytes:
    asked = window.program
    program = Program(
        fate.identity, asked.headers_after_ms, asked.first_chunk_after_ms, asked.chunk_gap_ms, asked.chunks
    )
    if window.whole_upload:
        body = chat_body(stream=window.stream, program=program)
        return request_head(PATH, len(body), api_key) + body
    body = chat_body(stream=window.stream, program=program, padding_bytes=UPLOAD_BYTES)
    return request_head(PATH, len(body), api_key) + body[: len(body) // 2]


async def _read_chunks(connection: socket.socket, count: int) -> None:
    loop = asyncio.get_running_loop()
    while count > 0:
        data = await loop.sock_recv(connection, 65536)
        if not data:
            raise ConnectionError("closed by the proxy")
        count -= data.count(CHUNK_MARK)


def _close(connection: socket.socket, window: Window) -> int:
    """Closes and returns the time of it, CLOCK_MONOTONIC nanoseconds."""
    if window.reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    else:
        # Unread bytes would turn the close into a reset.
        with contextlib.suppress(OSError):
            while connection.recv(65536):
                pass
    now_ns = time.monotonic_ns()
    connection.close()
    return now_ns


async def _outcome(fate: Fate, closed_ns: int) -> tuple[str, float]:
    if not fate.began.is_set():
        # A proxy may yet pass on what it has; only a request that is still unknown a while later never came.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(fate.began.wait(), UPLOAD_ARRIVAL_SECONDS_MAX / 2)
        if not fate.began.is_set():
            return NOT_REACHED, 0.0
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(fate.ended.wait(), 2 * HOLD_MS / 1000)
    if fate.closed_ns is None:
        return NEVER, 0.0
    latency_ms = (fate.closed_ns - closed_ns) / 1e6
    return (DETECTED if latency_ms < LATE_AFTER_MS else LATE), latency_ms
