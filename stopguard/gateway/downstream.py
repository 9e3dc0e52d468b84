"""The client's side of the relay: one connection, one request after another.

Theory
------
The connection is read at all times (`liveness` says why), so the parser may get requests while one is in
progress. Complete ones wait in `ready`, at most `Limits.pipelined_requests` of them; what comes after
those is read and dropped, and the connection ends after the last one that was accepted. A client may
always send again what was not answered on a connection that closed (RFC 9112 section 9.3.1).

A request's body is collected before anything is sent to an engine: routing needs its `model`, and a client
that leaves during its upload then costs no engine anything. The limits on one body and on all bodies
together keep that bounded.

Nothing here waits and nothing is scheduled for a request: deadlines are one number a connection, looked
at by the gateway's single timer.
"""

from __future__ import annotations

import asyncio
import enum
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import httptools

from stopguard.gateway import terminal
from stopguard.gateway.head import HeadRejected, RequestHead, read_request
from stopguard.gateway.liveness import loss_method, silent_seconds
from stopguard.gateway.routes import RouteKind, kind_of
from stopguard.gateway.seen_heads import cut_length
from stopguard.gateway.settings import HalfClose
from stopguard.stops import RetryAdvice

if TYPE_CHECKING:
    from stopguard.gateway.server import Gateway
    from stopguard.stops import Timer

__all__ = ["Downstream", "Phase", "Serving"]

_NEVER = float("inf")
_NOT_SENT = RetryAdvice(True, "never dispatched")


class Phase(enum.IntEnum):
    """What a connection waits for."""

    IDLE = 0
    HEAD = 1
    BODY = 2


class Serving(Protocol):
    """Whoever answers the request in progress: the relay, or one of our own routes."""

    def client_left(self, method: str, late_seconds: float | None = None) -> None:
        """The client is gone, since `late_seconds` where that is known; nothing can be written any more."""
        ...

    def pause(self) -> None:
        """The client's buffer is full."""
        ...

    def resume(self) -> None:
        """There is room again."""
        ...


class Downstream(asyncio.Protocol):
    """One client's connection."""

    __slots__ = (
        "_advancing",
        "_body",
        "_closing",
        "_deaf",
        "_gateway",
        "_head",
        "_head_bytes",
        "_headers",
        "_parser",
        "_phase",
        "_raw",
        "_rejection",
        "_secure",
        "_size",
        "_target",
        "_transport",
        "deadline_at",
        "half_closed",
        "paused",
        "ready",
        "serving",
        "timer",
        "upload_due",
        "write",
    )

    write: Any

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._transport: Any = None
        self._parser: Any = None
        self._phase = Phase.IDLE
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head: RequestHead | None = None
        self._head_bytes = 0
        self._body: list[bytes] = []
        self._size = 0
        self._rejection: HeadRejected | None = None
        # The bytes of the head that the parser is about to read, if they can be kept.
        self._raw = b""
        self._secure = False
        self._closing = False
        self._deaf = False
        self._advancing = False
        self.half_closed = False
        self.paused = False
        self.serving: Serving | None = None
        self.ready: list[tuple[RequestHead, bytes] | HeadRejected] = []
        # What the client owes (an upload, a next request, room in its buffer) and until when. `timer` stands in
        # the gateway's wheel at the earlier of the two or before it, and is only moved when it fires.
        self.deadline_at = _NEVER
        self.upload_due = _NEVER
        self.timer: Timer[Downstream] | None = None

    # ---- the event loop's calls ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.write = self._transport.write
        self._secure = transport.get_extra_info("ssl_object") is not None
        self._parser = httptools.HttpRequestParser(self)
        self._gateway.connection_opened(self)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._phase == Phase.IDLE:
            data = self._take_repeated(data)
            if not data:
                if self.serving is None:
                    self.advance()
                return
        if self._phase != Phase.BODY:
            self._head_bytes += len(data)
        fed = data
        try:
            while data:
                fed = data
                try:
                    self._parser.feed_data(data)
                    data = b""
                except httptools.HttpParserUpgrade as upgrade:
                    data = self._upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            # Raised in a callback of ours: a bug, which must not look like bad input.
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            # After the last request that is taken from this connection, whatever follows is dropped.
            if not self._deaf:
                self._reject(HeadRejected(400, f"the request is malformed: {error}"))
        if self._rejection is not None:
            self._reject(self._rejection)
        limit = self._gateway.limits.head_bytes
        if self._phase == Phase.HEAD and not self._head_bytes:
            self._head_bytes = self._begun_bytes(fed)
        if self._phase == Phase.HEAD and self._head_bytes > limit:
            self._reject(HeadRejected(431, f"the request's head is longer than {limit} bytes"))
        if self.serving is None and self.ready:
            self.advance()
        if self._phase != Phase.IDLE and self.upload_due == _NEVER and not self._deaf:
            self._watch_upload()

    def eof_received(self) -> bool:
        """Return True to keep the connection open for writing."""
        serving = self.serving
        self._deaf = True
        if serving is not None and not self._secure and self._gateway.settings.liveness.half_close is HalfClose.ALLOW:
            self.half_closed = True
            return True
        self._leave("eof", None if serving is None else silent_seconds(self._transport))
        return False

    def connection_lost(self, error: Exception | None) -> None:
        method = loss_method(error)
        # A reset carries no acknowledgement, so that the kernel's note of the last one says nothing of it.
        self._leave(method, silent_seconds(self._transport) if self.serving and method == "keepalive" else None)
        self._deaf = True
        # Parser and connection refer to each other, which no reference count would ever undo.
        self._parser = None
        self._gateway.connection_closed(self)

    def pause_writing(self) -> None:
        self.paused = True
        self.arm(monotonic() + self._gateway.timeouts.stall_seconds)
        if self.serving is not None:
            self.serving.pause()

    def resume_writing(self) -> None:
        self.paused = False
        if self._closing:
            return
        self.deadline_at = _NEVER
        if self.serving is not None:
            self.serving.resume()
        elif self.ready:
            self.advance()
        elif not self._deaf:
            self.arm(monotonic() + self._gateway.timeouts.keep_alive_seconds)

    def _begun_bytes(self, data: bytes) -> int:
        """How much of `data` belongs to a head that began in it, behind requests that were complete.

        Such a head has no empty line yet, so it stands behind the last one, and behind the body that may follow
        that. A body with empty lines in it makes this too small; then the next read is counted whole.
        """
        body = self.ready[-1][1] if self.ready and not isinstance(self.ready[-1], HeadRejected) else b""
        return max(0, len(data) - (data.rfind(b"\r\n\r\n") + 4) - len(body))

    def _take_repeated(self, data: bytes) -> bytes:
        """Take the complete requests at the start of `data` whose head was seen before; returns the rest."""
        gateway = self._gateway
        while data:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                self._raw = b""
                return data
            raw = data[:end]
            key, length = cut_length(raw)
            head = gateway.seen_heads.find(key)
            size = length if length > 0 else 0
            whole = end + size <= len(data) and size <= gateway.limits.body_bytes
            if head is None or length == -2 or not whole or not gateway.take_body_room(size):
                # The parser must have it. If it accepts this head, it need not see it again.
                self._raw = raw if head is None else b""
                return data
            self.ready.append((head, data[end : end + size] if size else b""))
            data = data[end + size :]
            if not head.keep_alive or len(self.ready) > gateway.limits.pipelined_requests:
                self._stop_reading()
                return b""
        return data

    # ---- the parser's calls --------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._phase = Phase.HEAD
        self._target = b""
        self._headers = []

    def on_url(self, piece: bytes) -> None:
        self._target = self._target + piece if self._target else piece

    def on_header(self, name: bytes, value: bytes) -> None:
        # After the head these are trailers, which end here: nothing may be added to a head afterwards.
        if self._phase == Phase.HEAD:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._phase = Phase.BODY
        self.upload_due = _NEVER
        if self._rejection is not None or self._deaf:
            return
        gateway = self._gateway
        parser = self._parser
        try:
            head = read_request(
                parser.get_method(),
                self._target,
                parser.get_http_version(),
                self._headers,
                gateway.limits,
                gateway.header_rules,
            )
            if head.length > gateway.limits.body_bytes:
                raise _too_large(gateway.limits.body_bytes)
        except HeadRejected as rejection:
            self._rejection = rejection
            return
        gateway.admission.judge(head)
        if self._raw:
            raw, self._raw = self._raw, b""
            if head.repeats and raw.startswith(head.method + b" "):
                gateway.seen_heads.keep(raw, len(self._headers), head)
        self._head = head
        if head.expects_continue and head.has_body and self.serving is None and not self.ready:
            self.write(terminal.CONTINUE)

    def on_body(self, piece: bytes) -> None:
        if self._rejection is not None or self._head is None or self._deaf:
            return
        self._size += len(piece)
        gateway = self._gateway
        if self._size > gateway.limits.body_bytes:
            self._size -= len(piece)
            self._rejection = _too_large(gateway.limits.body_bytes)
        elif not gateway.take_body_room(len(piece)):
            self._size -= len(piece)
            self._rejection = HeadRejected(503, "too many request bodies are waiting here; try again later")
        else:
            self._body.append(piece)

    def on_message_complete(self) -> None:
        self._phase = Phase.IDLE
        self._head_bytes = 0
        self.upload_due = _NEVER
        head = self._head
        if self._rejection is not None or head is None or self._deaf or self._parser.should_upgrade():
            return
        body = b""
        if self._body:
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body = []
        self._size = 0
        self._head = None
        self.ready.append((head, body))
        if not head.keep_alive or len(self.ready) > self._gateway.limits.pipelined_requests:
            self._stop_reading()

    # ---- what the gateway and the relay call ----------------------------------------------------

    def advance(self) -> None:
        """Begin the next request, if none is in progress and the client reads what it gets."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while self.ready and self.serving is None and not self.paused and not self._closing:
                item = self.ready.pop(0)
                self.deadline_at = _NEVER
                if isinstance(item, HeadRejected):
                    self._write_rejection(item)
                else:
                    self._gateway.begin(self, item[0], item[1])
        finally:
            self._advancing = False
        if self.serving is None and not self._closing:
            if self._deaf and not self.ready:
                self.close()
            elif not self.paused:
                self.arm(monotonic() + self._gateway.timeouts.keep_alive_seconds)

    def response_done(self, *, keep_alive: bool) -> None:
        """The response in progress is complete, as far as this connection is concerned."""
        self.serving = None
        if not keep_alive or self.half_closed:
            self._drop_ready()
            self.close()
        elif not self._advancing:
            if self.ready or self._deaf:
                self.advance()
            elif not self.paused:
                head = self._head
                if head is not None and head.expects_continue and self._phase == Phase.BODY and not self._body:
                    self.write(terminal.CONTINUE)
                # Written out, since this is the way of every request: the timer is left where it stands.
                self.deadline_at = monotonic() + self._gateway.timeouts.keep_alive_seconds
                if self.timer is None:
                    self._gateway.watch(self)

    def close(self) -> None:
        """Close after what was written has been sent."""
        if not self._closing:
            self._closing = self._deaf = True
            self.arm(monotonic() + self._gateway.timeouts.stall_seconds)
            self._transport.close()

    def abort(self) -> None:
        """Close now; what was written and not yet sent is lost, so that nobody takes it for complete."""
        self._closing = self._deaf = True
        self.serving = None
        self._drop_ready()
        self._transport.abort()

    def refuse(self, response: bytes) -> None:
        """Write `response` and close, reading on for a moment so that a client in its upload can read it."""
        self._drop_upload()
        self._drop_ready()
        self._deaf = self._closing = True
        self.write(response)
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self.arm(monotonic() + self._gateway.timeouts.linger_seconds)
        else:
            self._transport.close()

    def arm(self, due_at: float) -> None:
        """Look at this connection at `due_at`."""
        self.deadline_at = due_at
        timer = self.timer
        if timer is None or timer.due_at > due_at:
            self._gateway.watch(self)

    def deadline_passed(self, at: float) -> None:
        """A moment that was watched for has come."""
        if self.upload_due <= at:
            self.upload_due = _NEVER
            if self.serving is None and not self.ready:
                what = "head" if self._phase == Phase.HEAD else "body"
                self.refuse(_refusal(408, "request_timeout", f"the request's {what} did not come in time", self._head))
            else:
                # Behind a request in progress: that one is served, and nothing after it.
                self._stop_reading()
        elif self.deadline_at <= at:
            self.deadline_at = _NEVER
            if self._closing:
                self._transport.abort()
            elif self.paused:
                self._leave("stall", self._gateway.timeouts.stall_seconds)
                self.abort()
            elif self.serving is None and self._phase == Phase.IDLE:
                self.close()

    def shut(self) -> None:
        """Take no further request: close now if idle, else after what was accepted."""
        if self.serving is None and not self.ready and self._phase == Phase.IDLE:
            self.close()
        else:
            self._stop_reading()

    @property
    def keeps_open(self) -> bool:
        """Whether another request will be served on this connection after the present one."""
        return (not self._deaf or bool(self.ready)) and not self.half_closed

    @property
    def takes_more(self) -> bool:
        """Whether the client may send another request on this connection."""
        return not self._deaf

    @property
    def is_closing(self) -> bool:
        return self._closing

    # ---- private -------------------------------------------------------------------------------

    def _leave(self, method: str, late_seconds: float | None = None) -> None:
        serving = self.serving
        self.serving = None
        self._drop_upload()
        self._drop_ready()
        if serving is not None:
            # A client that does not read and then goes is found by its silence, whatever ends it.
            serving.client_left(method, late_seconds)

    def _reject(self, rejection: HeadRejected) -> None:
        """Answer with an error after what was accepted before, and read no more requests."""
        self._rejection = None
        self._drop_upload()
        self._deaf = True
        if self.serving is None and not self.ready:
            self._write_rejection(rejection)
        else:
            self.ready.append(rejection)

    def _write_rejection(self, rejection: HeadRejected) -> None:
        code = "bad_request" if rejection.status < 500 else "not_served"
        self.refuse(_refusal(rejection.status, code, str(rejection), self._head))

    def _upgrade(self, rest: bytes) -> bytes:
        """The parser stops after a head that asks for another protocol; returns what to parse next.

        Left alone it would take the body of such a request for the next request.

        An offer of HTTP/2 (the JDK's HttpClient makes it on every first request) is declined by ignoring it:
        the same head is parsed again without the offer, by a new parser, and the body after it.
        """
        head, self._head = self._head, None
        if self._rejection is not None or head is None:
            return b""
        if head.upgrade != b"h2c":
            self._rejection = HeadRejected(501, "websockets and other upgrades are not supported: use HTTP/1.1")
            return b""
        version = b"1.1" if head.http_1_1 else b"1.0"
        lines = [b"%b %b HTTP/%b\r\n" % (head.method, self._target, version)]
        lines += [b"%b: %b\r\n" % pair for pair in self._headers if pair[0].lower() != b"upgrade"]
        self._parser = httptools.HttpRequestParser(self)
        self._phase = Phase.IDLE
        self._raw = b""
        return b"".join(lines) + b"\r\n" + rest

    def _watch_upload(self) -> None:
        """The whole head has one deadline and the whole body another: a slow trickle does not extend them."""
        timeouts = self._gateway.timeouts
        seconds = timeouts.head_seconds if self._phase == Phase.HEAD else timeouts.body_seconds
        self.upload_due = monotonic() + seconds
        if self.timer is None or self.timer.due_at > self.upload_due:
            self._gateway.watch(self)

    def _stop_reading(self) -> None:
        """Drop whatever comes from now on. The socket is still read, so that its end is seen."""
        self._drop_upload()
        self._deaf = True

    def _drop_upload(self) -> None:
        if self._size:
            self._gateway.give_body_room(self._size)
            self._size = 0
        self._body = []
        self._phase = Phase.IDLE
        self.upload_due = _NEVER

    def _drop_ready(self) -> None:
        for item in self.ready:
            if not isinstance(item, HeadRejected):
                self._gateway.give_body_room(len(item[1]))
        self.ready = []


def _too_large(limit: int) -> HeadRejected:
    return HeadRejected(413, f"the request's body is longer than {limit} bytes")


def _refusal(status: int, code: str, message: str, head: RequestHead | None) -> bytes:
    kind = kind_of(head.path) if head is not None else RouteKind.OTHER
    notice = terminal.Notice(status=status, code=code, message=message, advice=_NOT_SENT)
    head_only = head is not None and head.method == b"HEAD"
    return terminal.error_response(kind, notice, keep_alive=False, head_only=head_only)
