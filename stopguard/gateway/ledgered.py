"""A stream whose tokens are known: it can be stopped at its engine, kept, and go on elsewhere or later.

Theory
------
The relay has two modes a request. *Pass-through* (`Exchange`) never looks into a stream. *Ledgered*, this one, reads
each event through the engine's `Resumption`, keeps the ids, and writes what the client would have seen without us.
Which of the two it is is decided when the request goes to its engine: only a request whose stream can go on exactly
(or approximately, with consent) is ledgered, and only where somebody may want to cut it.

The client's connection belongs to the request, the engine's to one *incarnation* of it. The client's framing is
therefore ours: what comes out of the engine's chunks is put into chunks of our own, whole events only, so that a
stream can be cut at any moment and something of ours can always follow.

`cut` closes the incarnation: from that moment nothing of it can reach the client, not even what lies in a
buffer. `shelve` books that the engine has let go. `go_on` begins the next incarnation; its first tokens are compared
with what the client has (`stopguard.preemption.stitch`) before anything of it passes. What must wait for an engine in
between is in `parking`; here nothing waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from stopguard.engines.resumption import Ask, AskKind, EngineCall, Piece, Reader, Resumption, UnreadableChunk
from stopguard.errors import LimitReached, StopGuardError
from stopguard.gateway.exchange import Exchange
from stopguard.gateway.framing import ChunkedBody, Scanner
from stopguard.gateway.head import ResponseHead
from stopguard.gateway.routes import RouteKind
from stopguard.gateway.upstream import Loss, Upstream
from stopguard.preemption.events import DONE, EventSplitter, data_of, event_of
from stopguard.preemption.exactness import judge
from stopguard.preemption.marks import Overlap, Transcript
from stopguard.preemption.stitch import Seam, SeamMismatch, Voice
from stopguard.preemption.ways import Exactness, Verdict
from stopguard.stops import DeadlineKind, Engine, Semantics, StopCause
from stopguard.stops.preemptions import preempted

if TYPE_CHECKING:
    from stopguard.gateway.fleet import Member

__all__ = ["LedgeredExchange"]

COMMENT = b": preempted\n\n"
_KINDS = {RouteKind.CHAT: AskKind.CHAT, RouteKind.COMPLETIONS: AskKind.COMPLETIONS}
_NOT_LEDGERED = Verdict(Exactness.NEVER, "passed through")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class LedgeredExchange(Exchange):
    """One request whose stream may go on after it was cut. `verdict` says how well; NEVER is pass-through."""

    __slots__ = (
        "_call",
        "_engine_id",
        "_errs",
        "_events",
        "_finish_seen",
        "_incarnation",
        "_live",
        "_reader",
        "_said_done",
        "_seam",
        "_voice",
        "ask",
        "failovers",
        "home",
        "outcome",
        "prepared_ids",
        "resumption",
        "transcript",
        "verdict",
    )

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.verdict = _NOT_LEDGERED
        self.ask: Ask | None = None
        self.resumption: Resumption | None = None
        self.transcript: Transcript | None = None
        # The engine that it was at last, while it is at none.
        self.home: Member | None = None
        self.failovers = 0
        self.prepared_ids: Sequence[int] | None = None
        # Of the incarnation that is being tried: "" once its beginning was the same, else why it was not.
        self.outcome: asyncio.Future[str] | None = None
        self._call: EngineCall | None = None
        self._engine_id = self.request_id
        self._reader: Reader | None = None
        self._voice: Voice | None = None
        self._seam: Seam | None = None
        self._events = EventSplitter()
        self._incarnation = 0
        self._live = False
        self._finish_seen = False
        self._said_done = False
        self._errs = ""

    # ---- towards the engine --------------------------------------------------------------------

    def approach(self, member: Member) -> None:
        """Decide how it is run there, then ask for a connection."""
        self._decide(member)
        resumption = self.resumption
        parking = self._gateway.parking
        if self._call is not None and resumption is not None and resumption.prepares and parking is not None:
            parking.prepare(self, member)
        else:
            super().approach(member)

    def _decide(self, member: Member) -> None:
        """Whether this engine's stream of it can be ledgered, and with which request."""
        parking = self._gateway.parking
        kind = _KINDS.get(self.kind)
        resumption = getattr(member.engine, "resumption", None)
        self._call = None
        self.verdict = _NOT_LEDGERED
        if parking is None or kind is None or resumption is None or not self.head.http_1_1:
            return
        if not parking.wants(self):
            return
        try:
            fields = _decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if not isinstance(fields, dict):
            return
        ask = Ask(kind=kind, path=self.head.path, fields=fields)
        verdict = judge(ask, resumption)
        consent = self.head.resume
        if consent == "never":
            verdict = Verdict(Exactness.NEVER, "the client said never")
        elif verdict.exactness is Exactness.APPROXIMATE and consent != "approximate":
            verdict = Verdict(Exactness.NEVER, f"{verdict.reason}, without the client's consent")
        self.verdict = verdict
        if verdict.exactness is Exactness.NEVER:
            return
        self.ask = ask
        self.resumption = resumption
        self.transcript = Transcript(parking.settings.kept_tokens)
        self._voice = Voice(ask)
        self._reader = resumption.first_reader(ask)
        self._call = resumption.first(ask, self.prepared_ids)

    def prepared(self, prompt_ids: Sequence[int]) -> None:
        """The prompt's ids, which this engine must be sent."""
        assert self.ask is not None
        assert self.resumption is not None
        assert self.transcript is not None
        if prompt_ids:
            self.prepared_ids = self.transcript.prompt_ids = prompt_ids
        self._call = self.resumption.first(self.ask, prompt_ids)

    def run_unledgered(self, reason: str) -> None:
        """It cannot be prepared: pass it through as it came."""
        self.verdict = Verdict(Exactness.NEVER, reason)
        self._call = None

    def request_to(self, member: Member) -> tuple[bytes, bytes]:
        """The request as it goes over the wire, in words that make the engine say the ids."""
        call = self._call
        if call is None:
            return super().request_to(member)
        return member.request_at(self, call.path, _encode(call.body))

    def dispatch(self, upstream: Upstream) -> None:
        """Send this incarnation's request."""
        tracked = self.tracked
        if self._incarnation:
            # The books begin again at "waiting": the next byte shows that it runs.
            tracked.output_started = False
            if tracked.cause is not None and tracked.cause.semantics is Semantics.PREEMPT:
                tracked.cause = None
        super().dispatch(upstream)

    def connect_failed(self, reason: str) -> None:
        """There is no connection: for a continuation that is an attempt that failed."""
        if self._incarnation and self.outcome is not None:
            member, self.member = self.member, None
            if member is not None:
                member.failed(monotonic())
            self._settle_attempt(f"unreachable: {reason}")
        else:
            super().connect_failed(reason)

    # ---- from the engine ---------------------------------------------------------------------------

    def payload_for(self, head: ResponseHead, scanner: Scanner) -> list[bytes] | None:
        """Out of the engine's chunks, if this is the stream that was asked for."""
        fits = head.status == 200 and head.event_stream and not head.encoded and isinstance(scanner, ChunkedBody)
        if self._call is not None and fits and not self.tracked.muted:
            self._live = True
            self.payload = []
            return self.payload
        self._live = False
        if not self._incarnation:
            self.payload = None
            return super().payload_for(head, scanner)
        self.payload = None
        return None

    def on_head(self, head: ResponseHead, length: int, scanner: Scanner, rest: bytes) -> None:
        """The response of this incarnation begins."""
        if not self._live:
            if self._incarnation and self._head_sent:
                self._attempt_failed(f"the engine answered {head.status}")
                return
            self._forget()
            super().on_head(head, length, scanner, rest)
            return
        at = monotonic()
        self._scanner = scanner
        self._event_stream = True
        self._encoded = False
        if self.member is not None:
            self.member.answered()
        client = self.client
        if client is None or self.tracked.muted:
            return
        if not self._head_sent:
            self._head_sent = True
            # Between us and the client there are chunks as well, only not the same ones.
            collected, self.payload = self.payload, None
            opening = head.opening + self._our_lines(head, length, scanner, client)
            self.payload = collected
            self._put(opening)
        self.tracked.last_activity_at = at
        if rest:
            self._received(at)

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if not self._live or self.tracked.muted:
            super().on_body(data)
            return
        at = monotonic()
        self.tracked.last_activity_at = at
        self._received(at)

    def _received(self, at: float) -> None:
        """Read the events that have come, and write what the client shall have of them in one chunk."""
        tracked = self.tracked
        if not tracked.output_started:
            self._gateway.admission.output_began(self, at)
        collected = self.payload
        assert collected is not None
        data = b"".join(collected)
        collected.clear()
        out: list[bytes] = []
        problem: StopGuardError | None = None
        try:
            for event in self._events.feed(data):
                self._read(event, out)
        except (SeamMismatch, UnreadableChunk, LimitReached) as error:
            problem = error
        if out:
            self._put_chunk(b"".join(out))
        if problem is not None:
            self._stumbled(problem)
        elif self._seam is not None and self._seam.closed:
            self._settle_attempt("")

    def _read(self, event: bytes, out: list[bytes]) -> None:
        data = data_of(event)
        if self._reader is None:
            out.append(event)  # not understood any more, passed on as it comes
            return
        if data is None:
            if not self._incarnation:
                out.append(event)
            return
        if data == DONE:
            self._said_done = True
            out.append(event_of(DONE))
            return
        try:
            pieces = self._reader.read(data)
        except UnreadableChunk as error:
            if self._incarnation:
                raise
            self._give_up_ledger(str(error))
            out.append(event)
            return
        for piece in pieces:
            if piece.error:
                self._errs = piece.error
                if self._incarnation and self.outcome is not None:
                    raise UnreadableChunk(f"the engine failed: {piece.error}")
                if self._gateway_fails_over:
                    return
                if piece.event is not None:
                    out.append(event_of(_encode(piece.event)))
            elif self._incarnation:
                self._say(piece, out)
            else:
                self._pass_on(piece, out)

    def _pass_on(self, piece: Piece, out: list[bytes]) -> None:
        """A piece of the first incarnation: the client gets it as the engine wrote it."""
        voice, transcript = self._voice, self.transcript
        if voice is not None:
            voice.hear(piece)
        if transcript is not None:
            if piece.prompt_ids and transcript.prompt_ids is None:
                transcript.prompt_ids = piece.prompt_ids
            self._deliver(transcript, piece.token_ids, piece.text, piece.position)
        if piece.unresumable:
            self._give_up_ledger(piece.unresumable, reading=True)
        if piece.finish_reason is not None:
            self._finish_seen = True
        if piece.event is not None:
            out.append(event_of(_encode(piece.event)))

    def _say(self, piece: Piece, out: list[bytes]) -> None:
        """A piece of a later incarnation: what is new in it, in the voice of the first."""
        seam, voice, ask, transcript = self._seam, self._voice, self.ask, self.transcript
        assert seam is not None
        assert voice is not None
        assert ask is not None
        assert transcript is not None
        if piece.prompt_ids and transcript.prompt_ids is None:
            transcript.prompt_ids = piece.prompt_ids
        if piece.opening:
            if not voice.opened:
                voice.hear(piece)
                if piece.event is not None:
                    out.append(event_of(_encode(voice.repeat(piece.event))))
            return
        fresh = seam.feed(piece)
        event = voice.say(fresh, piece)
        usage = None
        if piece.usage is not None:
            self._note_cached(piece)
            if ask.wants_usage or piece.shows_usage:
                usage = voice.usage(piece.usage, seam.mark.tokens)
        if event is not None:
            # A chat's usage has a chunk of its own, unless it was wanted with each.
            if usage is not None and (ask.kind is AskKind.COMPLETIONS or ask.wants_continuous_usage):
                event["usage"] = usage
                usage = None
            out.append(event_of(_encode(event)))
        if usage is not None and (event is None or piece.finish_reason is not None):
            out.append(event_of(_encode(voice.usage_event(usage, piece))))
        self._deliver(transcript, fresh.token_ids, fresh.text, fresh.position)
        if piece.finish_reason is not None:
            self._finish_seen = True

    def _deliver(self, transcript: Transcript, token_ids: Sequence[int], text: str, position: int | None) -> None:
        before = transcript.tokens
        try:
            transcript.deliver(token_ids, text, position)
        except LimitReached as error:
            self.tracked.events += len(token_ids)
            self._give_up_ledger(str(error), reading=True)
        else:
            self.tracked.events += transcript.tokens - before

    def on_end(self) -> None:
        """The response of this incarnation is complete."""
        if not self._live or self.tracked.muted or self.client is None:
            super().on_end()
            return
        if self._reader is not None and not self._finish_seen and (not self._errs or self._gateway_fails_over):
            detail = self._errs or "it ended the stream before the end of the answer"
            self.on_lost(Loss.TRUNCATED, detail, closed=True)
            return
        rest = self._events.rest
        if self._reader is None and rest:
            self._put_chunk(rest)
        elif self._incarnation and not self._said_done:
            self._put_chunk(event_of(DONE))
        self._put(b"0\r\n\r\n")
        super().on_end()

    def on_lost(self, reason: str, detail: str, *, closed: bool = False) -> None:
        """The engine's connection broke, or its stream ended too early."""
        tracked = self.tracked
        if not tracked.muted and self.client is not None and tracked.machine.engine is Engine.DISPATCHED:
            if self._incarnation and self.outcome is not None:
                self.upstream = None
                self._attempt_failed(detail)
                return
            parking = self._gateway.parking
            if parking is not None and self._gateway_fails_over:
                self.upstream = None
                self.detail = detail
                if self.member is not None:
                    self.member.failed(monotonic())
                parking.fail_over(self, reason)
                return
        super().on_lost(reason, detail, closed=closed)

    # ---- cut, kept, gone on ------------------------------------------------------------------------

    @property
    def engine_id(self) -> str:
        """A fresh one for each incarnation: engines abort by id, and some do it late (SGLang 2 s after a stream)."""
        return self._engine_id

    @property
    def obstacle(self) -> str:
        """Why it cannot be cut at this moment; empty if it can."""
        if self.verdict.exactness is Exactness.NEVER:
            return self.verdict.reason
        if self.transcript is None:
            return "its ids are not known any more"
        if self._finish_seen or self.client is None or self.tracked.muted:
            return "it has ended"
        return ""

    @property
    def _gateway_fails_over(self) -> bool:
        parking = self._gateway.parking
        return (
            parking is not None
            and self.failovers < parking.settings.failovers
            and not self.obstacle
            and self._call is not None
        )

    def next_overlap(self, steps_back: int = 0) -> Overlap:
        """Where it would go on from now, and what would be generated again."""
        assert self.transcript is not None
        if self.verdict.exactness is Exactness.APPROXIMATE:
            return self.transcript.end_of_text()
        return self.transcript.overlap(steps_back=steps_back)

    def cut(self) -> None:
        """Close this incarnation. Nothing of it reaches the client from now on."""
        self._live = False
        self.payload = None
        self._events = EventSplitter()
        self._settle_attempt("cut again")
        self.close_upstream()

    def shelve(self, at: float) -> bool:
        """The engine has let go of it: book that, and be nowhere. False if it was stopped meanwhile."""
        gateway = self._gateway
        tracked = self.tracked
        gateway.controller.clear_deadline(tracked, DeadlineKind.IDLE)
        # The scheduler's own names belong to the incarnation that is over.
        gateway.controller.forget_parts(tracked)
        tracked.parts_over = None
        gateway.carry_out(preempted(gateway.controller, tracked, at, shelved=True), at)
        if tracked.machine.engine is not Engine.SHELVED:
            return False
        if self.member is not None:
            self.home = self.member
        self.member = None
        self.upstream = None
        self.dispatched = False
        if gateway.parking is not None:
            gateway.parking.park(self)
        if gateway.admission.queue:
            gateway.admission.pump(at)
        return True

    def comment(self) -> None:
        """Keep the client's connection, and whatever is in between, awake."""
        if self._head_sent and self.client is not None and not self.tracked.muted and not self._paused:
            self._put_chunk(COMMENT)

    def go_on(self, member: Member, call: EngineCall, reader: Reader, overlap: Overlap) -> asyncio.Future[str]:
        """Begin the next incarnation at `member`; the future is "" when its beginning has proved to be the same."""
        assert self.transcript is not None
        if self.verdict.exactness is Exactness.APPROXIMATE:
            self.transcript.cut_back(overlap.mark)
        self._incarnation += 1
        self._call = call
        self._reader = reader
        self._seam = Seam(overlap)
        self._events = EventSplitter()
        self._live = False
        self._errs = ""
        self.tracked.ledgers.tokens_recomputed += len(overlap.token_ids)
        self.member = member
        # A probe's events find their request by our own id; there the incarnation before has to be over, and is.
        self._engine_id = self.request_id if member.profile.probed else self._gateway.admission.fresh_id()
        outcome = self.outcome = asyncio.get_running_loop().create_future()
        member.pool.acquire(self)
        return outcome

    def _attempt_failed(self, reason: str) -> None:
        """This incarnation is of no use: back to where it was, and somebody decides what then."""
        self.close_upstream()
        self._live = False
        self.payload = None
        if self.tracked.machine.engine is Engine.DISPATCHED:
            self.shelve(monotonic())
            # That was no preemption, only the end of an attempt.
            self.tracked.preemptions -= 1
        self._settle_attempt(reason)

    def _settle_attempt(self, outcome: str) -> None:
        future, self.outcome = self.outcome, None
        if future is not None and not future.done():
            future.set_result(outcome)

    def _stumbled(self, problem: StopGuardError) -> None:
        """What the engine sent cannot be, or cannot be continued."""
        if not self._incarnation:
            # A first incarnation has nothing to compare: only an event without end comes here.
            self.close_upstream()
            self.on_lost(Loss.MALFORMED, str(problem))
        elif self.outcome is not None:
            kind = "mismatch" if isinstance(problem, SeamMismatch) else "unreadable"
            if isinstance(problem, SeamMismatch) and problem.text_only:
                kind = "text mismatch"
            self._attempt_failed(f"{kind}: {problem}")
        else:
            self.close_upstream()
            self.on_lost(Loss.MALFORMED, str(problem))

    def _give_up_ledger(self, reason: str, *, reading: bool = False) -> None:
        """From here on it cannot be continued. It goes on being passed on, read (`reading`) or as it comes."""
        self.verdict = Verdict(Exactness.NEVER, reason)
        self.transcript = None
        if not reading:
            self._reader = None

    def _forget(self) -> None:
        """The answer is no stream of the kind that was asked for: nothing to keep."""
        self._call = None
        if self.verdict.exactness is not Exactness.NEVER:
            self.verdict = Verdict(Exactness.NEVER, "the answer is no stream")
        self.transcript = self._voice = self._reader = None

    # ---- from the gateway --------------------------------------------------------------------------

    def stop_began(self) -> None:
        """Nothing more of the engine's will pass. Our own framing is always between two events."""
        super().stop_began()
        if self._head_sent and self._call is not None:
            self._clean_cut = True
            self.payload = None
        self._live = False
        self._settle_attempt("stopped")

    def tell(self, cause: StopCause, advice: Any) -> None:
        """The terminal event; a parked one has no scanner of its engine's any more."""
        if self._head_sent and self._call is not None:
            self._scanner = ChunkedBody()
        super().tell(cause, advice)

    def settled(self) -> None:
        """The books are closed: let go of everything."""
        super().settled()
        self._settle_attempt("settled")
        if self._gateway.parking is not None:
            self._gateway.parking.unpark(self)
        self._forget()
        self._seam = None
        self.ask = self.home = self.prepared_ids = None

    # ---- private -------------------------------------------------------------------------------

    def _free_body(self) -> None:
        """The body is kept as long as it may have to be sent again: its room stays taken."""
        if self._call is None or self.tracked.request_id not in self._gateway.registry.alive:
            super()._free_body()

    def _note_cached(self, piece: Piece) -> None:
        """What was recomputed of prompt and delivered tokens: whatever the engine did not find in its cache."""
        usage = piece.usage
        if usage is not None and usage.cached_tokens is not None and piece.finish_reason is not None:
            self.tracked.ledgers.tokens_recomputed += max(0, usage.prompt_tokens - usage.cached_tokens)

    def _put_chunk(self, data: bytes) -> None:
        self._put(b"%x\r\n%b\r\n" % (len(data), data))

    def _put(self, data: bytes) -> None:
        # The books count what passes the buffer towards the client; what the engine wrote was something else.
        ledgers = self.tracked.ledgers
        ledgers.bytes_received += len(data)
        ledgers.bytes_sent += len(data)
        if self.recording is not None:
            self.recording.add(data)
        self._write(data)
