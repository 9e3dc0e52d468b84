"""Admission: what happens between a complete request and its engine.

A request is refused early and cheaply (429, 503, 404, each saying that a retry is safe), or its books are
opened and it is placed: with an engine that serves its model and has room, or in the queue. Without classes
(`preemption.mode` off) the queue is in order of arrival, except that a request whose engines are full does not hold
up one whose engine is free. With classes it is a `stopguard.preemption.FairQueue` of several levels and tenants, and
a deadline that cannot be met by what was seen lately is a reason to refuse.

`Idempotency-Key`: a retry that comes while the first try is alive takes its place (`supersede`) or joins it.
A retry that takes another's place waits until the other is settled, so that the two never run side by side.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from stopguard.errors import LimitReached
from stopguard.gateway import terminal
from stopguard.gateway.exchange import Exchange
from stopguard.gateway.identifiers import IdSource
from stopguard.gateway.joining import Recording
from stopguard.gateway.ledgered import LedgeredExchange
from stopguard.gateway.routes import BodyFacts, RouteKind, key_digest, kind_of, policy_for, read_facts
from stopguard.gateway.settings import Idempotency
from stopguard.gateway.upstream import Loss
from stopguard.preemption import Claim, FairQueue, Limits, UnknownClass
from stopguard.stops import ClientPolicy, DeadlineKind, RetryAdvice, Semantics, Source, StopCause

if TYPE_CHECKING:
    from stopguard.gateway.downstream import Downstream
    from stopguard.gateway.fleet import Member
    from stopguard.gateway.head import RequestHead
    from stopguard.gateway.server import Gateway

__all__ = ["Admission", "Standing"]

_NO_FACTS = BodyFacts()
_LEDGERED_KINDS = (RouteKind.CHAT, RouteKind.COMPLETIONS)
_NEVER_SENT = RetryAdvice(True, "never dispatched")
_ONE_FOR_ALL = ("", 1.0, 0)
"""Tenant, weight and rank of every request while there are no classes."""


class Standing:
    """What is known of every request with the same head before its body is read.

    `openings` keeps, for each engine, what the head becomes on the way to it.
    """

    __slots__ = ("digest", "kind", "openings", "ours", "policy", "timed")

    def __init__(self, *, kind: RouteKind, digest: str, policy: ClientPolicy, ours: bool, timed: bool) -> None:
        self.kind = kind
        self.digest = digest
        self.policy = policy
        self.ours = ours
        self.timed = timed
        self.openings: dict[Member, bytes] = {}


class Admission:
    """Takes requests in, and keeps the queue of those that no engine has room for."""

    __slots__ = ("_candidates", "_gateway", "_ids", "_no_tenant", "queue", "refused")

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._ids = IdSource()
        self._no_tenant = key_digest(b"")
        preempting = gateway.preempting
        self.queue: FairQueue[Exchange] = FairQueue(
            limit=gateway.limits.queued_requests,
            levels=1 if preempting is None else len(preempting.classes.ranked),
            promote_seconds=gateway.settings.preemption.promote_seconds,
        )
        # The engines that may serve each queued request.
        self._candidates: dict[Exchange, list[Member]] = {}
        self.refused = 0

    def judge(self, head: RequestHead) -> None:
        """Find out once what holds for all requests with this head, and keep it in `head.standing`."""
        gateway = self._gateway
        path, method = head.path, head.method
        kind = kind_of(path)
        digest = key_digest(head.credential) if head.credential else self._no_tenant
        merged = path == "/v1/models" and method == b"GET" and len(gateway.fleet.members) > 1
        timeouts = gateway.timeouts
        wanted = head.total_seconds, head.first_token_seconds, timeouts.total_seconds, timeouts.first_token_seconds
        head.standing = Standing(
            kind=kind,
            digest=digest,
            policy=policy_for(gateway.settings.policies, path, kind, digest),
            ours=merged or path.startswith("/v1/requests/"),
            timed=any(seconds is not None for seconds in (*wanted, timeouts.longest_total_seconds)),
        )

    def admit(self, client: Downstream, head: RequestHead, body: bytes) -> None:
        """Take a request in, or refuse it."""
        gateway = self._gateway
        standing: Standing = head.standing
        kind, digest = standing.kind, standing.digest
        facts = read_facts(body, head.content_type) if body else _NO_FACTS
        model = facts.model or ""
        candidates = gateway.fleet.serving(model)
        at = monotonic()
        claim: Claim | None = None
        lowered_from = ""
        refusal = None
        if gateway.preempting is not None:
            try:
                claim, granted = gateway.preempting.claim(head, digest, body, candidates, at)
                lowered_from = granted.lowered_from
            except UnknownClass as error:
                refusal = terminal.Notice(
                    status=400, code="unknown_class", message=str(error), advice=_NEVER_SENT, should_retry=False
                )
        if refusal is None:
            refusal = self._reason_to_refuse(head, model, candidates, claim, at)
        if refusal is not None:
            self.refuse(client, head, body, kind, refusal)
            return
        if head.idempotency_key and self._join(client, head, body, digest):
            return
        request_id = self._ids.next()
        try:
            tracked = gateway.controller.admit(request_id, at, model=gateway.fleet.label(model))
        except LimitReached as error:
            notice = terminal.Notice(status=503, code="books_full", message=str(error), advice=_NEVER_SENT)
            self.refuse(client, head, body, kind, notice)
            return
        ledgers = gateway.parking is not None and facts.stream is True and kind in _LEDGERED_KINDS
        exchange = (LedgeredExchange if ledgers else Exchange)(gateway, client, head, body, facts, tracked)
        tracked.owner = exchange
        if claim is not None:
            exchange.claim = claim
            asked = f" ({lowered_from} was asked for)" if lowered_from else ""
            tracked.ledgers.mark(at, f"class {claim.priority_class.name}{asked}")
        client.serving = exchange
        gateway.registry.add(exchange)
        if head.group:
            tracked.ledgers.labels = {"group": head.group}
        if gateway.on_admitted is not None:
            gateway.on_admitted(exchange)
        if standing.timed:
            self._set_deadlines(exchange, at)
        if head.idempotency_key and self._must_wait(exchange, at):
            self._set_queue_deadline(exchange, at)
            return
        self.place(exchange, candidates, at)

    def fresh_id(self) -> str:
        """Another id of ours, for a request that goes to an engine for another time."""
        return self._ids.next()

    def place(self, exchange: Exchange, candidates: list[Member], at: float) -> None:
        """Send it to the best engine, or let it wait in the queue for one."""
        gateway = self._gateway
        member = None
        if len(gateway.registry) - len(self.queue) <= gateway.limits.concurrent_requests:
            member = gateway.fleet.choose(candidates, exchange.tried)
        if member is None:
            self._let_wait(exchange, candidates, at)
        else:
            self._send(exchange, member, at)
        if not exchange.dispatched and not exchange.tracked.muted:
            self._set_queue_deadline(exchange, at)

    def output_began(self, exchange: Exchange, at: float) -> None:
        """The first piece of output: from now on the stream may not rest for too long."""
        self._gateway.controller.output_started(exchange.tracked, at)
        if self._gateway.preempting is not None:
            self._gateway.preempting.started(exchange, at)
        seconds = self._gateway.timeouts.idle_stream_seconds
        if seconds is not None and not exchange.tracked.muted:
            exchange.tracked.last_activity_at = at
            self._set_deadline(exchange, DeadlineKind.IDLE, at + seconds)

    def withdraw(self, exchange: Exchange) -> None:
        """It waits for nothing any more."""
        if self.queue.remove(exchange):
            del self._candidates[exchange]
        if exchange.member is not None and not exchange.dispatched:
            exchange.member.pool.withdraw(exchange)

    def pump(self, at: float) -> None:
        """A place may have become free: give it to whoever goes next and can use it."""
        gateway = self._gateway
        while self.queue:
            if len(gateway.registry) - len(self.queue) >= gateway.limits.concurrent_requests:
                return
            picked = self.queue.pick(at, self._engine_for)
            if picked is None:
                return
            exchange, member, level = picked
            del self._candidates[exchange]
            if gateway.preempting is not None and exchange.claim is not None:
                exchange.claim.served_as = gateway.preempting.classes.ranked[level]
            self._send(exchange, member, at)

    def ahead_of(self, rank: int, candidates: list[Member]) -> int:
        """How many wait for the same engines at `rank` or above."""
        return self.queue.ahead_of(rank, tuple(candidates))

    def highest_level(self, member: Member) -> int:
        """The highest level at which somebody waits for this engine, -1 when nobody does."""
        return self.queue.highest_level(lambda pool: member in pool)  # type: ignore[operator]

    def connect_failed(self, exchange: Exchange, reason: str) -> None:
        """No connection to the chosen engine: try another, or say that there is none. Nothing was sent."""
        gateway = self._gateway
        at = monotonic()
        member = exchange.member
        assert member is not None
        member.failed(at)
        exchange.member = None
        exchange.tried = (*exchange.tried, member)
        candidates = gateway.fleet.serving(exchange.asked_model)
        left = [each for each in candidates if each not in exchange.tried]
        if left:
            self.place(exchange, left, at)
            return
        exchange.detail = f"engine {member.engine.name} cannot be reached ({reason})"
        cause = StopCause(semantics=Semantics.FAIL, source=Source.ENGINE, reason=Loss.UNREACHABLE, observed_at=at)
        gateway.carry_out(gateway.controller.stop(exchange.tracked, at, cause), at)

    def follow(self, exchange: Exchange, at: float) -> None:
        """The request that `exchange` had to wait for is settled."""
        if not exchange.tracked.muted and exchange.keeps_client:
            self.place(exchange, self._gateway.fleet.serving(exchange.asked_model), at)

    def refuse(
        self, client: Downstream, head: RequestHead, body: bytes, kind: RouteKind, notice: terminal.Notice
    ) -> None:
        """Answer at once, without books."""
        self.refused += 1
        self._gateway.give_body_room(len(body))
        keep_alive = head.keep_alive and (client.takes_more or bool(client.ready)) and not notice.close
        client.write(
            terminal.error_response(
                kind,
                notice,
                alias=head.alias,
                keep_alive=keep_alive,
                head_only=head.method == b"HEAD",
                http_1_1=head.http_1_1,
            )
        )
        client.response_done(keep_alive=keep_alive)

    def too_many_connections(self) -> bytes:
        """The answer to a connection beyond the limit."""
        self.refused += 1
        notice = terminal.Notice(
            status=503,
            code="too_many_connections",
            message="too many connections are open here: try again later",
            advice=_NEVER_SENT,
            retry_after_seconds=1,
        )
        return terminal.error_response(RouteKind.OTHER, notice, keep_alive=False)

    # ---- private -------------------------------------------------------------------------------

    def _send(self, exchange: Exchange, member: Member, at: float) -> None:
        exchange.member = member
        exchange.approach(member)
        if self._gateway.preempting is not None and not exchange.tracked.muted:
            # Only now, when the place counts as taken.
            self._gateway.preempting.placed(exchange, at)

    def _let_wait(self, exchange: Exchange, candidates: list[Member], at: float) -> None:
        """Put it in the queue; whoever has no room there any more is turned away."""
        tenant, weight, rank = _standing_in_line(exchange.claim)
        arrived_at = exchange.tracked.ledgers.opened_at
        pool = tuple(candidates)
        waits, displaced = self.queue.offer(
            exchange, tenant=tenant, weight=weight, rank=rank, pool=pool, arrived_at=arrived_at, at=at
        )
        if displaced is not None:
            del self._candidates[displaced]
        if waits:
            self._candidates[exchange] = candidates
        for turned_away in (displaced, None if waits else exchange):
            if turned_away is not None:
                cause = StopCause(semantics=Semantics.FAIL, source=Source.GATEWAY, reason="queue_full", observed_at=at)
                self._gateway.carry_out(self._gateway.controller.stop(turned_away.tracked, at, cause), at)
        if waits and self._gateway.preempting is not None:
            self._gateway.preempting.queued(exchange, candidates, at)

    def _engine_for(self, exchange: Exchange) -> Member | None:
        return self._gateway.fleet.choose(self._candidates[exchange], exchange.tried)

    def _reason_to_refuse(
        self, head: RequestHead, model: str, candidates: list[Member], claim: Claim | None, at: float
    ) -> terminal.Notice | None:
        gateway = self._gateway
        if gateway.draining:
            message = "this gateway is shutting down: send the request to another one"
            return terminal.Notice(
                status=503, code="shutdown", message=message, advice=_NEVER_SENT, retry_after_seconds=1, close=True
            )
        if head.path in gateway.fleet.control_paths and not gateway.settings.allow_engine_control:
            message = f"{head.path} controls the engine itself and is not open to clients; use DELETE /v1/requests/ID"
            return terminal.Notice(status=403, code="engine_control", message=message, should_retry=False)
        if not candidates:
            known = ", ".join(sorted(gateway.fleet.models())[:20])
            message = f"the model {model[:100]!r} is not served here; there are: {known}"
            return terminal.Notice(status=404, code="model_not_found", message=message, advice=_NEVER_SENT)
        if (
            len(self.queue) >= gateway.limits.queued_requests
            and gateway.fleet.choose_quietly(candidates) is None
            and self.queue.full_for(*_standing_in_line(claim))
        ):
            message = f"{len(self.queue)} requests are waiting already: try again later"
            return terminal.Notice(
                status=429, code="queue_full", message=message, advice=_NEVER_SENT, retry_after_seconds=1
            )
        if gateway.preempting is not None and claim is not None:
            hopeless = gateway.preempting.judge(claim, candidates, self._limits(head), at)
            if hopeless is not None:
                kind = hopeless.kind.value.replace("_", " ")
                message = (
                    f"the {kind} deadline of {hopeless.limit_seconds:g} s cannot be met: "
                    f"by what was seen lately it takes {hopeless.expected_seconds:.1f} s"
                )
                return terminal.Notice(
                    status=429,
                    code="deadline_cannot_be_met",
                    message=message,
                    advice=_NEVER_SENT,
                    retry_after_seconds=hopeless.retry_after_seconds,
                )
        return None

    def _limits(self, head: RequestHead) -> Limits:
        """How long a request with this head may take."""
        timeouts = self._gateway.timeouts
        total = head.total_seconds or timeouts.total_seconds
        longest = timeouts.longest_total_seconds
        if longest is not None:
            total = longest if total is None else min(total, longest)
        return Limits(
            queue_seconds=timeouts.queue_seconds,
            first_token_seconds=head.first_token_seconds or timeouts.first_token_seconds,
            total_seconds=total,
        )

    def _set_deadlines(self, exchange: Exchange, at: float) -> None:
        limits = self._limits(exchange.head)
        if limits.total_seconds is not None:
            self._set_deadline(exchange, DeadlineKind.TOTAL, at + limits.total_seconds)
        if limits.first_token_seconds is not None:
            self._set_deadline(exchange, DeadlineKind.FIRST_TOKEN, at + limits.first_token_seconds)

    def _set_queue_deadline(self, exchange: Exchange, at: float) -> None:
        seconds = self._gateway.timeouts.queue_seconds
        if seconds is not None:
            self._set_deadline(exchange, DeadlineKind.QUEUE, at + seconds)

    def _set_deadline(self, exchange: Exchange, kind: DeadlineKind, due_at: float) -> None:
        self._gateway.controller.set_deadline(exchange.tracked, kind, due_at)
        self._gateway.wake_at(due_at)

    def _join(self, client: Downstream, head: RequestHead, body: bytes, digest: str) -> bool:
        """Whether the request has joined a live one with the same key."""
        gateway = self._gateway
        if gateway.settings.idempotency is not Idempotency.JOIN or not head.http_1_1:
            return False
        before = gateway.registry.key_holder(digest, head.idempotency_key)
        if before is None or before.tracked.muted or before.recording is None or not before.head.http_1_1:
            return False
        if not before.recording.join(client):
            return False
        gateway.give_body_room(len(body))
        return True

    def _must_wait(self, exchange: Exchange, at: float) -> bool:
        """Take the key over; whether an earlier request with it must be settled first."""
        gateway = self._gateway
        mode = gateway.settings.idempotency
        if mode is Idempotency.OFF:
            return False
        before = gateway.registry.hold_key(exchange)
        if mode is Idempotency.JOIN:
            exchange.recording = Recording(exchange, gateway.limits.joined_bytes)
        if before is None:
            return False
        # One that waits itself was never sent: whom it waits for is whom the new one has to wait for.
        ahead = before.predecessor or before
        before.predecessor = None
        ahead.follower = exchange
        exchange.predecessor = ahead
        if not before.tracked.muted:
            cause = StopCause(semantics=Semantics.CANCEL, source=Source.SUPERSEDED, reason="superseded", observed_at=at)
            gateway.carry_out(gateway.controller.stop(before.tracked, at, cause), at)
        # Settled within the call: then `follow` has placed it already.
        return exchange.follows or exchange.at_engine or exchange in self.queue


def _standing_in_line(claim: Claim | None) -> tuple[str, float, int]:
    """Tenant, weight and rank in the queue."""
    return _ONE_FOR_ALL if claim is None else (claim.tenant, claim.weight, claim.rank)
