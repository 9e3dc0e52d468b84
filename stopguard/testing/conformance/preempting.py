"""The preemption part of the suite: whoever makes room loses nothing, and whoever cannot make room says so.

Two ways lead off an engine (`stopguard.preemption.ways`): *inside*, by a probe that takes the request off between two
steps, and *at the gateway*, by token ids, for adapters that say how (`resumption`). What an adapter has must work; what
it has not must be refused with a reason, and the stream that was asked for goes on as if nobody had asked.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from time import monotonic
from typing import Final

import msgspec
import pytest

from stopguard.audit.client import SocketExchange
from stopguard.gateway.inside_way import InsideWay
from stopguard.gateway.parking import GatewayWay
from stopguard.gateway.settings import ResumeSettings
from stopguard.ledger import Evidence
from stopguard.preemption.ways import Exactness, Gone, Parked, Refused, Running
from stopguard.stops import Engine, IllegalTransition, Semantics, Source, StopCause, Tracked, preemptions
from stopguard.testing.conformance.subject import Closed, Subject

__all__ = ["WAYS", "Preempting"]

WAYS: Final = ("gateway", "inside")
#: Any stream may be cut by hand, and none goes on by itself when an engine dies.
_BY_HAND: Final = ResumeSettings(failover=True, failovers=0)
_CUT_EVENTS: Final = 8
_STREAMS: Final = 3
_ATTEMPTS: Final = 6
#: Of the subject's long output is enough to begin with: every stream is made twice.
_PART: Final = 4
_STALE_SECONDS: Final = 0.3
_AGAIN_SECONDS: Final = 0.05
_OVER: Final = (Engine.FINISHED, Engine.STOPPED)


class Away(msgspec.Struct):
    """One stream that was preempted: what became of the order, and what its client had then."""

    exchange: SocketExchange
    request_id: str
    tracked: Tracked
    answer: object
    tokens: int
    events: int


class Bench:
    """One way to preempt, in the gateway of a subject; everything is to be used in that gateway's loop."""

    def __init__(self, subject: Subject, way: GatewayWay | InsideWay) -> None:
        self.subject = subject
        self.way = way

    async def take_off(self, prompt: str, *, tokens: int, sampled: bool = False) -> Away:
        """Ask for a stream, and preempt it when some of it has come."""
        subject = self.subject
        fields = {"temperature": 1.0} if sampled else {}
        exchange = await subject.ask(prompt, tokens=tokens, fields=fields)
        reply, request_id = exchange.reply, subject.id_of(exchange)
        tracked = subject.gateway.controller.tracked.get(request_id)
        if tracked is None:  # closed before it could be looked up
            return await self.take_off(prompt, tokens=tokens * 2, sampled=sampled)
        await subject.through.wait(lambda: reply.events >= _CUT_EVENTS or reply.ended, subject.shape.patience_seconds)
        verdict = self.way.can(tracked)
        if verdict.exactness is not Exactness.EXACT:
            return Away(exchange, request_id, tracked, verdict, tokens, reply.events)
        at = monotonic()
        cause = StopCause(
            semantics=Semantics.PREEMPT, source=Source.PREEMPTION, reason="conformance", observed_at=at, actor="suite"
        )
        subject.gateway.carry_out(preemptions.preempt(subject.gateway.controller, tracked, at, cause), at)
        answer = await self.way.preempt(tracked)
        return Away(exchange, request_id, tracked, answer, tokens, reply.events)

    async def surely_taken_off(self, prompt: str) -> Away:
        """The same, tried again with more tokens when a fast engine had finished before it was asked."""
        for attempt in range(_ATTEMPTS):
            tokens = min(self.subject.shape.long_tokens, self.subject.shape.long_tokens * 2**attempt // _PART)
            away = await self.take_off(prompt, tokens=tokens)
            if isinstance(away.answer, Parked):
                return away
            ended = away.exchange.reply.ended or away.tracked.machine.engine in _OVER
            assert ended, f"{away.request_id} runs and was not preempted: {away.answer}"
            await self.subject.closed_book(away.request_id)
        raise AssertionError(f"in {_ATTEMPTS} attempts every stream had ended before it could be preempted")

    async def bring_back(self, away: Away) -> Running | Refused | Gone:
        """Let it go on, as the gateway does; asked again where an engine wants it to stay away for a step."""
        gateway, tracked = self.subject.gateway, away.tracked
        answer: Running | Refused | Gone = Gone()
        for _ in range(_ATTEMPTS):
            if isinstance(self.way, InsideWay):
                at = monotonic()
                try:
                    gateway.carry_out(preemptions.resume(gateway.controller, tracked, at), at)
                except IllegalTransition:
                    return Gone()
            answer = await self.way.resume(tracked)
            if not isinstance(answer, Refused):
                break
            if isinstance(self.way, InsideWay):
                at = monotonic()
                gateway.carry_out(preemptions.resume_refused(gateway.controller, tracked, at), at)
            await asyncio.sleep(max(answer.retry_after_seconds, _AGAIN_SECONDS))
        return answer


def _has(subject: Subject, name: str) -> bool:
    """Whether the adapter claims this way here."""
    profile, probing = subject.gateway.fleet.members[0].profile, subject.gateway.probing
    if name == "gateway":
        return subject.resumes and not profile.probed
    return probing is not None and profile.probed and probing.can(profile.name, "preempt")


@contextlib.asynccontextmanager
async def _bench(subject: Subject, name: str) -> AsyncIterator[Bench]:
    gateway = subject.gateway
    if name == "inside":
        yield Bench(subject, InsideWay(gateway))
        return
    assert gateway.parking is None
    gateway.parking = parking = GatewayWay(gateway)
    parking.settings = _BY_HAND
    try:
        yield Bench(subject, parking)
        await subject.idle()
        assert not parking.parked
    finally:
        await parking.close()
        gateway.parking = None


class Preempting:
    """Part of `Conformance`."""

    def test_it_says_whether_it_can_preempt(self, subject: Subject) -> None:
        """`preempts` needs somebody inside; resumption at the gateway needs token ids."""
        able, engine = subject.capabilities, subject.engine
        assert not able.preempts or engine.profile.probed, "only a probe preempts one named request"
        resumption = getattr(engine, "resumption", None)
        if resumption is not None:
            assert able.token_ids_field or getattr(resumption, "prepares", False), (
                "an exact resume needs the token ids of what was delivered"
            )

    @pytest.mark.parametrize("way", WAYS)
    def test_whoever_makes_room_loses_nothing(self, subject: Subject, way: str) -> None:
        """Preempted in the middle and resumed: the text is the one that an undisturbed run gives; or it is refused."""

        async def one(bench: Bench) -> tuple[bool, Closed]:
            prompt = subject.shape.prompt(subject.number())
            if not _has(subject, way):
                away = await bench.take_off(prompt, tokens=subject.shape.short_tokens)
                refused = away.answer
                assert getattr(refused, "exactness", None) is Exactness.NEVER, refused
                assert getattr(refused, "reason", ""), "a refusal says why"
            else:
                away = await bench.surely_taken_off(prompt)
                if way == "gateway":
                    await asyncio.sleep(_STALE_SECONDS)
                    assert away.exchange.reply.events == away.events, "something came though it is at no engine"
                outcome = await bench.bring_back(away)
                assert isinstance(outcome, Running), outcome
            text = await subject.text_of(away.exchange)
            closed = await subject.closed_book(away.request_id)
            undisturbed = await subject.text_of(await subject.ask(prompt, tokens=away.tokens))
            return text == undisturbed, closed

        async def several() -> list[tuple[bool, Closed]]:
            async with _bench(subject, way) as bench:
                return [await one(bench) for _ in range(_STREAMS if _has(subject, way) else 1)]

        found = subject.run(several)
        for _, closed in found:
            assert closed.stop.semantics == "finish", closed
            assert not closed.ledgers.leaks, closed
        # Where two tokens are as good as equal, an engine that prefills again may round to the other one.
        assert sum(equal for equal, _ in found) >= len(found) - len(found) // _STREAMS

    @pytest.mark.parametrize("way", WAYS)
    def test_a_cancel_outlives_a_preemption(self, subject: Subject, way: str) -> None:
        """A client that leaves while its request is away: it never comes back, and nothing of it is left."""
        if not _has(subject, way):
            return

        async def leave() -> tuple[Closed, object]:
            async with _bench(subject, way) as bench:
                prompt = subject.shape.prompt(subject.number())
                away = await bench.surely_taken_off(prompt)
                await away.exchange.leave()
                closed = await subject.closed_book(away.request_id)
                outcome = await bench.bring_back(away)
                await subject.idle()
                return closed, outcome

        closed, outcome = subject.run(leave)
        assert isinstance(outcome, Gone), outcome
        assert (closed.stop.semantics, closed.stop.outcome) == ("cancel", "confirmed"), closed
        assert closed.evidence >= Evidence.STREAM_CLOSED, closed
        assert not closed.ledgers.leaks, closed

    def test_what_would_not_go_on_exactly_stays(self, subject: Subject) -> None:
        """Sampling without a seed is never cut at the gateway; inside nothing is lost by it."""

        async def sampled() -> tuple[object, Closed]:
            async with _bench(subject, "gateway") as bench:
                prompt = subject.shape.prompt(subject.number())
                away = await bench.take_off(prompt, tokens=subject.shape.short_tokens, sampled=True)
                await subject.text_of(away.exchange)
                return away.answer, await subject.closed_book(away.request_id)

        refused, closed = subject.run(sampled)
        assert getattr(refused, "exactness", None) is Exactness.NEVER, refused
        assert getattr(refused, "reason", ""), "a refusal says why"
        assert closed.stop.semantics == "finish", closed
