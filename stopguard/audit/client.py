"""The real world: one call on one socket, and the precise ways of leaving it.

An HTTP library cannot end a connection by RST, close only one direction, or stop reading, so this is an
`asyncio.Protocol` with httptools' parser. Control routes go over httpx. Every connection is closed at the
end, whatever happened.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import httptools
import httpx
import msgspec

from stopguard.audit.world import Answer, Call, Exchange, Leaving, Reply
from stopguard.errors import ConfigurationError

__all__ = ["SocketExchange", "SocketWorld", "check_url"]

CONNECT_SECONDS: Final = 5.0
CONTROL_SECONDS: Final = 10.0
_REST_SECONDS: Final = 2.0
#: Open connections at most; a scenario that wants more has a fault.
CONNECTIONS_MAX: Final = 1024
#: A small receive window, so that a reader that stalls is felt by the other side.
STALL_BUFFER_BYTES: Final = 4096


def check_url(url: str) -> SplitResult:
    """The parts of a base URL; `ConfigurationError` when it is none."""
    parts = urlsplit(url)
    try:
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ConfigurationError(f"{url!r} is not a base URL (write it like http://127.0.0.1:8000)")
    return parts


class SocketExchange(asyncio.Protocol):
    """One connection and the call that is on it now."""

    def __init__(self, clock: Callable[[], float], changed: Callable[[], None]) -> None:
        self.reply = Reply(stream=False)
        self.left = False
        self.half_closed = False
        self.reusable = False
        #: Why there is no connection at all.
        self.refused = ""
        self._clock = clock
        self._changed = changed
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None

    def start(self, payload: bytes, *, stream: bool) -> None:
        """Send a call; its reply is a new one."""
        self.reply = Reply(stream=stream)
        self._parser = httptools.HttpResponseParser(self)
        if self._transport is None or self._transport.is_closing():
            self._fail(self.refused or "the connection is closed")
        else:
            self._transport.write(payload)

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def leave(self, how: Leaving = "fin") -> None:
        transport = self._transport
        self.left = True
        if transport is None or transport.is_closing():
            return
        match how:
            case "fin":
                self.half_closed = False
                transport.close()
            case "half-close":
                self.half_closed = True
                transport.write_eof()
            case "reset":
                raw = transport.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                transport.abort()
        await asyncio.sleep(0)

    def stall(self) -> None:
        if self.open and self._transport is not None:
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, STALL_BUFFER_BYTES)
            self._transport.pause_reading()

    def close(self) -> None:
        """Let go, whatever state it is in."""
        self.left = True
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self.left and not self.half_closed:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is not HTTP: {error}")
        self._changed()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        if not self.left:
            if self.reply.status is not None and self._parser is not None and not self._framed:
                self.reply.end(self._clock())  # a body that the end of the connection ends
            self._fail(f"the connection broke off: {error}" if error else "the connection was closed")
        self._changed()

    def _fail(self, failure: str) -> None:
        self.reply.fail(failure, self._clock())

    # httptools ------------------------------------------------------------------------------------

    _framed = False

    def on_message_begin(self) -> None:
        self._framed = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in {b"content-length", b"transfer-encoding"}:
            self._framed = True

    def on_headers_complete(self) -> None:
        self.reply.head(self._parser.get_status_code(), self._clock())

    def on_body(self, body: bytes) -> None:
        self.reply.data(body, self._clock())

    def on_message_complete(self) -> None:
        if self.reply.status is not None and self.reply.status >= 200:
            self.reusable = bool(self._parser.should_keep_alive())
            self.reply.end(self._clock())


class SocketWorld:
    """The machine's clock, `url` for calls and `engine_url` for control routes (the same without a gateway)."""

    def __init__(self, url: str, engine_url: str = "", *, key: str = "", tls: ssl.SSLContext | None = None) -> None:
        self._parts = check_url(url.rstrip("/").removesuffix("/v1"))
        self._engine_url = (engine_url or url).rstrip("/").removesuffix("/v1")
        check_url(self._engine_url)
        self._tls = tls or (ssl.create_default_context() if self._parts.scheme == "https" else None)
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._exchanges: list[SocketExchange] = []
        self._activity = asyncio.Event()
        self._client = httpx.AsyncClient(
            headers=self._headers,
            timeout=CONTROL_SECONDS,
            verify=tls if tls is not None else True,
            trust_env=False,
            # Servers close what has rested for five seconds (uvicorn); not to be on the way in that very moment.
            limits=httpx.Limits(max_connections=4, max_keepalive_connections=2, keepalive_expiry=_REST_SECONDS),
        )

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        until = self.now() + seconds
        while not condition():
            left = until - self.now()
            if left <= 0:
                return False
            self._activity.clear()
            try:
                async with asyncio.timeout(min(left, 0.5)):
                    await self._activity.wait()
            except TimeoutError:
                pass
        return True

    async def open(self, call: Call, after: Exchange | None = None) -> SocketExchange:
        if isinstance(after, SocketExchange) and after.open and after.reusable:
            exchange = after
        else:
            exchange = await self._connect()
        exchange.start(self._payload(call), stream=bool(call.body.get("stream")))
        return exchange

    async def _connect(self) -> SocketExchange:
        self._exchanges = [known for known in self._exchanges if known.open]
        exchange = SocketExchange(self.now, self._activity.set)
        if len(self._exchanges) >= CONNECTIONS_MAX:
            exchange.refused = f"{CONNECTIONS_MAX} connections are open already"
            return exchange  # never connected: its reply fails
        loop, parts = asyncio.get_running_loop(), self._parts
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await loop.create_connection(
                    lambda: exchange,
                    parts.hostname or "",
                    parts.port or (443 if parts.scheme == "https" else 80),
                    ssl=self._tls,
                )
        except (OSError, TimeoutError) as error:
            exchange.refused = f"nobody answers at {parts.netloc.rpartition('@')[2]} ({str(error) or 'timeout'})"
            return exchange
        self._exchanges.append(exchange)
        return exchange

    def _payload(self, call: Call) -> bytes:
        body = msgspec.json.encode(call.body)
        lines = [
            f"POST {self._parts.path}{call.path} HTTP/1.1",
            f"host: {self._parts.netloc.rpartition('@')[2]}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            f"connection: {'keep-alive' if call.keep_alive else 'close'}",
            *(f"{name}: {value}" for name, value in {**self._headers, **call.headers}.items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def control(self, method: str, path: str, body: Any = None) -> Answer:
        try:
            response = await self._client.request(method, self._engine_url + path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return Answer(status=0, failure=f"{self._engine_url}: {str(error) or type(error).__name__}")
        return Answer(status=response.status_code, body=response.content, headers=dict(response.headers))

    async def aclose(self) -> None:
        for exchange in self._exchanges:
            exchange.close()
        self._exchanges.clear()
        await self._client.aclose()
        await asyncio.sleep(0)
