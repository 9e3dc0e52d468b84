"""Parking: streams that are at no engine, and their way back.

`GatewayWay` is the way to preempt for engines that cannot do it themselves (see `stopguard.preemption.ways`): it cuts
a ledgered stream, waits until the engine has let go of it, keeps it, and continues it. The same continuation is
used when an engine dies in the middle of a stream and another one serves the same model (`ResumeSettings.failover`).

What waits for an engine here has a task of the way's caller or one of ours, and every one of them looks at the
request again after each wait: a client that left meanwhile, a deadline, a cancel have made it something else, and
then it is never sent again. While anything is parked one timer writes the comments that keep the clients'
connections awake.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from time import monotonic
from typing import TYPE_CHECKING, Any

from stopguard.engines import EngineUnreachable
from stopguard.engines.resumption import Resumption, UnreadableChunk
from stopguard.gateway.ledgered import LedgeredExchange
from stopguard.gateway.settings import ResumeSettings
from stopguard.preemption.marks import Overlap
from stopguard.preemption.ways import Exactness, Gone, Parked, Refused, Running, Verdict, WayKind
from stopguard.stops import (
    AbortAnswer,
    DoorKind,
    Engine,
    Semantics,
    Source,
    StopCause,
    Tracked,
)
from stopguard.telemetry.preemption import ContinuationNumbers

if TYPE_CHECKING:
    from stopguard.gateway.fleet import Member
    from stopguard.gateway.server import Gateway

__all__ = ["GatewayWay"]

logger = logging.getLogger("stopguard.gateway")

_NOT_LEDGERED = Verdict(Exactness.NEVER, "passed through")
_PROBED = Verdict(Exactness.NEVER, "its engine is probed: preempt it there")
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0
_GAP_AT_ONCE = 16
"""Ids that were not reported and lie this close together are asked for in one call."""

_DECODE_ERRORS = (ValueError, KeyError, TypeError)


class GatewayWay:
    """See `stopguard.preemption.ways.Way`."""

    kind = WayKind.GATEWAY

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.settings: ResumeSettings = gateway.settings.resume
        self.parked: dict[str, LedgeredExchange] = {}
        # Streams that were preempted and went on, and those whose engine was lost.
        self.resumed = 0
        self.failed_over = 0
        # Continuations that were not the same, and streams that no engine could continue.
        self.mismatches = 0
        self.given_up = 0
        self._failures: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    # ---- which streams are ledgered --------------------------------------------------------------

    def wants(self, exchange: LedgeredExchange) -> bool:
        """Whether anybody may want to cut this stream."""
        preempting = self._gateway.preempting
        return self.settings.failover or (preempting is not None and preempting.may_preempt(exchange))

    def prepare(self, exchange: LedgeredExchange, member: Member) -> None:
        """Ask for the prompt's ids, without which this engine's stream has none; then go there."""
        member.preparing.add(exchange)
        self._start(self._prepare(exchange, member), f"prepare {exchange.request_id}")

    async def _prepare(self, exchange: LedgeredExchange, member: Member) -> None:
        resumption, ask = exchange.resumption, exchange.ask
        assert resumption is not None
        assert ask is not None
        try:
            try:
                async with asyncio.timeout(self._gateway.timeouts.abort_seconds):
                    prompt_ids = await resumption.prompt_ids(member.engine, ask)
            finally:
                member.preparing.discard(exchange)
        except (EngineUnreachable, UnreadableChunk, TimeoutError, *_DECODE_ERRORS) as error:
            logger.warning("%s is passed through, it cannot be prepared: %s", exchange.request_id, error)
            exchange.run_unledgered("its engine did not say the ids of the prompt")
        else:
            if exchange.tracked.muted or exchange.ask is None:
                return
            exchange.prepared(prompt_ids)
        if exchange.member is member and not exchange.tracked.muted:
            member.pool.acquire(exchange)

    # ---- the way ---------------------------------------------------------------------------------

    def can(self, tracked: Tracked) -> Verdict:
        """Whether it can be cut now, and how well it would go on."""
        exchange = tracked.owner
        if not isinstance(exchange, LedgeredExchange):
            return _NOT_LEDGERED
        if tracked.probed:
            return _PROBED
        obstacle = exchange.obstacle
        if obstacle:
            return Verdict(Exactness.NEVER, obstacle)
        if not exchange.dispatched or exchange.upstream is None:
            return Verdict(Exactness.NEVER, "it is at no engine")
        if len(self.parked) >= self.settings.parked_requests:
            return Verdict(Exactness.NEVER, f"{self.settings.parked_requests} are parked already")
        return exchange.verdict

    async def preempt(self, tracked: Tracked) -> Parked | Refused | Gone:
        """Cut it, wait for the engine to let go of it, and keep it. The controller has it in PREEMPTING."""
        exchange = tracked.owner
        if tracked.machine.engine is not Engine.PREEMPTING or not isinstance(exchange, LedgeredExchange):
            return Gone()
        verdict = self.can(tracked)
        if verdict.exactness is Exactness.NEVER:
            return Refused(verdict.reason)
        member = exchange.member
        assert member is not None
        cut_at = monotonic()
        exchange.cut()
        proved = await self._let_go(exchange, member, cut_at)
        state = _state(tracked)
        if state in (Engine.ABORTING, Engine.UNCONFIRMED) and not proved:
            return Gone()  # a cancel came first: its own knocks go on
        if state not in (Engine.PREEMPTING, Engine.DISPATCHED, Engine.ABORTING, Engine.UNCONFIRMED):
            return Gone()
        at = monotonic()
        if not proved:
            tracked.ledgers.mark(at, "its connection is closed; nothing proves that the engine has let go")
        return Parked(len(exchange.next_overlap().token_ids)) if exchange.shelve(at) else Gone()

    async def _let_go(self, exchange: LedgeredExchange, member: Member, cut_at: float) -> bool:
        """Tell the engine in every way that it has, and wait for proof as long as that is worth it."""
        gateway, engine = self._gateway, member.engine
        due_at = cut_at + self.settings.ack_seconds
        cause = exchange.tracked.cause or _cause(cut_at)
        for door in member.profile.doors:
            if door.kind is not DoorKind.CALL:
                continue
            try:
                async with asyncio.timeout(min(gateway.timeouts.abort_seconds, self.settings.ack_seconds)):
                    reply = await engine.abort(exchange.engine_id, door.name, cause)
            except (EngineUnreachable, TimeoutError) as error:
                logger.warning("%s: door %s does not answer: %s", exchange.request_id, door.name, error)
                continue
            if reply.answer is AbortAnswer.GONE:
                return True
        while engine.gauge_seconds > 0 and monotonic() + engine.gauge_seconds <= due_at:
            await asyncio.sleep(engine.gauge_seconds)
            try:
                async with asyncio.timeout(max(0.01, due_at - monotonic())):
                    gauges = await engine.gauges()
            except (EngineUnreachable, TimeoutError):
                return False
            if gauges is None or gauges.running is None or gauges.waiting is None:
                return False
            members = gateway.controller.in_engine.get(member.profile.name, {}).values()
            others = sum(each.machine.engine in _THERE and each is not exchange.tracked for each in members)
            if gauges.at >= cut_at and gauges.running + gauges.waiting <= others:
                return True
        return False

    async def resume(self, tracked: Tracked) -> Running | Refused | Gone:
        """Let it go on, best where it was. Answered when its beginning has proved to be the same."""
        exchange = tracked.owner
        if not isinstance(exchange, LedgeredExchange) or _state(tracked) is not Engine.SHELVED:
            return Gone()
        members = self._members_for(exchange, failed=None)
        if not members:
            return self._not_this_time(exchange, "no engine has room", 0.0)
        before = tracked.ledgers.tokens_recomputed
        reason = await self._go_on(exchange, members[0])
        if reason == "":
            self.resumed += 1
            return Running(tracked.ledgers.tokens_recomputed - before)
        if reason == _CUT_AGAIN:
            return Running(0)
        if _state(tracked) is not Engine.SHELVED:
            return Gone()
        if _is_final(reason):
            self._end(exchange, reason)
            return Gone()
        return self._not_this_time(exchange, reason, self._pause_after(self._failures.get(exchange.request_id, 0)))

    def _not_this_time(self, exchange: LedgeredExchange, reason: str, pause: float) -> Refused | Gone:
        """It stays parked; when it failed too often the stream is ended."""
        if pause:
            failures = self._failures[exchange.request_id] = self._failures.get(exchange.request_id, 0) + 1
            if failures >= self.settings.tries:
                self._end(exchange, reason)
                return Gone()
        return Refused(reason, pause)

    # ---- failover --------------------------------------------------------------------------------

    def fail_over(self, exchange: LedgeredExchange, reason: str) -> None:
        """Its engine was lost in the middle of the stream: continue it where the same model is served."""
        at = monotonic()
        failed = exchange.member
        exchange.failovers += 1
        exchange.tracked.ledgers.mark(at, f"its engine was lost ({reason}): it goes on elsewhere")
        exchange.cut()
        if exchange.shelve(at):
            exchange.tracked.preemptions -= 1  # nobody preempted it
            self._start(self._fail_over(exchange, failed, reason), f"failover {exchange.request_id}")

    async def _fail_over(self, exchange: LedgeredExchange, failed: Member | None, reason: str) -> None:
        tracked = exchange.tracked
        for attempt in range(self.settings.tries):
            members = self._members_for(exchange, failed=failed)
            if members:
                outcome = await self._go_on(exchange, members[attempt % len(members)])
                if outcome in ("", _CUT_AGAIN):
                    self.failed_over += outcome == ""
                    return
                if _state(tracked) is not Engine.SHELVED:
                    return
                reason = outcome
                if _is_final(outcome):
                    break
            await asyncio.sleep(self._pause_after(attempt))
            if _state(tracked) is not Engine.SHELVED:
                return
        self._end(exchange, reason)

    def _members_for(self, exchange: LedgeredExchange, *, failed: Member | None) -> list[Member]:
        """Where it may go on, the best first: at home, or with failover wherever the same ids mean the same."""
        home = exchange.home
        fleet = self._gateway.fleet
        found = [home] if home is not None and home is not failed and home.healthy else []
        if self.settings.failover:
            family = getattr(home.engine, "resumption", None) if home is not None else None
            for member in fleet.serving(exchange.asked_model):
                other: Resumption | None = getattr(member.engine, "resumption", None)
                same = other is not None and family is not None and other.family == family.family
                if member not in (home, failed) and same and member.healthy:
                    found.append(member)
        found = [member for member in found if member.has_room_for_returning]
        if not found and home is not None and home.has_room_for_returning:
            found = [home]  # ejected or lost it may be back: trying it again is all that is left
        return found

    # ---- one attempt -------------------------------------------------------------------------------

    async def _go_on(self, exchange: LedgeredExchange, member: Member) -> str:
        """Continue it at `member`; the answer is empty when it goes on, else why it does not."""
        reason = ""
        for steps_back in range(_STEPS_BACK):
            reason = await self._attempt(exchange, member, exchange.next_overlap(steps_back))
            if not reason.startswith("text mismatch") or _state(exchange.tracked) is not Engine.SHELVED:
                break
            # The ids are right and the text is not: the mark was none. Another one, further back.
        if reason == "":
            self.unpark(exchange)
            self._failures.pop(exchange.request_id, None)
        elif _is_final(reason):
            self.mismatches += 1
        return reason

    async def _attempt(self, exchange: LedgeredExchange, member: Member, overlap: Overlap) -> str:
        tracked, transcript, ask = exchange.tracked, exchange.transcript, exchange.ask
        resumption: Resumption | None = getattr(member.engine, "resumption", None)
        if transcript is None or ask is None or resumption is None:
            return "its ids are not known any more"
        mark = overlap.mark
        try:
            if mark.tokens:
                if transcript.prompt_ids is None:
                    async with asyncio.timeout(self._gateway.timeouts.abort_seconds):
                        transcript.prompt_ids = await resumption.prompt_ids(member.engine, ask)
                if _state(tracked) is Engine.SHELVED:
                    await self._fill_gaps(exchange, member, resumption, mark.tokens)
        except (EngineUnreachable, TimeoutError) as error:
            return f"unreachable: {error}"
        except (UnreadableChunk, *_DECODE_ERRORS) as error:
            return f"unreadable: {error}"
        if _state(tracked) is not Engine.SHELVED:
            return "stopped"
        if mark.tokens:
            assert transcript.prompt_ids is not None
            call = resumption.resume(ask, transcript.prompt_ids, transcript.token_ids[: mark.tokens].tolist())
            reader = resumption.resume_reader(ask)
        else:
            call = resumption.first(ask, exchange.prepared_ids)
            reader = resumption.first_reader(ask)
        return await exchange.go_on(member, call, reader, overlap)

    async def _fill_gaps(self, exchange: LedgeredExchange, member: Member, resumption: Resumption, before: int) -> None:
        """Ask for the ids that the stream has left out, the nearest together; what was known must come out again."""
        transcript, ask = exchange.transcript, exchange.ask
        assert transcript is not None
        assert ask is not None
        assert transcript.prompt_ids is not None
        together = True
        while (gap := transcript.gap(before)) is not None:
            begin, end = gap
            while together and (further := _next_gap(transcript.token_ids, end, before)) is not None:
                if further[0] - end > _GAP_AT_ONCE:
                    break
                end = further[1]
            # One more than is missing: it is known, and shows that the others are right.
            end = min(end + 1, len(transcript.token_ids))
            context = [*transcript.prompt_ids, *transcript.token_ids[:begin]]
            async with asyncio.timeout(self._gateway.timeouts.abort_seconds):
                found = await resumption.unreported(member.engine, ask, context, end - begin)
            if exchange.transcript is not transcript or transcript.tokens < end:
                raise UnreadableChunk("it was stopped meanwhile")
            if transcript.fill(begin, found):
                together = True
            elif together:
                # Between two gaps lie tokens at which it may be chance which comes; within a character there are none.
                together = False
            else:
                raise UnreadableChunk("the ids that the stream left out do not fit between those that it named")

    # ---- the end -------------------------------------------------------------------------------------

    def _end(self, exchange: LedgeredExchange, reason: str) -> None:
        """It cannot go on: its client is told, with an error event and without an end."""
        at = monotonic()
        final = _is_final(reason)
        word = "resume_mismatch" if final else "resume_failed"
        self.given_up += not final
        exchange.detail = reason
        logger.warning("%s cannot be continued: %s", exchange.request_id, reason)
        cause = StopCause(semantics=Semantics.FAIL, source=Source.ENGINE, reason=word, observed_at=at)
        self._gateway.stop(exchange.tracked, cause)

    def numbers(self) -> ContinuationNumbers:
        """How streams that were cut fared, for the metrics. Called from another thread."""
        return ContinuationNumbers(
            preempted=self.resumed, engine_lost=self.failed_over, mismatch=self.mismatches, failed=self.given_up
        )

    # ---- parked --------------------------------------------------------------------------------------

    def park(self, exchange: LedgeredExchange) -> None:
        """It waits here from now on."""
        if exchange.request_id in self.parked:
            return
        self.parked[exchange.request_id] = exchange
        exchange.comment()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.settings.comment_seconds, self._say_so)

    def unpark(self, exchange: LedgeredExchange) -> None:
        """It goes on, or has ended. Harmless when it was not parked."""
        self.parked.pop(exchange.request_id, None)
        if exchange.tracked.request_id not in self._gateway.registry.alive:
            self._failures.pop(exchange.request_id, None)
        if not self.parked and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _say_so(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.settings.comment_seconds, self._say_so)
        for exchange in list(self.parked.values()):
            exchange.comment()

    async def close(self) -> None:
        """End the tasks. What was parked has been stopped by then."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("%s failed", task.get_name(), exc_info=task.exception())

    @staticmethod
    def _pause_after(attempt: int) -> float:
        return min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0**attempt)


_STEPS_BACK = 3
_CUT_AGAIN = "cut again"
_THERE = frozenset({Engine.DISPATCHED, Engine.PARKED, Engine.RESUMING})


def _state(tracked: Tracked) -> Engine:
    """Its state at this moment, which each wait may have changed."""
    return tracked.machine.engine


def _is_final(reason: str) -> bool:
    """Whether trying again could only give the same."""
    return "mismatch" in reason.partition(":")[0] or reason.startswith("unreadable")


def _cause(at: float) -> StopCause:
    return StopCause(semantics=Semantics.PREEMPT, source=Source.PREEMPTION, reason="preempted", observed_at=at)


def _next_gap(token_ids: Any, after: int, before: int) -> tuple[int, int] | None:
    """The next run of unreported ids from `after` on."""
    begin = after
    while begin < before and token_ids[begin] >= 0:
        begin += 1
    if begin >= before:
        return None
    end = begin
    while end < before and token_ids[end] < 0:
        end += 1
    return begin, end
