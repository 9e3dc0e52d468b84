"""One request on its way through the relay: the client's side, the engine's side, and the books between.

Theory
------
An exchange connects three things that end at different times: the client's connection (`client`, `None`
from the moment it left, was served, or was told), the engine's connection (`upstream`, `None` while there is
none), and the request's books (`tracked`, until the controller says `Settled`). Each event is reported to
the controller first; what must be done comes back as effects, and the gateway carries them out.

**Bytes** pass unmodified. Only two things are counted: bytes, exactly, and events. An event is a line that
begins with ``data:``, counted also when a read cuts it; ``[DONE]`` is taken off at the end. A token whose text
contains a line break followed by ``data:`` cannot be mistaken (JSON escapes line breaks), but an engine that
cuts one event into several HTTP chunks, one of which begins with these letters, is counted one too many. For
engines with a probe the scheduler's own counts replace this one. A response that is no stream counts the
completion tokens of its `usage`.

**After a stop was observed** (`tracked.muted`) nothing of the engine's reaches the client any more. Whether
something of ours may be put in was decided at that moment: only between two whole events, and between two
chunks of the framing. Otherwise the connection is cut, which no client can take for an end.

**An upstream that breaks** is never turned into a clean end: the client gets an error event and then the end
of the connection without the end of the body.
"""

from __future__ import annotations

import re
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from stopguard.errors import LimitReached
from stopguard.gateway import terminal
from stopguard.gateway.framing import ChunkedBody, Scanner, UntilCloseBody
from stopguard.gateway.head import RequestHead, ResponseHead
from stopguard.gateway.routes import BodyFacts, RouteKind
from stopguard.gateway.upstream import Loss, Upstream
from stopguard.stops import Engine, RetryAdvice, Semantics, Source, StopCause, Tracked
from stopguard.stops.straight import serve_whole

if TYPE_CHECKING:
    from stopguard.gateway.downstream import Downstream
    from stopguard.gateway.fleet import Member
    from stopguard.gateway.joining import Recording
    from stopguard.gateway.server import Gateway
    from stopguard.preemption import Claim

__all__ = ["Exchange"]

_STOPPING = (Engine.ABORTING, Engine.UNCONFIRMED)
_WITH_DONE = (RouteKind.CHAT, RouteKind.COMPLETIONS)
_CUT = 5  # one less than b"\ndata:" is long
_EDGE = 32  # room for b"data: [DONE]", the empty line after it and the end of the framing
_DONE = b"\ndata: [DONE]"
_USAGE = re.compile(rb'"(?:completion_tokens|output_tokens)":\s*([0-9]{1,9})')
_USAGE_BYTES = 2048
_NATURAL_END = re.compile(rb'"(?:finish_reason|stop_reason)":\s*"(?:stop|length|tool_calls|end_turn|max_tokens)"')
_ANSWERED = RetryAdvice(True, "the engine answered with an error")


class Exchange:
    """One request. Made by `Gateway.begin`, freed when its books are settled."""

    __slots__ = (
        "_clean_cut",
        "_encoded",
        "_ended_by_itself",
        "_event_stream",
        "_gateway",
        "_head_sent",
        "_keep_alive",
        "_last_piece",
        "_paused",
        "_scanner",
        "_write",
        "body",
        "claim",
        "client",
        "detail",
        "dispatched",
        "facts",
        "follower",
        "head",
        "member",
        "payload",
        "plain",
        "predecessor",
        "recording",
        "request_id",
        "tracked",
        "tried",
        "upstream",
    )

    def __init__(
        self,
        gateway: Gateway,
        client: Downstream,
        head: RequestHead,
        body: bytes,
        facts: BodyFacts,
        tracked: Tracked,
    ) -> None:
        self._gateway = gateway
        self.client: Downstream | None = client
        self._write: Any = client.write
        self.head = head
        self.body = body
        self.facts = facts
        self.tracked = tracked
        self.request_id = tracked.request_id
        # What it may claim among others, while classes are in use.
        self.claim: Claim | None = None
        self.member: Member | None = None
        self.tried: tuple[Member, ...] = ()
        self.upstream: Upstream | None = None
        self.dispatched = False
        # What went wrong, in words for people; the stop's reason is the stable word for it.
        self.detail = ""
        self.recording: Recording | None = None
        # The request with the same idempotency key that waits for this one to be settled, and the other way round.
        self.follower: Exchange | None = None
        self.predecessor: Exchange | None = None
        self.payload: list[bytes] | None = None
        # Whether chunks of events may take the short way: nothing but counting and passing on.
        self.plain = False
        self._scanner: Scanner | None = None
        self._head_sent = False
        self._event_stream = False
        self._encoded = False
        self._keep_alive = False
        self._paused = False
        self._clean_cut = False
        self._ended_by_itself = False
        # Of an event stream: what passed last, at least `_EDGE` bytes if there were so many. The line break stands
        # for the end of the head, after which an event may begin.
        self._last_piece = b"\n"

    # ---- towards the engine --------------------------------------------------------------------

    def approach(self, member: Member) -> None:
        """`member` is the engine for it: get a connection."""
        member.pool.acquire(self)

    def request_to(self, member: Member) -> tuple[bytes, bytes]:
        """Head and body of the request as they go over the wire."""
        return member.request_for(self)

    def dispatch(self, upstream: Upstream) -> None:
        """Send the request to the engine over `upstream`."""
        member = self.member
        assert member is not None
        gateway = self._gateway
        at = monotonic()
        self.dispatched = True
        try:
            gateway.controller.dispatch(self.tracked, at, member.profile_of(self))
        except LimitReached as error:
            self.dispatched = False
            upstream.abort()
            self.detail = str(error)
            cause = StopCause(semantics=Semantics.FAIL, source=Source.GATEWAY, reason="books_full", observed_at=at)
            gateway.stop(self.tracked, cause)
            return
        if gateway.preempting is not None:
            gateway.preempting.dispatched(self, at)
        self.upstream = upstream
        if self._paused:
            upstream.pause()
        request, body = self.request_to(member)
        if len(body) <= 16_384:
            upstream.write(request + body)
        else:
            upstream.write(request)
            upstream.write(body)

    def connect_failed(self, reason: str) -> None:
        """There is no connection to the chosen engine. Nothing was sent, so another may be tried."""
        self._gateway.connect_failed(self, reason)

    # ---- from the engine: called by its connection ------------------------------------------------

    def payload_for(self, head: ResponseHead, scanner: Scanner) -> list[bytes] | None:
        """Where the scanner shall put the payload, if the client cannot be given the chunks themselves."""
        if not self.head.http_1_1 and isinstance(scanner, ChunkedBody):
            self.payload = []
        return self.payload

    def on_head(self, head: ResponseHead, length: int, scanner: Scanner, rest: bytes) -> None:
        """The engine's response begins; `length` is its Content-Length or -1, `rest` what of its body has come."""
        at = monotonic()
        tracked = self.tracked
        self._scanner = scanner
        self._event_stream = head.event_stream
        self._encoded = head.encoded
        member = self.member
        if member is not None:
            member.answered()
        if rest or not head.event_stream:
            self._gateway.admission.output_began(self, at)
        self._free_body()
        client = self.client
        if client is None or tracked.muted:
            self._count(rest, at)
            return
        self._head_sent = True
        written = head.opening + self._our_lines(head, length, scanner, client)
        self._count(rest, at)
        if self.payload is not None:
            rest = b"".join(self.payload)
            self.payload.clear()
        self._pass(written + rest if rest else written)

    def on_event_chunk(self, data: bytes) -> None:
        """One whole chunk of an event stream: the path of nearly every streamed chunk.

        No event begins across the edge of two chunks that were read apart: what precedes `data` ends with the
        line break that closes its chunk, and `data` begins with the digits of a size.
        """
        tracked = self.tracked
        tracked.events += data.count(b"\ndata:")
        tracked.last_activity_at = monotonic()
        if tracked.muted:
            return
        self._last_piece = data
        size = len(data)
        ledgers = tracked.ledgers
        ledgers.bytes_received += size
        ledgers.bytes_sent += size
        self._write(data)

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        tracked = self.tracked
        at = monotonic()
        if self._event_stream:
            last = self._last_piece
            tracked.events += data.count(b"\ndata:") + (last[-_CUT:] + data[:_CUT]).count(b"\ndata:")
            if not tracked.muted:
                self._last_piece = data if len(data) >= _EDGE else last[-_EDGE:] + data
            elif _DONE in data:
                tracked.events -= 1
        else:
            self._last_piece = data
        tracked.last_activity_at = at
        if not tracked.output_started:
            self._gateway.admission.output_began(self, at)
        if tracked.muted:
            self.plain = False
            self._ended_by_itself = self._ended_by_itself or _NATURAL_END.search(data) is not None
            return
        if self.payload is not None:
            data = b"".join(self.payload)
            self.payload.clear()
            if not data:
                return
        if self.recording is not None:
            self.recording.add(data)
        elif self._event_stream and self.payload is None:
            self.plain = isinstance(self._scanner, ChunkedBody)
        size = len(data)
        ledgers = tracked.ledgers
        ledgers.bytes_received += size
        ledgers.bytes_sent += size
        self._write(data)

    def on_end(self) -> None:
        """The response is complete and well-formed."""
        at = monotonic()
        self.upstream = None
        tracked = self.tracked
        gateway = self._gateway
        controller = gateway.controller
        if tracked.muted and tracked.machine.engine in _STOPPING and not self._ended_by_itself:
            # A stream that ends after an abort ends because of it, unless it says otherwise.
            gateway.carry_out(controller.stream_ended_by_engine(tracked, at), at)
            return
        if not self._event_stream:
            self._count_usage()
        elif not tracked.muted and self._saw_done:
            tracked.events -= 1
        client = self.client
        if client is None or tracked.muted:
            gateway.carry_out(controller.engine_finished(tracked, at), at)
            return
        self.client = None
        gateway.carry_out(serve_whole(controller, tracked, at), at)
        if self.recording is not None:
            self.recording.finish(keep_alive=self._keep_alive)
        client.response_done(keep_alive=self._keep_alive)

    def on_end_by_close(self) -> None:
        """The connection ended, and with it a body that has no other end."""
        if self._event_stream and self.kind in _WITH_DONE and not self._saw_done:
            self.on_lost(Loss.TRUNCATED, "it closed the connection before the end of the stream", closed=True)
        else:
            self.on_end()

    def on_lost(self, reason: str, detail: str, *, closed: bool = False) -> None:
        """The engine's connection broke (or was `closed`, too early), or it sent what is not HTTP.

        `reason` is one of `Loss`, `detail` is for people.
        """
        at = monotonic()
        self.detail = detail
        self.upstream = None
        gateway = self._gateway
        tracked = self.tracked
        if self.member is not None and not self._head_sent and not tracked.muted:
            self.member.failed(at)
        if closed and tracked.muted and tracked.machine.engine in _STOPPING:
            gateway.carry_out(gateway.controller.stream_ended_by_engine(tracked, at), at)
            return
        gateway.carry_out(gateway.controller.engine_lost(tracked, at, reason), at)

    # ---- from the client: called by its connection -------------------------------------------------

    def client_left(self, method: str, late_seconds: float | None = None) -> None:
        """The client is gone, in whatever window. Finished beats gone: then `client` is `None` already."""
        if self.client is None:
            return
        at = monotonic()
        self.client = None
        if self._paused and self.upstream is not None:
            self._paused = False
            self.upstream.resume()
        gateway = self._gateway
        if self.recording is not None and self.recording.take_over():
            return
        policy = self.head.standing.policy
        member = self.member
        profile = self.tracked.profile
        closes_first = profile is not None and profile.closes_first
        if member is not None and closes_first and policy.stops_at_once and self._runs:
            # The wire before the books, where they can only come to this: the engine hears of it some tens of
            # microseconds earlier, and the knock that the controller orders finds the work done.
            self.close_upstream()
        occurred_at = None if late_seconds is None else at - late_seconds
        gateway.carry_out(gateway.controller.client_left(self.tracked, at, method, policy, occurred_at), at)
        gateway.wake_soon(at)

    def pause(self) -> None:
        """The client's buffer is full: stop reading from the engine, whose own sending then stops."""
        self._paused = True
        if self.upstream is not None:
            self.upstream.pause()

    def resume(self) -> None:
        self._paused = False
        if self.upstream is not None:
            self.upstream.resume()

    # ---- from the gateway, carrying out effects ----------------------------------------------------

    def stop_began(self) -> None:
        """Nothing more will pass. Note now whether something of ours can follow what has passed."""
        self.plain = False
        scanner = self._scanner
        self._clean_cut = (
            self._event_stream
            and not self._encoded
            and scanner is not None
            and (self.payload is not None or scanner.between_pieces)
            and self._between_events()
        )
        self._gateway.withdraw(self)

    def close_upstream(self) -> None:
        """The abort that every engine understands: close its connection."""
        upstream = self.upstream
        if upstream is not None:
            self.upstream = None
            upstream.abort()

    def tell(self, cause: StopCause, advice: RetryAdvice) -> None:
        """Give a client that is still connected its terminal event, and end its response."""
        client = self.client
        at = monotonic()
        controller = self._gateway.controller
        if client is None:
            self._gateway.carry_out(controller.client_told(self.tracked, at), at)
            return
        self.client = None
        notice = terminal.notice_of_stop(cause, advice, self.detail)
        keep_alive = False
        whole = True
        if not self._head_sent:
            keep_alive = self._may_keep_alive(client) and not notice.close
            said = self._error_response(notice, keep_alive)
        elif self._clean_cut:
            broken = cause.source is Source.ENGINE
            keep_alive = self._keep_alive and not broken and self.payload is None
            said = self._last_events(notice, broken=broken)
        else:
            said = b""
            whole = False
        if self.recording is not None:
            self.recording.tell(said, keep_alive=keep_alive, whole=whole)
        if whole:
            client.write(said)
        self._gateway.carry_out(controller.client_told(self.tracked, at), at)
        if whole:
            client.response_done(keep_alive=keep_alive)
        else:
            client.abort()

    def settled(self) -> None:
        """The books are closed: let go of everything."""
        if self.body:
            self._free_body()
        if self.upstream is not None:
            self.close_upstream()
        self._scanner = None
        self._last_piece = b""
        self.recording = None

    def adopt(self, client: Downstream) -> None:
        """Another client that joined this request is its client from now on."""
        self.client = client
        self._write = client.write
        client.serving = self

    @property
    def engine_id(self) -> str:
        """Its id at the engine: ours, unless it is there for another time."""
        return self.request_id

    @property
    def kind(self) -> RouteKind:
        """The API that it speaks."""
        kind: RouteKind = self.head.standing.kind
        return kind

    @property
    def digest(self) -> str:
        """Whose it is."""
        digest: str = self.head.standing.digest
        return digest

    @property
    def asked_model(self) -> str:
        """The model that its body names, empty without one."""
        return self.facts.model or ""

    @property
    def _saw_done(self) -> bool:
        return _DONE in self._last_piece[-_EDGE:]

    @property
    def keeps_client(self) -> bool:
        """Whether a client waits for this response."""
        return self.client is not None

    @property
    def follows(self) -> bool:
        """Whether it waits for another request to be settled."""
        return self.predecessor is not None

    @property
    def at_engine(self) -> bool:
        """Whether it waits for an engine or is with one (not: in our own queue)."""
        return self.member is not None

    @property
    def _runs(self) -> bool:
        """Whether the engine works on it and nobody has stopped it."""
        return self.upstream is not None and self.tracked.machine.engine is Engine.DISPATCHED

    # ---- private -------------------------------------------------------------------------------

    def _pass(self, data: bytes) -> None:
        ledgers = self.tracked.ledgers
        size = len(data)
        ledgers.bytes_received += size
        ledgers.bytes_sent += size
        if self.recording is not None:
            self.recording.add(data)
        self._write(data)

    def _count(self, piece: bytes, at: float) -> None:
        """Count the events in the first piece of the body, which came with the head."""
        if not piece:
            return
        tracked = self.tracked
        tracked.last_activity_at = at
        if not self._event_stream:
            self._last_piece = piece
            return
        tracked.events += (b"\n" + piece).count(b"\ndata:")
        if not tracked.muted:
            self._last_piece = b"\n" + piece

    def _count_usage(self) -> None:
        match = _USAGE.search(self._last_piece, max(0, len(self._last_piece) - _USAGE_BYTES))
        if match is not None:
            self.tracked.events += int(match[1])

    def _our_lines(self, head: ResponseHead, length: int, scanner: Scanner, client: Downstream) -> bytes:
        """The rest of the head, which only we write: framing, ids, retry advice, and the empty line."""
        request = self.head
        request_id = self.request_id.encode()
        shown = request.alias.encode() if request.alias else request_id
        keep_alive = self._may_keep_alive(client)
        if keep_alive and head.status < 400 and request.http_1_1 and (length >= 0 or head.chunked):
            # Written out for the way of nearly every response.
            self._keep_alive = True
            if head.chunked:
                return b"transfer-encoding: chunked\r\nx-stopguard-id: %b\r\nx-request-id: %b\r\n\r\n" % (
                    request_id,
                    shown,
                )
            return b"content-length: %d\r\nx-stopguard-id: %b\r\nx-request-id: %b\r\n\r\n" % (length, request_id, shown)
        framing = b""
        if self.payload is not None or isinstance(scanner, UntilCloseBody):
            keep_alive = False
        elif head.chunked:
            framing = b"transfer-encoding: chunked\r\n"
        elif length >= 0:
            framing = b"content-length: %d\r\n" % length
        elif request.method != b"HEAD" and head.status not in (204, 304):
            keep_alive = False
        self._keep_alive = keep_alive
        if not keep_alive:
            framing += b"connection: close\r\n"
        elif not request.http_1_1:
            framing += b"connection: keep-alive\r\n"
        if head.status >= 400:
            framing += b"x-stopguard-retry: %b\r\n" % _ANSWERED.header().encode()
        return b"%bx-stopguard-id: %b\r\nx-request-id: %b\r\n\r\n" % (framing, request_id, shown)

    def _may_keep_alive(self, client: Downstream) -> bool:
        return client.keeps_open and self.head.keep_alive

    def _error_response(self, notice: terminal.Notice, keep_alive: bool) -> bytes:
        return terminal.error_response(
            self.kind,
            notice,
            request_id=self.request_id,
            alias=self.head.alias,
            keep_alive=keep_alive,
            head_only=self.head.method == b"HEAD",
            http_1_1=self.head.http_1_1,
        )

    def _last_events(self, notice: terminal.Notice, *, broken: bool) -> bytes:
        if broken:
            events = terminal.stream_error(self.kind, notice, self.request_id)
        else:
            model = self.asked_model
            choices = self.facts.choices
            events = terminal.stream_stopped(self.kind, notice, self.request_id, model, choices, int(time()))
        if self.payload is None and isinstance(self._scanner, ChunkedBody):
            return b"%x\r\n%b\r\n%b" % (len(events), events, b"" if broken else b"0\r\n\r\n")
        return events

    def _between_events(self) -> bool:
        """Whether what has passed ends with a whole event (an empty line), or nothing has passed yet."""
        last = self._last_piece
        if last == b"\n":
            return True
        if isinstance(self._scanner, ChunkedBody):
            last = last[-_EDGE:-2]
        return last.endswith((b"\n\n", b"\n\r\n"))

    def _free_body(self) -> None:
        if self.body:
            self._gateway.give_body_room(len(self.body))
            self.body = b""
