"""The engine's side of the relay: connections, their pool, and responses passed through.

A response's head is parsed by httptools and written anew; its body is only scanned for its end
(`framing`) and passed on as the very bytes objects that the event loop delivered.

A connection is used again only when nothing at all is in doubt: the response was complete and framed by
itself, the engine keeps the connection, our request was sent entirely, no byte too many came, and the
engine's adapter allows it (TensorRT-LLM's server pins a request for as long as its connection lives:
NVIDIA/TensorRT-LLM#13777). Before it is used again its socket is asked whether the engine has closed it:
a request that crosses a close can be neither proved sent nor proved unsent. For the same reason
connections rest for less time than uvicorn keeps them.

Connecting is the one thing here that needs a task: one a connection, never one a request.
"""

from __future__ import annotations

import asyncio
import enum
import select
import socket
import ssl
from time import monotonic
from typing import TYPE_CHECKING, Any

import httptools

from stopguard.gateway.framing import ChunkedBody, FramingError, NoBody, Scanner, SizedBody, UntilCloseBody
from stopguard.gateway.head import HeaderRules, ResponseHead, ResponseHeadError, read_response
from stopguard.gateway.seen_heads import SeenHeads, cut_length

if TYPE_CHECKING:
    from stopguard.gateway.exchange import Exchange

__all__ = ["Loss", "Pool", "Upstream"]

_NO_BODY = NoBody()
_GONE_EVENTS = select.POLLIN | getattr(select, "POLLRDHUP", 0)
_SURE_SECONDS = 0.001
_HANGUP_EVENTS = getattr(select, "POLLRDHUP", select.POLLHUP)


class Loss(enum.StrEnum):
    """Why an engine's response did not come to its end: the stable words for a stop's reason."""

    UNREACHABLE = "unreachable"
    CLOSED_EARLY = "closed_early"
    TRUNCATED = "truncated_stream"
    BROKEN = "connection_broken"
    MALFORMED = "malformed_response"


class Upstream(asyncio.Protocol):
    """One connection to an engine. It serves one exchange at a time, or rests in the pool."""

    __slots__ = (
        "_body",
        "_head",
        "_headers",
        "_parser",
        "_poll",
        "_pool",
        "_reason",
        "_reusable",
        "_socket",
        "_transport",
        "exchange",
        "idle_since",
        "write",
    )

    write: Any

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: Any = None
        self._poll: Any = None
        self._socket: Any = None
        self._parser: Any = None
        self._body: Scanner | None = None
        self._head = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._reason = b""
        self._reusable = True
        self.exchange: Exchange | None = None
        self.idle_since = 0.0

    # ---- the event loop's calls ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.write = self._transport.write
        connection = self._socket = transport.get_extra_info("socket")
        if connection is not None and hasattr(select, "poll"):
            self._poll = select.poll()
            # Over TLS bytes may come at rest (session tickets); only a hang-up counts there.
            secure = transport.get_extra_info("ssl_object") is not None
            self._poll.register(connection.fileno(), _HANGUP_EVENTS if secure else _GONE_EVENTS)
        self._pool.connected(self)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            # Nobody asked: what comes now could only be taken for the answer to somebody else's request.
            self.abort()
            return
        body = self._body
        if body is None:
            self._read_head(exchange, data)
            return
        if exchange.plain and body.is_one_chunk(data):
            exchange.on_event_chunk(data)
            return
        try:
            taken = body.feed(data, exchange.payload)
        except FramingError as error:
            self._break(str(error))
            return
        if taken != len(data):
            self._reusable = False
            data = data[:taken]
        exchange.on_body(data)
        # The exchange may have let go of this connection while it read.
        if body.done and self.exchange is exchange:
            self._finish(exchange)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        exchange, body = self.exchange, self._body
        self.exchange = None
        self._parser = None
        self._pool.lost(self)
        if exchange is None:
            return
        if body is not None and body.complete_at_end and error is None:
            exchange.on_end_by_close()
        elif error is None:
            exchange.on_lost(Loss.CLOSED_EARLY, "it closed the connection", closed=True)
        else:
            exchange.on_lost(Loss.BROKEN, str(error))

    # ---- the parser's calls --------------------------------------------------------------------

    def on_status(self, piece: bytes) -> None:
        self._reason += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    # ---- what the relay calls ------------------------------------------------------------------

    def serve(self, exchange: Exchange) -> None:
        """From now on this connection's response belongs to `exchange`, which writes its request itself."""
        self.exchange = exchange
        self._body = None
        self._head = b""
        self._reusable = True

    def abort(self) -> None:
        """Close now. Whatever the engine still sends reaches nobody."""
        if self.exchange is not None:
            self.exchange = None
            self._say_goodbye()
        self._transport.abort()

    def _say_goodbye(self) -> None:
        """Let the engine know in this very moment.

        An aborted transport closes its socket in the loop's next turn, behind everything that is ready now:
        when a thousand clients leave at once, that is behind all of them.
        """
        connection = self._socket
        if connection is None or self._transport.is_closing():
            return
        # The loops lend their sockets without this call; family and type are given so that nobody asks the system.
        borrowed = socket.socket(connection.family, socket.SOCK_STREAM, 0, fileno=connection.fileno())
        try:
            borrowed.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was faster
        finally:
            borrowed.detach()

    def pause(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    @property
    def usable(self) -> bool:
        """Whether the engine still has this resting connection open."""
        return not self._transport.is_closing() and (self._poll is None or not self._poll.poll(0))

    # ---- private -------------------------------------------------------------------------------

    def _read_head(self, exchange: Exchange, data: bytes) -> None:
        if self._head:
            data = self._head + data
        pool = self._pool
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._head = data
                if len(data) > pool.head_bytes:
                    self._break(f"it sent a head of more than {pool.head_bytes} bytes")
                return
            end += 4
            raw = data[:end]
            key, length = cut_length(raw)
            head = pool.seen_heads.find(key)
            if head is None or length == -2:
                try:
                    head = self._parse(raw)
                except (httptools.HttpParserError, ResponseHeadError) as error:
                    self._break(str(error))
                    return
                length = head.length
            data = data[end:]
            if head.status >= 200:
                break
            if head.status == 101:
                self._break("it changed to a protocol that nobody asked for")
                return
        self._head = b""
        body = self._body = _body_of(head, length, exchange.head.method)
        if not head.keep_alive or isinstance(body, UntilCloseBody):
            self._reusable = False
        rest = b""
        try:
            payload = exchange.payload_for(head, body)
            taken = body.feed(data, payload) if data else 0
        except FramingError as error:
            self._break(str(error))
            return
        if taken:
            rest = data if taken == len(data) else data[:taken]
        if taken != len(data):
            self._reusable = False
        exchange.on_head(head, length, body, rest)
        if body.done and self.exchange is exchange:
            self._finish(exchange)

    def _parse(self, raw: bytes) -> ResponseHead:
        self._headers = []
        self._reason = b""
        parser = self._parser = httptools.HttpResponseParser(self)
        parser.feed_data(raw)
        self._parser = None
        if parser.get_http_version() not in ("1.1", "1.0"):
            raise ResponseHeadError(f"HTTP/{parser.get_http_version()} is not spoken here")
        head = read_response(
            parser.get_status_code(),
            self._reason,
            self._headers,
            self._pool.header_rules,
            keep_alive=parser.get_http_version() == "1.1",
        )
        if raw.startswith(b"HTTP/1."):
            self._pool.seen_heads.keep(raw, len(self._headers), head)
        return head

    def _finish(self, exchange: Exchange) -> None:
        self.exchange = None
        # The pool first: the exchange's end may begin the client's next request, which wants a connection.
        try:
            if self._reusable and self._pool.reuse and not self._transport.get_write_buffer_size():
                self._pool.release(self)
            else:
                self._transport.abort()
        finally:
            exchange.on_end()

    def _break(self, reason: str) -> None:
        exchange = self.exchange
        self.abort()
        if exchange is not None:
            exchange.on_lost(Loss.MALFORMED, reason)


def _body_of(head: ResponseHead, length: int, method: bytes) -> Scanner:
    """How the body is framed (RFC 9112 section 6.3)."""
    if method == b"HEAD" or head.status in (204, 304):
        return _NO_BODY
    if head.chunked:
        return ChunkedBody()
    if length >= 0:
        return SizedBody(length) if length else _NO_BODY
    return UntilCloseBody()


class Pool:
    """The connections to one engine.

    `idle` is a stack, oldest at the bottom; `waiting` are exchanges for which a connection is being made,
    first come, first served. A connection that becomes free serves whoever waits.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        header_rules: HeaderRules,
        tls: ssl.SSLContext | None,
        reuse: bool,
        idle_connections: int,
        idle_seconds: float,
        connect_seconds: float,
        head_bytes: int,
    ) -> None:
        self.host = host
        self.port = port
        self.header_rules = header_rules
        self.tls = tls
        self.reuse = reuse
        self.idle_connections = idle_connections
        self.idle_seconds = idle_seconds
        self.connect_seconds = connect_seconds
        self.head_bytes = head_bytes
        self.seen_heads: SeenHeads[ResponseHead] = SeenHeads()
        self.idle: list[Upstream] = []
        self.open: set[Upstream] = set()
        self.waiting: dict[Exchange, None] = {}
        # Connections that are being made, and the tasks that make them. Not the same number: a task outlives
        # its connection's first moment, in which the connection has served somebody already.
        self._making: set[Upstream] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def acquire(self, exchange: Exchange) -> None:
        """Give `exchange` a connection, now or as soon as one is made (`dispatch` or `connect_failed`)."""
        idle = self.idle
        at = monotonic() if idle else 0.0
        while idle:
            upstream = idle.pop()
            rested = at - upstream.idle_since
            # One that rested for less has had no time to be closed but in this very moment.
            if rested < _SURE_SECONDS or (rested < self.idle_seconds and upstream.usable):
                upstream.serve(exchange)
                exchange.dispatch(upstream)
                return
            upstream.abort()
        self.waiting[exchange] = None
        if len(self._making) < len(self.waiting):
            upstream = Upstream(self)
            self._making.add(upstream)
            task = asyncio.get_running_loop().create_task(self._connect(upstream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def withdraw(self, exchange: Exchange) -> None:
        """`exchange` wants no connection any more. One that is being made for it will rest in the pool."""
        self.waiting.pop(exchange, None)

    def connected(self, upstream: Upstream) -> None:
        """A new connection stands."""
        self._making.discard(upstream)
        self.open.add(upstream)
        if self._closed:
            upstream.abort()
        else:
            self._serve_next(upstream)

    def release(self, upstream: Upstream) -> None:
        """A connection has served its exchange and can be used again."""
        if self._closed:
            upstream.abort()
        else:
            self._serve_next(upstream)

    def lost(self, upstream: Upstream) -> None:
        """A connection is closed."""
        self.open.discard(upstream)
        if upstream.exchange is None and upstream in self.idle:
            self.idle.remove(upstream)

    def close_rested(self, at: float) -> bool:
        """Close what has rested too long; returns whether any rest."""
        while self.idle and at - self.idle[0].idle_since >= self.idle_seconds:
            self.idle.pop(0).abort()
        return bool(self.idle)

    def close(self) -> None:
        """Close every connection, in use or not, and make no more."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        for upstream in list(self.open):
            upstream.abort()
        self.idle.clear()

    def _serve_next(self, upstream: Upstream) -> None:
        if self.waiting:
            exchange = next(iter(self.waiting))
            del self.waiting[exchange]
            upstream.serve(exchange)
            exchange.dispatch(upstream)
        elif len(self.idle) < self.idle_connections and self.reuse:
            upstream.idle_since = monotonic()
            self.idle.append(upstream)
        else:
            upstream.abort()

    async def _connect(self, upstream: Upstream) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_seconds):
                await loop.create_connection(lambda: upstream, self.host, self.port, ssl=self.tls)
        except TimeoutError:
            self._failed(upstream, f"no connection within {self.connect_seconds:g} s")
        except OSError as error:
            self._failed(upstream, error.strerror or str(error))
        finally:
            self._making.discard(upstream)

    def _failed(self, upstream: Upstream, reason: str) -> None:
        """One attempt failed: it was made for whoever has waited longest."""
        if upstream not in self._making:
            return  # it stood before the attempt was given up
        self._making.discard(upstream)
        if self.waiting:
            exchange = next(iter(self.waiting))
            del self.waiting[exchange]
            exchange.connect_failed(reason)
